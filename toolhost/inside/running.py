"""One call while a worker runs it, what the parts of a worker ask of the worker, and what the call prints.

What a tool prints becomes log lines, each with its call.
"""

from __future__ import annotations

import posix
from io import TextIOBase

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class ToolCalls(Protocol):
        """`ctx.tools`: how a handler has its agent call tools."""

        def send(self, questions: list[tuple[str, Any, Callable[[dict[str, Any]], None]]]) -> None:
            """Ask for each (`tool` or `tools`, value, who gets the `answer` frame) and return; see Questions.send."""

    class Serving(Protocol):
        """The worker, as its parts know it: contexts, event loop, questions, printed lines."""

        forked: bool
        running: dict[str, Running]
        messages: dict[str, Any]
        output_limit: int

        def send(self, body: bytes) -> None: ...
        def send_all(self, bodies: list[bytes]) -> None: ...
        def log(self, level: str, text: str, call_id: str | None) -> None: ...
        def current_call(self) -> str | None: ...
        def asking(self, call: Running) -> Callable[[str, dict[str, Any]], Any] | None: ...
        def calling(self, call: Running) -> ToolCalls | None: ...
        def conclude(self, call: Running, produce: Callable[[], Any], *, awaits: bool) -> None: ...


#: One log line (characters).
MAX_LINE = 8192


class Running:
    """One call while it runs."""

    __slots__ = ("cancelled", "frame", "id", "message", "pending", "progress_at", "started", "task", "worker")

    def __init__(self, worker: Serving, frame: dict[str, Any], now: float) -> None:
        """`frame` is the `call` frame; `now` is of time.monotonic."""
        self.worker = worker
        self.frame = frame
        self.id: str = frame["callId"]
        self.started = now
        #: The caller gave up.
        self.cancelled = False
        #: Its `pending` result is sent. The result of its work will follow.
        self.pending = False
        #: Its task in the event loop; None until it is there.
        self.task: Any = None
        #: The assistant message, copied for this call at the first look.
        self.message: dict[str, Any] | None = None
        #: When the last progress frame was sent (time.monotonic).
        self.progress_at = 0.0


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
