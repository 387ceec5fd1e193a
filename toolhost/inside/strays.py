"""Processes that a call left behind: noticing them for the price of one system call, and ending them.

A handler's process groups and sessions mean nothing here: what counts is the jail's pid namespace, in which there are
only the jail's init (1), the worker, and whatever tools have started.
"""

from __future__ import annotations

import posix

SIGKILL = 9
_WALL = 0x40000000  # children made without SIGCHLD as well
#: The newest process id of this pid namespace, in the shortest and in every kernel's file; the children of its init,
#: which some kernels do not tell.
_NEWEST, _NEWEST_ELSE = "/proc/sys/kernel/ns_last_pid", "/proc/loadavg"
_OF_INIT = "/proc/1/task/1/children"


class Strays:
    """What was started in this jail and is still there. Works only where `enabled` is set: kill(-1) is no toy."""

    def __init__(self) -> None:
        self.enabled = False
        self._pids = Said(_NEWEST)
        self._of_init = Said(_OF_INIT)
        self._newest = b""
        self._kept: set[int] = set()  # what an export with `background` left behind on purpose

    def enable(self) -> None:
        """Begin. The process ids must agree that this is a jail: outside of one, kill(-1) would hit everything."""
        self.enabled = posix.getpid() == 2 and posix.getppid() == 1
        if not self._pids.now():
            self._pids = Said(_NEWEST_ELSE)
        self._newest = self._now()

    def sweep(self, *, keep: bool) -> None:
        """A call has ended and no other runs: kill every process but this one and init; `keep` spares them for good."""
        newest = self._now()
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
        self._newest = b"" if again else self._now()

    def _now(self) -> bytes:
        """The newest process id, which is what both files end with; empty when neither can be read."""
        return self._pids.now().rpartition(b" ")[2]

    def _alone(self) -> bool:
        """Whether there is nobody but init and this process. Anybody else is a child of one of them, or has an ancestor
        who is; and nobody becomes our child who was not.
        """
        return reap() and self._of_init.now() == b"2 "


class Said:
    """What a file of /proc says, held open: one system call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def now(self) -> bytes:
        """Its first bytes, none when it cannot be read."""
        try:
            return posix.pread(self._fd, 128, 0)
        except OSError:  # the first time, or a handler closed it
            try:
                self._fd = posix.open(self._path, posix.O_RDONLY | posix.O_CLOEXEC)
                return posix.pread(self._fd, 128, 0)
            except OSError:
                return b""


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
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(posix.read(fd, 4096).rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    finally:
        posix.close(fd)
