"""Orphans: processes that a call left behind. Noticing them costs one system call; they are killed.

A handler's process groups and sessions do not count here. What counts is the jail's process namespace: its init (1),
the worker, and whatever tools have started.
"""

from __future__ import annotations

import posix

SIGKILL = 9
_WALL = 0x40000000  # children made without SIGCHLD as well
#: The children of the jail's init; some kernels do not tell.
_OF_INIT = "/proc/1/task/1/children"
#: Ends with the newest process id of this process namespace.
_LOADAVG = "/proc/loadavg"


class Orphans:
    """The processes that were started in this jail and are still there. Does nothing unless `enabled`."""

    def __init__(self) -> None:
        #: Whether this is a jail: elsewhere kill(-1) would hit every process of the user.
        self.enabled = False
        #: The newest process id when nobody but init and this process was there; empty when that is not known.
        self._newest = b""
        #: What calls of exports with `background` left behind on purpose.
        self._kept: set[int] = set()
        self._loadavg = -1

    def enable(self) -> None:
        """Begin, if the process ids agree that this is a jail."""
        self.enabled = posix.getpid() == 2 and posix.getppid() == 1
        self._newest = self._newest_pid()

    def sweep(self, *, keep: bool) -> None:
        """A call has ended and no other runs: kill every process but this one and init; `keep` spares them for good."""
        newest = self._newest_pid()
        if newest and newest == self._newest:
            return  # no process and no thread was started since
        if keep or self._kept:
            self._kept = self._kept | other_processes() if keep else kill_others(self._kept)
            reap()
        elif self._alone():
            self._newest = newest
            return
        else:
            try:  # noqa: SIM105 # contextlib is not imported here
                posix.kill(-1, SIGKILL)  # looks at every process of the host, so it is not what is done first
            except OSError:
                pass  # nobody there
            if not reap():  # some are still ending: the next call reaps them
                self._newest = b""
                return
        self._newest = self._newest_pid()

    def _alone(self) -> bool:
        """Whether there is nobody but init and this process. Anybody else is a child of one of them, or has an ancestor
        who is; and nobody becomes our child who was not.
        """
        return reap() and read(_OF_INIT) == b"2 "

    def _newest_pid(self) -> bytes:
        """Equal to what it said before if and only if no process or thread was started since; empty if unknown."""
        try:
            return posix.pread(self._loadavg, 128, 0).rpartition(b" ")[2]
        except OSError:  # the first time, or a handler closed it
            try:
                self._loadavg = posix.open(_LOADAVG, posix.O_RDONLY | posix.O_CLOEXEC)
                return posix.pread(self._loadavg, 128, 0).rpartition(b" ")[2]
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
    """Reap dead children; whether none is left alive."""
    try:
        while posix.waitpid(-1, posix.WNOHANG | _WALL)[0]:
            pass
    except OSError:
        return True
    return False


def other_processes() -> set[int]:
    """Every process of the jail but its init and this one."""
    return {int(name) for name in posix.listdir("/proc") if name.isdigit()} - {1, posix.getpid()}


def kill_others(kept: set[int]) -> set[int]:
    """Kill all processes but the kept ones and their descendants; which of the kept ones still live.

    Until a look finds nobody new: one that is killed may have started a process since the others were listed.
    """
    killed: set[int] = set()
    while True:
        spared: set[int] = set()
        before = len(killed)
        for pid in sorted(other_processes()):
            if pid in kept or parent(pid) in spared:
                spared.add(pid)
                continue
            killed.add(pid)
            try:  # noqa: SIM105
                posix.kill(pid, SIGKILL)
            except OSError:
                pass  # gone already
        if len(killed) == before:
            return spared


def parent(pid: int) -> int:
    """The parent of a process; 0 when it is gone."""
    try:
        return int(read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except (IndexError, ValueError):
        return 0
