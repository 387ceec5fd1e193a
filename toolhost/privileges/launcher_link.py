"""The link to the launcher process: requests go out, answers come back through the loop, several on their way at once.

Rules.
- Nothing here waits: a request is written when there is room, its answer read when it is there.
- The launcher answers in the order of the requests. At most MAX_ASKED are with it; more wait here, where they cost it
  no descriptors.
- A launcher that has ended, or has answered nothing for ANSWER_S, is ended and started again. Whatever was with it
  fails with LauncherLost: it may have started those jails or not. What still waits here goes to the new one.
- It is the child of the loop's thread, under root too, where the privileged helper forks it. So that thread is the
  parent of every jail, and bubblewrap dies with the thread whose child it is.

Source: docs/design/sandbox.md section 3; docs/decisions/022 and 031.
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
from contextlib import suppress
from typing import Any, Final, NamedTuple

from toolhost.launcher.request import Check, Hold, Launch, Run
from toolhost.offload import Offload

#: Where the launcher finds its socket.
_LAUNCHER_FD: Final = 3
#: An answer is a number or a sentence (bytes), and one descriptor.
_MAX_ANSWER: Final = 4096
#: Between two answers while something is asked for (seconds). It takes a millisecond or two on an idle machine, and a
#: third of a second was seen among twenty fork bombs on two processors; starting it takes some 50 ms.
ANSWER_S: Final = 10.0
#: Requests that are with the launcher at a time: enough that it never waits for us between two.
MAX_ASKED: Final = 4
#: What is ignored stays ignored through exec.
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


#: What the launcher says, and the descriptors that came with it.
Answer = tuple[dict[str, Any], list[int]]


class LauncherLost(OSError):
    """The launcher is gone, and whether it has done what it was asked for is not known."""


class _Question(NamedTuple):
    """A request with its descriptors, and where its answer goes."""

    data: bytes
    fds: list[int]
    answer: asyncio.Future[Answer]


#: Starts a launcher: our end of its socket, and its number. It raises OSError.
StartLauncher = Callable[[], tuple[socket.socket, int]]


class LauncherLink:
    """The launcher process of this process: started when it is needed, and again should it be gone.

    One for the whole process: it costs some megabytes and does nothing between two jails. Use from one loop at a time;
    between two of them nothing may be asked for.
    """

    def __init__(self, start: StartLauncher, offload: Offload) -> None:
        """`offload` waits for the ends of processes."""
        self.pid = 0
        self._start = start
        self._offload = offload
        self._channel: socket.socket | None = None
        self._registered = False
        self._waiting: deque[_Question] = deque()
        self._asked: deque[_Question] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, request: Launch | Run | Hold | Check, fds: list[int]) -> Answer:
        """Its answer, and the descriptors that came with it. `fds` must stay open until then.

        Raises LauncherLost, or another OSError when the launcher cannot be started; then nothing was begun.
        """
        loop = asyncio.get_running_loop()
        question = _Question(json.dumps(request).encode(), fds, loop.create_future())
        self._waiting.append(question)
        self._pump()
        return await question.answer

    def prepare(self, owner_uid: int, owner_gid: int, uid: int) -> None:
        """Let it make what the next jail of that user will need, unless somebody waits for it."""
        if not self._asked:
            self._tell({"prepare": [owner_uid, owner_gid, uid]})

    def put_first(self, thread: int) -> None:
        """Let this thread of ours run as soon as it wants to, on a busy machine, too. Only root's launcher can."""
        self._tell({"prompt": thread})

    def _tell(self, request: dict[str, object]) -> None:
        """What has no answer, and is left out when there is no room for it."""
        if self._channel is not None:
            with suppress(OSError):
                _send(self._channel, json.dumps(request).encode(), [])

    def close(self) -> None:
        """End it and wait for its end, which is at once."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    # --- out

    def _pump(self) -> None:
        """Send what there is room for."""
        while self._waiting and len(self._asked) < MAX_ASKED:
            question = self._waiting[0]
            if question.answer.done():  # given up meanwhile
                self._waiting.popleft()
                continue
            try:
                started = self._channel is None
                channel = self.start()
                try:
                    _send(channel, question.data, question.fds)
                except BlockingIOError:
                    if not self._asked:
                        raise
                    return  # it has to read first; its next answer brings us back
                except OSError:
                    if started:
                        raise
                    self._lost("it has ended")  # found out only now; this question was not with it
                    continue
            except OSError as error:
                self._waiting.popleft()
                question.answer.set_exception(error)
                continue
            self._waiting.popleft()
            self._asked.append(question)
            if len(self._asked) == 1:
                loop = question.answer.get_loop()
                loop.add_reader(channel.fileno(), self._readable)
                self._timer = loop.call_later(ANSWER_S, self._silent)

    def start(self) -> socket.socket:
        """See to it that it runs: our end of its socket. It has the powers of who calls. Raises OSError."""
        if self._channel is not None:
            return self._channel
        ours, self.pid = self._start()
        ours.setblocking(False)
        self._channel = ours
        if not self._registered:
            self._registered = True
            atexit.register(self.close)  # it would end by itself, but perhaps after us
        return ours

    # --- in

    def _readable(self) -> None:
        """One answer, or the end."""
        channel = self._channel
        if channel is None or not self._asked:
            return
        try:
            data, given, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, given = b"", []
        if not data:
            self._lost("it has ended")
            self._pump()
            return
        question = self._asked.popleft()
        answer: dict[str, Any] = json.loads(data)
        if not question.answer.done():
            question.answer.set_result((answer, given))
        else:
            self._drop(answer, given)
        loop = question.answer.get_loop()
        self._stop_timer()
        if self._asked:
            self._timer = loop.call_later(ANSWER_S, self._silent)
        else:
            loop.remove_reader(channel.fileno())
        self._pump()

    def _silent(self) -> None:
        self._timer = None
        self._lost(f"it has not answered for {ANSWER_S:g} s")
        self._pump()

    def _lost(self, how: str) -> None:
        """End it, and fail what was with it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            if self._asked:
                self._asked[0].answer.get_loop().remove_reader(channel.fileno())
            channel.close()
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it is our child and not yet waited for
            pid = self.pid
            self._offload.remove(lambda: _reap(pid))
        self._stop_timer()
        asked, self._asked = self._asked, deque()
        for question in asked:
            if not question.answer.done():
                question.answer.set_exception(LauncherLost(f"the launcher of jails is gone: {how}"))

    def _drop(self, answer: dict[str, Any], given: list[int]) -> None:
        """Nobody wants this jail any more."""
        for fd in given:
            os.close(fd)
        if "pid" in answer:
            pid = int(answer["pid"])
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._offload.remove(lambda: _reap(pid))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _send(channel: socket.socket, data: bytes, fds: list[int]) -> None:
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], extra)


def spawn(umask: int | None, *options: str) -> tuple[socket.socket, int]:
    """Start the program: our end of its socket, and its number. `umask` is that of jails, None for ours.

    Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "launcher", "__main__.py")
    argv = [sys.executable, "-I", "-S", program, str(_LAUNCHER_FD), "-" if umask is None else f"{umask:o}", *options]
    with theirs:
        # What this process was given to inherit, for instance tokens, the program closes before it does anything else.
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
