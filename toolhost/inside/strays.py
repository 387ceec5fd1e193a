"""Processes that a call left behind: noticing them for the price of one system call, and ending them.

A handler's process groups and sessions mean nothing here: what counts is the jail's pid namespace, in which there are
only the jail's init (1), the worker, and whatever tools have started.
"""

from __future__ import annotations

import posix

SIGKILL = 9
_WALL = 0x40000000  # children made without SIGCHLD as well
#: The children of the jail's init; some kernels do not tell.
_OF_INIT = "/proc/1/task/1/children"


class Strays:
    """What was started in this jail and is still there. Works only where `enabled` is set: kill(-1) is no toy."""

    def __init__(self) -> None:
        self.enabled = False
        self._pids = Pids()
        self._newest = b""
        self._kept: set[int] = set()  # what an export with `background` left behind on purpose

    def enable(self) -> None:
        """Begin. The process ids must agree that this is a jail: outside of one, kill(-1) would hit everything."""
        self.enabled = posix.getpid() == 2 and posix.getppid() == 1
        self._newest = self._pids.newest()

    def sweep(self, *, keep: bool) -> None:
        """A call has ended and no other runs: kill every process but this one and init; `keep` spares them for good."""
        newest = self._pids.newest()
        if newest and newest == self._newest:
            return  # no process and no thread was started since
        again = False
        if keep:
            self._kept |= other_processes()
            reap()
        elif self._kept:
            self._kept = kill_others(self._kept)
            reap()
        elif self._alone():
            self._newest = newest
            return
        else:
            try:  # noqa: SIM105 # contextlib is not imported here
                posix.kill(-1, SIGKILL)  # looks at every process of the host, so it is not what is done first
            except OSError:
                pass  # nobody there
            again = not reap()  # some are still ending: the next call takes leave of them
        self._newest = b"" if again else self._pids.newest()

    def _alone(self) -> bool:
        """Whether there is nobody but init and this process. Anybody else is a child of one of them, or has an ancestor
        who is; and nobody becomes our child who was not.
        """
        return reap() and read(_OF_INIT) == b"2 "


class Pids:
    """The newest process id of this pid namespace, as /proc/loadavg ends with it: one system call, no walk."""

    def __init__(self) -> None:
        self._fd = -1

    def newest(self) -> bytes:
        """Equal to what it said before if and only if no process or thread was started since; empty if unknown."""
        try:
            return posix.pread(self._fd, 128, 0).rpartition(b" ")[2]
        except OSError:  # the first time, or a handler closed it
            try:
                self._fd = posix.open("/proc/loadavg", posix.O_RDONLY | posix.O_CLOEXEC)
                return posix.pread(self._fd, 128, 0).rpartition(b" ")[2]
            except OSError:
                return b""


def read(path: str) -> bytes:
    """The first bytes of a file of /proc; none when it cannot be read."""
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return posix.read(fd, 4096)
    except OSError:
        return b""
    finally:
        posix.close(fd)


def reap() -> bool:
    """Take leave of dead children; whether none is left alive."""
    try:
        while posix.waitpid(-1, posix.WNOHANG | _WALL)[0]:
            pass
    except OSError:
        return True
    return False


def other_processes() -> set[int]:
    """Every process of the jail but its init and this one."""
    own = {1, posix.getpid()}
    return {int(name) for name in posix.listdir("/proc") if name.isdigit()} - own


def kill_others(kept: set[int]) -> set[int]:
    """Kill all processes but the kept ones and their descendants; which of the kept ones still live."""
    spared: set[int] = set()
    for pid in sorted(other_processes()):
        if pid in kept or parent(pid) in spared:
            spared.add(pid)
            continue
        try:  # noqa: SIM105
            posix.kill(pid, SIGKILL)
        except OSError:
            pass  # gone already
    return spared


def parent(pid: int) -> int:
    """The parent of a process; 0 when it is gone."""
    try:
        return int(read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except (IndexError, ValueError):
        return 0
