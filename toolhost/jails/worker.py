"""One worker as the host sees it: what it is told, what it says and prints, and whether it is being ended.

A jail is one (jail.py). The sandbox of one call, in a jail that forks its calls, is another. Two
ways lead out of a jail: the worker's socket, and the pipe of the standard output.

Rules.
- A wake-up reads once at most, so that a jail that sends much does not starve the others.
- The standard output of a jail is read within a budget. Beyond the budget the jail's own write blocks.
- untrusted.py checks the frames. After a refused frame nothing more is read.
- Secrets that the jail was granted end here, in whatever it sends or prints (`Granted`).

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from goondan.schemas.text import redaction
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.worker.worker_frames import HostFrame, Result, WorkerFrame
from goondan.toolhost.calls.untrusted import Channel, Violation, check_json
from goondan.toolhost.socket_end import READ_BYTES, SocketEnd

#: Frames that are written together: each written alone would wake the worker once more (docs/design/wire.md section 6).
BURST: Final = 8
#: Bytes of printed output that are read from one jail each second. A full pipe then makes its writers wait.
PRINTED_BYTES_PER_S: Final = 1 << 20
#: Bytes at the end of the printed output that are kept for the error of a crash.
PRINTED_TAIL_BYTES: Final = 8192
#: In a frame of more bytes secrets are looked for as they are, and in no other form: all forms of one in a MiB would
#: keep the loop for 50 ms.
LARGE: Final = 64 << 10
_FATAL: Final = re.compile(r"FATAL ERROR: |# Fatal |panic\(")
_NODE_ERROR: Final = re.compile(r"(Uncaught )?\w*Error\b")
_encode = msgspec.msgpack.Encoder().encode
_frame = msgspec.msgpack.Decoder(WorkerFrame).decode
_plain = msgspec.msgpack.Decoder().decode
#: The fields of a frame that are no words of the jail's.
_PARTS: Final = frozenset(("type", "callId", "status", "level", "op"))
#: How long a worker that has closed its socket may take to end by itself, so that its exit status is known (seconds).
EXIT_GRACE_S: Final = 0.25
#: The reason when a worker has closed its socket and does not end by itself.
CLOSED: Final = "closed its channel"


class Granted:
    """Takes the secrets that a jail was granted out of what it says."""

    def __init__(self, secrets: list[str]) -> None:
        self._secrets = secrets
        #: A text without them, in all of their forms.
        self.redact = redaction.Redactor(*secrets)

    def out_of(self, frame: WorkerFrame) -> WorkerFrame:
        """A frame without them; the same object when there are none. Raises Violation."""
        data = _encode(frame)
        text = data.decode("utf-8", "replace")
        redact = self._as_they_are if len(data) > LARGE else self.redact
        if redact(text) == text:
            return frame  # what stands between two strings can make a hit of none, and never hides one
        if isinstance(frame, Result) and frame.output is not None:
            check_json(bytes(frame.output))
        try:
            said: dict[str, Any] = _plain(data)
            shown = {key: value if key in _PARTS else redaction.in_texts(value, redact) for key, value in said.items()}
            return _frame(_encode(shown))  # type: ignore[no-any-return]
        except (*DECODE_ERRORS, TypeError):
            raise Violation("the worker sent a frame that cannot be read") from None

    def _as_they_are(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, redaction.HIDDEN)
        return text


class FrameStream(SocketEnd):
    """Our end of a worker's socket. `close` or the end of the other side closes it. Use from the loop's thread only."""

    def __init__(
        self,
        channel: socket.socket,
        loop: asyncio.AbstractEventLoop,
        output_limit: int,
        *,
        on_frames: Callable[[list[WorkerFrame]], None],
        on_end: Callable[[], None],
        on_violation: Callable[[Violation], None],
    ) -> None:
        """`channel` becomes ours. `on_end` is called when the other end has closed; our end is closed by then."""
        super().__init__(channel, loop, on_data=self._take, on_left=self._ended)
        self._channel = Channel(output_limit, loop.time())
        self._on_frames = on_frames
        self._on_end = on_end
        self._on_violation = on_violation
        self.read()

    def send(self, frame: HostFrame) -> None:
        """Queue a frame. Frames that are queued in one turn of the loop are written in bursts."""
        if self._fd < 0 or self._is_deaf:
            return
        body = _encode(frame)
        self._waiting.append(len(body).to_bytes(4, "little") + body)
        self.unwritten += 4 + len(body)
        if self._watching:
            return
        if len(self._waiting) >= BURST:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def give(self, frame: HostFrame, fds: list[int]) -> None:
        """Send a small frame with descriptors at once; they stay the caller's. Raises OSError when it cannot be sent.

        For a fork server: it reads at once, and little is sent to it.
        """
        if self._fd < 0:
            raise ConnectionResetError(errno.ECONNRESET, "the jail has ended")
        self.flush()
        if self._waiting:
            raise BlockingIOError(errno.EAGAIN, "the jail does not read")
        body = _encode(frame)
        socket.send_fds(self._socket, [len(body).to_bytes(4, "little") + body], fds)

    def _take(self, data: bytes) -> None:
        try:
            frames = self._channel.feed(data, self._loop.time())
        except Violation as violation:
            self._on_violation(violation)
            return
        if frames:
            self._on_frames(frames)

    def _ended(self) -> None:
        told = self._on_end
        self.close()
        told()

    def close(self) -> None:
        """See SocketEnd."""
        if self._fd >= 0:
            super().close()
            del self._on_frames, self._on_end, self._on_violation

    def drain(self) -> None:
        """Hand on what the worker sent before it ended, and close."""
        while self._fd >= 0:
            before = self._fd
            try:
                data = self._socket.recv(READ_BYTES)
                frames = self._channel.feed(data, self._loop.time()) if data else []
            except (OSError, Violation):
                break
            if not data:
                break
            if frames:
                self._on_frames(frames)
            if self._fd != before:
                return
        self.close()


class PrintedOutput:
    """Reads what a jail's processes write to standard output and error. Use from the loop's thread only."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, on_text: Callable[[str], None]) -> None:
        """`fd`, a pipe that does not block, becomes ours."""
        self._fd = fd
        self._loop = loop
        self._on_text = on_text
        self._left = PRINTED_BYTES_PER_S
        self._tail = b""
        #: What is printed is shown as this leaves it. None: as it is.
        self.redact: Callable[[str], str] | None = None
        #: Whether a JavaScript runtime writes here.
        self.javascript = False
        self._begun = b""  # a line without an end that nobody was told yet
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, min(READ_BYTES, self._left))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        self._left -= len(data)
        if self._left <= 0:
            self._loop.remove_reader(self._fd)
        if self._timer is None:
            self._timer = self._loop.call_later(1.0, self._refill)
        if self.redact is not None:
            data = self._begun + data
            end = data.rfind(b"\n") + 1
            if end == 0 and len(data) > READ_BYTES:
                end = len(data)
            data, self._begun = data[:end], data[end:]
        self._tell(data)

    def _tell(self, data: bytes) -> None:
        if not data:
            return
        text = data.decode("utf-8", "replace")
        if self.redact is not None:
            text = self.redact(text)
            data = text.encode()
        self._tail = (self._tail + data)[-PRINTED_TAIL_BYTES:]
        self._on_text(text)

    def _refill(self) -> None:
        self._timer = None
        paused = self._left <= 0
        self._left = PRINTED_BYTES_PER_S
        if paused and self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """The writers are gone: read what is left, and close. Safe to call again."""
        if self._fd >= 0:
            self._readable()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            begun, self._begun = self._begun, b""
            self._tell(begun)
            del self._on_text  # it belongs to who has this object
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def last_words(self) -> str:
        """The last line that was written, for the error of a crash."""
        told, begun = self._tail.decode("utf-8", "replace"), self._begun.decode("utf-8", "replace")
        lines = (told + (begun if self.redact is None else self.redact(begun))).split("\n")
        return last_line(lines, javascript=self.javascript)

    def forget(self) -> None:
        """What was written so far is nothing that a crash is explained by."""
        self._tail = b""


def last_line(lines: list[str], *, javascript: bool = False) -> str:
    """The last line that is not blank, cut to 500 characters. Node.js ends with its version, and says why above it. The
    runtime of a tool in JavaScript, when it has to end itself, says why above a native stack or an address for reports.
    """
    said = [stripped for line in lines if (stripped := line.strip())]
    if javascript and (fatal := [line for line in said if _FATAL.match(line)]):
        return fatal[-1][:500]
    if said and said[-1].startswith("Node.js v"):
        said = [line for line in said if _NODE_ERROR.match(line)] or said
    return said[-1][:500] if said else ""


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
            channel, loop, output_limit, on_frames=self._frames, on_end=self.ends, on_violation=self.broken
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
            self._timer = None
        self._reason = self._reason or cause
        self._output.close()
        self._stream.drain()
        self._owner.worker_gone(self, self._reason)
