"""One call while a worker runs it: its thread, what it prints, how its failure is put into words, and the processes
that it left behind.

What a tool prints becomes log lines, each with its call.

A tool that was granted no network may make no sockets: the system says "Operation not permitted", and a library wraps
that once or twice. Such a failure is told from others by the exceptions behind it.

Noticing the processes that a call left behind costs one system call; they are killed. A handler's process groups and
sessions do not count here. What counts is the jail's process namespace: its init (1), the worker, and whatever tools
have started.

Source: requirements ERROR-01 to ERROR-09; schemas/WORKER.md; docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import errno
import posix
from _thread import allocate_lock, start_new_thread
from io import TextIOBase

from . import wire

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from _thread import LockType
    from collections import deque
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Protocol

    #: Some questions about tools: `tool` or `tools`, the value, and who gets the `answer` frame.
    Asked = list[tuple[str, Any, Callable[[dict[str, Any]], None]]]
    #: `ctx.tools`: asks them all and returns (Questions.send), and waits until a lock is released (Worker.wait).
    AskTools = tuple[Callable[[Asked], None], Callable[[LockType], None]]

    class Serving(Protocol):
        """The worker, as its parts know it: contexts, event loop, questions, printed lines."""

        forked: bool
        running: dict[str, Running]
        output_limit: int

        def message_of(self, call: Running) -> Any: ...
        def send(self, body: bytes) -> None: ...
        def send_all(self, bodies: list[bytes]) -> None: ...
        def wait(self, done: LockType) -> None: ...
        def log(self, level: str, text: str, call_id: str | None) -> None: ...
        def current_call(self) -> str | None: ...
        def asking(self, call: Running) -> Callable[[str, dict[str, Any]], Any] | None: ...
        def calling(self, call: Running) -> AskTools | None: ...
        def conclude(self, call: Running, produce: Callable[[], Any], *, awaits: bool) -> None: ...
else:
    from _collections import deque  # without the package around it, which takes 4 ms


#: One log line (characters).
MAX_LINE = 8192


class Running:
    """One call while it runs."""

    __slots__ = (
        "_frame", "_unread", "cancelled", "export", "given", "id", "message", "pending", "progress_at", "started",
        "task", "worker",
    )  # fmt: skip

    def __init__(
        self, worker: Serving, frame: dict[str, Any], now: float, unread: tuple[bytes, int, int] | None = None
    ) -> None:
        """`frame` is the `call` frame, without those fields that are `unread` (see wire.others). `now` is of
        time.monotonic.
        """
        self.worker = worker
        self._frame, self._unread = frame, unread
        self.id: str = frame["callId"]
        self.export: str = frame["export"]
        #: The arguments.
        self.given: Any = frame["input"]
        self.started = now
        #: The caller gave up.
        self.cancelled = False
        #: Its `pending` result is sent. The result of its work will follow.
        self.pending = False
        #: Its task in the event loop; None until it is there.
        self.task: Any = None
        #: The assistant message, copied for this call at the first look.
        self.message: dict[str, Any] | None = None
        #: When the last progress frame was sent (time.monotonic).
        self.progress_at = 0.0

    @property
    def frame(self) -> dict[str, Any]:
        """The whole frame. Most handlers need no more of it than their arguments."""
        unread = self._unread
        if unread is not None:
            self._frame |= wire.others(*unread)
            self._unread = None  # only now: another thread may ask meanwhile
        return self._frame


class Printed(TextIOBase):
    """sys.stdout and sys.stderr: each line becomes a log line of the call that printed it."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, worker: Serving, level: str, fd: int) -> None:
        self._worker = worker
        self._level = level
        self._fd = fd
        self._partial: dict[str | None, str] = {}
        self.buffer = self

    def write(self, text: str | bytes) -> int:
        """Take text; complete lines are sent."""
        shown = text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")
        if self._worker.forked:
            posix.write(self._fd, shown.encode("utf-8", "replace"))
            return len(text)
        call_id = self._worker.current_call()
        lines = (self._partial.pop(call_id, "") + shown).split("\n")
        rest = lines.pop()
        for line in lines:
            self._worker.log(self._level, line, call_id)
        if len(rest) > MAX_LINE:
            self._worker.log(self._level, rest, call_id)
        elif rest:
            self._partial[call_id] = rest
        return len(text)

    def flush(self) -> None:
        """Send what has no newline yet."""
        call_id = self._worker.current_call()
        rest = self._partial.pop(call_id, "")
        if rest:
            self._worker.log(self._level, rest, call_id)

    def fileno(self) -> int:
        """The descriptor behind it, for programs that a tool starts."""
        return self._fd

    def writable(self) -> bool:
        """Always."""
        return True


# --- threads ----------------------------------------------------------------------------------------------------------


class Slot:
    """One thread. It waits for its next job."""

    __slots__ = ("job", "wake")

    def __init__(self) -> None:
        self.wake = allocate_lock()
        self.wake.acquire()
        self.job: Callable[[Slot], None] | None = None


class Threads:
    """The slots of a worker. A thread that has done its job waits here for the next one."""

    def __init__(self, most: int) -> None:
        """`most` jobs run at a time in all lanes together."""
        self.most = most
        #: Guards this and the lanes.
        self.lock = allocate_lock()
        #: How many jobs run in lanes.
        self.busy = 0
        self._parked: list[Slot] = []

    def run(self, job: Callable[[Slot], None]) -> None:
        """Give a job to a waiting thread, or to a new one. Raises RuntimeError when no thread can be started."""
        with self.lock:
            slot = self._parked.pop() if self._parked else None
        if slot is None:
            slot = Slot()
            start_new_thread(self._work, (slot,))
        slot.job = job
        slot.wake.release()

    def serve(self, slot: Slot) -> None:
        """Make this thread one of them. Never returns."""
        with self.lock:
            self._parked.append(slot)
        self._work(slot)

    def _work(self, slot: Slot) -> None:
        while True:
            slot.wake.acquire()
            if slot.job is not None:
                slot.job(slot)
            with self.lock:
                self._parked.append(slot)


class Lane:
    """Jobs of which at most `most` run at a time. The others wait, first come, first served.

    A lane always has room for one job if all other lanes together may have fewer than `threads.most`.
    """

    def __init__(self, threads: Threads, most: int) -> None:
        self._threads = threads
        self._most = most
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job, now or when there is room for it. Raises RuntimeError when no thread can be started."""
        threads = self._threads
        with threads.lock:
            if self._running >= self._most or threads.busy >= threads.most:
                self._waiting.append(job)
                return
            self._count(1)
        try:
            threads.run(lambda slot: self._run(job))
        except BaseException:
            with threads.lock:
                self._count(-1)
            raise

    def _run(self, job: Callable[[], None]) -> None:
        while True:
            job()
            with self._threads.lock:
                if not self._waiting:
                    self._count(-1)
                    return
                job = self._waiting.popleft()

    def _count(self, more: int) -> None:
        self._running += more
        self._threads.busy += more


# --- failures ---------------------------------------------------------------------------------------------------------

#: An error's message (characters).
MAX_ERROR = 16384
#: Where the worker's own code stands. Whoever reads of a failure has no use for its lines.
_OURS = (__file__.rpartition("/")[0] + "/", "<frozen ")
#: Exceptions looked at behind the one that was raised; a chain can be a ring.
_DEPTH = 16
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ECONNREFUSED)


def error_frame(
    call_id: str,
    name: str,
    message: str,
    *,
    code: object = None,
    suggestion: object = None,
    help_url: object = None,
) -> bytes:
    """A result frame with status `error`; only strings are carried."""
    error = {"name": name, "message": message[:MAX_ERROR]}
    for key, value in (("code", code), ("suggestion", suggestion), ("helpUrl", help_url)):
        if isinstance(value, str) and value:
            error[key] = value[:MAX_ERROR]
    return wire.pack({"type": "result", "callId": call_id, "status": "error", "error": error})


def describe(error: BaseException) -> str:
    """An exception's message; its class when it has none."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def where(error: BaseException) -> str:
    """File and line of the innermost frame, without importing traceback. "" for one in the worker's own code."""
    trace = _innermost(error)
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return ""
    code = trace.tb_frame.f_code
    return f" at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def is_offline(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, comes from a missing network."""
    seen: BaseException | None = error
    for _ in range(_DEPTH):
        if seen is None:
            return False
        if isinstance(seen, OSError) and _of_network(seen):
            return True
        reason = getattr(seen, "reason", None)  # urllib.error.URLError
        following = seen.__cause__ or seen.__context__
        seen = reason if following is None and isinstance(reason, BaseException) else following
    return False


def _of_network(error: OSError) -> bool:
    if type(error).__name__ == "gaierror" or error.errno in _UNREACHABLE:
        return True
    return error.errno in (errno.EPERM, errno.EACCES) and error.filename is None and _raised_by_socket(error)


def _raised_by_socket(error: BaseException) -> bool:
    """Whether the standard library's socket module could not make a socket: EPERM alone can mean anything."""
    trace = _innermost(error)
    return trace is not None and trace.tb_frame.f_code.co_filename.endswith("/socket.py")


# --- processes that a call left behind --------------------------------------------------------------------------------

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

    def sweep(self, call: Running) -> None:
        """This call has ended and no other runs: kill every process but this one and init. One of an export with
        `background` spares them for good.
        """
        newest = self._newest_pid()
        if newest and newest == self._newest:
            return  # no process and no thread was started since
        keep = bool(call.frame.get("background"))
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
