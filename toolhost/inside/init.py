"""Process 1 of a process namespace that is ours: it waits, and reaps the dead processes of its namespace."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # without the enumerations of the module around it
import posix

from .system import FAILED, call

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import NoReturn

_ALL = 0xFFFFFFFF


_SIGINT, _SIGCHLD = 2, 17


def wait(child: int) -> NoReturn:
    """Reap until that child has ended, and end with its status, as bubblewrap would. Linux then ends what is left."""
    try:
        _not_interrupted()
        call("close_range", 0, _ALL, 0)  # or else the host would not see the worker close its channel
        while True:
            _reaped(child, *posix.waitpid(-1, 0))
    finally:
        posix._exit(FAILED)


def wait_with_host(child: int, host: int) -> NoReturn:
    """The same, and end as well when nobody reads the pipe `host` any more. Only the tool host reads it.

    Elsewhere a death signal does this. The parent of this process is root without capabilities, and Linux lets it send
    no signal to another user, a death signal neither.
    """
    try:
        from select import POLLIN, poll

        _not_interrupted()
        call("close_range", 0, host - 1, 0)
        call("close_range", host + 1, _ALL, 0)
        waking, woken = posix.pipe2(posix.O_NONBLOCK | posix.O_CLOEXEC)
        _signal.set_wakeup_fd(woken)
        _signal.signal(_SIGCHLD, lambda number, frame: None)
        watch = poll()
        watch.register(host, 0)
        watch.register(waking, POLLIN)
        while True:
            try:
                while (ended := posix.waitpid(-1, posix.WNOHANG))[0]:
                    _reaped(child, *ended)
            except ChildProcessError:
                pass
            for fd, _ in watch.poll():
                if fd == host:
                    posix._exit(FAILED)
                posix.read(waking, 4096)
    finally:
        posix._exit(FAILED)


def _not_interrupted() -> None:
    """A namespace's first process gets no signal from within that it does not handle, but Python handles SIGINT. The
    worker can send that where Landlock has no scopes (before Linux 6.12), also to all of its group.
    """
    _signal.signal(_SIGINT, _signal.SIG_DFL)


def _reaped(child: int, pid: int, status: int) -> None:
    if pid == child:
        code = posix.waitstatus_to_exitcode(status)
        posix._exit(128 - code if code < 0 else code)
