"""The link to the launcher process, the programs of ours that it starts, and the threads for work that could hold the
loop up.

Of the three threads one prepares launches: it looks folders up, and records who may write to them. Another removes what
jails have left, so that no launch waits for that. The third looks at folders that callers name, which may hold 64 MiB.
Such work takes milliseconds to seconds: a folder may have ten thousand names, a fork bomb may hold the lock of a
control group. All other calls go through the loop meanwhile.

No jail may be started on these threads: bubblewrap ends with the thread whose child it is.

Rules of the link.
- Nothing here waits: a request is written when there is room, and its answer is read when it is there.
- The launcher answers in the order of the requests. At most MAX_ASKED are with it. More wait here, where they cost it
  no descriptors.
- A launcher that has ended, or has not answered a request for ANSWER_S, is ended and started again. The requests that
  it had fail with LauncherLost: it may have started those jails or not. The requests that wait here go to the new one.
- The launcher is the child of the loop's thread, under root too, where the privileged helper forks it. So that thread
  is the parent of every jail, and bubblewrap dies with its parent thread.

Source: docs/design/sandbox.md sections 3 and 3.1; docs/decisions/022.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import Launch, Run


_T = TypeVar("_T")


class Offload:
    """The threads of a tool host. Each starts with its first work, and does one piece after the other."""

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._removing = ThreadPoolExecutor(1, thread_name_prefix="remove")
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="look")

    async def prepared(self, work: Callable[[], _T]) -> _T:
        """Run `work` after all work that was given before, and return or raise what it does."""
        return await asyncio.wrap_future(self._preparing.submit(work))

    async def looked_up(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which looks at a folder that a caller named, after other such work. No launch waits for it."""
        return await asyncio.wrap_future(self._looking.submit(work))

    def submit(self, work: Callable[[], object]) -> None:
        """Run this between two launches. It must not raise."""
        self._preparing.submit(work)

    def remove(self, work: Callable[[], object]) -> None:
        """Run this when there is time. It must not raise."""
        self._removing.submit(work)

    async def settled(self) -> None:
        """Wait until everything that was given here before is done."""
        for thread in (self._preparing, self._removing):
            await asyncio.wrap_future(thread.submit(lambda: None))


# --- the launcher -----------------------------------------------------------------------------------------------------

#: The descriptor of the launcher's socket in the launcher.
_LAUNCHER_FD: Final = 3
#: Largest answer (bytes): it is a number or a sentence, and one descriptor.
_MAX_ANSWER: Final = 4096
#: From a request to its answer (seconds). It takes a millisecond or two on an idle machine; a third of a second was
#: seen among twenty fork bombs on two processors. Starting the launcher takes some 50 ms.
ANSWER_S: Final = 10.0
#: Requests that are with the launcher at a time: enough that it never waits for us between two requests.
MAX_ASKED: Final = 4
#: After this time (seconds) a request is sent again for which the launcher's socket had no room.
_FULL_S: Final = 0.001
#: What is ignored stays ignored through exec.
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
#: The launcher's answer, and the descriptors that came with it.
Answer = tuple[dict[str, Any], list[int]]


class LauncherLost(OSError):
    """The launcher is gone. It may have done what it was asked for, or not."""


#: Starts a launcher and returns our end of its socket and its process number. Raises OSError.
StartLauncher = Callable[[], tuple[socket.socket, int]]


class LauncherLink:
    """The launcher process of this process. It is started when it is needed, and again when it is gone.

    There is one for the whole process: it costs some megabytes and does nothing between two jails. Use it from one loop
    at a time; no request may be open when the loop changes.
    """

    def __init__(self, start: StartLauncher, offload: Offload) -> None:
        """`offload` waits for the ends of processes."""
        self.pid = 0
        self._start = start
        self._offload = offload
        self._channel: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(MAX_ASKED)
        self._asked: deque[asyncio.Future[Answer]] = deque()
        atexit.register(self.close)  # it would end by itself, but perhaps after us

    async def ask(self, request: Launch | Run, fds: list[int]) -> Answer:
        """Send a request. Returns its answer, and the descriptors that came with it. `fds` must stay open until then.

        Raises LauncherLost, or another OSError when the launcher cannot be started; then nothing was begun.
        """
        loop, data = asyncio.get_running_loop(), json.dumps(request).encode()
        if self._loop is not loop:
            self._loop, self._room = loop, asyncio.Semaphore(MAX_ASKED)
        async with self._room:
            limit = asyncio.timeout(ANSWER_S)
            try:
                async with limit:
                    while (answer := self._post(loop, data, fds)) is None:
                        await asyncio.sleep(_FULL_S)
                    return await answer
            except TimeoutError:
                if not limit.expired():
                    raise
                raise self._lost(f"it has not answered for {ANSWER_S:g} s") from None

    def prepare(self, owner_uid: int, owner_gid: int, uid: int) -> None:
        """Let it prepare what the next jail of that user will need, unless a request waits."""
        if not self._asked:
            self._tell({"prepare": [owner_uid, owner_gid, uid]})

    def put_first(self, thread: int) -> None:
        """Let this thread of ours run as soon as it is ready, on a busy machine, too. Only root's launcher can do
        that.
        """
        self._tell({"prompt": thread})

    def _tell(self, request: dict[str, object]) -> None:
        """Send a request that has no answer. It is left out when there is no room for it."""
        if self._channel is not None:
            with suppress(OSError):
                _send(self._channel, json.dumps(request).encode(), [])

    def let_go(self) -> None:
        """Have it end. `close` waits for that."""
        if self._channel is not None:
            with suppress(OSError):  # it has ended
                self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and wait for its end, which comes at once."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def start(self) -> socket.socket:
        """Make sure that it runs. Returns our end of its socket. It has the caller's powers. Raises OSError."""
        if self._channel is None:
            self._channel, self.pid = self._start()
            self._channel.setblocking(False)
        return self._channel

    def _post(self, loop: asyncio.AbstractEventLoop, data: bytes, fds: list[int]) -> asyncio.Future[Answer] | None:
        """Send a request and return the future of its answer; None while there is no room for it. Raises OSError."""
        began_before = self._channel is not None
        channel = self.start()
        try:
            _send(channel, data, fds)
        except BlockingIOError:
            return None
        except OSError:
            if not began_before:
                raise
            self._lost("it has ended")  # found out only now; this request was not with it
            return self._post(loop, data, fds)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._asked.append(answer)
        loop.add_reader(channel.fileno(), self._readable, loop, channel)
        return answer

    def _readable(self, loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
        """Read one answer, or notice the end."""
        data, given = b"", list[int]()
        with suppress(OSError):
            try:
                data, given, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
        if not data or not self._asked:
            self._lost("it has ended")
            return
        waiter, answer = self._asked.popleft(), json.loads(data)
        if waiter.done():
            self._drop(answer, given)
        else:
            waiter.set_result((answer, given))
        if not self._asked:
            loop.remove_reader(channel.fileno())

    def _lost(self, how: str) -> LauncherLost:
        """End the launcher, and fail the requests that it had with the returned error."""
        error = LauncherLost(f"the launcher of jails is gone: {how}")
        channel, self._channel = self._channel, None
        if channel is not None:
            if self._loop is not None:
                self._loop.remove_reader(channel.fileno())
            channel.close()
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it is our child and not yet waited for
            self._offload.remove(partial(_reap, self.pid))
        asked, self._asked = self._asked, deque()
        for waiter in asked:
            if not waiter.done():
                waiter.set_exception(error)
        return error

    def _drop(self, answer: dict[str, Any], given: list[int]) -> None:
        """Nobody wants this jail any more: end it."""
        for fd in given:
            os.close(fd)
        if "pid" in answer:
            pid = int(answer["pid"])
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._offload.remove(partial(_reap, pid))


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _send(channel: socket.socket, data: bytes, fds: list[int]) -> None:
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], extra)


def spawn(umask: int | None, *options: str) -> tuple[socket.socket, int]:
    """Start the program. Returns our end of its socket and its process number. `umask` is for jails; None: ours.

    Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launcher", "__main__.py")
    argv = [sys.executable, "-I", "-S", program, str(_LAUNCHER_FD), "-" if umask is None else f"{umask:o}", *options]
    with theirs:
        # The program first closes what this process was given to inherit, for instance tokens.
        actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), _LAUNCHER_FD),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ]
        try:
            pid = os.posix_spawn(
                argv[0], argv, {}, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
            )
            return ours, pid
        except OSError:
            ours.close()
            raise


class OwnPrograms:
    """The programs that one part of the tool host has started."""

    def __init__(self, loop: asyncio.AbstractEventLoop, launcher: LauncherLink) -> None:
        self._loop = loop
        self._launcher = launcher
        self._pidfds: dict[int, int] = {}

    async def run(self, program: Run, fds: list[int]) -> int:
        """Have the launcher start a program, and return its number. If the launcher is lost meanwhile, it is asked once
        more.

        Raises OSError.
        """
        try:
            answer, _ = await self._launcher.ask(program, fds)
        except LauncherLost:  # what it may have begun ends with its descriptors
            answer, _ = await self._launcher.ask(program, fds)
        if "error" in answer:
            raise OSError(0, answer["error"])
        pid = int(answer["pid"])
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._reap, pid)
        return pid

    def close(self) -> None:
        """End them all."""
        for pid in list(self._pidfds):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is None:
            return
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
