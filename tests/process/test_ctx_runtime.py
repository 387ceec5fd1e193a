"""`ctx.runtime` through the real kernel: handlers that ask agents, and what survives of it.

The swarm has two places for agents, so a third who is asked gets a process although its askers hold them.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, wait_until

#: The example of the page about tools: a module, and the spec of its manifest.
_PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
_EXAMPLE = _PAGE[_PAGE.index("`tools/second_opinion.py`") :].split("```")
SECOND_OPINION = _EXAMPLE[1].removeprefix("python\n")
BUNDLE = documents(
    "Model console {provider: embedded}",
    "Tool ask {entry: tools/ask.py, sandbox: {permissions: [agents]}, exports: [{name: it}, {name: async}, "
    "{name: has}, {name: leaves}]}",
    "Tool plain {entry: tools/ask.py, exports: [{name: has}, {name: it}]}",
    "Agent main {modelConfig: {modelRef: Model/console}, tools: [Tool/ask, Tool/plain, Tool/second-opinion, "
    '{kind: Tool, name: ask-too, package: "@acme/asking"}]}',
    "Agent narrow {modelConfig: {modelRef: Model/console}, tools: [{ref: Tool/ask, sandbox: {permissions: []}}]}",
    "Agent helper {modelConfig: {modelRef: Model/console}, tools: [Tool/bash, Tool/ask]}",
    "Agent critic {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}",
    "Agent editor {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}",
    "Swarm askers {entryAgent: Agent/main, agents: [Agent/main, Agent/narrow, Agent/helper, Agent/critic, "
    "Agent/editor], policy: {maxLiveAgents: 2}}",
)
BUNDLE += "---\napiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {name: second-opinion}\n"
BUNDLE += _EXAMPLE[3].removeprefix("yaml\n")
PACKAGE = documents(
    'Package "@acme/asking" {version: "1.0.0"}',
    "Tool ask-too {entry: tools/ask.py, sandbox: {permissions: [agents]}, exports: [{name: has}]}",
)
CODE = """\
import os

def it(ctx, input):
    op = input.get("op")
    if op == "made":
        os.mkdir("sub")
        return {"made": os.path.abspath("sub")}
    if op == "swapped":
        os.rmdir("sub")
        os.symlink(input["to"], "sub")
        return {}
    return getattr(ctx.runtime, input.pop("op", "request"))(**input)

async def later(ctx, input):
    return await getattr(ctx.runtime, input.pop("op", "request"))(**input)

def has(ctx, input): return "has it" if ctx.runtime is not None else "has none"

async def leaves(ctx, input):
    ctx.runtime.request("helper", input["input"])  # sent, and not awaited
    return "gone"

handlers = {"it": it, "async": later, "has": has, "leaves": leaves}
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    """One for all: each test has instances of its own, and those that kill something leave it working."""
    with sandbox(BUNDLE) as made:
        package = made.home / "state" / "packages" / "@acme" / "asking"
        for folder, document in ((made.home, BUNDLE), (package, PACKAGE)):
            (folder / "tools").mkdir(parents=True)
            (folder / "goondan.yaml").write_text(document)
            (folder / "tools" / "ask.py").write_text(CODE)
        (made.home / "tools" / "second_opinion.py").write_text(SECOND_OPINION)
        (made.home / "opened" / "docs").mkdir(parents=True)
        policy = made.home / "state" / "policy.yaml"
        policy.write_text(json.dumps({"spawn": {"workdirs": [str(made.home / "opened")]}}))
        policy.chmod(0o600)
        made.detach()
        yield made


def say(kernel: Sandbox, text: str, key: str, *, agent: str = "main") -> str:
    """What an agent answers."""
    result = kernel.gdn("send", agent, text, "--instance", key)
    assert result.status == 0, result.err
    return result.out


def ask(kernel: Sandbox, key: str, export: str = "it", **arguments: Any) -> Any:
    """What the handler gave, when it was called by the agent `main`."""
    shown = say(kernel, f"/ask__{export} {json.dumps(arguments)}", key)
    assert shown.startswith("{"), shown
    return json.loads(shown)


def folder(kernel: Sandbox, agent: str, key: str) -> Any:
    """The working directory of an instance, as soon as there is one."""
    pattern = f"state/workspaces/*/instances/{agent}/{key}/workspace"
    return wait_until(lambda: next(kernel.home.glob(pattern), None), what=pattern).resolve()


@pytest.mark.requirement("CONTEXT-09", "AGENTS-01", "AGENTS-02", "AGENTS-04", "AGENTS-07")
def test_a_handler_asks_another_agent_and_gives_its_answer(kernel: Sandbox) -> None:
    text = "/ask__it " + json.dumps(
        {"target": "helper", "input": "/bash__exec command='echo $PWD'", "instance_key": "other"}
    )
    sent = kernel.gdn("send", text, "--instance", "one", "--json").json
    given = json.loads(sent["response"])
    assert given["response"].endswith("/instances/helper/other/workspace")
    assert (given["target"], given["accepted"], given["async"]) == ("helper", True, False)
    assert given["correlationId"] == f"corr:{given['eventId']}"
    assert given["eventId"].startswith(f"{sent['turnId']}/"), "the turn that asks can be found from the question"
    awaited = ask(kernel, "one", "async", target="helper", input="/bash__exec command=pwd")
    assert awaited["response"].endswith("/instances/helper/one/workspace"), "the key is the caller's, if none is given"


def test_the_example_of_the_page_works(kernel: Sandbox) -> None:
    text = json.dumps({"text": "/bash__exec command='echo as you like it'"})
    shown = say(kernel, f"/second-opinion__review {text}", "page")
    assert json.loads(shown) == {"critic": "as you like it", "editor": "as you like it"}
    assert '"accepted": true' in say(kernel, f"/second-opinion__hand-over {text}", "page")


def test_an_agent_that_is_asked_asks_on(kernel: Sandbox) -> None:
    inner = {"target": "helper", "input": "/bash__exec command='echo deep'", "instance_key": "inner"}
    given = ask(kernel, "outer", target="helper", input=f"/ask__it {json.dumps(inner)}", instance_key="middle")
    assert json.loads(given["response"])["response"] == "deep"


@pytest.mark.requirement("CONTEXT-09", "AGENTS-11")
def test_only_a_tool_that_was_granted_the_permission_has_it(kernel: Sandbox) -> None:
    shown = say(kernel, "/ask__has\n/plain__has\n/ask-too__has", "grants")
    own, without, packaged = (part.splitlines()[1] for part in shown.split("\n\n"))
    assert own == "has it"
    assert without == "has none", "it did not ask for the permission"
    assert packaged == "has none", "nobody has accepted what the package asks for"
    refused = say(kernel, '/plain__it {"target": "helper", "input": "x"}', "grants")
    assert "'NoneType' object has no attribute 'request'" in refused, "what asks all the same is an error result"
    assert say(kernel, "/ask__has", "grants", agent="narrow") == "has none\n", "the agent has narrowed it away"


@pytest.mark.requirement("AGENTS-03")
def test_what_is_sent_is_done_by_an_agent_that_did_not_run_and_nobody_waits(kernel: Sandbox) -> None:
    given = ask(kernel, "sender", op="send", target="helper", input="/bash__exec command='touch here'")
    assert given == {"target": "helper", "eventId": given["eventId"], "accepted": True}
    wait_until((folder(kernel, "helper", "sender") / "here").exists, what="the turn")


def test_asking_oneself_is_an_error_and_another_instance_of_oneself_answers(kernel: Sandbox) -> None:
    back = {"target": "main", "input": "x", "instance_key": "self"}
    asked: list[dict[str, Any]] = [
        {"target": "main", "input": "x"},
        {"target": "main", "input": "/plain__has", "instance_key": "twin"},
        {"target": "helper", "input": f"/ask__it {json.dumps(back)}", "instance_key": "via"},
    ]
    shown = say(kernel, "\n".join(f"/ask__it {json.dumps(one)}" for one in asked), "self")
    itself, twin, around = shown.split("\n\n")
    assert "E_AGENT_CYCLE" in itself
    assert '"response": "has none"' in twin
    assert "E_AGENT_CYCLE" in around


def test_failures_are_errors_with_a_code(kernel: Sandbox) -> None:
    command = "touch began; while [ ! -e go ]; do sleep 0.02; done"
    text = "/bash__exec " + json.dumps({"command": command})
    waiting = kernel.popen("send", "helper", text, "--instance", "busy")
    busy = folder(kernel, "helper", "busy")
    wait_until((busy / "began").exists)
    queued = {
        "target": "helper",
        "input": "/bash__exec command='touch never'",
        "instance_key": "busy",
        "timeout_ms": 200,
    }
    text = json.dumps(queued)
    shown = say(kernel, f'/ask__it {{"target": "nobody", "input": "x"}}\n/ask__it {text}\n/ask__async {text}', "errors")
    (busy / "go").touch()
    assert (shown.count("E_AGENT_NOT_FOUND]"), shown.count("E_AGENT_TIMEOUT]")) == (1, 2), shown
    assert waiting.wait(30) == 0
    assert not (busy / "never").exists()


def test_agents_are_named_started_and_listed(kernel: Sandbox) -> None:
    assert ask(kernel, "lists", op="catalog") == {
        "swarmName": "askers",
        "entryAgent": "main",
        "selfAgent": "main",
        "availableCount": 5,
        "callableCount": 4,
        "availableAgents": ["critic", "editor", "helper", "main", "narrow"],
        "callableAgents": ["critic", "editor", "helper", "narrow"],
    }
    assert ask(kernel, "lists", op="list") == {"count": 0, "agents": []}
    mine = f"{folder(kernel, 'main', 'lists')}/sub"
    assert ask(kernel, "lists", op="made")["made"] == mine
    spawned = ask(kernel, "lists", op="spawn", target="helper", instance_key="shares", cwd="sub")
    assert spawned == {"target": "helper", "instanceKey": "shares", "spawned": True, "cwd": mine}
    again = ask(kernel, "lists", op="spawn", target="helper", instance_key="shares")
    assert (again["spawned"], again["cwd"]) == (False, mine), "it runs already"
    _replace(kernel, "broker")
    where = ask(kernel, "lists", target="helper", input="/bash__exec command=pwd", instance_key="shares")
    assert where["response"] == mine, "a new broker knows it still"
    (entry,) = ask(kernel, "lists", op="list")["agents"]
    assert (entry["target"], entry["instanceKey"], entry["cwd"]) == ("helper", "shares", mine)
    assert (entry["ownerAgent"], entry["ownerInstanceKey"]) == ("main", "lists")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["createdAt"])
    every = ask(kernel, "lists", op="list", include_all=True)
    assert ("main", "lists", None) in [(e["target"], e["instanceKey"], e["ownerAgent"]) for e in every["agents"]]
    shown = say(kernel, '/ask__it {"op": "spawn", "target": "helper", "instance_key": "x", "cwd": "/etc"}', "lists")
    assert "E_FORBIDDEN" in shown
    assert "spawn.workdirs" in shown, "the refusal names the setting"
    opened = str(kernel.home / "opened" / "docs")
    spawned = ask(kernel, "lists", op="spawn", target="helper", instance_key="opened", cwd=opened)
    assert spawned["cwd"] == opened
    command = "/bash__exec command='pwd; echo here > there'"
    assert ask(kernel, "lists", target="helper", input=command, instance_key="opened")["response"] == opened
    assert (kernel.home / "opened/docs/there").read_text() == "here\n"


def test_a_link_in_the_spawners_folder_leads_a_spawned_agent_nowhere(kernel: Sandbox) -> None:
    """The folder is one when the agent is spawned, and a link afterwards."""
    ask(kernel, "swaps", op="made")
    ask(kernel, "swaps", op="spawn", target="helper", instance_key="swapped", cwd="sub")
    ask(kernel, "swaps", op="swapped", to=str(kernel.home))
    shown = say(kernel, "/bash__exec command='ls'", "swapped", agent="helper")
    assert "E_SANDBOX_DENIED" in shown
    assert "leads through a link" in shown
    assert "goondan.yaml" not in shown


@pytest.mark.parametrize("victim", ["broker", "main", "helper"])
def test_a_request_outlives_each_process_and_is_answered_once(kernel: Sandbox, victim: str) -> None:
    key = f"kill-{victim}"
    command = "echo ran >> runs; while [ ! -e go ]; do sleep 0.02; done; echo answer"
    asked = {"target": "helper", "input": f"/bash__exec {json.dumps({'command': command})}"}
    waiting = kernel.popen("send", "main", f"/ask__it {json.dumps(asked)}", "--instance", key)
    work = folder(kernel, "helper", key)
    wait_until((work / "runs").exists)
    _replace(kernel, victim, key)
    (work / "go").touch()
    out, err = waiting.communicate(timeout=30)
    assert json.loads(out)["response"] == "answer", err
    assert (work / "runs").read_text() == "ran\n"


def _replace(kernel: Sandbox, name: str, key: str = "") -> None:
    """Kill the broker, or the process of an agent's instance, and wait for the next one."""
    (before,) = wait_until(lambda: _processes(kernel, name, key), what=name)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: _processes(kernel, name, key) not in ([], [before]), what=f"another {name}")


def _processes(kernel: Sandbox, name: str, key: str) -> list[int]:
    """The broker's process, or that of an agent's instance; nothing while there is none, or the supervisor is busy."""
    rows = [row for row in kernel.ps() if row["pid"] is not None]
    return [row["pid"] for row in rows if row["role"] == name or (row["name"], row["instanceKey"]) == (name, key)]


def test_a_call_that_ends_gives_up_what_it_asked(kernel: Sandbox) -> None:
    text = json.dumps({"input": "/bash__exec command='sleep 60'"})
    assert say(kernel, f"/ask__leaves {text}", "gone") == "gone\n"
    wait_until(lambda: "questions were open" in kernel.log("toolhost"), what="the line in the log")
    assert say(kernel, "/bash__exec command='echo free'", "gone", agent="helper") == "free\n", "its turn was cancelled"
    assert say(kernel, "/ask__has", "gone") == "has it\n", "and the agent goes on"


def test_a_cancelled_turn_takes_what_its_handlers_asked_for_with_it(kernel: Sandbox) -> None:
    held = json.dumps({"target": "helper", "input": "/bash__exec command='touch begun; sleep 617'"})
    event = kernel.gdn("send", "--no-wait", "main", f"/ask__it {held}", "--instance", "cancelled").out.strip()
    wait_until((folder(kernel, "helper", "cancelled") / "begun").exists)
    assert kernel.gdn("cancel", event).status == 0
    wait_until(lambda: "sleep 617" not in " ".join(kernel.processes().values()), what="the helper's call ended")

    def ended() -> Any:
        told = kernel.gdn("trace", "--agent", "helper", "--instance", "cancelled", "--json").json
        return told if told["status"] != "running" else None

    told = wait_until(ended, what="the helper's turn, which is told after its asker's")
    assert (told["status"], told["error"]["code"]) == ("failed", "E_CANCELLED")
    (asked,) = kernel.gdn("trace", event, "--json").json["steps"][0]["tools"]
    assert [turn["turnId"] for turn in asked["turns"]] == [told["turnId"]], "it hangs on the call whose handler asked"
    assert say(kernel, "/bash__exec command='echo free'", "cancelled", agent="helper").strip().endswith("free")
