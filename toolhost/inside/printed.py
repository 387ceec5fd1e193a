"""What a tool prints becomes log lines, each with its call."""

from __future__ import annotations

import posix
from io import TextIOBase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .running import Serving


#: One log line (characters).
MAX_LINE = 8192


class Printed(TextIOBase):
    """sys.stdout and sys.stderr: each line becomes a log line of the call that printed it."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, worker: Serving, level: str, fd: int) -> None:
        self._worker = worker
        self._level = level
        self._fd = fd
        self._partial: dict[str | None, str] = {}
        self.buffer = self

    def write(self, text: str | bytes) -> int:
        """Take text; complete lines are sent."""
        shown = text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")
        if self._worker.forked:
            posix.write(self._fd, shown.encode("utf-8", "replace"))
            return len(text)
        call_id = self._worker.current_call()
        lines = (self._partial.pop(call_id, "") + shown).split("\n")
        rest = lines.pop()
        for line in lines:
            self._worker.log(self._level, line, call_id)
        if len(rest) > MAX_LINE:
            self._worker.log(self._level, rest, call_id)
        elif rest:
            self._partial[call_id] = rest
        return len(text)

    def flush(self) -> None:
        """Send what has no newline yet."""
        call_id = self._worker.current_call()
        rest = self._partial.pop(call_id, "")
        if rest:
            self._worker.log(self._level, rest, call_id)

    def fileno(self) -> int:
        """The descriptor behind it, for programs that a tool starts."""
        return self._fd

    def writable(self) -> bool:
        """Always."""
        return True
