"""One worker as the host sees it: what it is told, what it says and prints, and whether it is being ended.

A jail is one (jail.py). The sandbox of one call, in a jail that forks its calls, is another (call_sandboxes.py).

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Protocol

from goondan.schemas.worker_frames import HostFrame, WorkerFrame
from goondan.toolhost.jails.stream import FrameStream, Granted, PrintedOutput
from goondan.toolhost.untrusted import Violation

#: How long a worker that has closed its socket may take to end by itself, so that its exit status is known (seconds).
EXIT_GRACE_S: Final = 0.25

#: The reason when a worker has closed its socket and does not end by itself.
CLOSED: Final = "closed its channel"


class WorkerOwner(Protocol):
    """The object that a worker reports to, in the loop."""

    def worker_frames(self, worker: Worker, frames: list[WorkerFrame]) -> None:
        """Frames of the worker, which keep to the limits."""

    def worker_broken(self, worker: Worker, violation: Violation) -> None:
        """The worker broke the protocol. It is being ended."""

    def worker_printed(self, worker: Worker, text: str) -> None:
        """Something was written to the standard output or error of its processes."""

    def worker_gone(self, worker: Worker, cause: str) -> None:
        """Its last process has ended. This is the last report of a worker."""


class Worker:
    """The socket, the output and the end of one worker. Use from the loop's thread only.

    It is abstract without being an ABC. `isinstance` with a subclass of an ABC takes several times as long, and it is
    asked twice for each frame of a worker.
    """

    def __init__(
        self,
        channel: socket.socket,
        output: int,
        owner: WorkerOwner,
        loop: asyncio.AbstractEventLoop,
        output_limit: int,
    ) -> None:
        """`channel` and `output`, the reading end of a pipe, become ours. Neither blocks."""
        #: Whether it has loaded the tool.
        self.live = False
        #: Whether it is being ended, or its worker has left.
        self.dying = False
        self._owner = owner
        self._loop = loop
        self._granted: Granted | None = None
        self._reason: str | None = None  # why it is being ended
        self._timer: asyncio.TimerHandle | None = None
        self._stream = FrameStream(
            channel, loop, output_limit, on_frames=self._frames, on_end=self._closed, on_violation=self.broken
        )
        self._output = PrintedOutput(output, loop, lambda text: owner.worker_printed(self, text))
        #: Queue a frame for the worker.
        self.send: Callable[[HostFrame], None] = self._stream.send
        #: Keep what is sent from now on until `release`: the worker must not begin yet.
        self.hold = self._stream.hold
        self.release = self._stream.release
        #: What it has printed so far explains no crash any more.
        self.forget = self._output.forget

    def hide(self, redact: Callable[[str], str]) -> None:
        """From now on what its processes print is shown as `redact` leaves it, whole lines at a time."""
        self._output.redact = redact

    def grant(self, granted: Granted) -> None:
        """From now on what it says and prints is without the secrets that it was granted."""
        self._granted = granted
        self.hide(granted.redact)

    @abstractmethod
    def kill(self, reason: str) -> None:
        """End all its processes. The caller ends its calls. Safe to call again."""

    def mark_live(self) -> None:
        """The worker has said `ready`."""
        self.live = True

    @property
    def unread(self) -> int:
        """Bytes that are not written to its socket yet."""
        return self._stream.unwritten

    @property
    def last_words(self) -> str:
        """The last line that was written to its standard output or error, for the error of a crash."""
        return self._output.last_words

    def broken(self, violation: Violation) -> None:
        """It broke the protocol."""
        self.kill(str(violation))
        self._owner.worker_broken(self, violation)

    def _frames(self, frames: list[WorkerFrame]) -> None:
        if self._granted is not None:
            try:
                frames = [self._granted.out_of(frame) for frame in frames]
            except Violation as violation:
                self.broken(violation)
                return
        self._owner.worker_frames(self, frames)

    def ends(self) -> None:
        """What it works for has ended, as it says itself: it gets a moment to end, so that its exit status is known."""
        self._closed()

    def _closed(self) -> None:
        if not self.dying:
            self.dying = True
            self._set_timer(EXIT_GRACE_S, self.kill, CLOSED)

    def _set_timer(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        """Call `action` after so many seconds, in place of what was planned before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, action, *args)

    def _end(self, cause: str) -> None:
        """Its last process has ended. What it sent and wrote before still counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._reason = self._reason or cause
        self._output.close()
        self._stream.drain()
        self._owner.worker_gone(self, self._reason)
