"""Code mode through the real kernel: scripts in jails that call the tools of their agent, and what is left of them when
a process dies in the middle.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from goondan.toolhost.inside.worker import LOOK_S
from tests.kernel_fixture import Sandbox, sandbox, wait_until

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash, Tool/json-query, Tool/agents]
  extensions: [Extension/code-mode]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: plain}
spec: {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: gated}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash, Tool/json-query]
  extensions:
    - Extension/code-mode
    - ref: Extension/approval
      config: {rules: [{tools: ["json-query__*"], action: ask}]}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: scripted}
spec: {entryAgent: Agent/main, agents: [Agent/main, Agent/plain, Agent/gated]}
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    """One for all: each test has instances of its own, and those that kill something leave it working."""
    with sandbox(BUNDLE) as made:
        made.detach()
        yield made


def message(code: str, language: str = "python") -> str:
    return "/code__run " + json.dumps({"language": language, "code": code})


def run(kernel: Sandbox, key: str, code: str, language: str = "python") -> str:
    """What a script printed, or its error as the model reads it."""
    sent = kernel.gdn("send", message(code, language), "--instance", key)
    assert sent.status == 0, sent.err
    try:
        return str(json.loads(sent.out)["printed"])
    except ValueError:
        return sent.out


def begin(kernel: Sandbox, key: str, code: str) -> subprocess.Popen[bytes]:
    """The same, in the background."""
    return kernel.popen("send", message(code), "--instance", key)


def said(process: subprocess.Popen[bytes]) -> str:
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return out.decode()


def workspace(kernel: Sandbox, key: str) -> Path:
    pattern = f"state/workspaces/*/instances/main/{key}/workspace"
    return Path(wait_until(lambda: next(kernel.home.glob(pattern), None), what=pattern))


def test_a_script_calls_tools_and_its_calls_stand_below_it_in_the_trace(kernel: Sandbox) -> None:
    code = """
count = tools.json_query__count(data="[1, 2, 3]")["count"]
out = tools.bash__exec(command="echo $((6*7))")["stdout"].strip()
try:
    tools.bash__exec(comand="x")
except ToolCallError as error:
    print(error.code)
others = tools.parallel(*[tools.json_query__count.later(data="[]") for _ in range(20)])
print(count, out, len(others), [tool["name"] for tool in tools.search("run a shell command", 1)])
answer = tools.agents__request(target="plain", input="/bash__exec command='echo from plain'")
print(answer["response"])
"""
    assert run(kernel, "trace", code) == "E_TOOL_INVALID_ARGS\n3 42 20 ['bash__exec']\nfrom plain\n"
    trace = kernel.gdn("trace", "--last", "--agent", "main", "--instance", "trace", "--json").json
    (script,) = trace["steps"][0]["tools"]
    assert script["toolName"] == "code__run"
    calls = script["calls"]
    assert [call["status"] for call in calls[:3]] == ["ok", "ok", "error"]
    assert (len(calls), calls[2]["code"], calls[1]["toolName"]) == (24, "E_TOOL_INVALID_ARGS", "bash__exec")
    assert calls[1]["receipt"]["jail"]["tier"], "each has its receipt"
    assert calls[23]["turns"][0]["agent"] == "plain", "what it asked for hangs on it"
    shown = kernel.gdn("trace", "--last", "--agent", "main", "--instance", "trace").out
    assert shown.index("code__run") < shown.index("├─ json-query__count") < shown.index("└─ agents__request")


def test_a_script_reads_the_answers_of_its_calls_itself(kernel: Sandbox) -> None:
    """A call puts one thread to sleep, once. The watcher of slow handlers is woken by the clock and by no call."""
    code = """
import os, time
def slept():
    found = {}
    for task in os.listdir("/proc/self/task"):
        for line in open(f"/proc/self/task/{task}/status"):
            if line.startswith("voluntary"):
                found[int(task)] = int(line.split()[1])
    own = found.pop(os.getpid())
    return own, sum(found.values())
call = lambda: tools.json_query__count(data="[1]")
call()
busy = time.monotonic() + 0.2
while time.monotonic() < busy: pass  # it keeps the reading role
before, began = slept(), time.monotonic()
for _ in range(100): call()
after, took = slept(), time.monotonic() - began
print(after[0] - before[0], after[1] - before[1], took)
"""

    def beyond(number: int) -> tuple[float, float]:
        own, others, took_s = map(float, run(kernel, f"wakes{number}", code).split())
        return others - 2 * took_s / LOOK_S, own

    # A busy machine may stop a script for so long that another thread reads from then on: then another one is counted.
    others, own = min(beyond(number) for number in range(3))
    assert others <= 20
    assert own <= 140, "it sleeps while it waits for the answer"


def test_a_call_of_a_script_passes_the_broker_three_times(kernel: Sandbox) -> None:
    """The question, the call, its result; the script has its output by then, and no answer follows. Of each frame
    libzmq's thread tells the broker's, and the broker's tells it.
    """
    assert run(kernel, "passes", "tools.json_query__count(data='[1]')") == ""

    def moved() -> tuple[int, int]:
        lines = Path(f"/proc/{kernel.pid('broker')}/io").read_text().splitlines()
        fields = dict(line.split(": ") for line in lines)
        return int(fields["syscr"]), int(fields["syscw"])

    code = "for _ in range({}): tools.json_query__count(data='[1]')"
    found = []
    for calls in (10, 110):
        before = moved()
        run(kernel, "passes", code.format(calls))
        found.append([after - then for after, then in zip(moved(), before, strict=True)])
    reads, writes = ((long - short) / 100 for short, long in zip(*found, strict=True))
    assert reads <= 2 * 3 + 0.6 and writes <= 2 * 3 + 0.6, "acknowledgements and the journal are the rest"


def test_threads_and_coroutines_of_a_script_get_their_answers(kernel: Sandbox) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(lambda n: tools.json_query__count(data="[1]")["count"], range(20))))
print(tools.json_query__count(data="[1, 2]")["count"])
"""
    assert run(kernel, "threads", code) == "20\n2\n"
    code = """
import asyncio
found = await asyncio.gather(*[tools.json_query__count(data="[1]") for _ in range(20)])
print(sum(one["count"] for one in found))
"""
    assert run(kernel, "coroutines", code) == "20\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")
def test_a_script_in_javascript_runs_in_the_jail(kernel: Sandbox) -> None:
    code = """
const count = (n) => tools.json_query__count({ data: JSON.stringify(Array(n)) });
const counts = await Promise.all([...Array(30).keys()].map(count));
console.log(counts.every((got, n) => got.count === n), process.env.HOME !== undefined);
try { await tools.code__run({ language: "python", code: "1" }); } catch (error) { console.log(error.code); }
"""
    assert run(kernel, "js", code, "javascript") == "true true\nE_FORBIDDEN\n"


def test_the_tool_is_of_its_extension_alone(kernel: Sandbox) -> None:
    refused = kernel.gdn("send", "plain", message("print(1)"), "--instance", "p").out
    assert "E_TOOL_NOT_IN_CATALOG" in refused
    assert kernel.gdn("call", "code__run", json.dumps({"language": "python", "code": "1"})).status != 0


def waiting_item(kernel: Sandbox, asked: int = 1) -> dict[str, Any]:
    """The item that waits, when so many were asked for."""

    def find() -> dict[str, Any] | None:
        items = kernel.gdn("approve", "list", "--json").json["items"]
        return next((item for item in items if item["state"] == "waits"), None)

    return dict(wait_until(find, what=f"item {asked}"))


@pytest.mark.feature("approvals")
def test_a_yes_shows_the_script_and_is_for_twenty_of_its_calls(kernel: Sandbox) -> None:
    code = "print(sum(tools.json_query__count(data='[1]')['count'] for _ in range(25)))"
    process = kernel.popen("send", "gated", message(code), "--instance", "yes")
    item = waiting_item(kernel)
    assert (item["script"], item["covers"], item["tool"]) == (code, 20, "json-query__count")
    assert "script   ┊ print(sum(" in kernel.gdn("approve", "show", item["code"]).out
    assert kernel.gdn("approve", "yes", item["code"]).status == 0
    again = waiting_item(kernel, 2)
    assert again["id"].endswith(">21"), again["id"]
    assert kernel.gdn("approve", "yes", again["code"]).status == 0
    assert json.loads(said(process))["printed"] == "25\n"


@pytest.mark.feature("approvals")
def test_a_no_reaches_the_script_and_its_end_withdraws_what_it_has_asked(kernel: Sandbox) -> None:
    code = """
try:
    tools.json_query__count(data="[1]")
except ToolCallError as error:
    print(error.code)
"""
    process = kernel.popen("send", "gated", message(code), "--instance", "no")
    kernel.gdn("approve", "no", waiting_item(kernel)["code"])
    assert json.loads(said(process))["printed"] == "E_APPROVAL_DENIED\n"
    process = kernel.popen("send", "gated", message(code), "--instance", "withdrawn")
    item = waiting_item(kernel)
    os.kill(pid(kernel, "agent", "withdrawn"), signal.SIGKILL)
    text = said(process)
    assert "E_TOOL_OUTCOME_UNKNOWN" in text, text
    assert "not known: json-query__count" in text, text
    assert kernel.gdn("approve", "yes", item["code"]).status != 0
    assert kernel.gdn("approve", "list", "--json").json["items"] == []


# --- hostile scripts


HOSTILE = """
import os
from goondan_tool import wire
def send(**frame):
    body = wire.pack({"type": "ask", **frame})
    os.write(3, len(body).to_bytes(4, "little") + body)
VALUE = {"name": "bash__exec", "args": {"command": "touch pwned"}}
"""


ATTACKS = (
    "send(callId='1', askId=1, op='request', target='plain', input='hi')",  # the permission is for tools only
    "send(callId='elses', askId=1, op='tool', value=VALUE)",
    "send(callId='main/k/e/c1', askId=1, op='tool', value=VALUE)",
    "send(callId='1', askId=1, op='elicit', value={})",
    "os.write(3, b'\\xff\\xff\\xff\\xff')",
    "[send(callId='x' + str(n), askId=n, op='tool', value=VALUE) for n in range(30000)]",
)


def test_a_script_that_speaks_for_others_ends_its_jail_and_the_next_one_runs(kernel: Sandbox) -> None:
    for attack in ATTACKS:
        shown = run(kernel, "hostile", f"{HOSTILE}\n{attack}\nimport time\ntime.sleep(20)\nprint('still here')")
        assert "still here" not in shown, attack
        assert "E_TOOL_BAD_OUTPUT" in shown or "E_TOOL_LIMIT" in shown or "E_TOOL_CRASHED" in shown, (attack, shown)
    assert run(kernel, "hostile", "print(tools.json_query__count(data='[1]')['count'])") == "1\n"
    assert not (workspace(kernel, "hostile") / "pwned").exists()


def test_a_flood_of_calls_is_refused_beyond_its_limits_and_the_script_goes_on(kernel: Sandbox) -> None:
    code = """
import threading
asking, codes, done = object.__getattribute__(tools, "_calls")._asking, [], threading.Event()
def take(frame):
    codes.append((frame.get("error") or {}).get("code"))
    if len(codes) == 200: done.set()
asking([("tool", {"name": "json-query__count", "args": {"data": "[]"}}, take) for _ in range(200)])
done.wait(30)
print(codes.count("E_TOOL_LIMIT") > 100, codes.count(None) >= 16, len(codes))
print(tools.json_query__count(data="[1]")["count"])
"""
    assert run(kernel, "flood", code) == "True True 200\n1\n"


def test_what_a_script_leaves_running_asks_nothing_after_its_end(kernel: Sandbox) -> None:
    code = """
import os, threading, time
def ask():
    while not os.path.exists("ended"):
        time.sleep(0.01)
    tools.bash__exec(command="touch pwned")
if os.fork() == 0:
    try:
        ask()
    finally:
        os._exit(0)
threading.Thread(target=ask, daemon=True).start()
print("left")
"""
    assert run(kernel, "after", code) == "left\n"
    (workspace(kernel, "after") / "ended").touch()
    code = "import time; time.sleep(0.3); print(tools.bash__exec(command='ls')['stdout'])"
    assert run(kernel, "after", code) == "ended\n\n"


# --- the end of a process in the middle


SLOW = """
tools.bash__exec(command="echo one > first")
tools.bash__exec(command="echo two > second; sleep 20")
print("never")
"""


def started(kernel: Sandbox, key: str) -> subprocess.Popen[bytes]:
    process = begin(kernel, key, SLOW)
    wait_until((workspace(kernel, key) / "second").exists, what="the second call")
    return process


def pid(kernel: Sandbox, role: str, key: str) -> int:
    rows = [row for row in kernel.ps() if row["role"] == role and row["instanceKey"] in (None, key)]
    return int(next(row["pid"] for row in rows if row["pid"]))


@pytest.mark.parametrize("role", ["agent", "toolhost"])
def test_a_script_that_lost_its_agent_or_host_is_unknown_and_its_calls_are_listed(kernel: Sandbox, role: str) -> None:
    process = started(kernel, role)
    os.kill(pid(kernel, role, role), signal.SIGKILL)
    text = said(process)
    assert "E_TOOL_OUTCOME_UNKNOWN" in text, text
    assert 'had finished: bash__exec {"command":"echo one > first"}.' in text, text
    assert "not known: bash__exec" in text, text
    assert run(kernel, role, "print(tools.json_query__count(data='[1]')['count'])") == "1\n", "the next one runs"


def test_a_new_broker_is_no_end_for_a_script(kernel: Sandbox) -> None:
    code = """
import os
while not os.path.exists("enough"):
    assert tools.json_query__count(data="[1, 2]")["count"] == 2
    open("going", "w").close()
assert tools.json_query__count(data="[1, 2]")["count"] == 2
print("counted")
"""
    process = begin(kernel, "broker", code)
    folder = workspace(kernel, "broker")
    wait_until((folder / "going").exists, what="the first call")
    before = kernel.pid("broker")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: any(row["role"] == "broker" and row["pid"] not in (None, before) for row in kernel.ps()))
    (folder / "going").unlink()
    wait_until((folder / "going").exists, what="a call through the new broker")
    (folder / "enough").touch()
    assert json.loads(said(process))["printed"] == "counted\n"


def test_a_cancelled_turn_ends_its_script_and_the_calls_of_it(kernel: Sandbox) -> None:
    process = started(kernel, "cancelled")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    code = """
import time
for _ in range(60):
    if tools.bash__exec(command="pgrep -c sleep || true")["stdout"].strip() == "0":
        print("gone")
        break
    time.sleep(0.1)
"""
    assert run(kernel, "cancelled", code) == "gone\n"
