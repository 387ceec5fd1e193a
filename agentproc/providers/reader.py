"""Reads the answer of a model's server: the events of its stream, and the texts, calls and reasoning in them. Pure.

A line of a stream ends in LF, CR or CRLF; an empty line ends an event; the `data` lines of an event are joined by LF.
Comments and other fields are skipped. The held data is limited: an event that is too long, or has too many lines, is
refused. Every byte is read a fixed number of times, for all lines and all pieces.

Source: docs/design/turns.md section 6; the WHATWG HTML standard, "Server-sent events".
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Struct

from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, Usage, asked_call, read_json
from goondan.agentproc.providers.faults import Fault, FaultKind, plain
from goondan.agentproc.providers.history import kept_by
from goondan.schemas.wire.codec import describe_decode_error, replace_surrogates

#: The most characters of text, arguments and thinking of one answer together. The longest answers that models can give
#: (128 000 tokens) are half of it, and more would not fit into a frame.
MAX_ANSWER_CHARS: Final = 1 << 20
#: The most tool calls of one answer, or parts of it. Each call becomes a process's work and a message of the
#: conversation.
MAX_CALLS: Final = 1024
#: The most tokens that a server can be believed to have counted. JSON readers everywhere can hold it.
MAX_TOKENS: Final = (1 << 53) - 1
#: The longest name of a model, and the longest reason why one stopped, that is kept (characters).
MAX_NAME: Final = 200
#: The largest event (bytes). Vendors send a few hundred bytes. A server that sends its whole answer as one event stays
#: below.
MAX_EVENT_BYTES: Final = 8 << 20
#: The most `data` lines of one event. Vendors send one. A pretty-printed answer of the largest size has fewer than
#: this.
MAX_EVENT_LINES: Final = 1 << 18

#: A name as nearly all are.
_PLAIN: Final = re.compile(r"[!-~]{1,200}")
_BOM: Final = b"\xef\xbb\xbf"
#: What a decoder raises. Python's C stack is the limit of nested values.
UNREAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


# --- events -----------------------------------------------------------------------------------------------------------


#: One event: its `event` field, empty when it has none, and its data.
SseEvent = tuple[bytes, bytes]


def event_stream(*events: str) -> str:
    """A stream of events with this data."""
    return "".join([f"data: {data}\n\n" for data in events])


class EventTooLarge(ValueError):
    """An event beyond MAX_EVENT_BYTES or MAX_EVENT_LINES."""


class SseDecoder:
    """Takes bytes and returns events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES, max_event_lines: int = MAX_EVENT_LINES) -> None:
        self._max = max_event_bytes
        self._max_lines = max_event_lines
        self._parts: list[bytes] = []  # of a line that has no end yet
        self._line_size = 0  # of these parts
        self._held_cr = False  # behind the last part stands a CR, which may be the first half of a CRLF
        self._data: list[bytes] = []
        self._data_size = 0  # with the LF of each line
        self._name = b""
        self._first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that `chunk` completes. Raises EventTooLarge."""
        events: list[SseEvent] = []
        if self._held_cr and chunk:  # the line is complete; an LF that follows belongs to its end
            self._held_cr = False
            self._take([self._line()], events)
            chunk = chunk.removeprefix(b"\n")
        if b"\r" not in chunk:
            lines = chunk.split(b"\n")
            rest = lines.pop()
        else:
            lines = chunk.splitlines()
            rest = b"" if chunk.endswith(b"\n") else lines.pop()
            self._held_cr = chunk.endswith(b"\r")
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = self._line()
        self._take(lines, events)
        if rest or self._held_cr:
            self._parts.append(rest)
            self._line_size += len(rest)
            self._check()
        return events

    def end(self) -> list[SseEvent]:
        """The event that the end of the stream completes. Many servers leave out its empty line."""
        events: list[SseEvent] = []
        self._held_cr = False
        self._take([self._line(), b""], events)
        return events

    def _line(self) -> bytes:
        """The line whose parts were held back."""
        line, self._parts, self._line_size = b"".join(self._parts), [], 0
        return line

    def _check(self) -> None:
        if self._line_size + self._data_size > self._max:
            raise EventTooLarge(f"an event of more than {self._max} bytes")
        if len(self._data) > self._max_lines:
            raise EventTooLarge(f"an event of more than {self._max_lines} lines")

    def _take(self, lines: list[bytes], events: list[SseEvent]) -> None:
        """Take complete lines, without their ends. The events that they complete are added to `events`."""
        if self._first and lines:
            lines[0], self._first = lines[0].removeprefix(_BOM), False
        for line in lines:
            if not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data, self._data_size = [], 0
                self._name = b""
                continue
            if line[:6] == b"data: ":  # as all servers write it
                field, value = b"data", line[6:]
            elif line[:7] == b"event: ":
                self._name = line[7:]
                continue
            else:
                field, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
                self._data_size += len(value) + 1
                if self._data_size > self._max or len(self._data) > self._max_lines:
                    self._check()
            elif field == b"event":
                self._name = value


# --- answers ----------------------------------------------------------------------------------------------------------


class Part(Struct):
    """A part of an answer while it arrives."""

    #: `text`, `call`, `thought`, or anything else for a part that is skipped.
    kind: str
    #: Of a call.
    id: str = ""
    #: Of a call.
    name: str = ""
    #: The text, or of a call its arguments (JSON).
    pieces: list[str] = []
    #: What the vendor's reader keeps of it.
    extra: dict[str, Any] = {}
    #: Of thinking, in pieces.
    signature: list[str] = []


class AnswerReader(ABC):
    """Reads one answer: events of a stream, or one whole document. Every method raises Fault when the answer is not
    valid.
    """

    #: The provider, which gets back what it wants kept.
    provider: ClassVar[str]
    #: Why a model has stopped that has stopped by itself.
    usual: ClassVar[tuple[str, ...]]
    #: Why one has stopped that has reached its limit of tokens.
    cut: ClassVar[tuple[str, ...]]

    #: Whether the stream has said that it is complete.
    done = False
    #: How much the model has said so far (characters): text, arguments, thinking. Data that a server sends to keep a
    #: connection alive does not count.
    content = 0
    _answered: str | None = None  # the name of the model that answers
    _stop: str | None = None  # why the model stopped
    _usage: Usage | None = None
    _taken = 0  # pieces of the reasoning that were taken
    _apart = False  # its next piece begins another part

    def __init__(self, model: str) -> None:
        """`model` is the name of the model that was asked."""
        self._model = model
        self._parts: dict[Any, Part] = {}
        self._thoughts: list[str] = []  # the reasoning, in pieces

    @abstractmethod
    def read(self, events: Sequence[SseEvent]) -> str:
        """Take the next events. Returns the text that they add."""

    @abstractmethod
    def read_whole(self, body: bytes) -> str:
        """Take the whole answer of a server that does not stream. Returns its text."""

    def take_reasoning(self) -> str:
        """The reasoning that was read since the last call."""
        new, self._taken = self._thoughts[self._taken :], len(self._thoughts)
        return "".join(new)

    def from_beginning(self) -> str:
        """All text that was read. The next `take_reasoning` gives all reasoning."""
        self._taken = 0
        return "".join(piece for part in self._in_order() if part.kind == "text" for piece in part.pieces)

    def answer(self) -> ModelAnswer:
        """The answer. To be called after everything was read. Raises Fault when its end is missing, and when there are
        neither text nor calls. A last call that was not written to its end, because the model has reached its limit of
        tokens, is answered with an error.
        """
        if not self.done and self._stop is None:
            raise Fault("broken", "half an answer: its end is missing")
        parts = self._in_order()
        calls: list[AskedCall] = []
        said: list[str] = []
        last = None
        for part in parts:
            if part.kind == "call":
                last = part
                calls.append(asked_call(part.id, part.name, self._arguments(part)))
            elif part.kind == "text":
                said += part.pieces
        text = "".join(said)
        cut = self._stop in self.cut
        if cut and last is not None and (calls[-1].broken is not None or not any(last.pieces)):
            reason = "they were cut off, because the answer reached its token limit"
            calls[-1] = AskedCall(calls[-1].id, calls[-1].name, {}, reason)
        if not calls and not text.strip():
            raise self._empty(cut=cut, reasoned=bool(self._thoughts) or any(part.kind == "thought" for part in parts))
        kept = self._kept(parts)
        return ModelAnswer(
            text=text,
            calls=calls,
            finish_reason=name_of(self._stop),
            usage=self._usage,
            metadata=kept_by(self.provider, self._model, **kept) if kept else None,
            reasoning="".join(self._thoughts),
            cut_off=cut,
            model=self._answered,
        )

    # --- of each vendor

    def _in_order(self) -> list[Part]:
        """The parts, in the order of the answer."""
        return list(self._parts.values())

    def _arguments(self, call: Part) -> str | dict[str, Any]:
        return "".join(call.pieces)

    @abstractmethod
    def _kept(self, parts: list[Part]) -> dict[str, Any]:
        """What the vendor wants back with this answer."""

    # --- for its methods

    def _part(self, key: Any, kind: str) -> Part:
        """The part with this key, which may be new."""
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= MAX_CALLS:
                raise Fault("final", f"an answer of more than {MAX_CALLS} parts")
            part = self._parts[key] = Part(kind)
        return part

    def _count(self, chars: int) -> None:
        """Count characters. What is stored of an answer is counted, whatever field it came in."""
        self.content += chars
        if self.content > MAX_ANSWER_CHARS:
            raise Fault("final", f"an answer of more than {MAX_ANSWER_CHARS} characters")

    def _sized(self, text: str) -> str:
        """The text, counted."""
        self.content += len(text)
        if self.content > MAX_ANSWER_CHARS:
            self._count(0)
        return text

    def _think(self, text: str) -> None:
        """Add a piece of reasoning, which was counted."""
        if text:
            self._thoughts.append(f"\n\n{text}" if self._apart else text)
            self._apart = False

    def _begin_thought(self) -> None:
        """The next piece of reasoning begins another part. An empty line stands between two parts."""
        self._apart = bool(self._thoughts)

    def _order(self, parts: Iterable[Part]) -> list[Any]:
        """An answer whose reasoning has to keep its place: reasoning as the vendor wants it back, texts, and calls by
        their number. Empty when nothing has to keep its place. `in_kept_order` (history.py) reads it.
        """
        order: list[Any] = []
        calls = 0
        for part in parts:
            if part.kind == "call":
                order.append(calls)
                calls += 1
            elif part.kind == "text":
                text = "".join(part.pieces)
                order.append({"text": text, **part.extra} if part.extra else text)
            elif part.kind == "thought" and part.extra:
                order.append(part.extra)
        return order if any(isinstance(item, dict) for item in order) else []

    def _empty(self, *, cut: bool, reasoned: bool) -> Fault:
        """The fault of an answer without text and calls. Another try is worth it when the model has stopped by itself.
        `cut`: it has reached its limit of tokens. `reasoned`: the answer has reasoning.
        """
        stop, usage = self._stop, self._usage
        kind: FaultKind = "broken" if stop is None or stop in self.usual else "final"
        what, suggestion = "an empty answer", None
        if reasoned or (usage is not None and usage.reasoning_tokens):
            spent = f" ({usage.output_tokens} tokens)" if usage is not None and usage.output_tokens else ""
            what, suggestion = f"an answer of reasoning only{spent}", _LESS_REASONING
        if cut:
            message = f"{what}; it was cut off at its limit of tokens ({plain(stop or '')[:80]})"
            return Fault("final", message, usage=usage, suggestion=_MORE_TOKENS)
        reason = "" if kind == "broken" else f"; it stopped because of {plain(stop or '')[:80]}"
        return Fault(kind, f"{what}{reason}", usage=usage, suggestion=suggestion)


#: What a person can do about an answer that has no text.
_MORE_TOKENS: Final = "Raise the limit in the Model's params (max_tokens), or ask for less reasoning there."
_LESS_REASONING: Final = "Send it again; if it stays so, ask for less reasoning in the Model's params."


# --- fields of answers ------------------------------------------------------------------------------------------------


class TokenDetails(Struct, frozen=True):
    """What the tokens of a request or of an answer were, as OpenAI counts them."""

    #: How many came from a cache.
    cached_tokens: int | None = None
    #: How many were put into a cache.
    cache_write_tokens: int | None = None
    #: How many are reasoning.
    reasoning_tokens: int | None = None


def counted(
    read: int | None, written: int | None, of_read: TokenDetails | None, of_written: TokenDetails | None
) -> Usage:
    """The tokens of a request and of its answer, as numbers that can be stored."""
    of_read, of_written = of_read or TokenDetails(), of_written or TokenDetails()
    return Usage(*tokens(read, written, of_read.cached_tokens, of_read.cache_write_tokens, of_written.reasoning_tokens))


def decode_json(decoder: msgspec.json.Decoder[T], data: str | bytes) -> T:
    """Decode JSON to a struct. Raises Fault `broken`. Half a surrogate pair, which msgspec refuses, becomes U+FFFD."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise Fault("broken", f"an answer of an unexpected form: {error}") from None
    except UNREAD:
        pass
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        return msgspec.convert(replace_surrogates(read_json(text)), decoder.type)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        shown = plain(data if isinstance(data, str) else data[:200].decode("utf-8", "replace"))[:80]
        raise Fault("broken", f"an answer that is no JSON ({describe_decode_error(error)}): {shown}") from None


def decode_events(decoder: msgspec.json.Decoder[T], events: Sequence[SseEvent]) -> Iterator[T | None]:
    """What events say, each when it is asked for: an error that a server tells counts more than what it sends behind
    it. None: it is blank, or the mark `[DONE]` of the end. Raises Fault as `decode_json`. What is no UTF-8 becomes
    U+FFFD.
    """
    for _, data in events:
        try:
            yield decoder.decode(data)
        except UNREAD:
            text = data.decode("utf-8", "replace")
            yield None if text.strip() in ("", "[DONE]") else decode_json(decoder, text)


def tokens(*counts: int | None) -> list[int]:
    """Numbers of tokens that a server reports, as numbers that can be stored."""
    known = [count or 0 for count in counts]
    if min(known) >= 0 and max(known) <= MAX_TOKENS:
        return known
    return [max(0, min(count, MAX_TOKENS)) for count in known]


def text_of(value: Any) -> str:
    """A field that should be a text; "" when it is none."""
    return value if isinstance(value, str) else ""


def name_of(value: Any) -> str | None:
    """A name from a field of the answer: of its model, or of why that stopped. None when it is no name."""
    if not isinstance(value, str):
        return None
    return value if _PLAIN.fullmatch(value) else plain(value)[:MAX_NAME] or None
