"""One call in a worker, and what the parts of a worker ask of it."""

from __future__ import annotations

from time import monotonic

from . import wire
from .api import Logger, Message
from .printed import MAX_LINE

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from _thread import LockType
    from typing import Any, Protocol

    from .api import Runtime

    class Serving(Protocol):
        """The worker, as far as calls, event loop, background work and questions need it."""

        forked: bool
        lock: LockType
        running: dict[str, Running]
        current: dict[int, str]
        messages: dict[str, Any]
        output_limit: int

        def send(self, body: bytes) -> None: ...
        def log(self, level: str, text: str, call_id: str | None) -> None: ...
        def runtime_of(self, call: Running) -> Runtime | None: ...
        def to_loop(self, call: Running, awaitable: Any) -> None: ...
        def goes_on(self, call: Running, value: Any) -> bool: ...
        def result_frame(self, call: Running, value: Any) -> bytes: ...
        def failure(self, call_id: str, error: BaseException) -> bytes: ...
        def finish(self, call: Running, body: bytes) -> bytes: ...


#: Two progress reports of a call are at least this far apart (seconds).
PROGRESS_S = 0.05


class Running:
    """One call while it runs."""

    __slots__ = (
        "_logger", "_message", "_progress_at", "cancelled", "frame", "id", "pending", "started", "task", "worker",
    )  # fmt: skip

    def __init__(self, worker: Serving, frame: dict[str, Any], now: float) -> None:
        self.worker = worker
        self.frame = frame
        self.id: str = frame["callId"]
        self.started = now
        self.cancelled = False
        self.pending = False  # its `pending` result is sent, and what its work comes to is still to be
        self.task: Any = None
        self._message: Message | None = None
        self._logger: Logger | None = None
        self._progress_at = 0.0

    def message(self) -> Message | None:
        """The assistant message, decoded at the first look; every call has its own copy."""
        if self._message is None:
            fields = self.worker.messages.get(self.frame.get("messageId", ""))
            if fields is None:
                return None
            self._message = Message.__new__(Message)
            object.__setattr__(self._message, "_fields", _copy(fields))
        return self._message

    def logger(self) -> Logger:
        """The call's logger."""
        if self._logger is None:
            self._logger = Logger.__new__(Logger)
            object.__setattr__(self._logger, "_sink", lambda level, text: self.worker.log(level, text, self.id))
        return self._logger

    def runtime(self) -> Runtime | None:
        """What the call may ask of the bus; None when its tool has no permission to."""
        return self.worker.runtime_of(self)

    def output_limit(self) -> int:
        """How many bytes an output may have as it travels."""
        return self.worker.output_limit

    def remaining_ms(self) -> int | None:
        """Milliseconds to the deadline that came with the call."""
        deadline = self.frame.get("deadlineMs")
        return None if deadline is None else max(0, deadline - int((monotonic() - self.started) * 1000))

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """Send a progress frame unless one was sent just now."""
        now = monotonic()
        if now - self._progress_at < PROGRESS_S and done != total:
            return
        self._progress_at = now
        frame: dict[str, Any] = {"type": "progress", "callId": self.id, "done": float(done)}
        if total is not None:
            frame["total"] = float(total)
        if message is not None:
            frame["message"] = str(message)[:MAX_LINE]
        self.worker.send(wire.pack(frame))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
