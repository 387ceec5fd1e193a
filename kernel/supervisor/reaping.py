"""Observes how processes get ready and end.

A program says itself, on its ready descriptor, that it is ready (one newline) or why it never will be (one line of
JSON, {"error": {…}}).

Only `Reaper` waits for processes. It waits for known processes by their pidfds. It finds unknown ones among our
children, because orphans come to a subreaper. Unknown zombies are collected, and unknown living children are killed.

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire import errors
from goondan.schemas.wire.frames import ErrorPayload

#: What a program may say about its failed start (bytes).
MAX_REPORT: Final = 65536
#: How long an unknown child may live (seconds). It may be an agent whose pid has not been reported yet.
ORPHAN_GRACE_S: Final = 2.0
#: How long an unknown zombie is kept for the same reason: a reaped pid may be given to another process (seconds).
ZOMBIE_GRACE_S: Final = 1.0
#: How soon after a death the children are checked (seconds). Several deaths share one check.
SWEEP_DELAY_S: Final = 0.05


# --- readiness ------------------------------------------------------------------------------------------------------


class Readiness:
    """The reading end of a ready descriptor.

    `on_ready` is called once for the newline. Other lines before the end are kept: `report` is the error that the
    program gave as its reason, if it gave one.
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
        elif not chunk or len(self._data) > MAX_REPORT:
            self.close()

    @property
    def report(self) -> ErrorPayload | None:
        """The reason of the program why it will never be ready."""
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


class _Report(msgspec.Struct):
    #: Why the start failed.
    error: ErrorPayload


def parse_report(data: bytes) -> ErrorPayload | None:
    """The error of a `{"error": {…}}` line; None for anything else."""
    try:
        return msgspec.json.decode(data, type=_Report).error
    except msgspec.DecodeError:
        return None


def report_start_failure(fd: int | None, error: errors.GoondanError) -> None:
    """Say why a kernel does not start, with every problem of its bundle, on the ready descriptor, or to the person."""
    if fd is None:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        return
    report = {
        "error": error.info,
        "problems": getattr(error, "problems", []),
        "dropped": getattr(error, "dropped", 0),
    }
    with suppress(OSError), open(fd, "wb") as out:
        out.write(msgspec.json.encode(report) + b"\n")


def start_failure(role: str, cause: str, log_path: str) -> ErrorPayload:
    """The error for a program that ended before it was ready and did not say why."""
    tail = last_line(log_path)
    return errors.error_payload(
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

    #: For a person, such as `exit 1` or `signal SIGKILL`.
    cause: str
    #: Whether it ended as it should.
    clean: bool


UNKNOWN_EXIT: Final = Exit("unknown exit", False)


def describe_exit(result: os.waitid_result | None) -> Exit:
    """The exit in the result of waitid."""
    if result is None:
        return UNKNOWN_EXIT
    if result.si_code == os.CLD_EXITED:
        return Exit(f"exit {result.si_status}", result.si_status == 0)
    try:
        name = signal.Signals(result.si_status).name
    except ValueError:
        name = str(result.si_status)  # a real-time signal has no name
    return Exit(f"signal {name}" + (" (core dumped)" if result.si_code == os.CLD_DUMPED else ""), False)


class Child:
    """A known process, held by its pidfd. So signals never reach another process that got its pid later."""

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
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with its whole process group if it leads one."""
        if self._pidfd >= 0 and self._leads_group:
            # The process is not reaped yet, because the reaper then forgets the pidfd. So the number of the group is
            # its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if its end has not been observed yet."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> int:
        """Close the pidfd: the process is gone, or others wait for it."""
        fd, self._pidfd = self._pidfd, -1
        return fd


class Reaper:
    """Waits for all children of this process, the ones that were started, forked for us or adopted.

    `is_expected` says whether an unknown living child may live on: the fork server keeps an agent ready that was not
    requested yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_expected: Callable[[int], bool] = lambda pid: False) -> None:
        self._loop = loop
        self._is_expected = is_expected
        self._known: dict[int, Child] = {}
        self._orphans: dict[int, float] = {}  # unknown children, and when they were first seen
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check the children whenever one of them ends."""
        self._loop.add_signal_handler(signal.SIGCHLD, self.sweep_soon)

    def stop(self) -> None:
        """Stop looking."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def watch(self, pid: int, on_exit: Callable[[Exit], None], *, leads_group: bool) -> Child | None:
        """Hold a child, and report its end once. None when there is no such child, or no longer.

        `leads_group` says that it leads a process group of its own, which dies with it.
        """
        try:
            pidfd = os.pidfd_open(pid) if pid > 0 and pid not in self._known else -1
        except (OSError, OverflowError):
            return None
        if pidfd < 0:
            return None
        try:
            # Check that it is our child. A number from outside may be old, and may belong to another process now.
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            os.close(pidfd)
            return None
        child = Child(pid, pidfd, leads_group=leads_group)
        self._known[pid] = child
        self._orphans.pop(pid, None)
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
        """Collect unknown zombies, and kill unknown living children. Returns how many unknown children are left.

        `patience` scales the time in which a child may turn out to be known. It is 0 at the very end, when no child is
        expected any more.
        """
        unknown = children_of_this_process() - self._known.keys()
        self._orphans = {
            pid: self._orphans.get(pid, now) for pid in unknown if patience == 0.0 or not self._is_expected(pid)
        }
        for pid, first_seen in list(self._orphans.items()):
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                if ended and now - first_seen >= ZOMBIE_GRACE_S * patience:
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
                    del self._orphans[pid]
                elif not ended and now - first_seen >= ORPHAN_GRACE_S * patience:
                    os.kill(pid, signal.SIGKILL)  # our child and not waited for, so the number is still its own
            except (ChildProcessError, ProcessLookupError):
                self._orphans.pop(pid, None)
        return len(self._orphans)


def children_of_this_process() -> set[int]:
    """The living and dead children that nobody has waited for.

    If the Linux kernel does not list them (CONFIG_PROC_CHILDREN), it is only one dead child. That is enough to collect
    them one after the other.
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
