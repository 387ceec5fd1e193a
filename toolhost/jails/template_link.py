"""The link to the template of a feature's workers, which forks one for each server of this tool host.

For the first server the launcher starts `jail/start.py` of the feature, which becomes the template. When it has ended,
its workers have ended with it, and the next server gets a new template. Use from the loop's thread.

Source: docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import deque
from typing import Final, NamedTuple

from goondan.schemas.system.authorities import authorities_pem
from goondan.toolhost.facts.host import machine
from goondan.toolhost.privileges.launcher_link import OwnPrograms
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.seccomp.program import template_program, worker_program

#: How long a worker may take to begin, a new template included (seconds). Importing the SDK takes half a second on an
#: idle machine, and some seconds among many that compute.
FORK_S: Final = 20.0
#: An answer is one number or a sentence (bytes).
_MAX_ANSWER: Final = 4096


class Forked(NamedTuple):
    """A worker that has begun. Whoever gets it owns the descriptor."""

    #: Its number on the host.
    pid: int
    #: A descriptor of it (a pidfd).
    pidfd: int


_Waiter = asyncio.Future[Forked]


class TemplateLink:
    """The template of one feature in one tool host."""

    def __init__(self, feature: str, loop: asyncio.AbstractEventLoop, powers: Powers) -> None:
        self._feature = feature
        self._loop = loop
        self._powers = powers
        self._programs = OwnPrograms(loop, powers.launcher)
        self._channel: socket.socket | None = None
        self._started: asyncio.Task[None] | None = None
        self._uid: int | None = None
        self._asked: deque[_Waiter] = deque()  # in the order of the answers
        #: The template's number on the host; 0 while there is none.
        self.pid = 0

    async def fork(self, ends: dict[str, socket.socket | int]) -> Forked:
        """Have a worker forked that gets these descriptors: `channel`, `output`, and `server` or `connector`.

        They stay the caller's. Raises OSError.
        """
        try:
            async with asyncio.timeout(FORK_S):
                await self._start()
                return await self._ask(ends)
        except TimeoutError:
            raise OSError(0, f"the worker did not begin in {FORK_S:g} s") from None

    def close(self) -> None:
        """End the template, and with it every worker."""
        if self._started is not None:
            self._started.cancel()
        self._lost()
        self._programs.close()
        self._give_back()

    async def _start(self) -> None:
        """Make sure that the template runs, or that it is being started. Raises OSError."""
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._channel = ours  # what is asked meanwhile, it reads when it is there
            self._loop.add_reader(ours.fileno(), self._readable, ours)
            self._started = self._loop.create_task(self._launch(theirs))
        if self._started is not None:
            await asyncio.shield(self._started)

    async def _launch(self, theirs: socket.socket) -> None:
        programs = (template_program(machine()), worker_program(machine()))
        files = [os.memfd_create("given", os.MFD_CLOEXEC) for _ in range(3)]
        try:
            with theirs:
                for file, data in zip(files, (*programs, authorities_pem()), strict=True):
                    with open(file, "wb", closefd=False) as out:
                        out.write(data)
                    os.lseek(file, 0, os.SEEK_SET)
                if not self._powers.shares_user and self._uid is None:
                    self._uid = self._powers.uids.take()
                    if self._uid is None:
                        raise OSError(0, "every user number for jails is in use")
                arguments = [self._feature, *([] if self._uid is None else [str(self._uid)])]
                fds = [theirs.fileno(), *files]
                self.pid = await self._programs.run({"program": "worker", "arguments": arguments}, fds)
        except OSError as error:
            self._lost()
            raise OSError(
                0, f"the template of the servers' workers could not be started: {error.strerror or error}"
            ) from None
        finally:
            for file in files:
                os.close(file)

    async def _ask(self, ends: dict[str, socket.socket | int]) -> Forked:
        channel = self._channel
        if channel is None:
            raise _ended()
        fds = [end if isinstance(end, int) else end.fileno() for end in ends.values()]
        waiter: _Waiter = self._loop.create_future()
        try:
            socket.send_fds(channel, [json.dumps({"ends": list(ends)}).encode()], fds)
        except OSError as error:
            raise OSError(0, f"the template of the servers' workers takes no request: {error.strerror}") from None
        self._asked.append(waiter)
        return await waiter

    def _readable(self, channel: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data or not self._asked:
            for fd in fds:
                os.close(fd)
            self._lost()
            return
        answer, waiter = json.loads(data), self._asked.popleft()
        if waiter.done():  # nobody waits any more: without its channel the worker ends
            for fd in fds:
                os.close(fd)
        elif "error" in answer:
            waiter.set_exception(OSError(0, f"the worker could not be forked: {answer['error']}"))
        else:
            waiter.set_result(Forked(int(answer["pid"]), fds[0]))

    def _lost(self) -> None:
        """The template has ended, or is to end: it does when it finds its socket closed."""
        channel, self._channel, self._started, self.pid = self._channel, None, None, 0
        if channel is not None:
            self._loop.remove_reader(channel.fileno())
            channel.close()
        asked, self._asked = self._asked, deque()
        for waiter in asked:
            if not waiter.done():
                waiter.set_exception(_ended())

    def _give_back(self) -> None:
        if self._uid is not None:
            self._powers.uids.give_back(self._uid)
            self._uid = None


def _ended() -> OSError:
    return OSError(0, "the template of the servers' workers has ended")
