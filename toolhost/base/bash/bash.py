"""The bundled tool `bash`: shell commands and scripts in the instance's workdir.

How a call ends: when the shell has exited and nobody holds its output pipes any more; or, once its time is over, with
SIGTERM to the process group at once and SIGKILL after KILL_AFTER_S. Either way what was printed is returned.

Processes are started with posix_spawn, which neither forks this threaded process nor imports `subprocess` (15 ms of a
cold call).

Source: docs/design/tools.md section 9; requirements BASH-01 to BASH-09; recorded parity `bash__*`.
"""

from __future__ import annotations

import errno
import posix
import select
from time import monotonic

from goondan_base.arguments import InvalidInput, absolute, as_text, mapping, non_empty, number, string, strings
from goondan_base.reasons import name_of, reason_of
from goondan_tool import ToolContext

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

DEFAULT_TIMEOUT_MS = 30_000
#: Between SIGTERM and SIGKILL (seconds): time for a trap to clean up (docs/design/tools.md section 9).
KILL_AFTER_S = 0.5
#: Each stream is returned up to this size (bytes); the rest is read and counted.
STREAM_BYTES = 1 << 20
#: The host ends the whole jail at the call's deadline; stop this long before, so that there is a result (milliseconds).
DEADLINE_MARGIN_MS = 1000
#: A deadline that is closer than this is left to the host: stopping before it would leave no time at all.
SHORT_DEADLINE_MS = 3000
#: How often a waiting call looks whether it was cancelled (seconds).
LOOK_S = 0.1
#: After SIGKILL the pipes are read for this long at most: a process in a session of its own may still hold them.
LAST_READ_S = 0.05
#: What the output's other fields take beside command and paths, at most (bytes).
FIELDS_BYTES = 1024
READ_BYTES = 65536
SIGTERM, SIGKILL = 15, 9
#: From 1 on; the `signal` module would cost a cold call 3 ms.
# fmt: off
SIGNALS = (
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
)
# fmt: on
SHELL = "/bin/sh"
SCRIPT_SHELL = "/bin/bash"
#: Ignored signals stay ignored through exec, and this worker ignores SIGPIPE.
DEFAULT_SIGNALS = (13,)


class ShellError(Exception):
    """The shell could not be started; `code` is the operating system's name of the reason."""

    def __init__(self, number: int, operation: str, suggestion: str | None = None, *, text: str | None = None) -> None:
        self.code = name_of(number)
        super().__init__(text or f"{self.code}: {reason_of(number)}, {operation}")
        self.suggestion = suggestion


class Cancelled(Exception):
    """The caller gave up; everything the call started has been killed."""

    code = "E_CANCELLED"


# --- exports --------------------------------------------------------------------------------------------------------


def execute(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`bash__exec`: run a command line with /bin/sh as a login shell."""
    command = required(input, "command")
    cwd = absolute(ctx.workdir, optional_string(input, "cwd", ctx.workdir))
    timeout_ms = timeout(input)
    environment = merged_environment(input)
    check_folder(cwd)
    ended = Shell(ctx, [SHELL, "-lc", command], cwd, environment, timeout_ms).run()
    return report(ctx, {"command": command, "cwd": cwd}, ended)


def script(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`bash__script`: run a script file with a shell, in the workdir."""
    path = absolute(ctx.workdir, required(input, "path"))
    args = optional_strings(input, "args")
    shell = optional_string(input, "shell", SCRIPT_SHELL)
    timeout_ms = timeout(input)
    environment = merged_environment(input)
    check_script(path)
    program = find_program(shell, environment)
    ended = Shell(ctx, [shell, path, *args], ctx.workdir, environment, timeout_ms, program=program).run()
    return report(ctx, {"path": path, "shell": shell, "args": args}, ended)


handlers = {"exec": execute, "script": script}


# --- arguments ------------------------------------------------------------------------------------------------------


def required(input: dict[str, Any], name: str) -> str:
    """A required string that a program can be given."""
    return without_null(name, non_empty(input, name))


def optional_string(input: dict[str, Any], name: str, default: str) -> str:
    """A string that may be left out, likewise."""
    return without_null(name, string(input, name, default))


def optional_strings(input: dict[str, Any], name: str) -> list[str]:
    """A list of strings that may be left out, likewise."""
    return [without_null(name, item) for item in strings(input, name)] if name in input else []


def timeout(input: dict[str, Any]) -> float:
    """`timeoutMs`; zero or less means none."""
    return float(number(input, "timeoutMs", DEFAULT_TIMEOUT_MS))


def merged_environment(input: dict[str, Any]) -> dict[bytes, bytes]:
    """The jail's environment with `env` on top (BASH-05)."""
    environment = dict(posix.environ)
    for name, value in mapping(input, "env").items():
        if not isinstance(value, str | int | float):  # bool is an int
            raise InvalidInput(f"env.{name} must be a primitive string/number/boolean value")
        if not name or "=" in name:
            raise InvalidInput(f"'{name}' is no name of an environment variable")
        environment[encode(without_null("env", name))] = encode(without_null(f"env.{name}", as_text(value)))
    return environment


def without_null(name: str, value: str) -> str:
    """No string with a zero byte can reach a program."""
    if "\0" in value:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    return value


def encode(text: str) -> bytes:
    """Arguments as the operating system takes them."""
    return text.encode("utf-8", "replace")


# --- paths ----------------------------------------------------------------------------------------------------------


def check_folder(path: str) -> None:
    """Raise what starting the shell there would raise."""
    try:
        mode = posix.stat(path).st_mode
    except OSError as error:
        raise missing(path) or ShellError(error.errno or errno.ENOENT, f"posix_spawn '{SHELL}'") from None
    if mode & 0o170000 != 0o040000:
        raise ShellError(errno.ENOTDIR, f"posix_spawn '{SHELL}'")
    if not posix.access(path, posix.X_OK):
        raise ShellError(errno.EACCES, f"posix_spawn '{SHELL}'")


def check_script(path: str) -> None:
    """Raise unless the script is there."""
    try:
        posix.stat(path)
    except OSError as error:
        raise missing(path) or ShellError(error.errno or errno.ENOENT, f"access '{path}'") from None


def missing(path: str) -> Exception | None:
    """The better error for a path that the sandbox does not show."""
    from goondan_tool.sandbox import denied

    return denied(path)


def find_program(shell: str, environment: dict[bytes, bytes]) -> str:
    """The file to start; a bare name is looked up in PATH."""
    if not shell:
        raise InvalidInput("'shell' must be a non-empty string")
    if "/" in shell:
        candidates = [shell]
    else:
        path = environment.get(b"PATH", b"/usr/bin:/bin").decode("utf-8", "surrogateescape")
        candidates = [f"{folder or '.'}/{shell}" for folder in path.split(":")]
    found = errno.ENOENT
    for candidate in candidates:
        try:
            is_folder = posix.stat(candidate).st_mode & 0o170000 == 0o040000
        except OSError:
            continue
        if not is_folder and posix.access(candidate, posix.X_OK):
            return candidate
        found = errno.EACCES
    if found == errno.ENOENT and "/" not in shell:
        raise ShellError(found, "", text=f'Executable not found in $PATH: "{shell}"')
    # A program that is not there stays ENOENT, as recorded; where it might be, the suggestion says.
    denied = missing(shell) if shell.startswith("/") and found == errno.ENOENT else None
    raise ShellError(found, f"posix_spawn '{shell}'", getattr(denied, "suggestion", None))


# --- running --------------------------------------------------------------------------------------------------------


class Stream:
    """What came through one pipe."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.total = 0
        self._kept = bytearray()

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
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
        """At most `limit` bytes of text, with a marker when there was more. Bad UTF-8 becomes U+FFFD."""
        text = self._kept.decode("utf-8", "replace")
        raw = text.encode()
        if self.total <= len(self._kept) and len(raw) <= limit:
            return text
        shown = raw[: min(limit, STREAM_BYTES)].decode("utf-8", "ignore")
        return f"{shown}\n[{self.name} was cut: {self.total} bytes in all]\n"


class Ended:
    """How a shell ended."""

    def __init__(self, status: int, timed_out: bool, seconds: float, streams: list[Stream]) -> None:
        self.status = status
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
        """Start it, read its pipes to their end, stop it when its time is over. Raises ShellError, Cancelled."""
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
        try:
            for stream in streams:
                posix.set_blocking(stream.fd, False)
            timed_out = self._wait(pid, streams, began)
        finally:
            kill_group(pid)  # what it left in the background; the shell itself is over, or is to be
            _, status = posix.waitpid(pid, 0)
            posix.close(out_read)
            posix.close(err_read)
        return Ended(status, timed_out, monotonic() - began, streams)

    def _spawn(self, out_write: int, err_write: int) -> int:
        argv = self._argv
        program = self._program
        if self._cwd != posix.getcwd():
            # posix_spawn cannot change the folder, and this process has other threads; a shell in between can.
            # What `cd` adds to the environment is not what the caller gave.
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

    def _wait(self, pid: int, streams: list[Stream], began: float) -> bool:
        """Until the shell has exited and its pipes are closed, or it had to be killed; whether its time was over."""
        exited_fd = posix.pidfd_open(pid)
        poll = select.poll()
        open_streams = {stream.fd: stream for stream in streams}
        for fd in (*open_streams, exited_fd):
            poll.register(fd, select.POLLIN)
        deadline = self._deadline(began)
        kill_at: float | None = None
        exited = False
        try:
            while open_streams or not exited:
                now = monotonic()
                if kill_at is not None and now >= kill_at:
                    kill_group(pid)
                    self._last_read(poll, open_streams, exited_fd)
                    return True
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
            return kill_at is not None
        finally:
            posix.close(exited_fd)

    def _deadline(self, began: float) -> float | None:
        """When to stop the shell: its own time, or just before the host ends the jail with everything in it."""
        milliseconds = self._timeout_ms if self._timeout_ms > 0 else None
        remaining = self._ctx.remaining_ms
        if remaining is not None and remaining > SHORT_DEADLINE_MS:
            limit = float(remaining - DEADLINE_MARGIN_MS)
            milliseconds = limit if milliseconds is None else min(milliseconds, limit)
        return None if milliseconds is None else began + milliseconds / 1000

    @staticmethod
    def _last_read(poll: select.poll, open_streams: dict[int, Stream], exited_fd: int) -> None:
        """After SIGKILL: what is still in the pipes."""
        end = monotonic() + LAST_READ_S
        while open_streams and (left := end - monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == exited_fd:
                    poll.unregister(fd)
                elif fd in open_streams and not open_streams[fd].read():
                    poll.unregister(fd)
                    del open_streams[fd]


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the shell and what shares its process group."""
    try:  # noqa: SIM105 # contextlib is not imported here
        posix.killpg(pid, number)
    except OSError:
        pass  # nobody there


def kill_group(pid: int) -> None:
    """SIGKILL to the group, and to the shell should it have left it; not reaped yet, its number is nobody else's."""
    signal_group(pid, SIGKILL)
    posix.kill(pid, SIGKILL)


# --- results --------------------------------------------------------------------------------------------------------


def report(ctx: ToolContext, first: dict[str, Any], ended: Ended) -> dict[str, Any]:
    """The result of a call (BASH-02, BASH-08). Streams are cut further when both do not fit the call's output."""
    texts = [*(value for value in first.values() if isinstance(value, str)), *first.get("args", [])]
    room = ctx.output_limit - FIELDS_BYTES - sum(len(encode(text)) + 8 for text in texts)
    half = max(0, room // 2)
    stderr = ended.stderr.text(max(half, room - min(ended.stdout.total * 3, room)))
    stdout = ended.stdout.text(max(half, room - len(stderr.encode())))
    code = posix.waitstatus_to_exitcode(ended.status)
    return {
        **first,
        "durationMs": ended.duration_ms,
        "stdout": stdout,
        "stderr": stderr,
        "exitCode": code if code >= 0 else -1,
        "signal": None if code >= 0 else signal_name(-code),
        "timedOut": ended.timed_out,
    }


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals have only their number."""
    return f"SIG{SIGNALS[number - 1]}" if number <= len(SIGNALS) else f"SIG{number}"
