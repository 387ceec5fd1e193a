"""Processes that a call left behind: noticing them for the price of one system call, and ending them.

A handler's process groups and sessions mean nothing here: what counts is the jail's pid namespace, in which there are
only the jail's init (1), the worker, and whatever tools have started.
"""

from __future__ import annotations

import posix

SIGKILL = 9


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
        if newest == self._newest:
            return
        if keep:
            self._kept |= other_processes()
        elif self._kept:
            self._kept = kill_others(self._kept)
        else:
            try:  # noqa: SIM105 # contextlib is not imported here
                posix.kill(-1, SIGKILL)
            except OSError:
                pass  # nobody there
        try:
            while posix.waitpid(-1, posix.WNOHANG)[0]:
                pass
        except OSError:
            pass  # no children
        self._newest = self._pids.newest()


class Pids:
    """The newest process id of this pid namespace, as /proc/loadavg ends with it: one system call, no walk."""

    def __init__(self) -> None:
        self._fd = -1

    def newest(self) -> bytes:
        """Equal to what it said before if and only if no process or thread was started since."""
        try:
            return posix.pread(self._fd, 128, 0).rpartition(b" ")[2]
        except OSError:  # the first time, or a handler closed it
            try:
                self._fd = posix.open("/proc/loadavg", posix.O_RDONLY | posix.O_CLOEXEC)
                return posix.pread(self._fd, 128, 0).rpartition(b" ")[2]
            except OSError:
                return b"?"


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
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(posix.read(fd, 4096).rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    finally:
        posix.close(fd)
