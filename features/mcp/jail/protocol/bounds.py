"""What of a hostile server is let through: of its values, and of the messages that it writes, one a line. Pure.

Rules.
- A line has at most MAX_MESSAGE_BYTES. A longer one ends the server: what follows it could be anything.
- A line that is no JSON object of JSON-RPC is noise: a program that prints. Noise is logged and skipped.
- Noise, requests and notifications come out of one allowance. A server that goes beyond it is ended.
- An answer counts only for the id that it names, of the same type, while that request is open. There is one space of
  ids, whoever asked.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import urlsplit

import msgspec

from goondan.schemas.text.visible import BLANKS, IGNORABLE, is_needed
from goondan.toolhost.calls.untrusted import Allowance

#: Levels of maps and arrays in one value. The host lets 60 through; the maps around a value need the rest.
MAX_DEPTH: Final = 56
#: Values, keys included, in one message. The host lets 200,000 of an output through.
MAX_VALUES: Final = 190_000
#: Characters of a name: of a tool, a prompt, a resource. The protocol says 128.
MAX_NAME: Final = 256
#: Characters of an URI.
MAX_URI: Final = 4096
#: Characters of a description that a model is shown in each step, so it pays for them.
MAX_DESCRIPTION: Final = 8192
#: Characters of a line of the log.
MAX_LINE: Final = 4096
#: Ends a text that was cut.
CUT: Final = "… (cut)"

# Control characters but tab and end of line; what turns the direction of text; what is there and not seen, in which
# text for models can be hidden from people (schemas/text/visible.py); lone surrogates.
_HIDDEN: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{IGNORABLE}{BLANKS}]")
_NOT_IN_LINES: Final = re.compile("[\t\n]")
_HALF: Final = re.compile("[\ud800-\udfff]")


class Excess(Exception):
    """A value that is larger than what is let through. Its text says which limit."""


def text(value: object, limit: int) -> str:
    """A text for people and models: without control characters and hidden ones, of at most `limit` characters.

    What is no string becomes "".
    """
    if not isinstance(value, str):
        return ""
    part = value[: limit + 1] if len(value) > 4 * limit else value
    shown = _HIDDEN.sub(lambda match: match[0] if is_needed(match) else "", part)
    return shown if len(shown) <= limit else shown[: limit - len(CUT)] + CUT


def line(value: object, limit: int = MAX_LINE) -> str:
    """The same on one line."""
    return _NOT_IN_LINES.sub(" ", text(value, limit)).strip()


def is_name(value: object, limit: int = MAX_NAME) -> bool:
    """Whether a name can be passed on as it is: by it, the server is asked."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= limit
        and all(map(is_needed, _HIDDEN.finditer(value)))
        and _NOT_IN_LINES.search(value) is None
    )


def is_page(url: str) -> bool:
    """Whether a person may be asked to open a URL. Its host is where it seems to be: no user stands before it
    (`https://bank.example@evil.example`), and no letter of it looks like another one.
    """
    if not is_name(url, MAX_URI) or not url.isascii() or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


def check(value: Any, *, depth: int = MAX_DEPTH, values: int = MAX_VALUES) -> None:
    """Raise Excess when a JSON value has too many levels or too many values."""
    allowance = values
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                allowance -= 2 * len(item)
                below.extend(item.values())
            elif isinstance(item, list):
                allowance -= len(item)
                below.extend(item)
            if allowance < 0:
                raise Excess(f"it has more than {values} values")
        level = [item for item in below if isinstance(item, dict | list)]
    if level:
        raise Excess(f"it is nested deeper than {depth}")


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is int or type(value) is float:
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None
    return None


def whole_characters(value: Any) -> Any:
    """The same JSON value with U+FFFD for each lone surrogate. Check its depth before."""
    if isinstance(value, str):
        return value if value.isascii() else _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return value


#: Bytes of one message: images and files travel in them as base64.
MAX_MESSAGE_BYTES: Final = 16 << 20
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
        for raw in complete.split(b"\n"):
            if not raw or raw == b"\r":
                continue
            if len(raw) > MAX_MESSAGE_BYTES:
                raise Flood(f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes")
            message = parse(raw)
            if type(message) is not Answered and not (self._messages.take(now) and self._bytes.take(now, len(raw))):
                raise Flood(
                    f"it wrote more than {UNASKED_PER_S} messages, or {UNASKED_BYTES_PER_S >> 20} MiB, a second that"
                    " nobody asked for"
                )
            messages.append(message)
        return messages

    def _keep(self, data: bytes) -> None:
        self._chunks.append(data)
        self._have += len(data)
        if self._have > MAX_MESSAGE_BYTES:
            raise Flood(f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes")


def parse(raw: bytes) -> Message:
    """One line as what it is."""
    try:
        value = _decode(raw)
    except RecursionError:
        return _broken(raw, "it is nested too deep")
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            value = _leniently(raw)
        except (ValueError, RecursionError, Excess):
            return _broken(raw, "it is no JSON")
    if type(value) is not dict or value.get("jsonrpc") != "2.0":
        return Noise(_start(raw), "it is no JSON-RPC 2.0 message")
    message = _message(value)
    if message is None:
        return _broken(raw, "it is no request, no notification and no answer")
    # So many bytes hold no more values, and so few brackets no more levels.
    if len(raw) > MAX_VALUES or raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        try:
            check(value)
        except Excess as error:
            return _broken(raw, str(error)) if type(message) is not Answered else _refused(message.id, str(error))
    return message


def _leniently(raw: bytes) -> Any:
    """JSON with halves of characters in it, which programs write that cut their strings anywhere. Raises ValueError."""
    # As text: of bytes it would guess other encodings, which are not there behind the walls.
    value = json.loads(raw.decode(), parse_constant=_no_number, parse_float=_finite)
    check(value)
    return whole_characters(value)


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _no_number(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _broken(raw: bytes, reason: str) -> Message:
    """A line that is no message. When it names the id of a request, it was meant as its answer."""
    for part in (raw[:_NEAR], raw[-_NEAR:]):
        found = _ID.search(part)
        if found is not None and raw.lstrip()[:1] == b"{" and b'"method"' not in raw[:_NEAR]:
            return _refused(_decode(found[1]), reason)
    return Noise(_start(raw), reason)


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
    has_id = type(key) is int or (type(key) is str and len(key) <= MAX_NAME)
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


def _start(raw: bytes) -> str:
    return line(raw[: 4 * MAX_LINE].decode("utf-8", "replace"))


def encode(message: dict[str, Any]) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
