"""The calls of a jail that forks them. Each call has a sandbox of its own: its own socket, output and end.

A call sandbox is a process namespace inside the jail, made by the jail's fork server. Its worker speaks the same
protocol as any other, over a socket that belongs to it alone, so nothing that it says can be about another call.
States: spare (made ahead, was told nothing) -> entered (it has its call) -> dying -> ended (its last process is gone).

Rules.
- A call sandbox runs one call and is told to leave when the call has its result. If it stays, it is ended.
- The fork server ends call sandboxes, and is trusted. If it does not end one, it is broken, and its jail is ended.
- A sandbox is made ahead while a jail is in use. Making one takes milliseconds, and a call does not wait for them.

Source: docs/design/sandbox.md section 5; docs/decisions/030.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from goondan.schemas.worker.worker_frames import Ended, Exit, Fork, Forked, Init, Kill, WorkerFrame
from goondan.toolhost.jails.jail import Jail, exit_cause
from goondan.toolhost.jails.worker import Granted, Worker, WorkerOwner
from goondan.toolhost.untrusted import Violation

#: How long a worker that was told to leave may take (seconds): enough for exit handlers.
LEAVE_S: Final = 0.3
#: How long the fork server may take to end a sandbox (seconds): it is one system call, but jails yield to others.
KILL_S: Final = 20.0


class CallSandbox(Worker):
    """The sandbox of one call."""

    def __init__(
        self, number: int, jail: Jail, owner: WorkerOwner, loop: asyncio.AbstractEventLoop, output_limit: int
    ) -> None:
        """Ask the jail's fork server for a sandbox. Raises OSError when there are no descriptors left."""
        self.number = number
        self.jail = jail
        #: The worker call id of its call; None while it is spare.
        self.name: str | None = None
        #: Why it could not be made.
        self.unmade: str | None = None
        #: Its first process, by its number in the jail; 0 until it is known.
        self.pid = 0
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
        super().__init__(ours, output, owner, loop, output_limit)

    def _frames(self, frames: list[WorkerFrame]) -> None:
        if self.name is None:
            self.broken(Violation("a worker spoke before it had a call"))
        else:
            super()._frames(frames)

    def leave(self) -> None:
        """Its call has its result: let it run its exit handlers and end. Safe to call again."""
        if self._reason is None and not self._stream.closed:
            self.send(Exit())
            self._set_timer(LEAVE_S, self.kill, "not needed any more")

    def kill(self, reason: str) -> None:
        """End all its processes. The caller ends its call. Safe to call again."""
        if self._reason is None:
            self.dying, self._reason = True, reason
            self._stream.close()
            self.jail.send(Kill(self.number))
            self._set_timer(KILL_S, self.jail.kill, "did not end a call")

    def ended(self, cause: str, unmade: str | None = None) -> None:
        """Its last process has ended. `unmade`: why it never existed, if it did not."""
        self.dying, self.unmade = True, unmade
        self._end(cause)


class CallSandboxes:
    """All call sandboxes of one jail."""

    def __init__(
        self, jail: Jail, owner: WorkerOwner, loop: asyncio.AbstractEventLoop, output_limit: int, init: Init
    ) -> None:
        """`init` is the first frame of every worker."""
        self._jail = jail
        self._owner = owner
        self._loop = loop
        self._output_limit = output_limit
        self._init = init
        self._sandboxes: dict[int, CallSandbox] = {}
        self._by_name: dict[str, CallSandbox] = {}
        self._spare: CallSandbox | None = None
        self._count = 0
        self._held = False
        #: The secrets that the workers get; None: they get none.
        self.granted: Granted | None = None

    def hold(self) -> None:
        """Let no worker begin until `release`."""
        self._held = True

    def release(self) -> None:
        """The workers may begin."""
        self._held = False
        for sandbox in self._sandboxes.values():
            sandbox.release()

    def enter(self, name: str) -> CallSandbox:
        """A sandbox for the call of this name. Raises OSError when none can be asked for."""
        sandbox, self._spare = self._spare or self._make(), None
        sandbox.name = name
        self._by_name[name] = sandbox
        sandbox.send(self._init)
        return sandbox

    def of(self, name: str) -> CallSandbox | None:
        """The sandbox of a call; None when it is gone."""
        return self._by_name.get(name)

    def prepare(self) -> None:
        """Have a sandbox made for the next call, if there is none. Raises OSError when none can be asked for."""
        if self._spare is None:
            self._spare = self._make()

    def processes(self) -> dict[str, int]:
        """The first process of each running call, by the call's name in the jail. Called from any thread."""
        sandboxes = list(self._sandboxes.values())
        return {sandbox.name: sandbox.pid for sandbox in sandboxes if sandbox.name is not None and sandbox.pid}

    def heard(self, frame: WorkerFrame) -> None:
        """The fork server says that a sandbox exists, or is gone. Raises Violation for anything else."""
        if not isinstance(frame, Forked | Ended) or frame.cell not in self._sandboxes:
            raise Violation("the fork server sent a frame that is none of its, or told of a call that it does not run")
        sandbox = self._sandboxes[frame.cell]
        if isinstance(frame, Forked):
            sandbox.pid = frame.pid
            return
        del self._sandboxes[frame.cell]
        if sandbox is self._spare:
            self._spare = None
        self._by_name.pop(sandbox.name or "", None)
        cause = f"could not be started: {frame.message}" if frame.message else exit_cause(frame.status)
        sandbox.ended(cause, frame.message)

    def close(self, cause: str) -> None:
        """The jail is gone, and so is every call sandbox."""
        self._spare = None
        self._by_name.clear()
        while self._sandboxes:
            self._sandboxes.popitem()[1].ended(cause)

    def _make(self) -> CallSandbox:
        self._count += 1
        made = CallSandbox(self._count, self._jail, self._owner, self._loop, self._output_limit)
        if self._held:
            made.hold()
        if self.granted is not None:
            made.grant(self.granted)
        self._sandboxes[self._count] = made
        return made
