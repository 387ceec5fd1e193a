"""Server-sent events out of bytes, however they are cut: the form in which model servers stream.

A line ends in LF, CR or CRLF; an empty line ends an event; the `data` lines of an event are joined by LF. Comments and
other fields are skipped. Nothing waits without bound: a longer event is refused.

Source: the WHATWG HTML standard, "Server-sent events".
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: One event (bytes). Vendors send a few hundred bytes; a server that sends its whole answer as one event stays below.
MAX_EVENT_BYTES: Final = 8 << 20

_BOM: Final = b"\xef\xbb\xbf"


class SseEvent(Struct, frozen=True):
    """One event. `name` is its `event` field, "message" when it has none."""

    data: str
    name: str = "message"


class EventTooLarge(ValueError):
    """An event beyond MAX_EVENT_BYTES."""


class SseDecoder:
    """Bytes in, events out."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._parts: list[bytes] = []  # of a line that has no end yet
        self._size = 0  # of everything that is held back
        self._data: list[bytes] = []
        self._name = b""
        self._first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that `chunk` completes. Raises EventTooLarge."""
        if not chunk:
            return []
        held_cr = bool(self._parts) and self._parts[-1].endswith(b"\r")
        self._parts.append(chunk)
        self._size += len(chunk)
        if not held_cr and b"\n" not in chunk and b"\r" not in chunk:
            self._check()
            return []
        lines = b"".join(self._parts).splitlines(keepends=True)
        # A CR at the end may be the first half of a CRLF: it is looked at again with what follows.
        self._parts = [] if lines[-1].endswith(b"\n") else [lines.pop()]
        events = self._take(lines)
        self._size = sum(map(len, self._parts)) + sum(map(len, self._data))
        self._check()
        return events

    def end(self) -> list[SseEvent]:
        """The event that the end of the stream completes, though it lacks its empty line (many servers')."""
        lines, self._parts = b"".join(self._parts).splitlines(keepends=True), []
        return self._take([*lines, b"\n"])

    def _check(self) -> None:
        if self._size > self._max:
            raise EventTooLarge(f"an event of more than {self._max} bytes")

    def _take(self, lines: list[bytes]) -> list[SseEvent]:
        events = []
        for line in lines:
            if self._first:
                line, self._first = line.removeprefix(_BOM), False
            line = line.rstrip(b"\r\n")
            if not line:
                if self._data:
                    name = self._name.decode("utf-8", "replace") or "message"
                    events.append(SseEvent(b"\n".join(self._data).decode("utf-8", "replace"), name))
                self._data, self._name = [], b""
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
        return events
