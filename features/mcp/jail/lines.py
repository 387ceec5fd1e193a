"""The messages that a server writes on its standard output, one a line. Pure: bytes in, messages out.

Rules.
- A line has at most MAX_LINE bytes. A longer one ends the server: what follows it could be anything.
- A line that is no JSON object of JSON-RPC is noise: a program that prints. Noise is logged and skipped.
- Noise, requests and notifications come out of one allowance. A server that goes beyond it is ended.
- An answer counts only for the id that it names, of the same type, while that request is open. There is one space of
  ids, whoever asked.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import msgspec

from goondan.features.mcp.jail import bounds
from goondan.features.mcp.jail.bounds import Allowance, Excess

#: Bytes of one message: images and files travel in them as base64.
MAX_LINE: Final = 16 << 20
#: Messages that nobody asked for, at once and per second after that. A server that reports progress ten times a second
#: for each of 64 calls stays below.
UNASKED_BURST: Final = 20_000
UNASKED_PER_S: Final = 2_000
#: Bytes of them, at once and per second after that.
UNASKED_BYTES_BURST: Final = 64 << 20
UNASKED_BYTES_PER_S: Final = 8 << 20

Id = str | int


class Flood(Exception):
    """The server says more than it may, and is ended. The text says what."""


class Answered(NamedTuple):
    """A result, or an error, under the id of a request. An error without an id is about a request that could not be
    read.
    """

    #: The id of the request. None: the server could not read it.
    id: Id | None
    #: The result. None: it is an error.
    result: dict[str, Any] | None
    #: The error. None: it is a result.
    error: dict[str, Any] | None


class Asked(NamedTuple):
    """A request of the server."""

    #: The id under which the server waits for the answer.
    id: Id
    #: The method.
    method: str
    #: Its parameters.
    params: dict[str, Any] | None


class Told(NamedTuple):
    """A notification."""

    method: str
    params: dict[str, Any] | None


class Noise(NamedTuple):
    """A line that is no message, and why."""

    text: str
    reason: str


Message = Answered | Asked | Told | Noise

_decode = msgspec.json.Decoder().decode


class Lines:
    """The incoming half of a connection."""

    __slots__ = ("_bytes", "_chunks", "_have", "_messages")

    def __init__(self, now: float) -> None:
        """`now` in seconds, as in `feed`."""
        self._chunks: list[bytes] = []
        self._have = 0
        self._messages = Allowance(UNASKED_BURST, UNASKED_PER_S, now)
        self._bytes = Allowance(UNASKED_BYTES_BURST, UNASKED_BYTES_PER_S, now)

    def feed(self, data: bytes, now: float) -> list[Message]:
        """The messages that `data` completes, in order. Raises Flood; then nothing more of this server is read."""
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return []
        complete = data[:end]
        if self._chunks:
            complete = b"".join([*self._chunks, complete])
            self._chunks.clear()
        self._have = 0
        if end + 1 < len(data):
            self._keep(data[end + 1 :])
        messages: list[Message] = []
        for line in complete.split(b"\n"):
            if not line or line == b"\r":
                continue
            if len(line) > MAX_LINE:
                raise Flood(f"it wrote a line of more than {MAX_LINE} bytes")
            message = parse(line)
            if type(message) is not Answered and not (self._messages.take(now) and self._bytes.take(now, len(line))):
                raise Flood(
                    f"it wrote more than {UNASKED_PER_S} messages, or {UNASKED_BYTES_PER_S >> 20} MiB, a second that"
                    " nobody asked for"
                )
            messages.append(message)
        return messages

    def _keep(self, data: bytes) -> None:
        self._chunks.append(data)
        self._have += len(data)
        if self._have > MAX_LINE:
            raise Flood(f"it wrote a line of more than {MAX_LINE} bytes")


def parse(line: bytes) -> Message:
    """One line as what it is."""
    try:
        value = _decode(line)
    except RecursionError:
        return _broken(line, "it is nested too deep")
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            value = _leniently(line)
        except (ValueError, RecursionError, Excess):
            return _broken(line, "it is no JSON")
    if type(value) is not dict or value.get("jsonrpc") != "2.0":
        return Noise(_start(line), "it is no JSON-RPC 2.0 message")
    message = _message(value)
    if message is None:
        return _broken(line, "it is no request, no notification and no answer")
    # So many bytes hold no more values, and so few brackets no more levels.
    if len(line) > bounds.MAX_VALUES or line.count(b"{") + line.count(b"[") > bounds.MAX_DEPTH:
        try:
            bounds.check(value)
        except Excess as error:
            return _broken(line, str(error)) if type(message) is not Answered else _refused(message.id, str(error))
    return message


def _leniently(line: bytes) -> Any:
    """JSON with halves of characters in it, which programs write that cut their strings anywhere. Raises ValueError."""
    # As text: of bytes it would guess other encodings, which are not there behind the walls.
    value = json.loads(line.decode(), parse_constant=_no_number)
    bounds.check(value)
    return bounds.whole_characters(value)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _broken(line: bytes, reason: str) -> Message:
    """A line that is no message. When it names the id of a request, it was meant as its answer."""
    for part in (line[:_NEAR], line[-_NEAR:]):
        found = _ID.search(part)
        if found is not None and line.lstrip()[:1] == b"{" and b'"method"' not in line[:_NEAR]:
            return _refused(_decode(found[1]), reason)
    return Noise(_start(line), reason)


def _refused(key: Id | None, reason: str) -> Answered:
    return Answered(key, None, {"code": NOT_LET_THROUGH, "message": f"the answer was not let through: {reason}"})


#: The code of the error that stands in place of an answer which is not let through. No server's own: JSON-RPC keeps
#: -32768 to -32000 for itself, and this is below.
NOT_LET_THROUGH: Final = -33_001
#: The same of an exchange with a server at an URL that has failed.
NOT_REACHED: Final = -33_002
#: The same of a connection that has ended. The SDK's code for that is one that servers use for anything.
GONE: Final = -33_003
#: How far from the start and the end of a broken line its id is looked for (bytes).
_NEAR: Final = 256
_ID: Final = re.compile(rb'"id"\s*:\s*(\d{1,15}|"[!#-\[\]-~]{1,64}")\s*[,}]')


def _message(value: dict[str, Any]) -> Message | None:
    method, key = value.get("method"), value.get("id")
    has_id = type(key) is int or (type(key) is str and len(key) <= bounds.MAX_NAME)
    if method is not None:
        params = value.get("params")
        if type(method) is not str or not (params is None or type(params) is dict):
            return None
        if has_id:
            return Asked(key, method, params)  # type: ignore[arg-type] # of one of the two types
        return Told(method, params) if key is None else None
    error, result = value.get("error"), value.get("result")
    if type(error) is dict and (has_id or key is None):
        return Answered(key, None, error)
    if type(result) is dict and has_id:
        return Answered(key, result, None)
    return None


def _start(line: bytes) -> str:
    return bounds.line(line[: 4 * bounds.MAX_LINE].decode("utf-8", "replace"))


def encode(message: dict[str, Any]) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
