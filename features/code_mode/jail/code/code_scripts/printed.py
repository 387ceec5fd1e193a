"""What a script prints: its beginning and its end, as much as a model is to read."""

from __future__ import annotations

from _thread import allocate_lock

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Iterable

#: Characters that are kept of the beginning and of the end: a model reads all of it, and pays for it.
MAX_HEAD = 40_000
MAX_TAIL = 10_000
#: Characters that an error repeats of what was printed last.
ERROR_TAIL = 1_500


class Printed:
    """A text file that can be written to, from any thread."""

    encoding = "utf-8"
    errors = "replace"
    closed = False

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._head: list[str] = []
        self._head_size = 0
        self._end = ""
        self._size = 0

    def write(self, text: str) -> int:
        """Take a piece of text."""
        if not isinstance(text, str):
            raise TypeError(f"write() takes a str, not {type(text).__name__}")
        with self._lock:
            self._size += len(text)
            room = MAX_HEAD - self._head_size
            if room > 0:
                self._head.append(text[:room])
                self._head_size += min(room, len(text))
            if len(text) > room:
                self._end = (self._end + text[max(0, room) :])[-MAX_TAIL:]
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Take several pieces."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        """Nobody looks at it while it is written."""
        return False

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def text(self) -> str:
        """All of it; where something was left out, how much."""
        head, left_out = "".join(self._head), self._size - self._head_size - len(self._end)
        return f"{head}\n… {left_out} characters left out …\n{self._end}" if left_out > 0 else head + self._end

    def tail(self) -> str:
        """Its end, for an error."""
        text = "".join(self._head) + self._end
        return text if len(text) <= ERROR_TAIL else "…" + text[-ERROR_TAIL:]
