"""The tool host's process: the link, the host, the probe jail, signals, its log, its folder, and the end.

Several tool hosts can work for one kernel. The broker knows each by a name, and each has a folder of its own. So no
tool host takes the notes of a living one for those of a tool host that is gone. The lock ends with the process.

`pending.json` has the pending work that the tool host has promised. It is read once, when a tool host starts: all work
in it was lost with the tool host before. It is written again whenever work begins or ends. It survives the end of the
process, but not a loss of power. A file that cannot be read or written costs the promise, never a call.

Ready means: the broker has welcomed us, and a probe jail has run or cannot be made, now or when this machine was as
it is (remembered.py).

Each tool of an agent instance has a share of the log's room. Code in a jail writes log lines as fast as it likes.
Without shares one tool would push the lines of all others out of the log.

Source: docs/design/tools.md section 6; requirement RESULT-04; docs/decisions/043.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Self

import msgspec
from msgspec import Struct

from goondan.features import parts
from goondan.schemas.bundle import address, launch
from goondan.schemas.system import directories, startup
from goondan.schemas.system.log_lines import JsonLines
from goondan.schemas.traces.log_admission import Admission, suppressed_lines
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ORCHESTRATOR, PASSED_ON, Frame, Welcome
from goondan.schemas.worker.tool_host_reports import EXPOSURES, LOCK, TOOLHOSTS, LogLine, WorkerNews
from goondan.toolhost.calls.results import Promise
from goondan.toolhost.host import Host
from goondan.toolhost.jails.write_exposures import WriteExposures
from goondan.toolhost.lookup import folders, hiding
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.remembered import Memory
from goondan.toolhost.survey import ALONE, Survey, survey, why_calls_are_not_forked
from goondan.toolhost.watch.procfs import end_stranded

# --- the folder -------------------------------------------------------------------------------------------------------

#: How long the tool host before may take to end after its link did (seconds): its jails are killed first.
PATIENCE_S: Final = 2.0
_POLL_S: Final = 0.05
PROMISES: Final = "pending.json"
#: A larger file was not written by us (bytes).
_MAX_BYTES: Final = 4 << 20


class StateFolder:
    """A folder that this process has locked. `path` is None where nothing can be kept; nothing is locked then."""

    def __init__(self, path: str | None, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    async def claim(cls, state_dir: str, principal: str, powers: Powers, *, patience_s: float = PATIENCE_S) -> Self:
        """The folder of the tool host `principal`. Raises GoondanError E_PRINCIPAL_BUSY when another one has it."""
        path = os.path.join(state_dir, TOOLHOSTS, address.path_segment(principal.removeprefix("toolhost/")))
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        try:
            powers.claim_state(state_dir, TOOLHOSTS, os.path.basename(path))
            while (lock := _lock(path)) is None:
                if loop.time() >= until:
                    name = principal[:100]
                    raise fail("E_PRINCIPAL_BUSY", f"another process is {name} of the state in {state_dir}")
                await asyncio.sleep(_POLL_S)
        except OSError:
            return cls(None, -1)
        return cls(path, lock)

    def orphans(self) -> list[Self]:
        """The folders of tool hosts that are gone, locked. `release` each."""
        found: list[Self] = []
        above = None if self.path is None else os.path.dirname(self.path)
        for name in [] if above is None else sorted(os.listdir(above)):
            path = os.path.join(above or "", name)
            with suppress(OSError):
                lock = None if path == self.path else _lock(path)
                if lock is not None:
                    found.append(type(self)(path, lock))
        return found

    def file(self, name: str) -> str | None:
        """The path of one file in it."""
        return None if self.path is None else os.path.join(self.path, name)

    def release(self) -> None:
        """Unlock it, so that another process can have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock(folder: str) -> int | None:
    """The locked descriptor of a folder's lock; None when another process has it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(folder, LOCK), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def read_promises(path: str | None) -> list[Promise]:
    """The promises in such a file; none when there is none, or nothing can be kept (None)."""
    return [] if path is None else directories.read_list(path, Promise, _MAX_BYTES)


def write_promises(path: str | None, promises: list[Promise]) -> None:
    """Replace the promises in it by these."""
    with suppress(OSError):
        if path is not None and promises:
            directories.replace_file(path, msgspec.json.encode(promises))
        elif path is not None:
            os.unlink(path)


# --- the process ------------------------------------------------------------------------------------------------------

#: How long queued results may take to reach the broker at the end (seconds).
LINGER_S: Final = 0.5
#: The folder in which copies of pinned skills are.
_COPIES: Final = "folders"
#: When the collector looks at young, older and old objects (gc.set_threshold): rarely, because calls make no cycles.
GC_THRESHOLDS: Final = (20_000, 20, 50)
#: The longest time until the log reports a suppressed line (seconds).
REPORT_S: Final = 5.0

parts("wire")  # no handler speaks with an error code of a feature (calls/results.py)


class Settings(Struct, frozen=True, kw_only=True):
    """What the command line sets."""

    #: The broker's socket for tool hosts.
    endpoint: str
    #: The token that the broker knows this host by.
    token: str
    #: A descriptor that gets a newline when this host is ready; None: nobody waits for that.
    ready_fd: int | None = None
    #: A descriptor that gets a line for each start and end of a worker; None: nobody reads them.
    status_fd: int | None = None
    #: The values that sandbox.env can grant, by name.
    granted: dict[str, str] = {}
    #: How long the broker may take to welcome this host (seconds).
    patience_s: float = 10.0
    #: The broker's user; None: ours.
    broker_uid: int | None = None
    #: The file in this host's folder with what an earlier survey has found; None: nothing is remembered.
    survey_path: str | None = None


class App:
    """One tool host from start to end."""

    def __init__(self, settings: Settings, powers: Powers, machine: HostFacts | GoondanError) -> None:
        """`machine` is what is known of this machine (facts.gather)."""
        self._settings = settings
        self._powers = powers
        self._machine = machine
        self._host: Host | None = None
        self._logbook = Logbook()
        self._early: list[Frame] = []
        self._stop = asyncio.Event()
        if settings.status_fd is not None:
            os.set_blocking(settings.status_fd, False)  # a supervisor that does not read must not stop us
        self._shutdown: Frame | None = None
        self._broken: GoondanError | None = None
        self._facts: HostFacts | None = None
        self._memory: Memory | None = None
        self._forking: asyncio.Task[None] | None = None
        self._announcing: set[asyncio.Task[None]] = set()
        self._link = Link(
            settings.endpoint,
            settings.token,
            on_frame=self._on_frame,
            held=self._held,
            on_welcome=self._on_welcome,
            on_unsent=self._on_unsent,
            broker_uid=settings.broker_uid,
        )

    def _held(self) -> dict[str, Any]:
        if (host := self._host) is None:
            return {}
        return {"calls": host.answers.calls.known_ids(), "attached": host.sessions.servers.attached()}

    async def run(self) -> None:
        """Serve until SIGTERM, a `shutdown` frame or the end of the link. Raises GoondanError when refused."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._end_idle)
        loop.set_exception_handler(_broken)
        if self._powers.lifeline is not None:
            pidfd = os.pidfd_open(self._powers.lifeline)
            loop.add_reader(pidfd, self._helper_lost, pidfd)
        self._powers.offload.remove(end_stranded)  # of a tool host that was killed
        memory = self._remember()
        probing = asyncio.ensure_future(self._survey(memory))  # while the broker answers
        try:
            if (welcome := await self._connect()) is not None:
                await self._live(welcome, probing, memory)
        finally:
            await asyncio.wait([probing])  # its jail goes before this process

    def _remember(self) -> Memory | None:
        path, usual = self._settings.survey_path, self._machine
        if path is None or isinstance(usual, GoondanError):
            return None
        operator = self._settings.broker_uid
        with suppress(OSError):  # then it is surveyed
            return Memory(path, self._powers, usual, os.geteuid() if operator is None else operator)
        return None

    async def _survey(self, memory: Memory | None) -> Survey:
        known = None if memory is None else memory.survey
        return known or await survey(self._powers, self._machine)

    async def _live(self, welcome: Welcome, probing: asyncio.Future[Survey], memory: Memory | None) -> None:
        """Work from the welcome to the end."""
        powers = self._powers
        spec = _spec(welcome)
        state = await StateFolder.claim(spec.state_dir, welcome.principal, powers)
        promises = state.file(PROMISES)
        exposures = WriteExposures(state.file(EXPOSURES), powers)
        host = self._host = Host(
            spec,
            powers,
            send=self._send,
            on_log=self._logbook.write,
            on_worker=self._report,
            environment=self._settings.granted,
            announce=self._announce,
            remember=partial(write_promises, promises),
            unmade=(lambda: None) if memory is None else memory.forget,
            speaker=self._link,
            exposures=exposures,
            copies=folders.FolderCopies(state.file(_COPIES)),
            server_asks={op: make for part in parts("host") for op, make in part.ASKS.items()},
        )
        host.answers.give_up(read_promises(promises))
        for orphan in state.orphans():
            left = orphan.file(PROMISES)
            host.answers.give_up(read_promises(left))  # from here on they stand in our file
            write_promises(left, [])
            exposures.take_over(orphan.file(EXPOSURES))
            directories.remove_tree(orphan.file(_COPIES) or "")
            orphan.release()
        for frame in self._early:
            self._on_frame(frame)
        self._early.clear()
        try:
            found = await probing
            powers.settle(found.facts is not None and not found.facts.user_namespaces)
            if found.facts is None:
                _say("error", f"{found.error.info.message}. {found.error.info.suggestion}", code=found.error.info.code)
                host.sessions.open(None, found.error)
            else:
                hidden = hiding.hidden_folders(spec, self._settings.endpoint, found.facts.home, powers.operator)
                host.sessions.open(hiding.with_hidden(found.facts, hidden))
            # What is here now stays; calls come and go without cycles, so young collections only cost time.
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            gc.enable()  # kernel/start.py turned it off
            startup.report_ready(self._settings.ready_fd)
            with suppress(OSError):  # the first jail tries it again, and says why not
                powers.launcher.start()
            self._facts, self._memory = found.facts, memory
            if memory is not None and memory.survey is None:
                memory.keep(found)
            self._fork_calls()
            await self._serve()
        finally:
            if self._forking is not None:
                self._forking.cancel()
                await asyncio.wait([self._forking])  # its jail goes before the launcher
            await host.close()
            self._logbook.close()
            if self._shutdown is not None:
                to = self._shutdown.from_ or ORCHESTRATOR
                answer = Frame("shutdown_ack", from_=welcome.principal, to=to, in_reply_to=self._shutdown.id)
                with suppress(GoondanError):
                    self._link.send(answer)
            await self._link.close(LINGER_S)
            powers.let_go()
            state.release()

    async def _connect(self) -> Welcome | None:
        """The broker's welcome; None when we are told to stop before it comes."""
        starting = asyncio.ensure_future(self._link.start(self._settings.patience_s))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.wait([starting])
        await self._link.close(0)
        return None

    async def _serve(self) -> None:
        self._link.closed.add_done_callback(lambda closed: self._stop.set())
        await self._stop.wait()
        if self._broken is not None:
            raise self._broken
        if self._link.closed.done():
            self._link.closed.result()  # raises what the broker refused us with

    def _end_idle(self) -> None:
        """The kernel ends soon: jails that nobody uses end now, while agents leave."""
        if self._host is not None:
            self._host.sessions.end_idle()

    def _helper_lost(self, pidfd: int) -> None:
        """The privileged helper is gone, and nobody can start another one."""
        asyncio.get_running_loop().remove_reader(pidfd)
        self._break("the privileged helper of this tool host, which does what only root can, has ended")

    def _break(self, why: str) -> None:
        self._broken = self._broken or fail("E_SANDBOX_UNAVAILABLE", why, suggestion="It is started anew.")
        self._stop.set()

    # --- the link

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == "shutdown":
            self._shutdown = frame
            self._stop.set()
        elif self._host is None:
            self._early.append(frame)
        else:
            self._host.on_frame(frame)

    def _on_welcome(self, welcome: Welcome) -> None:
        """We are welcomed again, perhaps by a new broker with a new bundle."""
        if self._host is None:
            return
        try:
            spec = _spec(welcome)
        except GoondanError as error:
            _say("error", error.info.message, code=error.info.code)
            return
        if self._powers.lifeline is not None and spec.state_dir != self._host.spec.state_dir:
            self._break(f"the state was in {self._host.spec.state_dir} and is in {spec.state_dir} now")
        if spec != self._host.spec:
            self._host.configure(spec)
            self._fork_calls()
        self._host.answers.resend()

    def _fork_calls(self) -> None:
        """Find out whether calls can be forked, as soon as a tool wants it: until then each has a jail of its own."""
        host, facts = self._host, self._facts
        if host is None or facts is None or self._forking is not None or not host.wants_forks:
            return

        memory = self._memory

        async def find_out() -> None:
            if memory is not None and memory.forks:
                host.sessions.fork_calls()
                return
            problem = await why_calls_are_not_forked(facts, self._powers)
            if problem is not None:
                _say("warn", f"{ALONE}: {problem}.")
                return
            host.sessions.fork_calls()
            if memory is not None:
                memory.keep_forks()

        self._forking = asyncio.ensure_future(find_out())

    def _send(self, frame: Frame) -> bool:
        try:
            return self._link.send(frame, with_next=frame.stage == PASSED_ON)
        except GoondanError as error:  # too large for a broker that takes no large payloads
            self._on_unsent(frame, error)
            return False

    def _on_unsent(self, frame: Frame, error: GoondanError) -> None:
        _say("error", error.info.message, code=error.info.code)
        if self._host is not None:
            self._host.unsent(frame, error)

    def _announce(self, event: Frame, told: Callable[[], None]) -> None:
        """Tell an agent of the end of pending work: at once, should it be in a turn, and through its mailbox."""
        news = msgspec.structs.replace(event, type="tool.completed")
        self._send(news)
        task = asyncio.ensure_future(self._deliver(event, told))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _deliver(self, event: Frame, told: Callable[[], None]) -> None:
        while True:
            try:
                await self._link.post(msgspec.structs.replace(event))
            except GoondanError as error:
                if error.info.code in ("E_OVERLOADED", "E_DISK_FULL"):
                    await asyncio.sleep((error.info.retry_after_ms or 1000) / 1000)
                    continue
                if error.info.code == "E_LINK_CLOSED":
                    return  # the next tool host says it
                _say("warn", f"{event.event_id}: {error.info.message}", code=error.info.code)
            told()
            return

    def _report(self, event: WorkerNews) -> None:
        fd = self._settings.status_fd
        if fd is not None:
            with suppress(OSError):  # nobody listens any more, or does not keep up
                os.write(fd, msgspec.json.encode(event) + b"\n")


def _spec(welcome: Welcome) -> launch.ToolHostSpec:
    try:
        return from_raw(welcome.spec, launch.ToolHostSpec)
    except GoondanError as error:
        raise fail(
            "E_INTERNAL", f"the broker's welcome holds no tool host specification: {error.info.message}"
        ) from None


def _broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug of ours in a callback: one line for the log, and the host goes on."""
    error = context.get("exception")
    where = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
    _say("error", f"{context.get('message', 'unhandled error')}: {where}", code="E_INTERNAL")


class _Said(Struct, omit_defaults=True):
    #: The level.
    level: str
    #: The text.
    message: str
    #: The code of the error that it reports.
    code: str | None = None


def _say(level: str, message: str, *, code: str | None = None) -> None:
    put(msgspec.json.encode(_Said(level, message, code)))


class Source(NamedTuple):
    """The writer of lines. Each writer has a share of its own."""

    #: The agent. None: the line belongs to no agent.
    agent: str | None
    #: The key of its instance.
    instance_key: str | None
    #: The tool.
    tool: str


class Logbook:
    """The log of one tool host. Use from the loop's thread."""

    def __init__(self) -> None:
        self._admission: Admission[Source] = Admission()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: LogLine) -> None:
        """Write a line of a tool, if its source has room."""
        data = msgspec.json.encode(line)
        source = Source(line.agent, line.instance_key, line.tool)
        if self._admission.admit(line.agent or line.tool, source, len(data) + 1, time.monotonic()):
            self._say(source, self._admission.take_suppressed(source))
            put(data)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def close(self) -> None:
        """Report the lines that were suppressed until now."""
        if self._timer is not None:
            self._timer.cancel()
        self._report()

    def _report(self) -> None:
        self._timer = None
        for source, count in self._admission.take_all_suppressed().items():
            self._say(source, count)

    def _say(self, source: Source, count: int) -> None:
        if count:
            put(msgspec.json.encode(suppressed_lines(count, time.time(), **source._asdict())))


def put(line: bytes) -> None:
    """Write one line to standard error, from which the supervisor collects the log."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.put_object(line)
        return
    with suppress(OSError):
        os.write(sys.stderr.fileno(), line + b"\n")
