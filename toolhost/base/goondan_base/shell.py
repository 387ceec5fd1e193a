"""Processes that handlers start in their jail: a shell with pipes, until it ends or its time is over.

A run ends when the shell has exited. What it left behind is killed, and named if it held the output. When its time is
over, the process group gets SIGTERM at once and SIGKILL after KILL_AFTER_S. In both cases the printed output is
returned.

Processes are started with posix_spawn, which neither forks this threaded process nor imports `subprocess` (15 ms of a
cold call).

Source: docs/design/tools.md section 9; requirements BASH-01 to BASH-09, SKILL-14, SKILL-15.
"""

from __future__ import annotations

import errno
import posix
import select
from time import monotonic

from goondan_tool import ToolContext
from goondan_tool.orphans import other_processes, read

from goondan_base.reasons import name_of, reason_of

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

#: The time between SIGTERM and SIGKILL (seconds), in which a trap can clean up (docs/design/tools.md section 9).
KILL_AFTER_S = 0.5
#: The most of each stream that is returned (bytes). The rest is read and counted.
STREAM_BYTES = 1 << 20
#: How long before the call's deadline the shell is stopped (milliseconds). At the deadline the host ends the whole
#: jail, and there would be no result.
DEADLINE_MARGIN_MS = 1000
#: The host handles deadlines that are closer than this: stopping before them would leave no time for the shell.
SHORT_DEADLINE_MS = 3000
#: How often a waiting call checks whether it was cancelled (seconds).
LOOK_S = 0.1
#: How long the pipes are read at most after the shell has exited or was killed (seconds): another process may still
#: hold them. The last filter of a shell, as in `exec > >(tee log)`, ends within that time.
LAST_READ_S = 0.05
#: How many of the processes that were left behind are named, and how much of each command line (bytes).
NAMED, NAME_BYTES = 10, 100
#: The size of the output's other fields besides command and paths, at most (bytes).
FIELDS_BYTES = 1024
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
SHELL = "/bin/sh"
#: Ignored signals stay ignored through exec, and this worker ignores SIGPIPE.
DEFAULT_SIGNALS = (13,)


class ShellError(Exception):
    """The shell could not be started. `code` is the operating system's name of the reason."""

    def __init__(self, number: int, operation: str, suggestion: str | None = None, *, text: str | None = None) -> None:
        self.code = name_of(number)
        super().__init__(text or f"{self.code}: {reason_of(number)}, {operation}")
        self.suggestion = suggestion


class Cancelled(Exception):
    """The caller gave up. All processes of the call have been killed."""

    code = "E_CANCELLED"


def encode(text: str) -> bytes:
    """Arguments in the form that the operating system takes."""
    return text.encode("utf-8", "replace")


class Stream:
    """The output that came through one pipe."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.total = 0
        self._kept = bytearray()

    def read(self) -> bool:
        """Read what is in the pipe. False at the end of the stream."""
        try:
            data = posix.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.total += len(data)
        if len(self._kept) < STREAM_BYTES:
            self._kept += data[: STREAM_BYTES - len(self._kept)]
        return bool(data)

    def text(self, limit: int) -> str:
        """The first `limit` bytes as text, with a marker when there was more. Bad UTF-8 becomes U+FFFD."""
        text = self._kept.decode("utf-8", "replace")
        raw = text.encode()
        if self.total <= len(self._kept) and len(raw) <= limit:
            return text
        shown = raw[: min(limit, STREAM_BYTES)].decode("utf-8", "ignore")
        return f"{shown}\n[{self.name} was cut: {self.total} bytes in all]\n"


class Ended:
    """How a shell ended."""

    def __init__(
        self, status: int, timed_out: bool, seconds: float, streams: list[Stream], left: list[str] | None = None
    ) -> None:
        self.status = status
        #: The command lines of the processes that it left behind with its pipes. They have been killed.
        self.left = left or []
        self.timed_out = timed_out
        self.duration_ms = int(seconds * 1000)
        self.stdout, self.stderr = streams


class Shell:
    """One shell with its pipes, from start to end."""

    def __init__(
        self,
        ctx: ToolContext,
        argv: list[str],
        cwd: str,
        environment: dict[bytes, bytes],
        timeout_ms: float,
        *,
        program: str | None = None,
    ) -> None:
        self._ctx = ctx
        self._program = program or argv[0]
        self._shown = argv[0]
        self._argv = argv
        self._cwd = cwd
        self._environment = environment
        self._timeout_ms = timeout_ms

    def run(self) -> Ended:
        """Start the shell, read its pipes until it has exited, and stop it when its time is over. Raises ShellError,
        Cancelled.
        """
        began = monotonic()
        out_read, out_write = posix.pipe()
        err_read, err_write = posix.pipe()
        try:
            pid = self._spawn(out_write, err_write)
        except OSError as error:
            posix.close(out_read)
            posix.close(err_read)
            raise ShellError(error.errno or errno.EIO, f"posix_spawn '{self._shown}'") from None
        finally:
            posix.close(out_write)
            posix.close(err_write)
        streams = [Stream(out_read, "stdout"), Stream(err_read, "stderr")]
        left: list[str] = []
        try:
            for stream in streams:
                posix.set_blocking(stream.fd, False)
            timed_out, held = self._wait(pid, streams, began)
            if held and not timed_out:
                left = end_holders({f"pipe:[{posix.fstat(stream.fd).st_ino}]" for stream in held})
        finally:
            kill_group(pid)  # background processes of the shell; the shell itself has ended, or must end
            _, status = posix.waitpid(pid, 0)
            posix.close(out_read)
            posix.close(err_read)
        return Ended(status, timed_out, monotonic() - began, streams, left)

    def _spawn(self, out_write: int, err_write: int) -> int:
        argv = self._argv
        program = self._program
        if self._cwd != posix.getcwd():
            # posix_spawn cannot change the folder, and this process has other threads. So a shell in between does it.
            # The variable that `cd` adds to the environment was not given by the caller, so it is removed.
            line = 'cd -P -- "$1" && shift && unset OLDPWD && exec "$@"'
            argv = [SHELL, "-c", line, "sh", self._cwd, program, *argv[1:]]
            program = SHELL
        return posix.posix_spawn(
            encode(program),
            [encode(argument) for argument in argv],
            self._environment,
            file_actions=[
                (posix.POSIX_SPAWN_OPEN, 0, "/dev/null", posix.O_RDONLY, 0),
                (posix.POSIX_SPAWN_DUP2, out_write, 1),
                (posix.POSIX_SPAWN_DUP2, err_write, 2),
            ],
            setpgroup=0,
            setsigdef=DEFAULT_SIGNALS,
        )

    def _wait(self, pid: int, streams: list[Stream], began: float) -> tuple[bool, list[Stream]]:
        """Wait until the shell has exited, or until it had to be killed; when its time is over also for those that hold
        its pipes, which may be cleaning up. Returns whether its time was over, and the streams that are still held.
        """
        exited_fd = posix.pidfd_open(pid)
        poll = select.poll()
        open_streams = {stream.fd: stream for stream in streams}
        for fd in (*open_streams, exited_fd):
            poll.register(fd, select.POLLIN)
        deadline = self._deadline(began)
        kill_at: float | None = None
        exited = False
        try:
            while not exited or (kill_at is not None and open_streams):
                now = monotonic()
                if kill_at is not None and now >= kill_at:
                    kill_group(pid)
                    break
                if kill_at is None and deadline is not None and now >= deadline:
                    kill_at = now + KILL_AFTER_S
                    signal_group(pid, SIGTERM)
                if self._ctx.cancelled:
                    raise Cancelled("the command was cancelled")
                until = min((at for at in (kill_at, deadline if kill_at is None else None) if at), default=now + LOOK_S)
                for fd, _ in poll.poll(max(0.0, min(until - now, LOOK_S)) * 1000):
                    if fd == exited_fd:
                        exited = True
                        poll.unregister(fd)
                    elif not open_streams[fd].read():
                        poll.unregister(fd)
                        del open_streams[fd]
            self._last_read(poll, open_streams, exited_fd)
            return kill_at is not None, list(open_streams.values())
        finally:
            posix.close(exited_fd)

    def _deadline(self, began: float) -> float | None:
        """The time when the shell is stopped: at the end of its own time, or just before the host ends the whole
        jail.
        """
        milliseconds = self._timeout_ms if self._timeout_ms > 0 else None
        remaining = self._ctx.remaining_ms
        if remaining is not None and remaining > SHORT_DEADLINE_MS:
            limit = float(remaining - DEADLINE_MARGIN_MS)
            milliseconds = limit if milliseconds is None else min(milliseconds, limit)
        return None if milliseconds is None else began + milliseconds / 1000

    @staticmethod
    def _last_read(poll: select.poll, open_streams: dict[int, Stream], exited_fd: int) -> None:
        """Read the rest of the pipes once the shell has exited or was killed."""
        end = monotonic() + LAST_READ_S
        while open_streams and (left := end - monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == exited_fd:
                    poll.unregister(fd)
                elif fd in open_streams and not open_streams[fd].read():
                    poll.unregister(fd)
                    del open_streams[fd]


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group of the shell."""
    try:  # noqa: SIM105 # contextlib is not imported here
        posix.killpg(pid, number)
    except OSError:
        pass  # the group is gone


def kill_group(pid: int) -> None:
    """Send SIGKILL to the group, and to the shell in case it has left the group. The shell is not reaped yet, so no
    other process has its number.
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


def fitting_texts(ctx: ToolContext, first: dict[str, Any], ended: Ended) -> tuple[str, str]:
    """The texts of stdout and stderr, cut further when both do not fit the call's output together with `first`."""
    texts = [*(value for value in first.values() if isinstance(value, str)), *first.get("args", []), *ended.left]
    room = ctx.output_limit - FIELDS_BYTES - sum(len(encode(text)) + 8 for text in texts)
    half = max(0, room // 2)
    stderr = ended.stderr.text(max(half, room - min(ended.stdout.total * 3, room)))
    stdout = ended.stdout.text(max(half, room - len(stderr.encode())))
    return stdout, stderr


def signal_name(number: int) -> str:
    """The name of a signal: SIGTERM for 15. Real-time signals have only their number."""
    return f"SIG{SIGNALS[number - 1]}" if number <= len(SIGNALS) else f"SIG{number}"
