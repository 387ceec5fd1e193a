"""`python -m schemas.vectors.generate [--check]`: writes frames.json, or says that it is out of date.

Good frames are built from the structs; bad and unusual ones are put together byte by byte, because no encoder of ours
would write them.

Source: design section 4 ("`vectors/` (bytes, decoded form, and the error for bad ones) that every client replays").
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from schemas.codec import MAX_DEPTH, MAX_FRAME_BYTES, encode, encode_value, to_raw
from schemas.errors import error_payload
from schemas.frames import (
    TOOL_COMPLETED,
    AgentEvent,
    AgentsList,
    AgentsSpawn,
    Answer,
    Completion,
    Credit,
    ErrorPayload,
    Frame,
    Hello,
    Lease,
    OperatorCall,
    ReplyTo,
    RuntimeEvent,
    Shutdown,
    Source,
    ToolCallPayload,
    ToolError,
    ToolResult,
    Welcome,
)

FILE: Final = Path(__file__).parent / "frames.json"
#: Integers that every JSON parser keeps.
SAFE_INT: Final = 2**53 - 1
FORMAT: Final = 1
_TIME: Final = "2026-11-21T09:30:00.125Z"
_SIGNED: Final = "b2Zm.aW4="


def to_json(value: Any) -> Any:
    """A decoded msgpack value as the vectors write it."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > SAFE_INT:
        return {"$int": str(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return {key: to_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def from_json(value: Any) -> Any:
    """The other way."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        return int(value["$int"]) if value.keys() == {"$int"} else {k: from_json(v) for k, v in value.items()}
    return value


def describe(frame: Frame) -> dict[str, Any]:
    """A frame in its decoded form: the header without defaults, opaque fields opened."""
    described: dict[str, Any] = {}
    for field in msgspec.structs.fields(Frame):
        value = getattr(frame, field.name)
        if value is None or value == field.default or value == "" or bytes_of(value) == b"\xc0":
            continue
        described[field.encode_name] = to_json(msgspec.msgpack.decode(encode_value(value)))
    return described


def bytes_of(value: Any) -> bytes | None:
    """What an opaque field holds."""
    return bytes(value) if isinstance(value, Raw) else None


# --- good frames ----------------------------------------------------------------------------------------------------


def good_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    hello = Hello(token=_SIGNED, incarnation="5f1c0a9b3d2e")
    returning = Hello(
        token=_SIGNED,
        incarnation="5f1c0a9b3d2e",
        leases=[Lease("e-1", 7, "u1")],
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
        id="e-1", type="user.message", created_at=_TIME, input={"text": "안녕하세요 👋"}, instance_key="u1"
    )
    answer = Answer(turn_id="t1", status="completed", response="네", finish_reason="stop", steps=2)
    answered = AgentEvent(
        id="e-1.answer",
        type="agent.response",
        created_at=_TIME,
        instance_key="u1",
        metadata={"inReplyTo": "e-1"},
        answer=answer,
    )
    failed = AgentEvent(
        id="e-1.answer",
        type="agent.response",
        created_at=_TIME,
        metadata={"inReplyTo": "e-1"},
        answer=Answer(
            turn_id="t1",
            status="failed",
            finish_reason="error",
            error=error_payload("E_MODEL_FAILED", "the model answered 500"),
        ),
    )
    operator = AgentEvent(
        id="e-2", type="operator.call", created_at=_TIME, input=OperatorCall("bash__exec", {"command": "ls"})
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
                deadline_ms=59990,
                source=Source("client", "operator"),
                auth=to_raw({"user": "u"}),
                workdir="/w",
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
                payload=to_raw(answered),
            ),
            "AgentEvent",
        ),
        (
            "answer of a failed turn",
            Frame("event", id="b.7", from_="coder", event_id="e-1.answer", in_reply_to="q-1", payload=to_raw(failed)),
            "AgentEvent",
        ),
        ("ack accepted", Frame("ack", id="b.8", event_id="e-1", in_reply_to="x.4", stage="accepted"), None),
        ("ack renew", Frame("ack", id="x.6", **lease, stage="renew"), None),
        ("ack done", Frame("ack", id="x.7", **lease, stage="done", payload=to_raw(answered)), "AgentEvent"),
        ("ack failed", Frame("ack", id="x.8", **lease, stage="failed", payload=to_raw(failed)), "AgentEvent"),
        ("ack release", Frame("ack", id="x.9", **lease, stage="release"), None),
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
                payload=to_raw(call),
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
                workdir="/w",
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
        ("tool.cancel of an event", Frame("tool.cancel", id="b.14", event_id="e-1", epoch=7), None),
        ("agents.spawn", Frame("agents.spawn", id="x.15", to="reviewer", instance_key="u2"), None),
        ("agents.list", Frame("agents.list", id="x.16"), None),
        ("agents.catalog", Frame("agents.catalog", id="x.17"), None),
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
            Frame("event", id="x.27", **event, reply_to=reply_to, live=True, payload=to_raw(asked)),
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
            "a tool call that has failed",
            Frame("runtime.event", id="x.29", **lease, payload=to_raw(failed_call)),
            "RuntimeEvent",
        ),
        ("log", Frame("log", id="x.20", payload=to_raw({"level": "info", "message": "ready"})), None),
        (
            "shutdown",
            Frame("shutdown", id="b.10", payload=to_raw(Shutdown(10000, "orchestrator_shutdown"))),
            "Shutdown",
        ),
        ("shutdown_ack", Frame("shutdown_ack", id="x.21", in_reply_to="b.10"), None),
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


def nested(levels: int) -> bytes:
    """Lists in lists, an empty one innermost."""
    return b"\x91" * (levels - 1) + b"\x90"


# --- unusual frames that are as good --------------------------------------------------------------------------------


def text(value: str) -> bytes:
    """A short string."""
    return encode_value(value)


def mapping(*items: tuple[bytes, bytes]) -> bytes:
    """A map of at most 15 encoded keys and values, in this order."""
    return bytes([0x80 | len(items)]) + b"".join(key + value for key, value in items)


TYPE: Final = text("type")
PING: Final = (TYPE, text("ping"))
ID: Final = (text("id"), text("x.1"))


def unusual_frames() -> list[tuple[str, bytes, Frame]]:
    """Name, bytes, and the frame they mean."""
    long_text = b"\xdb\x00\x00\x00\x04ping"
    wide = b"\xdf\x00\x00\x00\x02" + TYPE + long_text + text("epoch") + b"\xd3" + (7).to_bytes(8, "big")
    return [
        ("fields in another order", mapping(ID, PING), Frame("ping", id="x.1")),
        ("without an id", mapping(PING), Frame("ping")),
        (
            "defaults written out",
            mapping(PING, (text("v"), b"\x01"), (text("payload"), b"\xc0")),
            Frame("ping", payload=Raw(b"\xc0")),
        ),
        ("nil for an absent field", mapping(PING, (text("to"), b"\xc0"), (text("epoch"), b"\xc0")), Frame("ping")),
        ("lengths and numbers in their widest form", wide, Frame("ping", epoch=7)),
        (
            "a field of the future is skipped",
            mapping(PING, (text("priority"), b"\x05"), (text("x"), b"\x81\xa1y\x90")),
            Frame("ping"),
        ),
        ("of two equal keys the last one counts", mapping(PING, (TYPE, text("pong"))), Frame("pong")),
        ("a forged sender is only a field", mapping(PING, (text("from"), text("coder"))), Frame("ping", from_="coder")),
        ("another version", mapping(PING, (text("v"), b"\x02")), Frame("ping", v=2)),
        (
            "a payload that is no map",
            mapping(PING, (text("payload"), encode_value("free"))),
            Frame("ping", payload=to_raw("free")),
        ),
        (
            "a float32 in the payload",
            mapping(PING, (text("payload"), b"\xca\x3f\x00\x00\x00")),
            Frame("ping", payload=Raw(b"\xca\x3f\x00\x00\x00")),
        ),
    ]


# --- bad frames -----------------------------------------------------------------------------------------------------


class Bad(Struct, frozen=True, kw_only=True):
    """One vector that must be refused: prefix, `times` × unit, suffix."""

    name: str
    prefix: bytes
    unit: bytes = b""
    times: int = 0
    suffix: bytes = b""
    code: str = "E_FRAME_INVALID"
    stage: str = "frame"
    payload_kind: str | None = None

    @property
    def data(self) -> bytes:
        """The bytes."""
        return self.prefix + self.unit * self.times + self.suffix


def bad_frames() -> list[Bad]:
    """What a decoder must refuse."""

    def payload(kind: str, data: bytes) -> dict[str, Any]:
        frame = mapping((TYPE, text("event")), (text("payload"), data))
        return {"prefix": frame, "stage": "payload", "payload_kind": kind}

    head = b"\x82" + TYPE + text("ping") + text("payload")
    event = {"id": "e", "type": "t", "createdAt": _TIME}
    over = MAX_FRAME_BYTES - len(head) - 5 + 1
    return [
        Bad(name="nothing", prefix=b""),
        Bad(name="text", prefix=b"GET / HTTP/1.1\r\n"),
        Bad(name="JSON", prefix=b'{"type":"ping"}'),
        Bad(name="nil", prefix=b"\xc0"),
        Bad(name="a list", prefix=b"\x91" + text("ping")),
        Bad(name="an empty map", prefix=b"\x80"),
        Bad(name="a map without a type", prefix=mapping(ID)),
        Bad(name="nil as type", prefix=mapping((TYPE, b"\xc0"))),
        Bad(name="a number as type", prefix=mapping((TYPE, b"\x01"))),
        Bad(name="bytes as type", prefix=mapping((TYPE, b"\xc4\x04ping"))),
        Bad(name="a number as id", prefix=mapping(PING, (text("id"), b"\x01"))),
        Bad(name="text as epoch", prefix=mapping(PING, (text("epoch"), text("7")))),
        Bad(name="a fraction as epoch", prefix=mapping(PING, (text("epoch"), b"\xcb" + struct.pack(">d", 1.5)))),
        Bad(name="an ext type in the header", prefix=mapping(PING, (text("to"), b"\xd4\x05\x00"))),
        Bad(name="a timestamp in the header", prefix=mapping(PING, (text("deadlineMs"), b"\xd6\xff\x00\x00\x00\x00"))),
        Bad(name="a map as replyTo without its fields", prefix=mapping(PING, (text("replyTo"), b"\x80"))),
        Bad(name="a text as calls", prefix=mapping(PING, (text("calls"), text("c")))),
        Bad(name="a number in calls", prefix=mapping(PING, (text("calls"), b"\x91\x01"))),
        Bad(
            name="a kind of source that is none",
            prefix=mapping(PING, (text("source"), mapping((text("kind"), text("root")), (text("name"), text("x"))))),
        ),
        Bad(name="a number as key", prefix=mapping(PING, (b"\x01", b"\x01"))),
        Bad(name="bytes as key", prefix=mapping((b"\xc4\x04type", text("ping")))),
        Bad(name="bad UTF-8 in a field", prefix=mapping((TYPE, b"\xa2\xc3\x28"))),
        Bad(name="an encoded surrogate", prefix=mapping((TYPE, b"\xa3\xed\xa0\x80"))),
        Bad(name="truncated in a text", prefix=mapping(PING)[:-1]),
        Bad(name="truncated after a key", prefix=b"\x82" + TYPE + text("ping") + text("id")),
        Bad(name="truncated in a length", prefix=b"\x81" + TYPE + b"\xda\x00"),
        Bad(name="a text longer than the frame", prefix=b"\x81" + TYPE + b"\xdb\xff\xff\xff\xff" + b"ping"),
        Bad(name="a map larger than the frame", prefix=b"\xdf\xff\xff\xff\xff" + TYPE + text("ping")),
        Bad(name="a list larger than the frame", prefix=mapping(PING, (text("calls"), b"\xdd\xff\xff\xff\xff"))),
        Bad(name="bytes after the frame", prefix=mapping(PING) + b"\xc0"),
        Bad(name="two frames in one part", prefix=mapping(PING) * 2),
        Bad(name="a byte that msgpack never uses", prefix=mapping(PING, (text("payload"), b"\xc1"))),
        Bad(
            name="one byte over the limit",
            prefix=head + b"\xc6" + over.to_bytes(4, "big"),
            unit=b"\x00",
            times=over,
            code="E_FRAME_TOO_LARGE",
        ),
        Bad(
            name="far over the limit, and no msgpack",
            prefix=b"",
            unit=b"\xff",
            times=2 * MAX_FRAME_BYTES,
            code="E_FRAME_TOO_LARGE",
        ),
        Bad(
            name="nested without end in an unknown field",
            prefix=b"\x82" + TYPE + text("ping") + text("x"),
            unit=b"\x91",
            times=100_000,
            suffix=b"\x90",
        ),
        Bad(name="nested without end in the payload", prefix=head, unit=b"\x91", times=100_000, suffix=b"\x90"),
        Bad(name="nested without end in maps", prefix=head, unit=b"\x81\xa1a", times=100_000, suffix=b"\xc0"),
        Bad(
            name="a payload one level too deep",
            prefix=head + nested(MAX_DEPTH + 1),
            stage="payload",
            payload_kind="any",
        ),
        Bad(
            name="a payload one map too deep",
            prefix=head,
            unit=b"\x81\xa1a",
            times=MAX_DEPTH + 1,
            suffix=b"\xc0",
            stage="payload",
            payload_kind="any",
        ),
        Bad(name="bad UTF-8 in the payload", **payload("AgentEvent", mapping((text("id"), b"\xa1\xff")))),
        Bad(name="an event without a type", **payload("AgentEvent", encode_value({"id": "e", "createdAt": _TIME}))),
        Bad(name="an event that is nil", **payload("AgentEvent", b"\xc0")),
        Bad(name="metadata that is a list", **payload("AgentEvent", encode_value({**event, "metadata": []}))),
        Bad(
            name="an answer of an unknown status",
            **payload("AgentEvent", encode_value({**event, "answer": {"turnId": "t", "status": "perhaps"}})),
        ),
        Bad(name="a result of an unknown status", **payload("ToolResult", encode_value({"status": "maybe"}))),
        Bad(
            name="a result whose error is a text",
            **payload("ToolResult", encode_value({"status": "error", "error": "x"})),
        ),
        Bad(
            name="a call without arguments",
            **payload("ToolCallPayload", encode_value({"turnId": "t", "toolCallId": "c"})),
        ),
        Bad(name="a hello without a token", **payload("Hello", encode_value({"incarnation": "i"}))),
        Bad(name="a hello with a number as token", **payload("Hello", encode_value({"incarnation": "i", "token": 1}))),
        Bad(
            name="a lease of no instance",
            **payload(
                "Hello", encode_value({"incarnation": "i", "token": "t", "leases": [{"eventId": "e", "epoch": 1}]})
            ),
        ),
        Bad(
            name="a shutdown for an unknown reason",
            **payload("Shutdown", encode_value({"gracePeriodMs": 1, "reason": "boredom"})),
        ),
        Bad(name="a credit that is a text", **payload("Credit", encode_value({"window": "64"}))),
    ]


# --- the file -------------------------------------------------------------------------------------------------------


def build() -> dict[str, Any]:
    """The content of frames.json."""
    valid: list[dict[str, Any]] = []
    for name, frame, kind in good_frames():
        vector: dict[str, Any] = {"name": name, "bytes": encode(frame).hex(), "frame": describe(frame)}
        valid.append(vector if kind is None else {**vector, "payloadKind": kind})
    for name, data, frame in unusual_frames():
        valid.append({"name": name, "bytes": data.hex(), "frame": describe(frame), "canonical": encode(frame).hex()})
    bad: list[dict[str, Any]] = []
    for item in bad_frames():
        vector = {"name": item.name}
        if item.times:
            parts = {"prefix": item.prefix.hex(), "unit": item.unit.hex(), "times": item.times}
            vector["repeat"] = {**parts, "suffix": item.suffix.hex()}
        else:
            vector["bytes"] = item.prefix.hex()
        vector |= {"stage": item.stage, "code": item.code}
        bad.append(vector if item.payload_kind is None else {**vector, "payloadKind": item.payload_kind})
    limits = {"maxFrameBytes": MAX_FRAME_BYTES, "maxDepth": MAX_DEPTH}
    return {"format": FORMAT, "limits": limits, "valid": valid, "bad": bad}


def render(content: dict[str, Any]) -> str:
    """One vector a line, so that a change of one is a change of one line."""
    lines = [f'{{"format": {content["format"]},', f'"limits": {json.dumps(content["limits"])},']
    for key, end in (("valid", ","), ("bad", "")):
        vectors = ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in content[key])
        lines.append(f'"{key}": [\n{vectors}\n]{end}')
    return "\n".join(lines) + "}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or check it: 1 when it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m schemas.vectors.generate", description="Recorded frames.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the file is up to date")
    options = parser.parse_args(arguments)
    content = render(build())
    if not options.check:
        FILE.write_text(content, encoding="utf-8")
        return 0
    if not FILE.is_file() or FILE.read_text(encoding="utf-8") != content:
        print(f"{FILE} is out of date; run `python -m schemas.vectors.generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
