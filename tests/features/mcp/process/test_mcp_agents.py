"""MCP servers on the whole way: a bundle, a kernel, agents with a scripted model, the broker, the tool host, jails."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.mcp_fixture import SERVER
from tests.process.scripted_model import ScriptedModel, scripted_model

HEAD = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: scripted}
spec: {provider: openai, model: m, endpoint: "BASE", apiKey: {value: k}}
---
"""
EXTENSION = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-NAME}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport:
      type: stdio
      command: [PYTHON, -I, -S, ./servers/small/server.py, ARGUMENT]
      env: {X: "${SECRET_OF_SERVER}"}
    attach: {mode: MODE, scope: SCOPE}
    expose: {tools: true}
    grants: [GRANTS]
---
"""
AGENT = """\
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: NAME}
spec:
  modelConfig: {modelRef: Model/scripted}
  extensions: [EXTENSIONS]
---
"""
SWARM = """\
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/a0}
"""
#: Agents that share the server `shared`, and one that also has one of its own.
SHARING = 3
AGENTS = {
    **{f"a{number}": "Extension/mcp-shared" for number in range(SHARING)},
    "own": "Extension/mcp-own, Extension/mcp-shared",
    "bare": "Extension/mcp-bare",
    "placed": "Extension/mcp-placed",
}
SERVERS = {
    "shared": ("stateful", "instance"),
    "own": ("stateful", "agent"),
    "bare": ("stateless", "agent"),
    "placed": ("stateful", "agent"),
    "unnamed": ("stateful", "instance"),
}
#: What the small server can do besides.
MORE = """
import hashlib
me = os.urandom(4).hex()
def knows(args, ask): return hashlib.sha256(os.environ["X"].encode()).hexdigest()
def count(args, ask):
    global calls
    calls += 1
    return [calls, me]
answers, told = {}, threading.Condition()
def pizza(args, ask):
    form = {"type": "object", "properties": {"size": {"type": "string", "enum": ["s", "l"]}}, "required": ["size"]}
    say({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create",
         "params": {"message": "How large?", "requestedSchema": form}})
    with told:
        told.wait_for(lambda: "q" in answers)
        return answers.pop("q")
def think(args, ask):
    text = {"type": "text", "text": args["text"]}
    say({"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage",
         "params": {"messages": [{"role": "user", "content": text}], "maxTokens": 9}})
    with told:
        told.wait_for(lambda: "s" in answers)
        return answers.pop("s")
def work_on(line):
    message = json.loads(line)
    if "method" in message and "id" in message:
        threading.Thread(target=work, args=(message,), daemon=True).start()
    elif "id" in message:
        with told:
            answers[message["id"]] = message.get("result") or message["error"]["message"]; told.notify_all()
tools.update(count=count, pizza=pizza, think=think, knows=knows)
if sys.argv[1:] and not os.path.exists(sys.argv[1]): sys.exit(f"there is no {sys.argv[1]}")
"""
SECRET = "s3cret-of-the-server"


def bundle(base: str) -> str:
    documents = [HEAD.replace("BASE", base)]
    for name, (mode, scope) in SERVERS.items():
        granted = "sampling" if name == "own" else ""
        text = EXTENSION.replace("NAME", name).replace("GRANTS", granted).replace("MODE", mode).replace("SCOPE", scope)
        text = text.replace(", ARGUMENT", ', "${WORKDIR}/mark"' if name == "placed" else "")
        documents.append(text.replace("PYTHON", f"{sys.base_prefix}/bin/python3"))
    documents += [AGENT.replace("NAME", name).replace("EXTENSIONS", uses) for name, uses in AGENTS.items()]
    return "".join([*documents, SWARM])


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with scripted_model() as made:
        yield made


@pytest.fixture(scope="module")
def kernel(model: ScriptedModel) -> Iterator[Sandbox]:
    with sandbox(bundle(model.base), {"SECRET_OF_SERVER": SECRET}) as made:
        script = Path(made.bundle).parent / "servers/small/server.py"
        script.parent.mkdir(parents=True)
        script.write_text(f"{SERVER}\n{MORE}\nfor line in sys.stdin: work_on(line)\n")
        made.detach()
        yield made


def turn(
    kernel: Sandbox, model: ScriptedModel, agent: str, *steps: tuple[str, dict[str, Any]], key: str = "k"
) -> dict[str, Any]:
    """One call in each step; what the model was told of each: `c0`, `c1`, …"""
    number = len(model.scripts)
    said = f"{agent} {key} {number}"
    model.scripts[said] = [*([(f"t{number}-c{n}", tool, args)] for n, (tool, args) in enumerate(steps)), "done"]
    sent = kernel.gdn("send", agent, said, "--instance", key, "--json", timeout=60)
    assert sent.json["status"] == "completed", sent.json
    return {
        "said": said,
        **{id_.rpartition("-")[2]: told for id_, told in model.results(said).items() if id_.startswith(f"t{number}-")},
    }


def value(result: Any) -> Any:
    """What a tool of the small server has returned."""
    told = json.loads(result) if isinstance(result, str) and result.startswith("{") else result
    text = told["content"][0]["text"] if isinstance(told, dict) and isinstance(told.get("content"), list) else told
    return json.loads(text) if isinstance(text, str) else text


@pytest.mark.requirement("MCP-01", "MCP-05", "MCP-07", "MCP-09", "MCP-16", "CATALOG-06")
def test_agents_of_one_instance_key_share_a_server_and_those_of_another_have_another(
    kernel: Sandbox, model: ScriptedModel
) -> None:
    counted = [value(turn(kernel, model, f"a{n}", ("shared__count", {}))["c0"]) for n in range(SHARING)]
    assert [number for number, _ in counted] == list(range(1, SHARING + 1))
    assert len({pid for _, pid in counted}) == 1
    other = value(turn(kernel, model, "a0", ("shared__count", {}), key="other")["c0"])
    assert other[0] == 1
    told = turn(kernel, model, "a0", ("shared__where", {}), ("shared__knows", {}))
    assert told["c1"] == hashlib.sha256(SECRET.encode()).hexdigest(), "it has its variable"
    folder, files, _, shown = value(told["c0"])
    assert shown == "***", "and cannot say it"
    assert "shared__count" in model.offered(told["said"])
    assert SECRET not in kernel.gdn("logs").out
    assert "conversation.db" not in files, folder


@pytest.mark.feature("approvals")
def test_a_person_answers_a_server_and_the_answer_has_to_fit(kernel: Sandbox, model: ScriptedModel) -> None:
    model.scripts["eat"] = [[("p1", "own__pizza", {})], "done"]
    sending = kernel.popen("send", "own", "eat", "--instance", "eating", "--json")
    found = wait_until(lambda: kernel.gdn("approve", "list", "--json").json["items"])
    (item,) = found
    assert item["message"] == "The MCP server of own asks: How large?"
    assert item["tool"] == "own__pizza"
    wrong = kernel.gdn("approve", "answer", item["code"], '{"size": "xl"}')
    assert (wrong.status, "the answer does not fit" in wrong.err) == (2, True), wrong.err
    assert kernel.gdn("approve", "answer", item["code"], '{"size": "l"}').status == 0
    sending.communicate(timeout=30)
    assert value(model.results("eat")["p1"]) == {"action": "accept", "content": {"size": "l"}}


def test_a_server_asks_the_agents_model_only_where_that_was_granted(kernel: Sandbox, model: ScriptedModel) -> None:
    model.scripts["What is 2 + 2?"] = ["four"]
    asked = {"text": "What is 2 + 2?"}
    told = turn(kernel, model, "own", ("own__think", asked), ("shared__think", asked), key="thinking")
    answer = value(told["c0"])
    assert (answer["content"]["text"], answer["model"]) == ("four", "m")
    assert len(model.requests["What is 2 + 2?"]) == 1
    assert "four" not in str(told["c1"])


def test_a_server_is_started_in_the_workdir_of_the_turn_and_says_why_it_does_not_start(
    kernel: Sandbox, model: ScriptedModel
) -> None:
    work = kernel.home.parent / "work"
    work.mkdir()
    (work / "mark").touch()
    model.scripts["in the workdir"] = [[("w0", "placed__count", {})], "done"]
    sent = kernel.gdn("send", "placed", "in the workdir", "--instance", "placed", "--workdir", str(work), timeout=60)
    assert (sent.status, sent.err) == (0, "")
    assert value(model.results("in the workdir")["w0"])[0] == 1
    # In another instance's own folder there is no mark. The person and the model hear the server's last words.
    model.scripts["elsewhere"], model.by_first = ["done"], True
    sent = kernel.gdn("send", "placed", "elsewhere", "--instance", "elsewhere", timeout=60)
    assert "the MCP server placed exited with status 1" in sent.err
    assert "it said last: there is no " in sent.err
    (asked,) = model.requests["elsewhere"]
    assert "The MCP server placed cannot be used now" in json.dumps(asked)
    listed = kernel.gdn("mcp", "list").out
    assert any(line.split()[0] == "unnamed" and "no agent names it" in line for line in listed.splitlines())


@pytest.mark.feature("try_out")
def test_extensions_that_are_mcp_servers_are_tested_with_their_servers(kernel: Sandbox) -> None:
    def trial(name: str) -> dict[str, Any]:
        (told,) = kernel.gdn("extension", "test", name, "--json", timeout=60).json["trials"]
        return dict(told)

    bare = trial("mcp-bare")
    assert bare["status"] == "passed", bare
    assert "count" in bare["tools"]
    assert "it said last: there is no " in trial("mcp-placed")["message"]
    assert "no agent names it" in trial("mcp-unnamed")["message"]
