"""The Python worker: the program in a jail. It speaks schemas/WORKER.md on descriptor 3 and runs a tool's handlers.

Rules.
- It imports next to nothing, so that a cold jail starts in milliseconds. asyncio is imported for the first coroutine.
- One thread at a time holds the reading role. It runs a call's handler itself, so a quick call costs no thread switch;
  and while that handler waits for an answer, it reads. A watcher takes the role from a reader whose handler takes
  longer than TAKEOVER_S while there is something to do, so a slow handler holds up nothing else. A call of an export
  that is known to be slow goes to another thread at once.
- While more calls wait, results of quick handlers are collected and written together.
- When the last running call ends, every process that it left behind is killed before its result is sent.
- Nothing here is a wall: tool code runs in this process and can change all of it. The walls are around the jail. The
  host believes no frame from here.

Source: docs/design/sandbox.md section 5; requirements HANDLER-01 to HANDLER-07, CONTEXT-*.
"""

from __future__ import annotations

import errno
import posix
import sys
from _thread import allocate_lock, get_ident, stack_size
from select import POLLIN, poll  # before a tool, which may have a module of that name
from time import monotonic

from . import running, wire
from .api import Pending, ToolContext
from .wire import FD, READ_BYTES, Frames, framed

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from _thread import LockType
    from collections import deque
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .running import AskTools
    from .runtime import AsyncCalls, Questions
else:
    from _collections import deque  # without the package around it, which takes 4 ms

PROTOCOL = 1
#: A handler that runs longer than this on the reader loses the reading role to the watcher (seconds), when the host has
#: sent something or results wait; the watcher looks so often. One that is no script loses it anyway after KEEP_S.
TAKEOVER_S, KEEP_S = 0.005, 0.1
#: The watcher looks so often while no handler runs on the reader (seconds), and sleeps for good after so many looks
#: without a call. So a handler that was quick before and is slow now keeps the role for LOOK_S + TAKEOVER_S at most.
LOOK_S, LOOKS = 0.025, 4
#: Exports that take longer than this run on a thread of their own from the start (seconds).
SLOW_S = 0.001
#: Results wait to be written together only while the next handler is known to be quicker than this (seconds).
QUICK_S = 0.0001
#: Quick results are written together, so many at a time, and at this size at the latest (bytes).
BURST = 8
FLUSH_BYTES = 65536
#: Slow handlers, pieces of pending work, and both together that run at a time, each on a thread. Others wait. The
#: default limit of 64 processes counts threads, and a few more read, watch and run the event loop.
MAX_SLOW, MAX_PENDING, MAX_TOGETHER = 32, 40, 52
#: A thread's stack (bytes). What it may come to counts as memory: 64 of the usual 8 MiB are all of the default limit.
STACK_BYTES = 2 << 20
#: Messages kept for later calls, oldest out first; the host counts along (WORKER.md).
MAX_MESSAGES = 8
#: Log lines at once and per second; what is over is dropped and counted.
LOG_BURST = 1000
LOG_PER_S = 200


class Worker:
    """The state of this process. `_lock` guards the reading role, `running`, and the budget of log lines."""

    def __init__(self) -> None:
        #: The tool's functions by the names of their exports.
        self.handlers: dict[str, Callable[[ToolContext, Any], Any]] = {}
        #: The `message` frames of assistant messages by their ids, for later calls. Most handlers look at none.
        self.messages: dict[str, bytes] = {}
        #: The longest output as it travels (bytes).
        self.output_limit = 1 << 20
        #: The tool was granted no network.
        self.offline = False
        #: What the tool may do beside its work: `agents`, `tools`.
        self.permissions: list[str] = []
        #: The calls that run, by their ids.
        self.running: dict[str, running.Running] = {}
        #: This process is a copy that a handler has forked.
        self.forked = False
        self._lock = allocate_lock()
        #: Which call a thread works for, so that what is printed finds its call.
        self._current: dict[int, str] = {}
        self._send_lock = allocate_lock()
        self._inbox: deque[bytes] = deque()
        self._frames = Frames()
        #: Waits until there is something to read.
        self._poll: Callable[..., object] | None = None
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        #: How long an export takes (seconds).
        self._seconds: dict[str, float] = {}
        #: The thread with the reading role (get_ident).
        self._reader = 0
        #: Whether the handler that runs on the reader waits for an answer.
        self._asks = False
        #: Since when the reader runs a handler (time.monotonic); 0: it runs none.
        self._inline_since = 0.0
        #: Whether the watcher sleeps for good. It wakes up when `_doze` is released.
        self._dozing = False
        self._doze = allocate_lock()
        self._doze.acquire()
        self._threads = running.Threads(MAX_TOGETHER)
        self._pending = running.Lane(self._threads, MAX_PENDING)
        self._slow = running.Lane(self._threads, MAX_SLOW)
        self._async: AsyncCalls | None = None
        self._questions: Questions | None = None
        self._orphans = running.Orphans()
        self._log_tokens = float(LOG_BURST)
        self._log_at = 0.0
        self._log_dropped = 0

    # --- threads and the reading role

    def main(self) -> None:
        """Serve until the host closes the channel. Never returns."""
        stack_size(STACK_BYTES)
        self._reader = get_ident()
        posix.register_at_fork(after_in_child=self._after_fork)
        self._read_loop()
        self._threads.serve(running.Slot())

    def _after_fork(self) -> None:
        """A forked copy of this process must never speak for it."""
        self.forked = True
        self._orphans.enabled = False  # a copy that swept would kill the worker
        self._lock = allocate_lock()  # another thread may have held them
        self._send_lock = allocate_lock()
        try:  # noqa: SIM105 # contextlib is not imported here
            posix.close(FD)
        except OSError:
            pass  # the handler had closed it

    def _read_loop(self) -> None:
        """Read and serve for as long as this thread holds the role."""
        inbox, me = self._inbox, get_ident()
        while self._reader == me:
            if inbox:
                self._handle(inbox.popleft())
                continue
            if self._outbox:
                self._flush()
            self._receive()

    def _receive(self) -> None:
        """One read; complete frames go to the inbox."""
        if self.forked:
            leave()
        if self._poll is None and (self._seconds or self._asks):  # a cold jail makes none before its first result
            self._poll = input_poll()
        if self._poll is not None:
            self._poll()  # not below: what a handler's signal handler raises here may be an OSError
        try:
            data = posix.read(FD, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            leave()
        try:
            self._inbox.extend(self._frames.feed(data))
        except ValueError as error:
            leave(str(error))

    def wait(self, done: LockType) -> None:
        """Wait until somebody releases `done`. A handler that runs on the reader reads meanwhile."""
        with self._lock:
            reads = self._reader == get_ident()
            if reads:
                self._inline_since = 0.0
        if not reads:
            done.acquire()
            return
        self._asks = True
        try:
            while not done.acquire(False):
                if self._inbox:
                    self._handle(self._inbox.popleft())
                    continue
                if self._outbox:
                    self._flush()
                self._receive()
        finally:
            self._asks = False
            self._inline_since = monotonic()
        if self._dozing:
            self._wake_watcher()

    def _watch(self, slot: running.Slot) -> None:
        """Take the role over from a reader that is busy with a handler; then somebody else watches."""
        quiet = 0
        while True:
            since = self._inline_since
            if since:
                quiet = 0
                woken = self._doze.acquire(True, TAKEOVER_S)
            elif quiet < LOOKS:
                quiet += 1
                woken = self._doze.acquire(True, LOOK_S)
            else:
                self._dozing = True
                if not self._inline_since:  # else a call began meanwhile and may not have seen it
                    self._doze.acquire()
                self._dozing = False
                quiet = 0
                continue
            if woken or not since:
                continue
            keeps = "tools" in self.permissions or monotonic() - since < KEEP_S
            if keeps and not (self._inbox or self._outbox or input_poll()(0)):
                continue
            with self._lock:
                if self._inline_since != since:
                    continue
                self._reader = get_ident()
                self._inline_since = 0.0
            self._threads.run(self._watch)
            self._read_loop()
            return

    def _wake_watcher(self) -> None:
        self._dozing = False
        try:  # noqa: SIM105
            self._doze.release()
        except RuntimeError:
            pass  # it was awake already

    # --- sending

    def send(self, body: bytes) -> None:
        """Write one frame now. Silent in a forked child."""
        self._write(framed(body))

    def send_all(self, bodies: list[bytes]) -> None:
        """Write several frames at once. Silent in a forked child."""
        self._write(b"".join(map(framed, bodies)))

    def _write(self, data: bytes) -> None:
        if self.forked:
            return
        with self._send_lock:
            try:
                sent = posix.write(FD, data)
                if sent < len(data):
                    rest = memoryview(data)[sent:]
                    while rest:
                        rest = rest[posix.write(FD, rest) :]
            except OSError:
                leave()  # the host is gone, or the handler closed the channel

    def _flush(self) -> None:
        data = b"".join(self._outbox)
        self._outbox.clear()
        self._outbox_bytes = 0
        self._write(data)

    # --- frames from the host

    def _handle(self, data: bytes) -> None:
        try:
            if data.startswith(_MESSAGE):
                self._remember(wire.value_at(data, len(_MESSAGE)), data)
                return
            if data.startswith(_CALL, 1) and len(data) <= READ_BYTES:  # a large one would stay beside its arguments
                first, at = wire.opened(data, len(_CALL) + 1, len(_OPENED))
                if first.keys() == _OPENED:
                    unread = data, at, data[0] - 0x81 - len(_OPENED)
                    self._start(running.Running(self, first, monotonic(), unread))
                    return
            frame = wire.unpack(data)
            kind = frame["type"]
            if kind == "call":
                self._start(running.Running(self, frame, monotonic()))
            elif kind == "message":
                self._remember(frame["messageId"], data)
            elif kind == "cancel":
                self._cancel(frame["callId"])
            elif kind == "answer" and self._questions is not None:
                self._questions.answered(frame)
            elif kind == "init":
                self._load(frame)
            elif kind == "exit":
                self._flush()
                leave()
        except (ValueError, KeyError, TypeError) as error:
            leave(f"bad frame from the host: {type(error).__name__}: {error}")

    def _remember(self, message_id: str, data: bytes) -> None:
        self.messages[message_id] = data
        if len(self.messages) > MAX_MESSAGES:
            del self.messages[next(iter(self.messages))]

    def message_of(self, call: running.Running) -> Any:
        """The assistant message that made the call, a new copy of it; None when there is none."""
        data = self.messages.get(call.frame.get("messageId", ""))
        return None if data is None else wire.unpack(data)["message"]

    def _cancel(self, call_id: str) -> None:
        call = self.running.get(call_id)
        if call is not None:
            call.cancelled = True
            if call.task is not None and self._async is not None:
                self._async.cancel(call)

    def asking(self, call: running.Running) -> Callable[[str, dict[str, Any]], Any] | None:
        """How the call asks the bus for an operation with its fields; None when its tool has no permission to."""
        if "agents" not in self.permissions:
            return None
        return lambda op, fields: self._asked().ask(call, op, fields)

    def calling(self, call: running.Running) -> AskTools | None:
        """How the call has its agent call tools, and how it waits for one; None when its tool has no permission to."""
        if "tools" not in self.permissions:
            return None
        send = self._asked().send
        return (lambda asked: send(call, asked)), self.wait

    def _asked(self) -> Questions:
        """What handlers ask through `ctx.runtime`; made when the first one does."""
        with self._lock:
            if self._questions is None:
                from .runtime import Questions

                self._questions = Questions(self)
        return self._questions

    def _load(self, init: dict[str, Any]) -> None:
        if init["protocol"] != PROTOCOL:
            self.send(wire.pack({"type": "load_failed", "message": f"this worker speaks protocol {PROTOCOL}"}))
            leave()
        self.output_limit = init.get("outputLimit", self.output_limit)
        self.offline = init.get("offline", False)
        self.permissions = init.get("permissions", [])
        for name, value in init.get("env", {}).items():
            posix.environ[name.encode()] = value.encode()
            posix.putenv(name.encode(), value.encode())
        sys.path[:0] = init.get("importPaths", [])
        try:
            # A folder that shows for nothing but the entry may be the workdir: what is compiled there is not ours.
            folder = init["entry"].rpartition("/")[0]
            self.handlers = load_handlers(init["entry"], compiled=folder in init.get("importPaths", ()))
        except BaseException as error:  # sys.exit at import included
            message = f"{type(error).__name__}: {running.describe(error)}{running.where(error)}"
            self.send(wire.pack({"type": "load_failed", "message": message[: running.MAX_ERROR]}))
            leave()
        if init.get("jailed"):
            self._orphans.enable()
        self.send(wire.pack({"type": "ready", "protocol": PROTOCOL, "exports": list(self.handlers)}))
        self._threads.run(self._watch)

    # --- calls

    def _start(self, call: running.Running) -> None:
        """Begin a call: here on the reader if its export is quick or unknown, else on another thread."""
        with self._lock:
            self.running[call.id] = call
        seconds = self._seconds.get(call.export)
        if (seconds is not None and seconds > SLOW_S) or self._asks:
            try:
                self._slow.submit(lambda: self._send_result(self._run(call)))
            except RuntimeError as error:  # no thread could be started; it is no failure of a handler that waits
                self._send_result(self._finish(call, self._failure(call.id, error)))
            return
        outbox = self._outbox
        if outbox and (
            seconds is None or seconds > QUICK_S or len(outbox) >= BURST or self._outbox_bytes > FLUSH_BYTES
        ):
            self._flush()
        self._inline_since = call.started
        if self._dozing or seconds is None:
            self._wake_watcher()
        result = self._run(call)
        with self._lock:
            still_reader = self._reader == get_ident()
            if still_reader:
                self._inline_since = 0.0
        if not still_reader:
            self._send_result(result)
        elif result is not None:
            self._outbox.append(framed(result))
            self._outbox_bytes += len(result)

    def _send_result(self, result: bytes | None) -> None:
        if result is not None:
            self.send(result)

    def _run(self, call: running.Running) -> bytes | None:
        """Run a handler to its result frame; None when its result comes later."""
        export = call.export
        try:
            handler = self.handlers[export]
        except KeyError:
            names = ", ".join(sorted(self.handlers)) or "none"
            message = f"the tool has no handler {export!r}; it has: {names}"
            return self._finish(call, running.error_frame(call.id, "LookupError", message, code="E_TOOL_NOT_FOUND"))
        began = monotonic()
        body = self._answer(call, lambda: handler(ToolContext(call), call.given))
        if body is not None:
            seconds = monotonic() - began
            known = self._seconds.get(export)
            # Down at once, up slowly: one hiccup (or waiting for the interpreter lock) makes no export slow.
            self._seconds[export] = seconds if known is None or seconds < known else known + (seconds - known) * 0.1
        return self._finish(call, body)

    def conclude(self, call: running.Running, produce: Callable[[], Any], *, awaits: bool = True) -> None:
        """Run a later part of a call, and send the result that it comes to; see `_answer`."""
        self._send_result(self._finish(call, self._answer(call, produce, awaits=awaits)))

    def _answer(self, call: running.Running, produce: Callable[[], Any], *, awaits: bool = True) -> bytes | None:
        """Run a handler, or a part of it, to the call's result frame; None when what it returned goes on elsewhere.

        `awaits`: something to await is run by the event loop; else it is no result.
        """
        ident = get_ident()
        self._current[ident] = call.id
        try:
            value = produce()
            if type(value) is not dict:
                if awaits and hasattr(type(value), "__await__"):
                    self._to_loop(call, value)
                    return None
                if isinstance(value, Pending) and value.work is not None and not call.pending:
                    self._go_on(call, value)
                    return None
            body = self._result_frame(call, value)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: a handler cannot end the worker
            body = self._failure(call.id, error)
        finally:
            self._current.pop(ident, None)
        return body

    def _to_loop(self, call: running.Running, awaitable: Any) -> None:
        """Let the event loop run it to the call's result."""
        with self._lock:
            if self._async is None:
                from .runtime import AsyncCalls

                self._async = AsyncCalls(self)
        self._async.submit(call, awaitable)

    def _go_on(self, call: running.Running, pending: Pending) -> None:
        """Send the `pending` result of a call, and begin its work."""
        call.pending = True
        frame = {"type": "result", "callId": call.id, "status": "pending", "handle": pending.handle, "continues": True}
        self.send(wire.pack(frame))
        if hasattr(type(pending.work), "__await__"):
            self._to_loop(call, pending.work)
        else:
            self._pending.submit(lambda: self.conclude(call, pending.work))

    def _result_frame(self, call: running.Running, value: Any) -> bytes:
        """The result frame of what a handler, or its pending work, returned."""
        call_id = call.id
        if isinstance(value, Pending):
            if call.pending:
                message = "pending work returned a Pending; it may only return its final value"
                return running.error_frame(call_id, "TypeError", message, code="E_TOOL_BAD_OUTPUT")
            return wire.pack({"type": "result", "callId": call_id, "status": "pending", "handle": value.handle})
        try:
            output = wire.pack(value)
        except wire.BadValue as error:
            return running.error_frame(call_id, "TypeError", str(error), code="E_TOOL_BAD_OUTPUT")
        if len(output) > self.output_limit:
            message = f"the output has {len(output)} bytes, limit {self.output_limit} (outputMb)"
            return running.error_frame(call_id, "OutputTooLarge", message, code="E_TOOL_LIMIT")
        handler_ms = wire.pack_double(0xCB, (monotonic() - call.started) * 1000)
        return _RESULT + wire.pack_str(call_id) + _HANDLER + handler_ms + _OK + output

    def _failure(self, call_id: str, error: BaseException) -> bytes:
        """The result frame of an exception; where it came from goes to the log."""
        self.log("debug", f"{type(error).__name__}{running.where(error)}", call_id)
        code = getattr(error, "code", None)
        if self.offline and isinstance(error, Exception) and running.is_offline(error):
            code = "ENETUNREACH"  # the host knows why
        elif not isinstance(code, str) and isinstance(error, OSError) and error.errno is not None:
            code = errno.errorcode.get(error.errno)
        if isinstance(error, SystemExit):
            code = "E_TOOL"
        return running.error_frame(
            call_id,
            type(error).__name__,
            running.describe(error),
            code=code,
            suggestion=getattr(error, "suggestion", None),
            help_url=getattr(error, "help_url", None),
        )

    def _finish(self, call: running.Running, body: bytes | None) -> bytes | None:
        """A call with a result has ended: clean up what it left, then its result may go."""
        if body is None:
            return None
        with self._lock:
            if self._orphans.enabled and len(self.running) == 1:
                try:  # noqa: SIM105 # contextlib is not imported here
                    self._orphans.sweep(call)
                except OSError:
                    pass  # no descriptor is left: the next call looks again
            self.running.pop(call.id, None)
        return body

    # --- log

    def log(self, level: str, text: str, call_id: str | None = None) -> None:
        """Send a log line, within the budget."""
        now = monotonic()
        with self._lock:
            self._log_tokens = min(float(LOG_BURST), self._log_tokens + (now - self._log_at) * LOG_PER_S)
            self._log_at = now
            if self._log_tokens < 1:
                self._log_dropped += 1
                return
            self._log_tokens -= 1
            dropped, self._log_dropped = self._log_dropped, 0
        if dropped:
            self.send(wire.pack({"type": "log", "level": "warn", "message": f"{dropped} log lines were dropped"}))
        frame = {
            "type": "log",
            "level": level,
            "message": text if len(text) <= running.MAX_LINE else text[: running.MAX_LINE] + "…",
        }
        if call_id:
            frame["callId"] = call_id
        self.send(wire.pack(frame))

    def current_call(self) -> str | None:
        """The call that this thread, or this task, works for."""
        call_id = self._current.get(get_ident())
        if call_id is None and self._async is not None:
            return self._async.current()
        return call_id


#: How the host writes the type of a `call` frame, behind its first byte. The next fields have what every call needs.
_CALL = b"\xa4type\xa4call"
_OPENED = {"callId", "export", "input"}
#: How the host writes a `message` frame, up to the value of `messageId`.
_MESSAGE = b"\x83\xa4type\xa7message\xa9messageId"
# type, callId, handlerMs and status of an `ok` result, the way `wire.pack` would write them
_RESULT = b"\x85\xa4type\xa6result\xa6callId"
_HANDLER = b"\xa9handlerMs"
_OK = b"\xa6status\xa2ok\xa6output"


class NoHandlers(Exception):
    """A module that is no tool (HANDLER-03)."""


def load_handlers(entry: str, *, compiled: bool = True) -> dict[str, Callable[[ToolContext, Any], Any]]:
    """Run a tool's entry module and return its `handlers`. Raises what the module raises, or NoHandlers.

    `compiled`: its compiled form is taken if there is one. An entry that is no Python module is a program, which is not
    run yet. Raises NoProgram, OSError for one that cannot be run.
    """
    if not entry.endswith(".py"):
        from .executable import Executable

        return Executable(entry)
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    name = entry.rpartition("/")[2].partition(".")[0]
    name = name if name.isidentifier() and name not in sys.modules else "goondan_entry"
    loader = external.SourceFileLoader(name, entry)
    spec = external.spec_from_file_location(name, entry, loader=loader)
    if spec is None:
        raise NoHandlers(f"{entry} is no Python module")
    module = bootstrap.module_from_spec(spec)
    sys.modules[name] = module
    if compiled:
        loader.exec_module(module)
    else:
        exec(loader.source_to_code(loader.get_data(entry), entry), module.__dict__)  # noqa: S102 - as exec_module does
    handlers = getattr(module, "handlers", None)
    if not isinstance(handlers, dict) or not all(isinstance(k, str) and callable(v) for k, v in handlers.items()):
        raise NoHandlers(f"{entry} exposes no `handlers`, a dict from export names to functions")
    return handlers


def input_poll() -> Callable[..., object]:
    """A function that waits until the host has sent something, so many milliseconds at most.

    A read that blocks is woken once more for each result, when the host has read it: on a Unix socket whoever waits
    hears of room to write as well.
    """
    waiting = poll()
    waiting.register(FD, POLLIN)
    return waiting.poll


def leave(reason: str = "") -> NoReturn:
    """End this process; the jail ends with it."""
    atexit = sys.modules.get("atexit")
    try:
        if reason:
            posix.write(2, f"worker: {reason}\n".encode("utf-8", "replace"))
        elif atexit is not None:
            atexit._run_exitfuncs()
    finally:
        posix._exit(1 if reason else 0)


def main() -> None:
    """Entry point: see boot.py."""
    posix.set_inheritable(FD, False)
    worker = Worker()
    sys.stdout = running.Printed(worker, "info", 1)
    sys.stderr = running.Printed(worker, "warn", 2)
    worker.main()
