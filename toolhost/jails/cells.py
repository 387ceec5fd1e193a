"""The calls of a jail that forks them, one cell each: its own socket, its own output, its own end.

A cell is a process namespace inside the jail, made by the jail's fork server. Its worker speaks the same protocol as
any other, over a socket that belongs to it alone, so nothing that it says can be about another call. States: spare
(made ahead, has heard nothing) -> entered (it has its call) -> dying -> ended (its last process is gone).

Rules.
- A cell runs one call and is told to leave when that has its result. One that stays is ended.
- What ends a cell is the fork server, which is trusted; a server that does not is taken for broken, and its jail ended.
- One cell is made ahead while a jail is in use: making one takes milliseconds, and a call then waits for none of them.

Source: docs/design/sandbox.md section 5; docs/decisions/030.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final, Protocol

from schemas.worker_frames import Ended, Exit, Fork, Forked, HostFrame, Init, Kill, WorkerFrame
from toolhost.jails.jail import EXIT_GRACE_S, Jail, exit_cause
from toolhost.jails.stream import FrameStream, StrayOutput
from toolhost.untrusted import Violation

#: What a worker that was told to leave may take (seconds): enough to run exit handlers.
LEAVE_S: Final = 0.3
#: How long the fork server may take to end a cell (seconds): it is one system call, but jails yield to everybody else.
KILL_S: Final = 20.0


class Owner(Protocol):
    """Who a cell reports to, in the loop. `cell.name` is that of the call it has."""

    def cell_frames(self, cell: Cell, frames: list[WorkerFrame]) -> None:
        """Frames of its worker, already within the limits."""

    def cell_broken(self, cell: Cell, violation: Violation) -> None:
        """Its worker broke the protocol; the cell is being ended."""

    def cell_printed(self, cell: Cell, text: str) -> None:
        """Something was written to its standard output or error."""

    def cell_gone(self, cell: Cell, cause: str) -> None:
        """Its last process has ended, or the jail around it. The last report of a cell."""


class Cell:
    """The place of one call. `live`: its worker has loaded the tool."""

    def __init__(
        self, number: int, jail: Jail, owner: Owner, loop: asyncio.AbstractEventLoop, output_limit: int
    ) -> None:
        """Ask the jail's fork server for it. Raises OSError when there are no descriptors left."""
        self.number = number
        self.jail = jail
        self.name: str | None = None  # of its call, in the jail; None while it is spare
        self.live = False
        self.unmade: str | None = None  # why it could not be made
        self.pid = 0  # of its first process, by its number in the jail; 0 until it is known
        self._owner = owner
        self._loop = loop
        self._reason: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            output, written = os.pipe()
            try:
                ours.setblocking(False)
                os.set_blocking(output, False)
                jail.give(Fork(number), [theirs.fileno(), written])
            except OSError:
                ours.close()
                os.close(output)
                raise
            finally:
                os.close(written)
        self._stream = FrameStream(
            ours, loop, output_limit, on_frames=self._frames, on_end=self._closed, on_violation=self.broken
        )
        self._output = StrayOutput(output, loop, lambda text: owner.cell_printed(self, text))
        #: Queue a frame for the worker.
        self.send: Callable[[HostFrame], None] = self._stream.send
        self.hold, self.release = self._stream.hold, self._stream.release

    @property
    def dying(self) -> bool:
        """Whether it is being ended, or has."""
        return self._reason is not None

    @property
    def unread(self) -> int:
        """Bytes that its worker has not taken."""
        return self._stream.unread

    @property
    def last_words(self) -> str:
        """The last line that was written to its standard output or error."""
        return self._output.last_words

    def _frames(self, frames: list[WorkerFrame]) -> None:
        if self.name is None:
            self.broken(Violation("a worker spoke before it had a call"))
        else:
            self._owner.cell_frames(self, frames)

    def broken(self, violation: Violation) -> None:
        """Its worker broke the protocol."""
        self.kill(str(violation))
        self._owner.cell_broken(self, violation)

    def _closed(self) -> None:
        if self._reason is None:
            self._set_timer(EXIT_GRACE_S, lambda: self.kill("closed its channel"))

    def leave(self) -> None:
        """Its call has its result: let it run its exit handlers and end. Safe to call again."""
        if self._reason is None and not self._stream.closed:
            self.send(Exit())
            self._set_timer(LEAVE_S, lambda: self.kill("not needed any more"))

    def kill(self, reason: str) -> None:
        """End all of its processes. Its call is the caller's affair. Safe to call again."""
        if self._reason is None:
            self._reason = reason
            self._stream.close()
            self.jail.send(Kill(self.number))
            self._set_timer(KILL_S, lambda: self.jail.kill("did not end a call"))

    def _set_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, action)

    def ended(self, cause: str) -> None:
        """It has: what it sent and wrote before counts."""
        if self._timer is not None:
            self._timer.cancel()
        reason = self._reason = self._reason or cause
        self._output.close()
        self._stream.drain()
        self._owner.cell_gone(self, reason)


class Cells:
    """All cells of one jail."""

    def __init__(
        self, jail: Jail, owner: Owner, loop: asyncio.AbstractEventLoop, output_limit: int, init: Init
    ) -> None:
        """`init` is the first frame of every worker."""
        self._jail = jail
        self._owner = owner
        self._loop = loop
        self._output_limit = output_limit
        self._init = init
        self._cells: dict[int, Cell] = {}
        self._by_name: dict[str, Cell] = {}
        self._spare: Cell | None = None
        self._count = 0
        self._held = False

    def hold(self) -> None:
        """Let no worker begin until `release`."""
        self._held = True

    def release(self) -> None:
        """The workers may begin."""
        self._held = False
        for cell in self._cells.values():
            cell.release()

    def enter(self, name: str) -> Cell:
        """A cell for the call of this name. Raises OSError when none can be asked for."""
        cell, self._spare = self._spare or self._make(), None
        cell.name = name
        self._by_name[name] = cell
        cell.send(self._init)
        return cell

    def of(self, name: str) -> Cell | None:
        """The cell of a call; None when it is gone."""
        return self._by_name.get(name)

    def prepare(self) -> None:
        """Have one made ahead for the next call, if there is none."""
        if self._spare is None:
            self._spare = self._make()

    def processes(self) -> dict[str, int]:
        """The first process of each call that runs, by the call's name in the jail. Called from any thread."""
        cells = list(self._cells.values())
        return {cell.name: cell.pid for cell in cells if cell.name is not None and cell.pid}

    def forked(self, frame: Forked) -> None:
        """The fork server says that a cell is there. Raises Violation for one that was not asked for."""
        if frame.cell not in self._cells:
            raise Violation("the fork server told of a call that it does not run")
        self._cells[frame.cell].pid = frame.pid

    def ended(self, frame: Ended) -> None:
        """The fork server says that a cell is gone. Raises Violation for one that was not there."""
        cell = self._cells.pop(frame.cell, None)
        if cell is None:
            raise Violation("the fork server told of a call that it does not run")
        if cell is self._spare:
            self._spare = None
        self._by_name.pop(cell.name or "", None)
        cell.unmade = frame.message
        cell.ended(f"could not be started: {frame.message}" if frame.message else exit_cause(frame.status))

    def close(self, cause: str) -> None:
        """The jail is gone, and with it every cell."""
        self._spare = None
        self._by_name.clear()
        while self._cells:
            self._cells.popitem()[1].ended(cause)

    def _make(self) -> Cell:
        self._count += 1
        cell = Cell(self._count, self._jail, self._owner, self._loop, self._output_limit)
        if self._held:
            cell.hold()
        self._cells[self._count] = cell
        return cell
