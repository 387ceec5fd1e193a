"""Decodes server-sent events from bytes, in pieces of any size. Model servers stream in this form.

A line ends in LF, CR or CRLF; an empty line ends an event; the `data` lines of an event are joined by LF. Comments and
other fields are skipped. The held data is limited: an event that is too long, or has too many lines, is refused. Every
byte is read a fixed number of times, for all lines and all pieces.

Source: the WHATWG HTML standard, "Server-sent events".
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: The largest event (bytes). Vendors send a few hundred bytes. A server that sends its whole answer as one event stays
#: below.
MAX_EVENT_BYTES: Final = 8 << 20
#: The most `data` lines of one event. Vendors send one. A pretty-printed answer of the largest size has fewer than
#: this.
MAX_EVENT_LINES: Final = 1 << 18

_BOM: Final = b"\xef\xbb\xbf"


class SseEvent(Struct, frozen=True):
    """One event. `name` is its `event` field, "message" when it has none."""

    #: Its data.
    data: str
    #: Its name.
    name: str = "message"


class EventTooLarge(ValueError):
    """An event beyond MAX_EVENT_BYTES or MAX_EVENT_LINES."""


class SseDecoder:
    """Takes bytes and returns events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES, max_event_lines: int = MAX_EVENT_LINES) -> None:
        self._max = max_event_bytes
        self._max_lines = max_event_lines
        self._parts: list[bytes] = []  # of a line that has no end yet
        self._line_size = 0  # of these parts
        self._held_cr = False  # the last part ends in a CR, which may be the first half of a CRLF
        self._data: list[bytes] = []
        self._data_size = 0  # with the LF of each line
        self._name = b""
        self._first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that `chunk` completes. Raises EventTooLarge."""
        if not chunk:
            return []
        events: list[SseEvent] = []
        if self._held_cr:  # the line is complete; an LF that follows belongs to its end
            self._held_cr = False
            self._take(self._line(), events)
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        lines = chunk.splitlines(keepends=True)
        rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        for line in lines:
            if self._parts:
                self._parts.append(line)
                line = self._line()
            self._take(line, events)
        if rest:
            self._parts.append(rest)
            self._line_size += len(rest)
            self._held_cr = rest.endswith(b"\r")
            self._check()
        return events

    def end(self) -> list[SseEvent]:
        """The event that the end of the stream completes. Many servers leave out its empty line."""
        events: list[SseEvent] = []
        self._held_cr = False
        if self._parts:
            self._take(self._line(), events)
        self._take(b"\n", events)
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

    def _take(self, line: bytes, events: list[SseEvent]) -> None:
        """Take one complete line. An event that it completes is added to `events`."""
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        line = line.rstrip(b"\r\n")
        if not line:
            if self._data:
                name = self._name.decode("utf-8", "replace") or "message"
                events.append(SseEvent(b"\n".join(self._data).decode("utf-8", "replace"), name))
            self._data, self._data_size, self._name = [], 0, b""
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_size += len(value) + 1
            self._check()
        elif field == b"event":
            self._name = value
