"""Frames as our own encoder writes them: at least one of each type, and what refers to large payloads.

Source: docs/design/wire.md section 1.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from msgspec import Raw

from goondan.features import FEATURES
from goondan.schemas.wire.blobs import describe as describe_payload
from goondan.schemas.wire.codec import MAX_DEPTH, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import (
    ORCHESTRATOR,
    TOOL_COMPLETED,
    AgentEvent,
    AgentsList,
    AgentsSpawn,
    Answer,
    Blob,
    Completion,
    Credit,
    ErrorPayload,
    FilePart,
    Frame,
    Hello,
    InstanceEnd,
    InstanceEnded,
    Lease,
    OperatorCall,
    ReplyTo,
    RestartRequest,
    Shutdown,
    Source,
    ToolCallPayload,
    ToolError,
    ToolResult,
    Welcome,
)
from goondan.schemas.wire.runtime_events import Gap, RuntimeEvent
from tests.contract.vectors.bad import FILE_NAME, TIME, nested
from tests.contract.vectors.configuration import configuration_frames
from tests.contract.vectors.mcp import mcp_frames
from tests.contract.vectors.tool_asks import tool_ask_frames

ROOT: Final = Path(__file__).resolve().parents[3]
_SIGNED: Final = "b2Zm.aW4="


def of_features() -> list[ModuleType]:
    """Recorded frames of features: `vectors.py` beside their tests, with `frames` and the KINDS of their payloads."""
    there = [row.name for row in FEATURES if (ROOT / "tests" / "features" / row.name / "vectors.py").exists()]
    return [import_module(f"tests.features.{name}.vectors") for name in there]


def good_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    hello = Hello(token=_SIGNED, incarnation="5f1c0a9b3d2e")
    returning = Hello(
        token=_SIGNED,
        incarnation="5f1c0a9b3d2e",
        leases=[Lease("e-1", 7, "u1", "e-0")],
        calls=["t1/c1"],
        awaiting=["q-1"],
        pid=4711,
        started_ms=1_234_567,
    )
    client = Welcome(version=1, principal="client/3", broker="9f00aa11", credit=256, max_frame=1 << 20, revision="r1")
    agent = Welcome(
        version=1,
        principal="agent/coder/u1",
        broker="9f00aa11",
        credit=256,
        max_frame=1 << 20,
        instance_key="u1",
        workdir="/state/instances/coder/u1/workspace",
        epoch=7,
        revision="r1",
        spec=to_raw({"name": "coder"}),
    )
    asked = AgentEvent(
        id="e-1", type="user.message", created_at=TIME, input={"text": "안녕하세요 👋"}, instance_key="u1"
    )
    answer = Answer(turn_id="t1", status="completed", response="네", finish_reason="stop", steps=2)
    answered = AgentEvent(
        id="e-1.answer",
        type="agent.response",
        created_at=TIME,
        instance_key="u1",
        metadata={"inReplyTo": "e-1"},
        answer=answer,
    )
    failed = AgentEvent(
        id="e-1.answer",
        type="agent.response",
        created_at=TIME,
        metadata={"inReplyTo": "e-1"},
        answer=Answer(
            turn_id="t1",
            status="failed",
            finish_reason="error",
            error=error_payload("E_MODEL_FAILED", "the model answered 500"),
        ),
    )
    operator = AgentEvent(
        id="e-2", type="operator.call", created_at=TIME, input=OperatorCall("bash__exec", {"command": "ls"})
    )
    call = ToolCallPayload(
        args=to_raw({"command": "echo 'ü'"}),
        turn_id="t1",
        tool_call_id="c1",
        message_id="m1",
        message=to_raw({"role": "assistant", "content": []}),
    )
    again = ToolCallPayload(args=to_raw({}), turn_id="t1", tool_call_id="c2", message_id="m1")
    ok = ToolResult(status="ok", output=to_raw({"stdout": "ü\n", "exitCode": 0}))
    error = ToolResult(
        status="error",
        error=ToolError(message="no such file", name="FileNotFoundError", code="ENOENT", suggestion="Check the path."),
    )
    told = Completion(
        handle="h-1", tool_name="slow__start", tool_call_id="c1", turn_id="t1", result=to_raw(ToolResult(status="ok"))
    )
    done = AgentEvent(id="t1/c1~completed", type=TOOL_COMPLETED, created_at="2026-01-01T00:00:00.000Z", input=told)
    piece = RuntimeEvent(kind="text", step=1, text="글 one", at=12, again=True)
    thought = RuntimeEvent(kind="reasoning", step=1, text="Which file?")
    failed_call = RuntimeEvent(
        kind="tool.failed", step=1, tool_call_id="c1", tool_name="bash__exec", code="E_TOOL_TIMEOUT"
    )
    reply_to = ReplyTo("client", "q-1")
    numbers = {
        "small": [0, 1, -1, 127, 128, -32, -33, 255, 256, 65535, 65536],
        "large": [2**32, -(2**31), 2**53 - 1, -(2**53) + 1, 2**63 - 1, -(2**63), 2**64 - 1],
        "real": [0.5, -1.5, 1e300, 5e-324, -0.0, 1.0],
    }
    texts = {
        "": "",
        "ascii": "x" * 32,
        "long": "y" * 300,
        "한국어": "글",
        "emoji": "👩‍👩‍👧",
        "zero": "a\0b",
        "quote": '"\\\n',
    }
    event: dict[str, Any] = {"to": "coder", "instance_key": "u1", "event_id": "e-1"}
    lease: dict[str, Any] = {"event_id": "e-1", "epoch": 7}
    return [
        ("hello of a new process", Frame("hello", id="5f1c0a9b3d2e.1", payload=to_raw(hello)), "Hello"),
        ("hello after a reconnect", Frame("hello", id="5f1c0a9b3d2e.9", payload=to_raw(returning)), "Hello"),
        (
            "welcome of a client",
            Frame("welcome", id="b.1", in_reply_to="5f1c0a9b3d2e.1", payload=to_raw(client)),
            "Welcome",
        ),
        (
            "welcome of an agent",
            Frame("welcome", id="b.2", in_reply_to="5f1c0a9b3d2e.1", payload=to_raw(agent)),
            "Welcome",
        ),
        ("ping", Frame("ping", id="b.3"), None),
        ("pong", Frame("pong", id="x.2", in_reply_to="b.3"), None),
        ("bye", Frame("bye", id="x.3"), None),
        ("reply to bye", Frame("reply", id="b.4", in_reply_to="x.3"), None),
        (
            "event of a client",
            Frame("event", id="x.4", **event, reply_to=reply_to, deadline_ms=60000, payload=to_raw(asked)),
            "AgentEvent",
        ),
        (
            "event of an operator with a picture",
            Frame(
                "event",
                id="x.24",
                **event,
                files=[FilePart(Blob(FILE_NAME, "5e" * 32, 81034), "image/jpeg", "photo.jpg")],
                payload=to_raw(asked),
            ),
            "AgentEvent",
        ),
        (
            "event as an agent gets it",
            Frame(
                "event",
                id="b.5",
                from_="client/3",
                **event,
                reply_to=reply_to,
                chain=["agent/boss/u1"],
                epoch=7,
                trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
                parent_span_id="00f067aa0ba902b7",
                waited_ms=12,
                place_ms=5,
                budget=True,
                deadline_ms=59990,
                source=Source("client", "operator"),
                auth=to_raw({"user": "u"}),
                workdir="/w",
                root_event="e-0",
                payload=to_raw(asked),
            ),
            "AgentEvent",
        ),
        (
            "event of an operator",
            Frame(
                "event",
                id="x.5",
                to="_operator",
                instance_key="k",
                event_id="e-2",
                workdir="/w",
                payload=to_raw(operator),
            ),
            "AgentEvent",
        ),
        (
            "answering event",
            Frame(
                "event",
                id="b.6",
                from_="coder",
                instance_key="u1",
                event_id="e-1.answer",
                in_reply_to="q-1",
                source=Source("agent", "coder", "u1"),
                root_event="e-0",
                payload=to_raw(answered),
            ),
            "AgentEvent",
        ),
        (
            "answer of a failed turn",
            Frame("event", id="b.7", from_="coder", event_id="e-1.answer", in_reply_to="q-1", payload=to_raw(failed)),
            "AgentEvent",
        ),
        (
            "answer to an agent that did not wait",
            Frame(
                "event",
                id="b.10",
                from_="coder",
                event_id="e-1:answer",
                in_reply_to="q-1",
                epoch=7,
                payload=to_raw(answered),
                asynchronous=True,
            ),
            "AgentEvent",
        ),
        ("ack accepted", Frame("ack", id="b.8", event_id="e-1", in_reply_to="x.4", stage="accepted"), None),
        ("ack renew", Frame("ack", id="x.6", **lease, stage="renew", position=3), None),
        ("ack done", Frame("ack", id="x.7", **lease, stage="done", payload=to_raw(answered)), "AgentEvent"),
        ("ack failed", Frame("ack", id="x.8", **lease, stage="failed", payload=to_raw(failed)), "AgentEvent"),
        (
            "ack failed by a cause outside of the message",
            Frame("ack", id="x.8", **lease, stage="failed", payload=to_raw(failed), cause="E_DISK_FULL: no room"),
            "AgentEvent",
        ),
        ("ack release", Frame("ack", id="x.9", **lease, stage="release", seen_epoch=1_700_000_000_000), None),
        ("ack result", Frame("ack", id="x.10", stage="result", calls=["t1/c1", "t1/c2"]), None),
        ("ack of an answer", Frame("ack", id="x.11", event_id="e-1.answer", in_reply_to="b.6", stage="done"), None),
        ("credit", Frame("credit", id="b.9", payload=to_raw(Credit(64))), "Credit"),
        (
            "tool.call of an agent",
            Frame(
                "tool.call",
                id="x.12",
                event_id="e-1",
                tool="bash__exec",
                call_id="t1/c1",
                epoch=7,
                deadline_ms=120000,
                first_sent_ms=1_234_900,
                span_id="df11055600cae3f3",
                parent_span_id="dce0018eefc9dfaf",
                payload=to_raw(call),
                step=2,
            ),
            "ToolCallPayload",
        ),
        (
            "tool.call as a tool host gets it",
            Frame(
                "tool.call",
                id="x.13",
                from_="coder",
                instance_key="u1",
                event_id="e-1",
                tool="bash__exec",
                call_id="t1/c2",
                epoch=7,
                workdir="/w/sub",
                workdir_base="/w",
                attach=True,
                root_event="e-0",
                payload=to_raw(again),
            ),
            "ToolCallPayload",
        ),
        ("tool.result ok", Frame("tool.result", id="h.1", call_id="t1/c1", payload=to_raw(ok)), "ToolResult"),
        (
            "tool.result ok with nil",
            Frame(
                "tool.result", id="h.2", call_id="t1/c1", payload=to_raw(ToolResult(status="ok", output=Raw(b"\xc0")))
            ),
            "ToolResult",
        ),
        (
            "tool.result as an agent gets it",
            Frame("tool.result", id="h.8", call_id="t1/c1", payload=to_raw(ok), passed_us=[51583412187, 51583413238]),
            "ToolResult",
        ),
        ("tool.result error", Frame("tool.result", id="h.3", call_id="t1/c1", payload=to_raw(error)), "ToolResult"),
        (
            "tool.result pending",
            Frame("tool.result", id="h.4", call_id="t1/c1", payload=to_raw(ToolResult(status="pending", handle="h-1"))),
            "ToolResult",
        ),
        (
            "tool.progress",
            Frame(
                "tool.progress",
                id="h.5",
                call_id="t1/c1",
                payload=to_raw({"done": 1.5, "total": 3.0, "message": "half"}),
            ),
            "ToolProgress",
        ),
        (
            "tool.completed",
            Frame("tool.completed", id="h.6", to="coder", instance_key="u1", event_id=done.id, payload=to_raw(done)),
            "AgentEvent",
        ),
        ("tool.cancel", Frame("tool.cancel", id="x.14", call_id="t1/c1"), None),
        (
            "instance.end",
            Frame(
                "instance.end",
                id="b.15",
                from_=ORCHESTRATOR,
                to="coder",
                instance_key="k",
                payload=to_raw(InstanceEnd(force=True)),
            ),
            "InstanceEnd",
        ),
        (
            "reply to instance.end",
            Frame("reply", id="h.15", in_reply_to="b.15", payload=to_raw(InstanceEnded(["t1/c1", "bash/build"]))),
            "InstanceEnded",
        ),
        ("tool.cancel of an event", Frame("tool.cancel", id="b.14", event_id="e-1", epoch=7), None),
        ("agents.spawn", Frame("agents.spawn", id="x.15", to="reviewer", instance_key="u2"), None),
        ("agents.list", Frame("agents.list", id="x.16"), None),
        ("agents.catalog", Frame("agents.catalog", id="x.17"), None),
        (
            "restart",
            Frame("restart", id="x.18", call_id="t1/c2", payload=to_raw(RestartRequest("tool:self-restart"))),
            "RestartRequest",
        ),
        *configuration_frames(),
        *(one for module in of_features() for one in module.frames()),
        *tool_ask_frames(),
        *mcp_frames(),
        ("ack park", Frame("ack", id="x.20", event_id="e-1", stage="park", epoch=7), None),
        ("clock of a turn", Frame("clock", id="b.21", event_id="e-1", epoch=7, stage="held", deadline_ms=5000), None),
        (
            "clock of a request",
            Frame("clock", id="b.22", event_id="e-2", in_reply_to="corr:e-2", call_id="t1/c1", stage="runs"),
            None,
        ),
        (
            "agents.spawn in the name of a call",
            Frame(
                "agents.spawn",
                id="t1/c1~spawn",
                to="reviewer",
                instance_key="u2",
                call_id="t1/c1",
                deadline_ms=60000,
                payload=to_raw(AgentsSpawn(".")),
            ),
            "AgentsSpawn",
        ),
        (
            "agents.list of all",
            Frame("agents.list", id="h.7", call_id="t1/c1", payload=to_raw(AgentsList(include_all=True))),
            "AgentsList",
        ),
        (
            "event of a handler",
            Frame(
                "event",
                id="h.8",
                to="reviewer",
                instance_key="u1",
                event_id="t1/c1~ask",
                call_id="t1/c1",
                reply_to=ReplyTo("coder", "q-9"),
                deadline_ms=60000,
                payload=to_raw(asked),
            ),
            "AgentEvent",
        ),
        ("admin", Frame("admin", id="x.18", payload=to_raw({"op": "stats"})), None),
        (
            "runtime.event",
            Frame("runtime.event", id="x.19", payload=to_raw({"kind": "wanted", "principals": []})),
            None,
        ),
        (
            "event of a client that wants to hear of the turn",
            Frame("event", id="x.27", **event, reply_to=reply_to, live=True, digest="2f1c", payload=to_raw(asked)),
            "AgentEvent",
        ),
        (
            "a piece of text, from the agent",
            Frame("runtime.event", id="x.28", **lease, payload=to_raw(piece)),
            "RuntimeEvent",
        ),
        (
            "a piece of text, as the asker gets it",
            Frame(
                "runtime.event",
                id="b.13",
                from_="coder",
                instance_key="u1",
                event_id="e-1",
                in_reply_to="q-1",
                payload=to_raw(piece),
            ),
            "RuntimeEvent",
        ),
        (
            "a piece of text, as an observer gets it",
            Frame(
                "observed",
                id="b.23",
                from_="coder",
                instance_key="u1",
                event_id="e-1",
                in_reply_to="c.9",
                root_event="e-0",
                position=12,
                payload=to_raw(piece),
            ),
            "RuntimeEvent",
        ),
        (
            "what an observer has missed",
            Frame("observed", id="b.24", in_reply_to="c.9", stage="gap", position=40, payload=to_raw(Gap(13, 40))),
            "Gap",
        ),
        ("what an observer has read", Frame("observed", id="c.10", in_reply_to="c.9", position=40), None),
        ("somebody wants to hear of a turn that runs", Frame("listen", id="b.25", **lease, live=True), None),
        (
            "a piece of reasoning",
            Frame("runtime.event", id="x.30", **lease, payload=to_raw(thought)),
            "RuntimeEvent",
        ),
        (
            "a tool call that has failed",
            Frame("runtime.event", id="x.29", **lease, payload=to_raw(failed_call)),
            "RuntimeEvent",
        ),
        ("log", Frame("log", id="x.20", payload=to_raw({"level": "info", "message": "ready"})), None),
        (
            "shutdown",
            Frame(
                "shutdown",
                id="b.10",
                from_=ORCHESTRATOR,
                to="coder",
                payload=to_raw(Shutdown(10000, "orchestrator_shutdown")),
            ),
            "Shutdown",
        ),
        ("shutdown_ack", Frame("shutdown_ack", id="x.21", from_="coder", to=ORCHESTRATOR, in_reply_to="b.10"), None),
        (
            "error",
            Frame(
                "error",
                id="b.11",
                in_reply_to="x.4",
                payload=to_raw(error_payload("E_OVERLOADED", "full", retry_after_ms=100)),
            ),
            "ErrorPayload",
        ),
        (
            "error that asks for hello",
            Frame(
                "error",
                id="b.12",
                payload=to_raw(ErrorPayload("E_HELLO_REQUIRED", "this connection has not said hello")),
            ),
            "ErrorPayload",
        ),
        ("a type of the future", Frame("agents.migrate", id="x.22"), None),
        ("numbers at their limits", Frame("admin", id="x.23", payload=to_raw(numbers)), None),
        ("texts in many scripts", Frame("admin", id="x.24", payload=to_raw(texts)), None),
        (
            "containers of every size",
            Frame(
                "admin",
                id="x.25",
                payload=to_raw(
                    {
                        "a": [],
                        "b": {},
                        "c": [None, True, False],
                        "d": list(range(20)),
                        "e": {str(n): n for n in range(20)},
                    }
                ),
            ),
            None,
        ),
        ("as deep as allowed", Frame("admin", id="x.26", payload=Raw(nested(MAX_DEPTH))), None),
    ]


def references() -> list[tuple[str, Frame, str, bytes]]:
    """Name and frame of what refers to a payload, what that is, and the bytes of its file."""
    result = bytes(to_raw(ToolResult(status="ok", output=to_raw("글" * 8))))
    call = bytes(to_raw(ToolCallPayload(args=to_raw({"text": "x" * 40}), turn_id="t1", tool_call_id="c1")))
    event = bytes(to_raw(AgentEvent(id="e-1", type="user.message", created_at=TIME, input="y" * 300)))
    return [
        (
            "tool.result by reference",
            Frame("tool.result", id="h.7", call_id="t1/c1", blob=describe_payload(result, FILE_NAME)),
            "ToolResult",
            result,
        ),
        (
            "tool.call by reference",
            Frame("tool.call", id="x.22", call_id="t1/c1", tool="bash__exec", blob=describe_payload(call, FILE_NAME)),
            "ToolCallPayload",
            call,
        ),
        (
            "event by reference",
            Frame(
                "event",
                id="x.23",
                to="coder",
                instance_key="u1",
                event_id="e-1",
                blob=describe_payload(event, FILE_NAME),
            ),
            "AgentEvent",
            event,
        ),
    ]
