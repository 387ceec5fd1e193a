"""Restarts of a kernel, from the request until processes are ended: of the whole kernel, of one agent's processes, or
of what a change of a watched bundle affects.

A person asks for a restart, or an agent through the broker, or a file has changed, or a feature has changed the bundle.
In each case the bundle is read first, by a process of its own (reader.py), one reading at a time. A bundle that may not
run stops nothing.

`gdn run --watch` follows the files of a bundle by their marks. A mark is a file's size, time and inode number. No file
is read. The files are polled. The system is not asked to report changes: a bundle has some dozen files, and one look at
them costs tens of microseconds. Polling works on every file system, and for files that an editor exchanges
(docs/design/processes.md section 6). Editors write in several steps: a new file, a rename, an attribute. A bundle is
looked at when none of its files has changed for REST_S, and once for each such change.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw, Struct

from goondan.features import parts
from goondan.kernel.bundle.files import SKIPPED_FOLDERS
from goondan.kernel.bundle.loader import OpenedBundle
from goondan.kernel.bundle.rules.plan import Difference, difference
from goondan.kernel.grants.powers import Power
from goondan.kernel.spawn import command, memory_file, start_program
from goondan.kernel.supervisor import lifecycle, processes, reaping
from goondan.kernel.supervisor.agents import Agents
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.reader import Revision, RevisionRefused, Task, decode
from goondan.kernel.traces.logs import open_log
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire import codec, control, frames
from goondan.schemas.wire.errors import GoondanError, fail

#: Entries that are looked at in all: a bundle with more is looked at as far as that.
MAX_ENTRIES: Final = 20_000
#: Names that editors and interpreters make beside files, and that no bundle is made of.
_JUNK_ENDS: Final = ("~", ".swp", ".swo", ".swx", ".tmp", ".pyc", ".bak")
#: How long files rest before anything happens (seconds).
REST_S: Final = 0.3
#: Path -> what tells one content of it from another.
Marks = Mapping[str, tuple[int, ...]]
#: How often the files are looked at (seconds): a change shows within the time that files have to rest.
LOOK_S: Final = 0.1
#: A look that takes long comes seldom: looking takes a fiftieth of the time at most.
SHARE: Final = 50
#: Lines that are kept for a command that asks late.
KEPT: Final = 200

_log = logging.getLogger("supervisor")


class Watched(Struct, frozen=True):
    """The files of a bundle that are watched."""

    #: These files.
    files: list[str]
    #: This file. If it is a folder: every YAML file below it.
    documents: str | None = None
    #: Every file below these folders.
    trees: list[str] = []


def marks_of(watched: Watched) -> Marks:
    """The marks of all files that are there; one that is not has none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in watched.files:
        _mark(path, found)
    if watched.documents is not None:
        _walk([watched.documents], found, (".yaml", ".yml"))
    _walk(watched.trees, found, ())
    return found


def _mark(path: str, found: dict[str, tuple[int, ...]]) -> None:
    try:
        state = os.stat(path)
    except OSError:
        return
    found[path] = (state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode)


def _walk(roots: Iterable[str], found: dict[str, tuple[int, ...]], ends: tuple[str, ...]) -> None:
    todo = list(roots)
    seen = 0
    while todo and seen < MAX_ENTRIES:
        here = todo.pop()
        try:
            entries = list(os.scandir(here))
        except NotADirectoryError:
            _mark(here, found)
            continue
        except OSError:
            continue
        for entry in entries:
            seen += 1
            name = entry.name
            if name.startswith((".", "#")) or name in SKIPPED_FOLDERS or name.endswith(_JUNK_ENDS):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif not ends or name.endswith(ends):
                    _mark(entry.path, found)
            except OSError:
                continue


class Rest:
    """Told of the files again and again. `marks` are those that the revision which runs was read from."""

    def __init__(self, marks: Marks) -> None:
        self._settled = marks
        self._seen = marks
        self._since = 0.0

    def see(self, marks: Marks, now: float) -> bool:
        """Whether there is a change that has come to rest; it is told once. `now`: seconds of a steady clock."""
        if marks != self._seen:
            self._seen, self._since = marks, now
            return False
        if self._seen == self._settled or now - self._since < REST_S:
            return False
        self._settled = self._seen
        return True


class Watcher:
    """`watched` may be set again at any time; `follow` is awaited for each change."""

    def __init__(self, watched: Watched, follow: Callable[[], Awaitable[None]]) -> None:
        self.watched = watched
        self._follow = follow

    async def run(self) -> None:
        """Until it is cancelled. The first look counts as a change: files may have changed since they were read."""
        loop = asyncio.get_running_loop()
        rest = Rest({})
        while True:
            began = loop.time()
            marks = await loop.run_in_executor(None, marks_of, self.watched)
            now = loop.time()
            if rest.see(marks, now):
                await self._follow()
            await asyncio.sleep(max(LOOK_S, SHARE * (now - began)))


class News:
    """Lines, numbered from the first."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told = 0
        self._more = asyncio.Event()
        self._over = False

    def close(self) -> None:
        """The kernel ends: who waits for more is told so."""
        self._over = True
        self._more.set()

    def say(self, line: str) -> None:
        """Tell everybody."""
        shown = visible_line(line)
        _log.info("%s", shown)
        self._lines = [*self._lines, shown][-KEPT:]
        self._told += 1
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, known: int) -> tuple[list[str], int]:
        """The lines after the first `known`, as soon as there is one, and how many there are. A command that knows more
        lines than there are has asked the program before this one.

        Raises GoondanError E_KERNEL_NOT_RUNNING when there will be no more.
        """
        known = known if known <= self._told else 0
        while known >= self._told:
            if self._over:
                raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
            await self._more.wait()
        return self._lines[max(0, len(self._lines) - (self._told - known)) :], self._told


#: Reading a bundle takes well under a second, and longer for one with many modules on a busy machine. One that takes
#: more is given up (seconds).
READ_S: Final = 30.0


class BundleReader:
    """Has the bundle of the running kernel read again. `log_path` is the supervisor's own log, and that of the program
    that reads.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reaper: reaping.Reaper, options: Options, log_path: str
    ) -> None:
        self.loop = loop
        self.reaper = reaper
        self.options = options
        self.log_path = log_path
        #: Held while the bundle is read, or changed by a changeset.
        self.turn = asyncio.Lock()
        self._child: reaping.Child | None = None

    async def look(self, running: list[Power]) -> Revision:
        """The bundle as it is now; `running` are the powers of what runs.

        Raises GoondanError: why it may not run, or why that cannot be found out; nothing has changed then.
        """
        async with self.turn:
            result = os.memfd_create("revision")
            try:
                seen = await self._read(running, result)
                with open(os.dup(result), "rb") as source:
                    source.seek(0)
                    data = source.read()
            finally:
                os.close(result)
        try:
            found = decode(data)
        except codec.DECODE_ERRORS:
            raise GoondanError(reaping.start_failure("the reader of the bundle", seen.cause, self.log_path)) from None
        if isinstance(found, RevisionRefused):
            raise GoondanError(found.error)
        return found

    def close(self) -> None:
        """End a look that still runs."""
        if self._child is not None:
            self._child.kill()

    async def _read(self, running: list[Power], result: int) -> reaping.Exit:
        task = memory_file("task", msgspec.msgpack.encode(Task(self.options, running)))
        given = [task]
        ended: asyncio.Future[reaping.Exit] = self.loop.create_future()
        try:
            log = open_log(self.log_path)
            given.append(log)
            arguments = ["--task-fd", str(task), "--result-fd", str(result), "--parent-pid", str(os.getpid())]
            pid = start_program(
                command("goondan.kernel.supervisor.reader", arguments),
                env=os.environ,  # the bundle may name any variable
                output_fd=log,
                pass_fds=[task, result],
            )
        except OSError as error:
            raise fail("E_INTERNAL", f"the reader of the bundle could not be started: {error}") from None
        finally:
            for fd in given:
                os.close(fd)
        child = self._child = self.reaper.watch(pid, ended.set_result, leads_group=True)
        if child is None:
            raise AssertionError(f"the reader, pid {pid}, cannot be watched")
        try:
            async with asyncio.timeout(READ_S):  # not wait_for, see Ending.run
                return await asyncio.shield(ended)
        except TimeoutError:
            raise fail("E_KERNEL_SLOW", f"the bundle was not read within {READ_S:g} s") from None
        finally:
            if not ended.done():
                child.kill()
            self._child = None


#: How long the broker may take to say that it has what it was told (seconds): a journal waits for the disk.
ANSWER_S: Final = 5.0
#: How long it may take until a broker serves another revision (seconds). One that was killed meanwhile is started
#: again, several times if need be; one that hangs is found out, killed and replaced within this time.
TAKE_OVER_S: Final = 30.0
#: How often it is looked whether processes are gone (seconds).
GONE_POLL_S: Final = 0.02
#: A piece of a plan (bytes): well below a frame.
PIECE_BYTES: Final = 512 << 10


class Restartable(Protocol):
    """What a restart needs of the supervisor."""

    @property
    def ending(self) -> bool:
        """Whether the kernel ends."""

    @property
    def stopping(self) -> bool:
        """Whether its processes are being ended."""

    @property
    def is_ready(self) -> bool:
        """Whether it has started."""

    def begin_restart(self, revision: Revision, reason: str) -> None:
        """End every process, then become the next program. That uses `revision` if it cannot read the bundle."""

    def answer(self, message: control.ToBroker) -> None:
        """Tell the broker."""

    def revise(self, opened: OpenedBundle) -> None:
        """Another revision runs now. Processes that start from now on belong to it."""


class Client(Protocol):
    """What of a feature changes the bundle of a kernel that runs, and has the conductor take over what became of it."""

    def heard(self, payload: Raw) -> None:
        """A message of the feature's half in the broker (control.ForFeature)."""

    async def ask(self, question: Any) -> Any:
        """Answer a question of the feature's command. Both are plain values. Raises GoondanError."""

    def close(self) -> None:
        """The kernel ends, or restarts: begin nothing any more."""


def clients() -> Mapping[str, Callable[[Conductor], Client]]:
    """What makes each client, by the names of the features: `make_client` of their `process`."""
    return {module.FEATURE: module.make_client for module in parts("process") if hasattr(module, "make_client")}


class Conductor:
    """Restarts one kernel. `opened` is the bundle that runs, `bundle` its path. `extra` are further files that count
    for it.
    """

    def __init__(
        self,
        kernel: Restartable,
        reader: BundleReader,
        agents: Agents,
        opened: OpenedBundle,
        bundle: str,
        extra: list[str],
    ) -> None:
        self.news = News()
        self.reader = reader
        self._kernel = kernel
        self._agents = agents
        self._opened = opened
        self._bundle = bundle
        self._extra = extra
        self._checked: Revision | None = None  # for the restart that is due next
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[str, asyncio.Future[None]] = {}  # what the broker is to say
        self._broker_came = asyncio.Event()
        self._replaced: set[int] = set()  # launches that are to leave, because they cannot follow the bundle
        self._changing = asyncio.Lock()
        self._watcher: Watcher | None = None
        self._refused = ""  # what was said last about a bundle that does not run
        self._clients = {name: make(self) for name, make in clients().items()}

    async def restart(self, reason: str, *, fresh: bool) -> None:
        """Begin to restart, if the bundle may run. Raises GoondanError: E_RESTART_REFUSED, E_KERNEL_NOT_RUNNING, and
        what is wrong with the bundle.
        """
        revision = await self._look()
        self._may_restart()
        if fresh:
            await self._begin_anew("")
        self._begin(revision, reason)

    async def restart_agent(self, agent: str, *, fresh: bool) -> int:
        """Restart the processes of an agent, each at the end of its step; how many there were, when they are gone.

        Raises GoondanError: E_AGENT_NOT_FOUND, E_RESTART_REFUSED, E_RESTART_FAILED, E_KERNEL_NOT_RUNNING.
        """
        self._may_restart()
        agents = self._opened.plan.agents.keys() - {frames.OPERATOR_AGENT}
        if agent not in agents:
            raise fail("E_AGENT_NOT_FOUND", f"no agent {agent[:100]!r}; there are: {', '.join(sorted(agents))[:500]}")
        if fresh:
            await self._begin_anew(agent)
        before = self._agents.launches([agent], here=True)  # nobody asks one to leave that is only starting: it is new
        self._kernel.answer(control.RestartAgents([agent], round(processes.RESTART_GRACE_S * 1000)))
        loop = asyncio.get_running_loop()
        until = loop.time() + processes.RESTART_GRACE_S + lifecycle.LEAVE_LIMIT_S
        while left := before & self._agents.launches([agent]):
            if loop.time() >= until:
                raise fail("E_RESTART_FAILED", f"{len(left)} processes of {agent!r} do not end")
            await asyncio.sleep(GONE_POLL_S)
        _log.info("restarted %d processes of %s%s", len(before), agent, ", fresh" if fresh else "")
        return len(before)

    def watch(self) -> None:
        """Follow the bundle's files from now on."""
        self._watcher = Watcher(self._watched(self._opened.files, self._opened.trees), self._follow)
        self._soon(self._watcher.run())

    def heard(self, message: control.AboutBundle) -> None:
        """A word of the broker."""
        if isinstance(message, control.ForFeature):
            client = self._clients.get(message.feature)
            if client is not None:
                client.heard(message.payload)
        elif isinstance(message, control.CheckBundle):
            self._soon(self._check(message.name))
        elif isinstance(message, control.RestartDue):
            self._soon(self._carry_out(message.reason))
        else:
            said = f"revision {message.revision}" if isinstance(message, control.Revised) else f"anew {message.agent}"
            waiting = self._answers.get(said)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    @property
    def powers(self) -> list[Power]:
        """The powers of the revision that runs."""
        return self._opened.powers

    def tell(self, feature: str, payload: Raw) -> None:
        """Send a message to a feature's half in the broker."""
        self._kernel.answer(control.ForFeature(feature, payload))

    async def ask(self, feature: str, question: Any) -> Any:
        """A command's question to a feature's client. Raises GoondanError."""
        client = self._clients.get(feature)
        if client is None:
            raise fail("E_USAGE", f"no feature {feature[:40]!r} answers commands here")
        return await client.ask(question)

    def close(self, *, for_good: bool) -> None:
        """No restart begins any more. `for_good`: the next program begins none either."""
        for client in self._clients.values():
            client.close()
        self.reader.close()
        if for_good:
            self.news.close()
        for task in self._tasks:
            task.cancel()

    async def _check(self, name: str) -> None:
        """Read the bundle for an agent that asks for a restart, and say why there can be none."""
        try:
            self._checked = await self._look()
        except GoondanError as error:
            _log.warning("an agent asked for a restart, and there is none: %s", visible_line(str(error)))
            self._kernel.answer(control.BundleChecked(name, error.info))
        else:
            self._kernel.answer(control.BundleChecked(name))

    async def _carry_out(self, reason: str) -> None:
        if self._kernel.stopping:
            return  # it restarts, or ends, already
        revision, self._checked = self._checked, None
        try:
            # The answer to a request of before the broker was replaced is lost.
            self._begin(revision or await self._look(), f"an agent wishes it: {reason}")
        except GoondanError as error:
            _log.error("the restart that an agent wished is not done: %s", visible_line(str(error)))
            self._kernel.answer(control.RestartUndone(error.info))

    # --- a bundle that is watched

    async def _follow(self) -> None:
        """Files of the bundle have changed and come to rest."""
        watcher = self._watcher
        if watcher is None or self._kernel.stopping:
            return
        try:
            revision = await self._look()
        except GoondanError as error:
            line = f"the changed bundle does not run: {error.info.message}; what runs goes on. {error.info.suggestion}"
            if line != self._refused:
                self.news.say(line)
            self._refused = line
            # The missing part may come as a new file, in a place that is not known yet.
            root = self._bundle if os.path.isdir(self._bundle) else os.path.dirname(self._bundle)
            files, trees = watcher.watched.files, watcher.watched.trees
            watcher.watched = self._watched(files, [*trees, root])
            return
        self._refused = ""
        try:
            await self.take_over(revision)
        except GoondanError as error:
            self.news.say(f"the changed bundle was not taken over: {error}")

    async def take_over(self, revision: Revision) -> None:
        """Another revision takes the place of the one that runs, as far as they differ. Raises GoondanError when it
        could not.
        """
        if self._watcher is not None:
            self._watcher.watched = self._watched(revision.files, revision.trees)
        plan = msgspec.msgpack.decode(revision.plan, type=KernelPlan)
        async with self._changing:  # a changeset and a watched file at the same time
            change = difference(self._opened.plan, plan)
            if change.nothing:
                return
            if change.whole is not None:
                self.news.say(f"the bundle has changed ({change.whole}): the kernel restarts in place")
                self._begin(revision, f"{change.whole} has changed")
            else:
                await self._apply(plan, revision, change)

    async def _apply(self, plan: KernelPlan, revision: Revision, change: Difference) -> None:
        """Processes that the change affects go on with it, or restart when they cannot. No other process restarts."""
        self._opened = OpenedBundle(plan, revision.powers, revision.files, revision.trees)
        self._kernel.revise(self._opened)
        try:
            await self._revised(plan.revision, revision.plan)
        except GoondanError as error:  # it may have one revision, and processes that start now another
            self.news.say(f"the bundle has changed, and the kernel restarts in place: {error.info.message}")
            self._begin(revision, "the broker did not take over the changed bundle")
            return
        self._replaced |= self._agents.launches(change.replaced)
        self._replace(change.replaced)
        what = [f"Agent/{name}" for name in change.agents] + [f"Tool/{name}" for name in change.tools]
        self.news.say(f"the bundle has changed: {', '.join(what) or 'nothing that runs'}; revision {plan.revision[:8]}")

    def _watched(self, files: list[str], trees: list[str]) -> Watched:
        # The bundle's own place in any case: it may have been empty, or gone.
        return Watched(sorted({*files, *self._extra, self._bundle}), self._bundle, sorted(set(trees)))

    # --- inside

    async def _begin_anew(self, agent: str) -> None:
        await self._told(f"anew {agent}", control.BeginAnew(agent))

    async def _told(self, name: str, message: control.BeginAnew) -> None:
        """Tell the broker, and wait until it confirms. Raises GoondanError E_RESTART_REFUSED."""
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        try:
            self._kernel.answer(message)
            async with asyncio.timeout(ANSWER_S):  # not wait_for, see Ending.run
                await answer
        except TimeoutError:
            raise fail("E_RESTART_REFUSED", f"the broker did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._answers[name]

    async def _revised(self, revision: str, plan: bytes) -> None:
        """Give the broker another plan, and wait until it serves this plan. If that broker is killed, its successor
        gets the plan again. Raises GoondanError E_RESTART_REFUSED.
        """
        pieces = [plan[at : at + PIECE_BYTES] for at in range(0, max(1, len(plan)), PIECE_BYTES)]
        said = f"revision {revision}"
        answer = self._answers[said] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                while not answer.done():
                    self._broker_came.clear()
                    for number, piece in enumerate(pieces):
                        self._kernel.answer(control.Revise(number, len(pieces), piece))
                    came = asyncio.ensure_future(self._broker_came.wait())
                    try:
                        await asyncio.wait([answer, came], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        came.cancel()
        except TimeoutError:
            raise fail("E_RESTART_REFUSED", f"the broker did not answer within {TAKE_OVER_S:g} s") from None
        finally:
            del self._answers[said]

    def _replace(self, agents: list[str]) -> None:
        """Those processes of these agents that cannot go on with their new revision leave when their step has ended."""
        launches = sorted(self._replaced & self._agents.launches(agents))
        if launches:
            self._kernel.answer(control.RestartAgents(agents, None, "config_change", launches))

    def broker_here(self) -> None:
        """A broker has connected. It has not got the messages to the broker before it."""
        self._broker_came.set()
        agents = list(self._opened.plan.agents)
        self._replaced &= self._agents.launches(agents)
        self._replace(agents)

    async def _look(self) -> Revision:
        """The bundle as it is now, if it may run in the place of what does."""
        self._may_restart()
        return await self.reader.look(self._opened.powers)

    def _begin(self, revision: Revision, reason: str) -> None:
        self._may_restart()
        self._kernel.begin_restart(revision, visible_line(reason))

    def _may_restart(self) -> None:
        kernel = self._kernel
        if kernel.ending:
            raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
        if kernel.stopping:
            raise fail("E_RESTART_REFUSED", "a restart is under way already")
        if not kernel.is_ready:
            raise fail("E_RESTART_REFUSED", "the kernel is still starting")

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
