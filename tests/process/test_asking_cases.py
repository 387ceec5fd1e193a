"""What the specification says of the tools `agents`, `handoff` and `self-restart`, case by case, on a running swarm.

Nothing here knows how they are made. Calls go in as messages; what comes out is written down by an extension, which is
handed what every extension is: the results of calls, the events that an agent gets, and its conversation.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import pytest

from tests.kernel_fixture import Sandbox, has_feature, sandbox, wait_until

#: What the coordinator has besides.
RESTARTS: Final = ", Tool/self-restart" if has_feature("restart") else ""
NOTARY: Final = """\
import asyncio
import json
import os

NOTES = os.path.join(os.environ["GOONDAN_STATE_ROOT"], "notes.jsonl")


def plain(value):
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    names = getattr(value, "__struct_fields__", None) or [n for n in dir(value) if not n.startswith("_")]
    return {name: plain(one) for name in names if not callable(one := getattr(value, name, None))}


def note(kind, **more):
    with open(NOTES, "a") as notes:
        notes.write(json.dumps({"kind": kind, **more}) + "\\n")


def register(api, config):
    if config.get("ends") == "loading":
        os._exit(3)

    async def turn(ctx):
        event = ctx.input_event
        messages = [plain(message) for message in ctx.conversation_state.next_messages]
        note("event", agent=ctx.agent_name, key=ctx.instance_key, trace=ctx.trace_id, event=plain(event))
        late = [m["metadata"] for m in messages if "__goondanInterAgentResponse" in (m.get("metadata") or {})]
        note("late", agent=ctx.agent_name, key=ctx.instance_key, messages=late, conversation=messages)
        text = event.input if isinstance(event.input, str) else ""
        if config.get("plays"):
            if text == "crash":
                os._exit(4)
            if text == "fail":
                raise ValueError("x" * 5000)
            if text == "sleep":
                await asyncio.sleep(30)
        result = await ctx.next()
        if config.get("plays"):
            result.response = f"heard {text}"
        return result

    async def call(ctx):
        result = await ctx.next()
        note("result", tool=ctx.tool_name, key=ctx.instance_key, status=result.status, output=plain(result.output),
             error=plain(result.error), handle=getattr(result, "handle", None))
        return result

    api.pipeline.register("turn", turn)
    api.pipeline.register("toolCall", call)
"""
_AGENT: Final = """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: %s}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [%s]
  extensions: [{ref: Extension/notary, config: {%s}}]
"""
AGENTS: Final = ("coordinator", "worker", "broken")
BUNDLE: Final = (
    """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: notary}
spec: {entry: ext/notary.py}
"""
    + _AGENT % ("coordinator", "Tool/agents, Tool/handoff" + RESTARTS, "plays: false")
    + _AGENT % ("worker", "Tool/agents", "plays: true")
    + _AGENT % ("broken", "Tool/agents", "ends: loading")
    + """\
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: my-swarm}
spec: {entryAgent: Agent/coordinator, agents: [Agent/coordinator, Agent/worker, Agent/broken]}
"""
)


@dataclass
class Swarm:
    """A kernel, and what was written down in it."""

    kernel: Sandbox
    numbers: Iterator[int]

    def notes(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        paths = (self.kernel.home / "state").resolve().glob("**/notes.jsonl")
        found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [n for n in found if n["kind"] == kind and all(n.get(name) == value for name, value in like.items())]

    def key(self) -> str:
        """An instance key that nobody has used."""
        return f"k{next(self.numbers)}"

    def call(self, tool: str, key: str, /, **arguments: Any) -> dict[str, Any]:
        """The result of a call of the coordinator's."""
        before = len(self.notes("result", tool=tool, key=key))
        said = self.kernel.gdn("send", f"/{tool} {json.dumps(arguments)}", "--instance", key)
        assert said.status == 0, said.err
        results = self.notes("result", tool=tool, key=key)
        assert len(results) == before + 1, said.out
        return results[-1]

    def events(self, **like: Any) -> list[dict[str, Any]]:
        """What an agent got."""
        return [note["event"] for note in self.notes("event", **like)]


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with sandbox(BUNDLE) as kernel:
        (kernel.home / "ext").mkdir()
        (kernel.home / "ext" / "notary.py").write_text(NOTARY)
        kernel.detach()
        yield Swarm(kernel, count())


def fields(event: dict[str, Any], *names: str) -> Any:
    """A field of an event, under whichever of these names extensions see it."""
    return next((event[name] for name in names if name in event), None)


# --- refused calls


#: Calls that ask nobody: what is wrong with the arguments, and whom nobody is called.
INVALID: Final[list[tuple[str, dict[str, Any]]]] = [
    ("agents__request", {"input": "x"}),
    ("agents__request", {"target": "worker"}),
    ("agents__request", {"target": "worker", "input": 7}),
    ("agents__request", {"target": "worker", "input": "x", "timeoutMs": "soon"}),
    ("agents__request", {"target": "worker", "input": "x", "timeoutMs": 0}),
    ("agents__request", {"target": "worker", "input": "x", "timeoutMs": -5}),
    ("agents__request", {"target": "worker", "input": "x", "async": "yes"}),
    ("agents__request", {"target": "worker", "input": "x", "metadata": "m"}),
    ("agents__request", {"target": "worker", "input": "x", "instanceKey": ""}),
    ("agents__request", {"target": "worker", "input": "x", "instanceKey": "a\u0000b"}),
    ("agents__send", {"input": "x"}),
    ("agents__send", {"target": "worker"}),
    ("agents__spawn", {}),
    ("agents__list", {"includeAll": "yes"}),
    ("handoff__request", {"payload": "x"}),
    ("handoff__request", {"target": "worker"}),
    *([("self-restart__request", {"reason": 5})] if RESTARTS else []),
]
NOBODY: Final[list[tuple[str, dict[str, Any]]]] = [
    ("agents__request", {"target": "nobody", "input": "x"}),
    ("agents__send", {"target": "nobody", "input": "x"}),
    ("agents__spawn", {"target": "nobody"}),
    ("handoff__request", {"target": "nobody", "payload": "x"}),
]


@pytest.mark.parametrize(
    ("calls", "code"), [(INVALID, "E_TOOL_INVALID_ARGS"), (NOBODY, "E_AGENT_NOT_FOUND")], ids=["invalid", "nobody"]
)
def test_what_asks_nobody_is_an_error_result(swarm: Swarm, calls: list[tuple[str, dict[str, Any]]], code: str) -> None:
    key = swarm.key()
    said = "\n".join(f"/{tool} {json.dumps(arguments)}" for tool, arguments in calls)
    assert swarm.kernel.gdn("send", said, "--instance", key).status == 0
    results = swarm.notes("result", key=key)
    assert sorted(result["tool"] for result in results) == sorted(tool for tool, _ in calls)
    assert {(result["status"], result["error"]["code"]) for result in results} == {("error", code)}
    for message in (result["error"]["message"] for result in results):
        assert len(message) <= 1500
        assert code != "E_AGENT_NOT_FOUND" or all(name in message for name in AGENTS)
    assert not swarm.notes("event", agent="worker", key=key), "it was asked all the same"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"target": "worker", "input": "crash"}, "E_AGENT_FAILED"),
        ({"target": "worker", "input": "fail"}, "E_AGENT_FAILED"),
        ({"target": "worker", "input": "sleep", "timeoutMs": 300}, "E_AGENT_TIMEOUT"),
    ],
)
def test_a_request_that_fails_is_an_error_result(swarm: Swarm, arguments: dict[str, Any], code: str) -> None:
    began = time.monotonic()
    result = swarm.call("agents__request", swarm.key(), **arguments)
    assert (result["status"], result["error"]["code"]) == ("error", code)
    assert len(result["error"]["message"]) <= 1500
    assert time.monotonic() - began < 15


def test_an_agent_that_ends_while_it_loads_is_not_spawned_and_fails_what_it_is_asked(swarm: Swarm) -> None:
    key = swarm.key()
    spawned = swarm.call("agents__spawn", key, target="broken")
    assert (spawned["status"], spawned["error"]["code"]) == ("error", "E_AGENT_SPAWN_FAILED")
    asked = swarm.call("agents__request", key, target="broken", input="x")
    assert (asked["status"], asked["error"]["code"]) == ("error", "E_AGENT_SPAWN_FAILED")


# --- requests


def test_a_request_waits_for_the_answer(swarm: Swarm) -> None:
    key, metadata = swarm.key(), {"ticket": 17, "deep": {"a": [1, None]}}
    word, other = f"word of {key}", f"another key/\u00fc {key}"
    more = {"eventType": "code.review", "metadata": metadata, "instanceKey": other, "timeoutMs": 20_000, "async": False}
    result = swarm.call("agents__request", key, target="worker", input=word, **more)
    assert result["status"] == "ok", result
    output = result["output"]
    assert set(output) == {"target", "eventId", "correlationId", "accepted", "async", "response"}
    assert (output["target"], output["accepted"], output["async"]) == ("worker", True, False)
    assert output["response"] == f"heard {word}"
    (event,) = [e for e in swarm.events(agent="worker", key=other) if e["input"] == word]
    assert (event["id"], event["type"]) == (output["eventId"], "code.review")
    reply_to = fields(event, "reply_to", "replyTo")
    assert fields(reply_to, "correlation_id", "correlationId") == output["correlationId"]
    assert reply_to["target"] == "coordinator"
    assert metadata.items() <= event["metadata"].items()
    traces = {n["trace"] for n in swarm.notes("event") if n["event"]["id"] == event["id"]}
    assert traces <= {n["trace"] for n in swarm.notes("event", agent="coordinator", key=key)}, "another trace"


def test_an_asynchronous_request_returns_at_once_and_its_answer_is_injected(swarm: Swarm) -> None:
    key = swarm.key()
    result = swarm.call("agents__request", key, target="worker", input="later", **{"async": True})
    output = result["output"]
    assert result["status"] == "ok"
    assert (output["accepted"], output["async"], output["response"]) == (True, True, None)

    def injected() -> list[dict[str, Any]]:
        swarm.kernel.gdn("send", "look", "--instance", key)
        found = [message for note in swarm.notes("late", agent="coordinator", key=key) for message in note["messages"]]
        return [message["__goondanInterAgentResponse"] for message in found]

    (told, *_) = wait_until(injected)
    assert (told["target"], told["eventId"], told["correlationId"]) == (
        "worker", output["eventId"], output["correlationId"])  # fmt: skip
    assert told["response"] == "heard later"


def test_a_send_returns_at_once_and_starts_who_does_not_run(swarm: Swarm) -> None:
    key = swarm.key()
    result = swarm.call("agents__send", key, target="worker", input="told", metadata={"n": 1})
    assert result["status"] == "ok"
    output = result["output"]
    assert (output["target"], output["accepted"], output["sent"]) == ("worker", True, True)
    wait_until(lambda: [e for e in swarm.events(agent="worker", key=key) if e["input"] == "told"])
    (event,) = [e for e in swarm.events(agent="worker", key=key) if e["input"] == "told"]
    assert (event["id"], event["type"]) == (output["eventId"], "agent.send")
    assert fields(event, "reply_to", "replyTo") is None
    assert event["metadata"]["n"] == 1


# --- instances


def test_spawned_instances_are_listed_for_whoever_spawned_them(swarm: Swarm) -> None:
    key, other, own = swarm.key(), swarm.key(), swarm.key()
    for arguments, expected in (({}, key), ({"instanceKey": own}, own)):
        spawned = swarm.call("agents__spawn", key, target="worker", **arguments)
        assert spawned["output"] == {"target": "worker", "instanceKey": expected, "spawned": True, "cwd": None}
    again = swarm.call("agents__spawn", key, target="worker", instanceKey=own)
    assert (again["status"], again["output"]["spawned"]) == ("ok", False)
    listed = swarm.call("agents__list", key)["output"]
    assert listed["count"] == len(listed["agents"]) == 2
    for entry in listed["agents"]:
        assert set(entry) == {"target", "instanceKey", "ownerAgent", "ownerInstanceKey", "createdAt", "cwd"}
        assert (entry["target"], entry["ownerAgent"], entry["ownerInstanceKey"]) == ("worker", "coordinator", key)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["createdAt"])
        assert entry["cwd"] is None
    assert {entry["instanceKey"] for entry in listed["agents"]} == {key, own}
    assert swarm.call("agents__list", other)["output"] == {"count": 0, "agents": []}
    everything = swarm.call("agents__list", other, includeAll=True)["output"]
    assert everything["count"] == len(everything["agents"])
    assert {key, own} <= {entry["instanceKey"] for entry in everything["agents"]}


# --- handoff


def test_a_handoff_is_pending_and_its_end_comes_by_itself(swarm: Swarm) -> None:
    key, fresh, payload = swarm.key(), swarm.key(), {"task": "write", "parts": [1, 2]}
    result = swarm.call("handoff__request", key, target="worker", payload=payload, instanceKey=fresh)
    assert result["status"] == "pending", result
    assert result["handle"]
    wait_until(lambda: swarm.events(agent="worker", key=fresh))
    (event,) = swarm.events(agent="worker", key=fresh)
    assert (
        event["input"] == payload
        or payload in (event.get("metadata") or {}).values()
        or (isinstance(event["input"], str) and json.loads(event["input"]) == payload)
    )
    correlation = fields(fields(event, "reply_to", "replyTo"), "correlation_id", "correlationId")
    assert correlation
    text = wait_until(lambda: told_of(swarm, key, result["handle"]))
    assert correlation in text, "the correlationId is the same"


def told_of(swarm: Swarm, key: str, handle: str) -> str | None:
    """The message of the coordinator's conversation about a handle, after the call itself."""
    notes = swarm.notes("late", agent="coordinator", key=key)
    told = (json.dumps(message) for note in notes for message in note["conversation"])
    return next((text for text in told if handle in text and "heard" in text), None)
