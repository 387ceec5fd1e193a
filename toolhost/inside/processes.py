"""Processes that a worker starts in its jail: one with pipes, until it ends.

A run ends when the process has exited. What it left behind is killed, and named if it held the output. When its time is
over, the process group gets SIGTERM at once and SIGKILL after KILL_AFTER_S. In both cases all that it has printed was
read.

Processes are started with posix_spawn, which neither forks this threaded process nor imports `subprocess` (15 ms of a
cold call).

Source: docs/design/tools.md sections 9 and 13; requirements BASH-01 to BASH-09, SKILL-14, SKILL-15.
"""

from __future__ import annotations

import posix
import select
from time import monotonic

from .running import other_processes, read

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .api import ToolContext

#: The time between SIGTERM and SIGKILL (seconds), in which a trap can clean up (docs/design/tools.md section 9).
KILL_AFTER_S = 0.5
#: How often a waiting call checks whether it was cancelled (seconds).
LOOK_S = 0.1
#: How long the pipes are read at most after the process has exited or was killed (seconds): another process may still
#: hold them. The last filter of a shell, as in `exec > >(tee log)`, ends within that time.
LAST_READ_S = 0.05
#: How many of the processes that were left behind are named, and how much of each command line (bytes).
NAMED, NAME_BYTES = 10, 100
READ_BYTES = 65536
SIGTERM, SIGKILL = 15, 9
#: The names of signals from 1 on. The `signal` module would cost a cold call 3 ms.
# fmt: off
SIGNALS = (
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
)
# fmt: on
#: SIGPIPE and SIGXFSZ, which this worker ignores: ignored signals stay ignored through exec.
DEFAULT_SIGNALS = (13, 25)


class Cancelled(Exception):
    """The caller gave up. All processes of the call have been killed."""

    code = "E_CANCELLED"


class Stream:
    """What comes through one pipe. `take` says what becomes of it."""

    def __init__(self, fd: int = -1) -> None:
        #: The end that is read.
        self.fd = fd

    def take(self, data: bytes) -> None:
        """Some bytes have come; none: that was all."""
        raise NotImplementedError

    def read(self) -> bool:
        """Read what is in the pipe. False at the end of the stream."""
        try:
            data = posix.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.take(data)
        return bool(data)


class _Given:
    """What a process can read. Stands among the streams: its `read` writes."""

    def __init__(self, fd: int, data: bytes) -> None:
        posix.set_blocking(fd, False)
        self.fd = fd
        self._rest = memoryview(data)

    def read(self) -> bool:
        """Write some of it. False when there is no more of it, or nobody who reads it."""
        try:
            self._rest = self._rest[posix.write(self.fd, self._rest[:READ_BYTES]) :]
        except BlockingIOError:
            return True
        except OSError:
            self._rest = self._rest[:0]
        if self._rest:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Say that this was all."""
        if self.fd >= 0:
            posix.close(self.fd)
            self.fd = -1


class Process:
    """One process with its pipes, from start to end."""

    def __init__(
        self,
        ctx: ToolContext,
        streams: Sequence[Stream],
        *,
        given: bytes | None = None,
        deadline: float | None = None,
        keep: bool = False,
    ) -> None:
        """`streams` take standard output and error. `given` is what it can read, and need not; None: nothing.

        At `deadline` (time.monotonic) it is stopped. `keep`: what it leaves behind lives on.
        """
        self._ctx = ctx
        self._streams = streams
        self._given = given
        self._deadline = deadline
        self._keep = keep
        #: It was stopped at its deadline.
        self.timed_out = False
        #: The command lines of the processes that it has left behind with its pipes. They have been killed.
        self.left: list[str] = []

    def run(self, program: bytes, argv: list[bytes], environment: dict[bytes, bytes]) -> int:
        """Start it, read its pipes until it has exited, and stop it when its time is over. Returns its status, as
        waitpid does. Raises OSError when it cannot be started, Cancelled, and what a stream raises.
        """
        pipes = [posix.pipe() for _ in self._streams]
        reads, writes = [fd for fd, _ in pipes], [fd for _, fd in pipes]
        stdin, feed = (-1, -1) if self._given is None else posix.pipe()
        given = None if self._given is None else _Given(feed, self._given)
        try:
            pid = self._spawn(program, argv, environment, stdin, writes)
        except OSError:
            _close([*reads, feed])
            raise
        finally:
            _close([*writes, stdin])
        keep = False
        try:
            for stream, fd in zip(self._streams, reads, strict=True):
                stream.fd = fd
                posix.set_blocking(fd, False)
            held = self._wait(pid, given)
            keep = self._keep
            if held and not self.timed_out and not keep:
                self.left = end_holders({f"pipe:[{posix.fstat(fd).st_ino}]" for fd in held})
        finally:
            if not keep:
                kill_group(pid)  # what it has started; the process itself has ended, or must end
            _, status = posix.waitpid(pid, 0)
            _close(reads)
            if given is not None:
                given.close()
        return status

    def _spawn(
        self, program: bytes, argv: list[bytes], environment: dict[bytes, bytes], stdin: int, writes: list[int]
    ) -> int:
        source = (posix.POSIX_SPAWN_OPEN, 0, "/dev/null", posix.O_RDONLY, 0)
        return posix.posix_spawn(
            program,
            argv,
            environment,
            file_actions=[
                source if stdin < 0 else (posix.POSIX_SPAWN_DUP2, stdin, 0),
                *((posix.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(writes, 1)),
            ],
            setpgroup=0,
            setsigdef=DEFAULT_SIGNALS,
        )

    def _wait(self, pid: int, given: _Given | None) -> list[int]:
        """Wait until the process has exited, or until it had to be killed; when its time is over also for those that
        hold its pipes, which may be cleaning up. Returns the pipes that are still held.
        """
        exited_fd = posix.pidfd_open(pid)
        poll = select.poll()
        open_streams: dict[int, Stream | _Given] = {stream.fd: stream for stream in self._streams}
        for fd in (*open_streams, exited_fd):
            poll.register(fd, select.POLLIN)
        if given is not None:
            poll.register(given.fd, select.POLLOUT)
            open_streams[given.fd] = given
        kill_at: float | None = None
        exited = False
        try:
            while not exited or (kill_at is not None and open_streams):
                now = monotonic()
                if kill_at is not None and now >= kill_at:
                    kill_group(pid)
                    break
                if kill_at is None and self._deadline is not None and now >= self._deadline:
                    self.timed_out = True
                    kill_at = now + KILL_AFTER_S
                    signal_group(pid, SIGTERM)
                if self._ctx.cancelled:
                    raise Cancelled("the command was cancelled")
                ends = (kill_at, self._deadline if kill_at is None else None)
                until = min((at for at in ends if at), default=now + LOOK_S)
                for fd, _ in poll.poll(max(0.0, min(until - now, LOOK_S)) * 1000):
                    if fd == exited_fd:
                        exited = True
                        poll.unregister(fd)
                    elif not open_streams[fd].read():
                        poll.unregister(fd)
                        del open_streams[fd]
            if given is not None and open_streams.pop(given.fd, None) is not None:
                poll.unregister(given.fd)
            self._last_read(poll, open_streams, exited_fd)
            return list(open_streams)
        finally:
            posix.close(exited_fd)

    @staticmethod
    def _last_read(poll: select.poll, open_streams: dict[int, Stream | _Given], exited_fd: int) -> None:
        """Read the rest of the pipes once the process has exited or was killed."""
        end = monotonic() + LAST_READ_S
        left = LAST_READ_S
        while open_streams and left > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == exited_fd:
                    poll.unregister(fd)
                elif fd in open_streams and not open_streams[fd].read():
                    poll.unregister(fd)
                    del open_streams[fd]
            left = end - monotonic()


def _close(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            posix.close(fd)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group of a process."""
    try:  # noqa: SIM105 # contextlib is not imported here
        posix.killpg(pid, number)
    except OSError:
        pass  # the group is gone


def kill_group(pid: int) -> None:
    """Send SIGKILL to the group, and to the process in case it has left the group. It is not reaped yet, so no other
    process has its number.
    """
    signal_group(pid, SIGKILL)
    posix.kill(pid, SIGKILL)


def end_holders(pipes: set[str]) -> list[str]:
    """Kill the processes that hold one of these pipes, named as in /proc. Returns their command lines."""
    names: list[str] = []
    try:
        processes = other_processes()
    except OSError:
        processes = set()  # the reduced tier has no list of them; the group is killed all the same
    for pid in sorted(processes):
        fields = read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()[:2]
        if not fields or int(fields[1]) == posix.getpid():
            continue  # it is gone, or another call starts it just now, with this one's pipes until its program runs
        words = read(f"/proc/{pid}/cmdline")[:NAME_BYTES].replace(b"\0", b" ").decode("utf-8", "replace").strip()
        try:
            if any(posix.readlink(f"/proc/{pid}/fd/{fd}") in pipes for fd in posix.listdir(f"/proc/{pid}/fd")):
                posix.kill(pid, SIGKILL)
                names.append(words or f"process {pid}")
        except OSError:
            pass  # it ends just now
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]


def signal_name(number: int) -> str:
    """The name of a signal: SIGTERM for 15. Real-time signals have only their number."""
    return f"SIG{SIGNALS[number - 1]}" if number <= len(SIGNALS) else f"SIG{number}"
