"""Starting the programs of the kernel, and seeing every one of them end.

- A program is started by exec, with an explicit argument list, a chosen environment, /dev/null as input, its log as
  output, a session of its own (so that its group can be killed without a race) and no descriptors but those named.
  Tokens and plans pass by descriptor. Call it from the main thread: a parent-death signal is sent when the thread
  that started the child ends.
- A program says itself, on its ready descriptor, that it is ready (one newline) or why it never will be (one line of
  JSON, {"error": {…}}).
- `Reaper` is the only place that waits for processes: by pidfd for those we know, and by looking at our children for
  those we do not (orphans come to a subreaper). Unknown zombies are collected, unknown living ones are killed.

Source: delivery.md section 8; design section 2.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from schemas.errors import error_payload
from schemas.frames import ErrorPayload

#: What a child of ours may inherit from our environment, besides LC_*. PYTHON* is not among it: a child runs what is
#: installed here. No name of it holds a secret; secrets pass by descriptor.
ENVIRONMENT: Final = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "GOONDAN_STATE_ROOT")
)
#: What agents need besides: their models' servers may be behind a proxy or a company's certificate.
AGENT_ENVIRONMENT: Final = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
    for name in (upper, upper.lower())
)
#: A log that is larger at the start of its program, or grows larger, moves to `<name>.1` (bytes).
MAX_LOG_BYTES: Final = 8 << 20
#: An unknown living child gets this long to turn out to be an agent whose pid has not been told yet (seconds).
STRAY_GRACE_S: Final = 2.0
#: How long an unknown zombie is kept for the same reason: a reaped pid may be given to another process (seconds).
ZOMBIE_GRACE_S: Final = 1.0
#: How soon after a death the children are looked at (seconds); several deaths share one look.
SWEEP_DELAY_S: Final = 0.05
#: What a program may say about its failed start (bytes).
_MAX_REPORT: Final = 65536

START: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


def environment(source: Mapping[str, str], extra: Iterable[str] = ()) -> dict[str, str]:
    """The part of `source` that a child gets; `extra` are further names."""
    names = ENVIRONMENT.union(extra)
    return {name: value for name, value in source.items() if name in names or name.startswith("LC_")}


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The argument list that runs a module of this installation with this interpreter."""
    return [sys.executable, "-P", START, module, *arguments]


def start_program(
    argv: list[str], *, env: Mapping[str, str], output_fd: int | None, pass_fds: Iterable[int] = ()
) -> int:
    """Start a program in a session of its own; its pid.

    Output and errors go to `output_fd` (None: to ours). `pass_fds` keep their numbers; every other descriptor of
    ours is expected to be close-on-exec, which is Python's and libzmq's way. Raises OSError when it cannot be started.
    """
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if output_fd is not None:
        actions += [(os.POSIX_SPAWN_DUP2, output_fd, 1), (os.POSIX_SPAWN_DUP2, output_fd, 2)]
    passed = list(pass_fds)
    before = [os.get_inheritable(fd) for fd in passed]
    try:
        for fd in passed:
            os.set_inheritable(fd, True)
        return os.posix_spawn(
            argv[0],
            argv,
            dict(env),
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    finally:
        for fd, inheritable in zip(passed, before, strict=True):
            os.set_inheritable(fd, inheritable)


def memory_file(name: str, data: bytes) -> int:
    """A descriptor from which `data` can be read to its end: how plans and secrets reach a child."""
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as out:
        out.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def open_log(path: str) -> int:
    """A log file to append to, closed to others; what is too large already moves to `<path>.1`."""
    rotate_log(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def rotate_log(path: str) -> None:
    """Move a log that no process writes to out of the way when it is too large."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_size > MAX_LOG_BYTES:
            os.replace(path, path + ".1")


def bound_log(path: str) -> None:
    """Bound a log that is being written: its content so far becomes `<path>.1`, and it starts again from nothing.

    The writers append, so they go on at the new end. Lines written between the copy and the cut are lost.
    """
    with suppress(OSError):
        if os.stat(path).st_size > MAX_LOG_BYTES:
            with open(path, "r+b") as log, open(path + ".1", "wb") as old:
                while chunk := log.read(1 << 20):
                    old.write(chunk)
                os.chmod(old.fileno(), 0o600)
                log.truncate(0)


def close_unknown_descriptors(keep: Iterable[int]) -> None:
    """Close what was inherited by accident: a shell's pipe held open by a daemon makes the shell wait for ever."""
    wanted = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with suppress(OSError):
                os.close(int(name))


# --- readiness ------------------------------------------------------------------------------------------------------


class _Report(msgspec.Struct):
    error: ErrorPayload


class Readiness:
    """The reading end of a ready descriptor.

    `on_ready` is called once for the newline. What else comes before the end is kept: `report` is the error that the
    program gave as its reason, when it did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ready: Callable[[], None]) -> None:
        self._loop = loop
        self._on_ready = on_ready
        self._data = b""
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        loop.add_reader(self.read_fd, self._read)

    def handed_over(self) -> None:
        """The child has its copy of `write_fd`: close ours, so that its death is seen as the end."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def _read(self) -> None:
        try:
            chunk = os.read(self.read_fd, 4096)
        except BlockingIOError:
            return
        self._data += chunk
        if self._data[:1] == b"\n":
            self.close()
            self._on_ready()
        elif not chunk or len(self._data) > _MAX_REPORT:
            self.close()

    @property
    def report(self) -> ErrorPayload | None:
        """Why the program will never be ready, in its own words."""
        while self.read_fd >= 0:
            self._read()
            if not self._data:
                break
        return parse_report(self._data)

    def close(self) -> None:
        """Stop listening."""
        self.handed_over()
        if self.read_fd >= 0:
            self._loop.remove_reader(self.read_fd)
            os.close(self.read_fd)
            self.read_fd = -1


def parse_report(data: bytes) -> ErrorPayload | None:
    """The error of a `{"error": {…}}` line; None for anything else."""
    try:
        return msgspec.json.decode(data, type=_Report).error
    except msgspec.DecodeError:
        return None


def start_failure(role: str, cause: str, log_path: str) -> ErrorPayload:
    """The error for a program that ended before it was ready and did not say why."""
    tail = last_line(log_path)
    return error_payload(
        "E_INTERNAL", f"{role} could not be started: {cause}" + (f"; its log ends: {tail}" if tail else "")
    )


def last_line(path: str) -> str:
    """The last line of a log that is not empty, cut to 300 characters; empty without one."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


# --- ends -----------------------------------------------------------------------------------------------------------


class Exit(msgspec.Struct, frozen=True):
    """How a process ended. `cause`: for a person, such as `exit 1` or `signal SIGKILL`."""

    cause: str
    clean: bool


UNKNOWN_EXIT: Final = Exit("unknown exit", False)


def describe_exit(result: os.waitid_result | None) -> Exit:
    """What waitid saw."""
    if result is None:
        return UNKNOWN_EXIT
    if result.si_code == os.CLD_EXITED:
        return Exit(f"exit {result.si_status}", result.si_status == 0)
    try:
        name = signal.Signals(result.si_status).name
    except ValueError:
        name = str(result.si_status)  # a real-time signal
    return Exit(f"signal {name}" + (" (core dumped)" if result.si_code == os.CLD_DUMPED else ""), False)


class Child:
    """A process that we know, held by its pidfd: signals never reach another process that got its pid later."""

    def __init__(self, pid: int, pidfd: int, *, leads_group: bool) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._leads_group = leads_group

    @property
    def alive(self) -> bool:
        """Whether its end has not been observed yet."""
        return self._pidfd >= 0

    def terminate(self) -> None:
        """Ask it to leave."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with its whole process group if it leads one."""
        if self._pidfd >= 0 and self._leads_group:
            # Not reaped yet (only the reaper does that, and it forgets the pidfd then), so the group's number is ours.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> int:
        """Give the pidfd up: the process is gone, or left to others."""
        fd, self._pidfd = self._pidfd, -1
        return fd


class Reaper:
    """Waits for all children of this process, the ones that were started and the ones that were adopted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[int, Child] = {}
        self._strays: dict[int, float] = {}  # unknown children, and when they were first seen
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at the children whenever one of them ends."""
        self._loop.add_signal_handler(signal.SIGCHLD, self.sweep_soon)

    def stop(self) -> None:
        """Stop looking."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def watch(self, pid: int, on_exit: Callable[[Exit], None], *, leads_group: bool) -> Child | None:
        """Hold a child and report its end once; None when there is no such child (any more).

        `leads_group` says that it leads a process group of its own, which dies with it.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            # Our child for sure? A number from outside may be old, and its process another one by now.
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            os.close(pidfd)
            return None
        child = Child(pid, pidfd, leads_group=leads_group)
        self._known[pid] = child
        self._strays.pop(pid, None)
        self._loop.add_reader(pidfd, self._ended, child, pidfd, on_exit)
        return child

    def _ended(self, child: Child, pidfd: int, on_exit: Callable[[Exit], None]) -> None:
        try:
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            seen = UNKNOWN_EXIT
        else:
            if result is None:
                return  # not yet: the descriptor is readable a moment before
            seen = describe_exit(result)
        self._loop.remove_reader(pidfd)
        child.forget()
        os.close(pidfd)
        del self._known[child.pid]
        on_exit(seen)

    def sweep_soon(self) -> None:
        """Look for unknown children shortly."""
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_DELAY_S, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweeper = None
        if self.sweep(self._loop.time()):
            self._sweeper = self._loop.call_later(ZOMBIE_GRACE_S, self._sweep_now)

    def sweep(self, now: float, *, patience: float = 1.0) -> int:
        """Collect unknown zombies and kill unknown living children; how many are left.

        `patience` scales the time they get to turn out to be known; 0 at the very end, when nobody is expected.
        """
        unknown = children_of_this_process() - self._known.keys()
        self._strays = {pid: self._strays.get(pid, now) for pid in unknown}
        for pid, first_seen in list(self._strays.items()):
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                if ended and now - first_seen >= ZOMBIE_GRACE_S * patience:
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
                    del self._strays[pid]
                elif not ended and now - first_seen >= STRAY_GRACE_S * patience:
                    os.kill(pid, signal.SIGKILL)  # our child and not waited for, so the number is still its own
            except (ChildProcessError, ProcessLookupError):
                self._strays.pop(pid, None)
        return len(self._strays)


def children_of_this_process() -> set[int]:
    """Living and dead children that have not been waited for.

    Where the kernel does not list them (CONFIG_PROC_CHILDREN), only one of the dead: enough to collect them in turn.
    """
    found: set[int] = set()
    with suppress(ChildProcessError):
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if dead is not None:
            found.add(dead.si_pid)
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as listing:
            found.update(int(pid) for pid in listing.read().split())
    return found
