"""Frames that a decoder must refuse, and the means to put any frame together byte by byte.

Source: docs/design/wire.md section 1.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.wire.blobs import MAX_BLOB_BYTES
from goondan.schemas.wire.codec import MAX_DEPTH, MAX_FRAME_BYTES, encode_value

#: A time and a name that stand in recorded frames.
TIME: Final = "2026-11-21T09:30:00.125Z"
FILE_NAME: Final = "00112233445566778899aabbccddeeff"


def nested(levels: int) -> bytes:
    """Lists in lists, an empty one innermost."""
    return b"\x91" * (levels - 1) + b"\x90"


def text(value: str) -> bytes:
    """A short string."""
    return encode_value(value)


def mapping(*items: tuple[bytes, bytes]) -> bytes:
    """A map of at most 15 encoded keys and values, in this order."""
    return bytes([0x80 | len(items)]) + b"".join(key + value for key, value in items)


TYPE: Final = text("type")
PING: Final = (TYPE, text("ping"))
ID: Final = (text("id"), text("x.1"))


class Bad(Struct, frozen=True, kw_only=True):
    """One vector that must be refused. Its bytes are the prefix, `times` × unit, and the suffix."""

    #: Its name.
    name: str
    #: What it begins with.
    prefix: bytes
    #: What is repeated.
    unit: bytes = b""
    #: How often.
    times: int = 0
    #: What it ends with.
    suffix: bytes = b""
    #: The code of the refusal.
    code: str = "E_FRAME_INVALID"
    #: What refuses it.
    stage: str = "frame"
    #: Which payload it is.
    payload_kind: str | None = None

    @property
    def data(self) -> bytes:
        """The bytes."""
        return self.prefix + self.unit * self.times + self.suffix


#: Who opens a payload of a kind, and so has to refuse a bad one.
_READERS: Final = {
    "any": ["client", "agent", "toolHost"],
    "AgentEvent": ["client", "agent"],
    "ToolResult": ["agent"],
    "ToolCallPayload": ["toolHost"],
    "Hello": ["broker"],
    "Shutdown": ["client", "agent", "toolHost"],
    "Credit": ["client", "agent", "toolHost"],
}


def refused_by(vector: Bad) -> list[str]:
    """Who must refuse it: `broker`, `client`, `agent`, `toolHost`. What is no frame reaches the broker only, which
    writes every header anew. A bad reference is refused by whoever gets it.
    """
    if vector.payload_kind is not None:
        return _READERS[vector.payload_kind]
    return ["broker"] if vector.stage == "frame" else ["broker", "client", "agent", "toolHost"]


def bad_frames() -> list[Bad]:
    """What a decoder must refuse."""

    def payload(kind: str, data: bytes) -> dict[str, Any]:
        frame = mapping((TYPE, text("event")), (text("payload"), data))
        return {"prefix": frame, "stage": "payload", "payload_kind": kind}

    blob = {"file": FILE_NAME, "digest": "0" * 64, "size": 9}

    def reference(
        blob: dict[str, Any],
        *more: tuple[bytes, bytes],
        of: str = "event",
        stage: str = "reference",
        code: str = "E_BLOB_INVALID",
    ) -> dict[str, Any]:
        frame = mapping((TYPE, text(of)), (text("blob"), encode_value(blob)), *more)
        return {"prefix": frame, "stage": stage, "code": "E_FRAME_INVALID" if stage == "frame" else code}

    head = b"\x82" + TYPE + text("ping") + text("payload")
    event = {"id": "e", "type": "t", "createdAt": TIME}
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
        Bad(name="a text as blob", prefix=mapping((TYPE, text("event")), (text("blob"), text("0" * 64)))),
        Bad(name="a blob without a size", **reference({"file": FILE_NAME, "digest": "0" * 64}, stage="frame")),
        Bad(name="a blob without a file", **reference({"digest": "0" * 64, "size": 9}, stage="frame")),
        Bad(name="a blob whose size is a text", **reference({**blob, "size": "9"}, stage="frame")),
        Bad(name="a blob whose file is a path", **reference({**blob, "file": "../" * 10 + "aa"})),
        Bad(name="a blob whose file has another name", **reference({**blob, "file": "client.token"})),
        Bad(name="a blob whose file has an end of line", **reference({**blob, "file": FILE_NAME + "\n"})),
        Bad(name="a blob in capitals", **reference({**blob, "digest": "A" * 64})),
        Bad(name="a blob of a short digest", **reference({**blob, "digest": "0" * 63})),
        Bad(name="a blob of no bytes", **reference({**blob, "size": 0})),
        Bad(name="a blob of less than no bytes", **reference({**blob, "size": -1})),
        Bad(name="a blob larger than any", **reference({**blob, "size": MAX_BLOB_BYTES + 1}, code="E_FRAME_TOO_LARGE")),
        Bad(name="a blob beside a payload", **reference(blob, (text("payload"), b"\x80"))),
        Bad(name="a blob of a ping", **reference(blob, of="ping")),
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
        Bad(name="an event without a type", **payload("AgentEvent", encode_value({"id": "e", "createdAt": TIME}))),
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
