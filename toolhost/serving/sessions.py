"""The shell around machine.py: it starts and ends jails, hears them, and performs what the machine decides.

starting.py starts a jail, and live.py acts on one jail. Everything that comes out of a jail is checked against what its
session was given: a Violation ends the jail, or only the processes of the call that it came from.

Rules.
- Every call that is placed here ends in exactly one result, whatever its jail does.
- Without a sandbox nothing runs: each call is answered with the reason.

Source: docs/design/sandbox.md section 5; schemas/WORKER.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from goondan.schemas.bundle.launch import ToolHostSpec, ToolSpec
from goondan.schemas.transport.link import boottime_us
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import Frame, ToolError
from goondan.schemas.wire.questions import MAX_ANSWER_BYTES
from goondan.schemas.worker import servers, tool_host_reports
from goondan.schemas.worker import worker_frames as frames
from goondan.schemas.worker.servers import CONNECT_S
from goondan.toolhost.calls import machine
from goondan.toolhost.calls.asks import ended as call_ended
from goondan.toolhost.calls.call_registry import Call, Listing
from goondan.toolhost.calls.results import PENDING_S, Work, own_error, refusal, shape, with_denial
from goondan.toolhost.calls.session import MAX_PENDING_PER_JAIL, JailSession, key_of
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.jails.jail import CallSandbox, Jail
from goondan.toolhost.jails.network import Egress
from goondan.toolhost.jails.server_jail import RemoteServer, ServerJail
from goondan.toolhost.jails.worker import Worker
from goondan.toolhost.policy import limits, subject
from goondan.toolhost.serving.answers import Answers, Asking, too_much_pending
from goondan.toolhost.serving.live import LiveSession, load_error, protocol_error, unavailable
from goondan.toolhost.serving.servers import Owner, Servers
from goondan.toolhost.serving.starting import CLOSE_S, JailStarter, why_not
from goondan.toolhost.traffic.messages import Denied, Failed
from goondan.toolhost.watch import jail_usage, watch

#: Results up to this size (bytes) wait for events of the network; larger ones would be looked through twice.
SETTLED_BYTES: Final = 65536
#: How long servers may take to end when the tool host does (seconds). Whoever stops it waits for that.
SERVER_CLOSE_S: Final = 1.0
#: Bytes that may wait for a worker that does not read: four of the largest answers.
MAX_UNREAD: Final = 4 * MAX_ANSWER_BYTES


class Sessions:
    """All sessions of one tool host (jail.JailOwner). Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        asking: Asking,
        starter: JailStarter,
        max_jails: int,
        *,
        send: Callable[[Frame], bool],
        on_log: Callable[[tool_host_reports.LogLine], None],
        on_worker: Callable[[tool_host_reports.WorkerNews], None],
    ) -> None:
        """Calls wait until `open` is called. `send` gets news of servers."""
        self._loop = loop
        self._answers = answers
        self._asking = asking
        self._starter = starter
        self._on_log = on_log
        self._on_worker = on_worker
        self._idle_s = 0.0
        self._unavailable: GoondanError | None = None
        self._machine = machine.Machine(max_jails)
        self.pool = self._machine.pool
        self.servers = Servers(loop, self._machine, answers, send, on_worker, asking)
        self._live: dict[int, LiveSession] = {}  # by the numbers of sessions whose jails are there
        self._by_jail: dict[Worker, LiveSession] = {}
        self._egress = Egress(loop, starter.powers.launcher, self._network_lost, self._network_event)
        self._watch = watch.Watch(loop, self._over_limit, starter.powers.launcher.put_first)
        self._held: list[Call] | None = []  # calls that came before it was known whether jails can be made
        self._launching: set[asyncio.Task[None]] = set()
        self._closing = False
        self._all_gone = asyncio.Event()  # set once the tool host ends and no jail is left

    # --- life

    def configure(self, spec: ToolHostSpec, changed: Iterable[str]) -> None:
        """Follow a new spec. Jails of changed tools (by name) finish what they run."""
        self._starter.spec = spec
        self._idle_s = spec.jail_idle_s
        self.pool.max_jails = max(1, spec.max_jails)
        names = frozenset(changed)
        for session in self.pool.sessions():
            if session.key[0] in names and not self._is_the_same_server(session, spec):
                self.servers.lost(session, "its configuration has changed")
                self._perform(self.pool.close(session))

    def _is_the_same_server(self, session: JailSession, spec: ToolHostSpec) -> bool:
        """Whether a session's server is in the new spec as it was: then agents stay attached."""
        live = self._live.get(session.number)
        if live is None or live.tool.server is None or not live.tool.server.digest:
            return False
        now = [server for tool in spec.tools if tool.server for server in (tool.server, *tool.servers.values())]
        return any(server.digest == live.tool.server.digest for server in now)

    def open(self, facts: subject.HostFacts | None, why_none: GoondanError | None = None) -> None:
        """It is known now whether jails can be made: run the calls that have waited for that."""
        self._starter.facts, self._unavailable = facts, why_none
        held, self._held = self._held or [], None
        for call in held:
            if call.state != "done":
                self.place(call)

    def fork_calls(self) -> None:
        """The walls around one call hold inside a jail: from now on a tool's forked calls share one jail."""
        self._starter.fork_calls()

    async def close(self) -> None:
        """End every jail and wait until all their processes are gone, CLOSE_S at most. Calls are not answered.

        Servers are asked to end first, and may write down what they must.
        """
        self._closing = True
        served = [live for live in self._live.values() if live.session.server and not live.jail.dying]
        for live in list(self._live.values()):  # what is being launched is killed when it is there
            if live in served:
                self._perform([machine.Leave(live.session)])
            else:
                live.jail.kill("the tool host was stopped")
        if served:
            await asyncio.wait([self._loop.create_task(live.gone.wait()) for live in served], timeout=SERVER_CLOSE_S)
        for live in list(self._live.values()):
            live.jail.kill("the tool host was stopped")
        self._note_gone()
        for ended in (self._all_gone.wait, self._starter.powers.offload.settled):
            with suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the end that it waits for.
                async with asyncio.timeout(CLOSE_S):
                    await ended()
        self._egress.close()
        self._starter.close()
        self._watch.close()

    async def end_all_of(self, owner: tuple[str, str]) -> None:
        """End the jails of an agent instance and wait until their last processes are gone. Shared jails stay."""
        self.detach(owner)
        while sessions := [session for session in self.pool.sessions() if session.instance == owner]:
            for session in sessions:
                self._perform(self.pool.close(session))
                if (there := self._live.get(session.number)) is not None and (session.calls or session.abandoned):
                    there.jail.kill("its instance was deleted")
            # What is being launched ends when it is there.
            live = [live for session in sessions if (live := self._live.get(session.number)) is not None]
            await asyncio.gather(*(each.gone.wait() for each in live))
            if self._launching and not live:
                await asyncio.wait(self._launching, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)

    def end_idle(self) -> None:
        """End the sessions that no call uses now. A later call gets a new one."""
        self._perform(self.pool.retire(self._loop.time()))

    @property
    def jail_count(self) -> int:
        """How many jails still have processes."""
        return len(self.pool.sessions())

    def tick(self) -> None:
        """Call now and then: retires idle sessions, ends what runs too long, sweeps what calls have left behind."""
        self._perform(self.pool.retire(self._loop.time() - self._idle_s))
        self._starter.exposures.beat()
        there = list(self._live.values())
        for live in there:
            self._end_what_sees(live, live.hiding.broken())
            self.servers.report(live)
        overdue = self._answers.overdue()
        for live in there if overdue else ():
            if any(work in overdue for work in live.session.works.values()):
                message = f"pending work ran for more than {PENDING_S:g} s"
                self._break_off(live, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), message)
        for session in self.pool.idle():
            idle = self._live.get(session.number)
            if idle is not None and not idle.sweep():
                self._perform(self.pool.close(session))
                idle.jail.kill("left processes behind that would not end")

    # --- calls come and go

    def place(self, call: Call) -> None:
        """Run a call in the jail that it belongs to, or fail it."""
        if self._held is not None:
            self._held.append(call)
            return
        if self._unavailable is not None:
            self._answers.fail(call, refusal(self._unavailable.info))
            return
        if call.tool.server is not None and (refused := self.servers.refuses(call)) is not None:
            self._answers.fail(call, refused)
            return
        forks = call.tool.sandbox.isolation == "call" and self._starter.forks(call.tool)
        key = call.key = key_of(call, forks=forks)
        session = self.pool.find(key)
        if session is not None:
            live = self._live[session.number]
            if live.jail.dying and session.server and not isinstance(call, Listing):
                message = f"the MCP server {call.tool.name} is ending"
                self._answers.fail(call, tool_error(servers.GONE, message, name=servers.ERROR_NAME))
                return
            if live.jail.dying:
                self._perform(self.pool.close(session))  # its worker has ended, only its last process has not
            elif self._takes_calls(live):
                self._run(live, call)
                return
        self._perform(self.pool.place(key, call))

    def detach(self, owner: Owner, prefix: str | None = None) -> None:
        """An agent instance does not need a server any more, or (None) none of all."""
        self.servers.forget(owner, prefix)
        for session in self.servers.of(owner, prefix):
            self._perform(self.pool.detach(session, owner, self._loop.time()))

    def run_out(self, call: Call) -> None:
        """The call has reached its deadline."""
        live = self._live.get(call.session)
        dying = live is not None and live.jail.dying
        self._perform(self._machine.run_out(call, self._loop.time(), dying=dying))

    def cancel(self, call: Call) -> None:
        """Nobody wants the call any more: ask its handler to stop."""
        self._perform(self._machine.cancel(call, self._loop.time()))

    def _takes_calls(self, live: LiveSession) -> bool:
        """Whether a jail takes calls: what was hidden from it, or read-only for it, still is.

        If it is not, somebody replaced it. A jail that sees something hidden ends. When a read-only place was replaced,
        every jail that can write there takes no more calls.
        """
        if (seen := live.hiding.broken()) is not None:
            self._end_what_sees(live, seen)
            return False
        if self._starter.exposures.intact(live.named):  # all that must stay read-only is in its place
            return not live.session.closed
        for other in list(self._live.values()):
            if not set(live.named).isdisjoint(other.named):
                self._perform(self.pool.close(other.session))
        return False

    def _end_what_sees(self, live: LiveSession, seen: str | None) -> None:
        """End a jail that sees a folder which is hidden from it. None: it sees nothing."""
        if seen is not None and not live.jail.dying:
            reason = f"{seen}, which no tool may see, was made or replaced while the jail could see what it lies in"
            self._break_off(live, tool_error("E_SANDBOX_DENIED", reason, name="SandboxDenied"), reason)

    def _run(self, live: LiveSession, call: Call) -> None:
        """Hand a call to its jail."""
        session, now = live.session, self._loop.time()
        self._machine.enter(session, call, now)
        call.began_us = boottime_us()
        call.denied_before = 0 if live.network is None else live.network.denied_count
        if isinstance(call, Listing):
            self._perform(self.servers.run_listing(live, call, now))
            return
        try:
            live.send_call(call, now)
        except OSError as error:
            self._perform(self._machine.not_started(session, call, error.strerror or str(error), now))
            return
        self._watch.wake(live.jail.usage)

    # --- what the machine decides

    def _perform(self, actions: Sequence[machine.Action]) -> None:
        for action in actions:
            match action:
                case machine.Assign():
                    self._assign(action.session, action.call)
                case machine.Start():
                    launching = self._loop.create_task(self._start(action.session, action.call))
                    self._launching.add(launching)
                    launching.add_done_callback(self._launching.discard)
                case machine.Again():
                    self._asking.drop(action.call)
                    self.place(action.call)
                case machine.Finish():
                    self._answers.finish(action.call, action.payload)
                case machine.Answer():
                    live = None if action.session is None else self._live.get(action.session.number)
                    receipt = None if live is None else live.receipt(action.call, self._loop.time(), action.cause)
                    self._answers.fail(action.call, action.error, receipt, action.work)
                case _:
                    if (live := self._live.get(action.session.number)) is not None:
                        self._do_to_jail(live, action)

    def _do_to_jail(
        self, live: LiveSession, action: machine.JailAction | machine.Wait | machine.WaitForStop | machine.End
    ) -> None:
        """Act on a jail that is there, now or after some time."""
        match action:
            case machine.End():
                if not live.jail.dying:
                    self._perform(self._machine.end(live.session))
            case machine.Wait():
                self._wait(live, action.seconds, action.then)
            case machine.WaitForStop():
                self._loop.call_later(action.seconds, self._did_not_stop, live, action.call)
            case _:
                live.perform(action)

    def _assign(self, session: JailSession, call: Call) -> None:
        if call.state == "done":
            return
        live = self._live.get(session.number)
        if live is not None and self._takes_calls(live):  # it did when the call came, which may be long ago
            self._run(live, call)
        else:
            self.place(call)

    def _conclude(self, live: LiveSession, action: machine.Conclude) -> None:
        result = action.result
        if live.network is None or (result.error is None and memoryview(action.payload).nbytes > SETTLED_BYTES):
            self._answers.conclude(action.call, action.work, action.payload)
        else:  # the proxy tells only afterwards what was reached, and whether the sandbox refused it
            self._egress.settle(live.session.number, lambda: self._settled(live, action.call, action.work, result))

    def _settled(self, live: LiveSession, call: Call, work: Work | None, result: frames.Result) -> None:
        """Finish a call in a jail with a network, now that everything reached and denied there is known."""
        if result.error is not None and live.network is not None:
            denied = live.network.denied_since(call.denied_before)
            result = msgspec.structs.replace(result, error=with_denial(result.error, denied))
        receipt = live.receipt(call, self._loop.time(), handler_ms=result.handler_ms)
        self._answers.conclude(call, work, shape(result, receipt, call.tool))

    def _wait(self, live: LiveSession, seconds: float, then: machine.Waiting) -> None:
        live.stop_timer()
        live.timer = self._loop.call_later(seconds, self._waited, live, then)

    def _waited(self, live: LiveSession, then: machine.Waiting) -> None:
        self._perform(self._machine.waited(live.session, then, live.jail.name))

    def _did_not_stop(self, live: LiveSession, call: Call) -> None:
        if not live.jail.dying:
            self._perform(self._machine.did_not_stop(live.session, call))

    def _break_off(self, live: LiveSession, error: ToolError, reason: str) -> None:
        """End a jail that is of no use: all its calls get `error`, and new calls get another jail."""
        if live.session.server:
            self.servers.lost(live.session, error.message)
            self.servers.report(live, last_error=error.message)
        self._perform(self._machine.break_off(live.session, error, reason))

    # --- the start and the end of a jail

    async def _start(self, session: JailSession, call: Call) -> None:
        """Launch the jail of a session, for this call and the others that wait for it."""
        try:
            niceness = self._watch.niceness_of_next(len(self._launching) - 1)
            live = await self._starter.start(session, call, self._live.values(), self, niceness)
        except Exception as error:
            self._not_launched(session, call.tool, error)
            return
        self.adopt(live)
        self._wait(live, CONNECT_S if session.server else machine.LOAD_TIMEOUT_S, "load")
        if isinstance(live.jail, RemoteServer) and live.network is not None:
            self._egress.connect(session.number, live.jail.connector, live.network, partial(self._network_up, live))
        actions = self.pool.launched(session, self._loop.time())
        if self._closing:
            live.jail.kill("the tool host was stopped")
        else:
            self._perform(actions)

    def adopt(self, live: LiveSession) -> None:
        """The jail of a session is there: watch it and listen to it from here on."""
        self._live[live.session.number] = self._by_jail[live.jail] = live
        live.jail.usage.running = live.session.under_way
        self._watch.add(live.jail.usage)

    def _not_launched(self, session: JailSession, tool: ToolSpec, error: Exception) -> None:
        if not isinstance(error, GoondanError | OSError):  # a bug of ours costs these calls, and no place for a jail
            context = {"message": f"a jail of {tool.name} could not be started", "exception": error}
            self._loop.call_exception_handler(context)
        calls, actions = self.pool.failed(session)
        if not self._closing:
            for waiting in calls:
                self._answers.fail(waiting, refusal(why_not(error)))
            self._perform(actions)
        self._note_gone()

    def _jail_gone(self, live: LiveSession, cause: str) -> None:
        session, jail = live.session, live.jail
        live.gone.set()
        live.stop_timer()
        self._watch.remove(jail.usage)
        if session.server and not self._closing:
            self._server_gone(live, cause)
        self._starter.ended(live)
        if live.network is not None:
            self._egress.detach(session.number)
        if (event := live.ended(cause)) is not None:
            self._on_worker(event)
        live.receipts.ended(cause)
        if self._closing:
            session.calls.clear()  # whoever made them decides, with the next incarnation of this host
        if live.sandboxes is not None:
            live.sandboxes.close(cause)  # what they have sent counts
        error, replaced = live.ending(cause, jail), jail.was_replaced
        self._perform(self._machine.gone(session, error, replaced=replaced, closing=self._closing))
        del self._by_jail[jail], self._live[session.number]
        self._note_gone()

    def _server_gone(self, live: LiveSession, cause: str) -> None:
        session, jail = live.session, live.jail
        wanted = bool(session.attached or session.calls)
        why = (session.reason or live.ending(cause, jail)).message
        self.servers.lost(session, why)
        self.servers.report(live, last_error=why if wanted else None, ended=True)

    def _note_gone(self) -> None:
        if self._closing and self.jail_count == 0:
            self._all_gone.set()

    # --- networks and limits

    def jail_found(self, jail: Jail, pid: int) -> None:
        """The namespaces of a jail are there (jail.JailOwner)."""
        live = self._by_jail[jail]
        if live.network is not None:
            self._egress.attach(live.session.number, pid, live.network, partial(self._network_up, live))

    def _network_up(self, live: LiveSession, problem: str | None) -> None:
        """The jail has its network, or cannot have it."""
        if problem is None:
            (live.sandboxes or live.jail).release()
        else:
            message = f"the tool {live.jail.name} has a network grant, and its jail has no network: {problem}"
            self._break_off(live, unavailable(message), "has no network")

    def _network_lost(self, number: int) -> None:
        """The egress proxy has ended. The jail's connections end, and new calls get another jail."""
        live = self._live.get(number)
        if live is not None and isinstance(live.jail, RemoteServer):
            self._break_off(live, unavailable("the egress proxy has ended"), "lost its network")
        elif live is not None:
            if live.session.server:
                self.servers.lost(live.session, "the egress proxy has ended")
            self._perform(self.pool.close(live.session))

    def _network_event(self, number: int, event: Denied | Failed) -> None:
        if (live := self._live.get(number)) is not None:
            self._on_log(live.network_line(event))

    def _over_limit(self, usage: jail_usage.JailUsage, limit: str, names: list[str] | None) -> None:
        """A jail has reached one of its limits, or these calls in it have reached theirs (watch.Report)."""
        live = next((live for live in self._live.values() if live.jail.usage is usage), None)
        if live is None or live.jail.dying:
            return
        error = limits.limit_error(limit, usage.limits)
        if names is None:
            self._break_off(live, error, error.message)
        else:
            self._perform(self._machine.calls_over_limit(live.session, error, names, self._loop.time()))

    # --- from workers

    def worker_frames(self, worker: Worker, frames: list[frames.WorkerFrame]) -> None:
        """Frames of a worker, or of the fork server of a jail (worker.WorkerOwner)."""
        live = self._live_with(worker)
        for frame in frames:
            try:
                self._hear(live, worker, frame)
            except Violation as violation:
                worker.kill(str(violation))
                self.worker_broken(worker, violation)
                return

    def worker_broken(self, worker: Worker, violation: Violation) -> None:
        """A worker broke the protocol: its call, or every call of its jail, ends at once (worker.WorkerOwner)."""
        self._worker_failed(self._live_with(worker), worker, protocol_error(violation, worker), str(violation))

    def worker_printed(self, worker: Worker, text: str) -> None:
        """A jail or one call wrote to its standard output or error (worker.WorkerOwner)."""
        live = self._live_with(worker)
        for line in filter(str.strip, text.splitlines()):
            self._on_log(live.log_line("info", line[:8192], live.own_call(worker)))

    def worker_gone(self, worker: Worker, cause: str) -> None:
        """The last process of a jail or of one call has ended (worker.WorkerOwner)."""
        live = self._live_with(worker)
        if not isinstance(worker, CallSandbox):
            self._jail_gone(live, cause)
        elif worker.name is not None:
            live.session.abandoned.discard(worker.name)
            if not live.jail.dying:  # else all of its calls end alike
                self._worker_failed(live, worker, live.ending(cause, worker), cause)
            live.session.own.pop(worker.name, None)

    def _live_with(self, worker: Worker) -> LiveSession:
        return self._by_jail[worker.jail if isinstance(worker, CallSandbox) else worker]

    def _worker_failed(self, live: LiveSession, worker: Worker, error: ToolError, cause: str) -> None:
        """A worker is of no use any more. The worker of one call ends with that call, any other with its jail."""
        if not isinstance(worker, CallSandbox):
            self._break_off(live, error, cause)
            return
        worker.kill(cause)
        if (call := live.own_call(worker)) is not None:
            self._perform(self._machine.call_failed(live.session, call, error, cause, self._loop.time()))

    def _hear(self, live: LiveSession, worker: Worker, frame: frames.WorkerFrame) -> None:
        """Handle one frame of a worker. The worker of one call can speak of that call only. Raises Violation."""
        if live.sandboxes is not None and worker is live.jail and not isinstance(frame, frames.Ready):
            live.sandboxes.heard(frame)
        elif isinstance(frame, frames.Result):
            self._result(live, worker, frame)
        elif isinstance(frame, frames.Log | frames.Progress):
            name = worker.name if isinstance(worker, CallSandbox) else frame.call_id
            call = live.session.calls.get(name or "")
            if isinstance(frame, frames.Log):
                self._on_log(live.log_line(frame.level, frame.message[:16384], live.own_call(worker) or call))
            elif call is not None:
                self._answers.progress(call, frame)
                self._answers.calls.heard_of(call, self._loop.time())
        elif isinstance(frame, frames.Ask):
            self._ask(live, worker, frame)
        elif isinstance(frame, frames.Ready | frames.LoadFailed):
            self._loaded(live, worker, frame)
        elif isinstance(frame, frames.LoginNeeded) and isinstance(live.jail, RemoteServer):
            self._perform(self.servers.login(live, frame, self._loop.time()))
        elif isinstance(frame, frames.Listed | frames.News) and live.session.server:
            self._perform(self.servers.said(live, frame, self._loop.time()))
        else:
            raise Violation("the worker sent a frame that is none of its")

    def _loaded(self, live: LiveSession, worker: Worker, frame: frames.Ready | frames.LoadFailed) -> None:
        """A worker has loaded its tool, or could not. Raises Violation."""
        if worker.live:
            raise Violation("the worker said `ready` or `load_failed` after `ready`")
        if isinstance(frame, frames.LoadFailed) and isinstance(live.jail, ServerJail):
            live.unloaded = frame.message[:4096]
            live.jail.ends()  # the end of its jail says why, if it has ended
            return
        if isinstance(frame, frames.LoadFailed):
            error = load_error(live.tool, frame.message[:4096])
            self._worker_failed(live, worker, error, "could not be loaded")
            return
        if frame.protocol != frames.WORKER_PROTOCOL:
            raise Violation("the worker said `ready` for another protocol")
        worker.mark_live()
        if worker is live.jail:
            live.stop_timer()
            self._machine.ready(live.session)
            if live.session.server:
                self._perform(self.servers.ready(live, frame, self._loop.time()))
            if (event := live.started()) is not None:
                self._on_worker(event)
        elif live.sandboxes is not None and not live.session.closed:
            with suppress(OSError):  # the next call asks for its own
                live.sandboxes.prepare()  # not before: both would want the processors, and this call is waited for

    def _result(self, live: LiveSession, worker: Worker, result: frames.Result) -> None:
        """A call has ended, or goes on after its answer. Raises Violation."""
        session, now, name = live.session, self._loop.time(), result.call_id
        if isinstance(worker, CallSandbox):
            if name != worker.name:
                raise Violation("the worker sent a result for a call that it does not run")
            if name in session.abandoned:
                worker.leave()
                return
        call = session.calls.get(name)
        if call is None:
            self._perform(self._machine.late_result(session, name))
            return
        if isinstance(call, Listing):
            raise Violation("the worker sent a result for a listing")
        said = result.error
        if said is not None and said.code == servers.GONE and isinstance(live.jail, ServerJail):
            live.jail.ends()  # the end of its jail says why, and answers the call
            return
        if said is not None:
            said = own_error(said, call)
            result = msgspec.structs.replace(result, error=live.explained(said))
        payload = shape(result, live.receipt(call, now, handler_ms=result.handler_ms), call.tool)
        if result.continues:
            self._machine.check_continues(session, call, result)
            begun: Work | ToolError
            if session.is_full_of_pending:
                begun = too_much_pending(f"this tool's jail, limit {MAX_PENDING_PER_JAIL}")
            else:
                begun = self._answers.begin_work(call, result.handle or "")
            self._perform(self._machine.goes_on(session, call, begun, payload, now))
            return
        live.jail.usage.answered = True
        # A large output harms nobody.
        spent = said is not result.error and result.error is not None and result.error.code == "E_TOOL_LIMIT"
        concluded, freed = self._machine.result(session, call, result, payload, spent=spent, now=now)
        self._conclude(live, concluded)
        if freed:
            self._perform(freed)
        if not session.calls:
            self._watch.rest(live.jail.usage)

    def _ask(self, live: LiveSession, worker: Worker, ask: frames.Ask) -> None:
        """A handler, or the worker of a server, asks something of the bus. Raises Violation."""
        if not ask.call_id and isinstance(live.jail, RemoteServer):
            agent = live.session.agent if live.session.agent in live.tool.servers else None
            to_worker = partial(self._reply, live, worker, None)
            self._asking.ask_for_server(live.session.number, live.tool.name, agent, ask, to_worker)
            return
        own = live.own_call(worker)
        if own is None and isinstance(worker, CallSandbox):
            raise Violation("the worker asked in the name of a call that it does not run")
        call = self._machine.asker(live.session, ask.op, ask.call_id, own)
        reply = partial(self._reply, live, worker, call)
        if call is None:
            reply(call_ended(ask))
        else:
            self._asking.ask(call, ask, reply)

    def _reply(self, live: LiveSession, worker: Worker, call: Call | None, answer: frames.Answer) -> None:
        if call is not None and answer.error is not None and answer.error.code is not None:
            call.heard |= {answer.error.code}
        if live.jail.dying or worker.dying:
            return
        if worker.unread <= MAX_UNREAD:
            worker.send(answer)
        else:
            worker.broken(Violation("the worker does not read what it has asked for"))
