"""The shell around machine.py: jails are started and ended here, and hear and are told what the machine decides.

What a jail sees is the policy's affair, how one lives jail.py's. Everything that comes out of one is checked against
what its session was given: a Violation ends it, or only the processes of the call that it came from.

Rules.
- Every call that is placed here ends in exactly one result, whatever its jail does.
- Without a sandbox nothing runs: each call is answered with the reason.

Source: docs/design/sandbox.md section 5; schemas/WORKER.md; docs/decisions/081.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from schemas.errors import GoondanError, error_payload, tool_error
from schemas.frames import Frame, ToolError
from schemas.launch import ToolHostSpec, ToolSpec
from schemas.worker_frames import (
    WORKER_PROTOCOL,
    Answer,
    Ask,
    Ended,
    Exit,
    Forked,
    LoadFailed,
    Log,
    Message,
    Progress,
    Ready,
    Result,
    WorkerFrame,
)
from toolhost.calls.answers import Answers, too_much_pending
from toolhost.calls.asking import Asking
from toolhost.calls.asks import ended as call_ended
from toolhost.calls.call_registry import Call
from toolhost.calls.denials import with_denial
from toolhost.calls.messages import MessageCache, SentMessages
from toolhost.calls.pending import PENDING_S, Work
from toolhost.calls.results import refusal, shape
from toolhost.egress.messages import Denied, Failed
from toolhost.jails.cells import Cell, Cells
from toolhost.jails.jail import Jail
from toolhost.jails.network import Egress
from toolhost.jails.sized_workdirs import Claim, SizedWorkdirs
from toolhost.jails.stays import Stays
from toolhost.limits.decide import limit_error
from toolhost.news import LogLine, WorkerNews
from toolhost.policy.hiding import Hiding
from toolhost.policy.plan import forks
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.sessions import machine, wording
from toolhost.sessions.live import LiveSession
from toolhost.sessions.machine import LOAD_TIMEOUT_S, Action, Machine, Waiting
from toolhost.sessions.pool import Assign, End, Start
from toolhost.sessions.session import MAX_PENDING_PER_JAIL, Session, key_of
from toolhost.sessions.starting import last_one_ended, load, start_jail, why_not
from toolhost.untrusted import Violation
from toolhost.watch.jail_usage import JailUsage
from toolhost.watch.watch import Watch

#: Results up to this size wait for news of the network; larger ones would be looked through twice (bytes).
SETTLED_BYTES: Final = 65536
#: Progress frames of one call that are passed on (seconds between two).
PROGRESS_S: Final = 0.05
#: Answers that may wait for a worker which does not read (bytes): four of the largest.
MAX_UNREAD: Final = 16 << 20
#: How long is waited for the last process of jails that were killed (seconds): it takes milliseconds.
CLOSE_S: Final = 3.0


class Sessions:
    """All sessions of one tool host (jail.Owner, cells.Owner). Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        messages: MessageCache,
        asking: Asking,
        *,
        spec: ToolHostSpec,
        powers: Powers,
        send: Callable[[Frame], bool],
        on_log: Callable[[LogLine], None],
        on_worker: Callable[[WorkerNews], None],
        environment: Mapping[str, str],
        stays: Stays | None,
        sized: SizedWorkdirs | None,
    ) -> None:
        """Calls wait until `open`."""
        self._loop = loop
        self._answers = answers
        self._messages = messages
        self._asking = asking
        self._spec = spec
        self._facts: HostFacts | None = None
        self._powers = powers
        self._unavailable: GoondanError | None = None
        self._send_frame = send
        self._on_log = on_log
        self._on_worker = on_worker
        self._environment = environment
        self._stays = Stays(None, powers) if stays is None else stays
        self._sized = SizedWorkdirs(powers) if sized is None else sized
        self._machine = Machine(spec.max_jails)
        self.pool = self._machine.pool
        self._live: dict[int, LiveSession] = {}  # by the numbers of sessions whose jails are there
        self._by_jail: dict[Jail, LiveSession] = {}
        self._by_usage: dict[JailUsage, LiveSession] = {}
        self._by_pid: dict[int, LiveSession] = {}  # those with a network, by their jails' pids
        self._egress = Egress(loop, powers.launcher, self._network_lost, self._network_news)
        self._watch = Watch(loop, self._over_limit, powers.launcher.put_first)
        self._held: list[Call] | None = []  # calls that came before it was known whether jails can be made
        self._launching: set[asyncio.Task[None]] = set()
        self._closing = False
        self._all_gone = asyncio.Event()  # set once the tool host ends and no jail is left

    # --- life

    def configure(self, spec: ToolHostSpec, changed: Iterable[str]) -> None:
        """Jails of tools that changed (by name) finish what they run."""
        self._spec = spec
        self._sized.configure(spec)
        self.pool.max_jails = max(1, spec.max_jails)
        names = frozenset(changed)
        for session in self.pool.sessions():
            if session.key[0] in names:
                self._perform(self.pool.close(session))

    def open(self, facts: HostFacts | None, unavailable: GoondanError | None = None) -> None:
        """It is known now whether jails can be made: run what has waited for that.

        `facts` None: no jail can be made, for the reason `unavailable`.
        """
        self._facts, self._unavailable = facts, unavailable
        held, self._held = self._held or [], None
        for call in held:
            if call.state != "done":
                self.place(call)

    def fork_calls(self) -> None:
        """The walls around one call hold inside of a jail: from now on calls of a tool that wants it share one."""
        if self._facts is not None:
            self._facts = msgspec.structs.replace(self._facts, nests=True)

    async def close(self) -> None:
        """Kill every jail and wait until all of their processes are gone, CLOSE_S at most. Calls are not answered."""
        self._closing = True
        for live in list(self._live.values()):  # what is being launched is killed when it is there
            live.jail.kill("the tool host was stopped")
        self._note_gone()
        for ended in (self._all_gone.wait, self._sized.settled, self._powers.offload.settled):
            with suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the end that it waits for.
                async with asyncio.timeout(CLOSE_S):
                    await ended()
        self._egress.close()
        self._watch.close()

    async def end_all_of(self, owner: tuple[str, str]) -> None:
        """End the jails of an agent instance, and wait until their last processes are gone; shared ones are not its."""
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

    @property
    def jail_count(self) -> int:
        """Jails whose processes are not all gone."""
        return len(self.pool.sessions())

    def live_of(self, session: Session) -> LiveSession:
        """What there is of a session whose jail is there."""
        return self._live[session.number]

    def tick(self) -> None:
        """Now and then: retire what is idle, end what runs for too long, sweep what calls have left behind."""
        self._perform(self.pool.retire(self._loop.time() - self._spec.jail_idle_s))
        self._stays.beat()
        there = list(self._live.values())
        for live in there:
            self._is_blind(live)
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
        key = call.key = key_of(call, forks=self._facts is not None and forks(call.tool, self._facts))
        session = self.pool.find(key)
        live = None if session is None else self._live[session.number]
        if session is not None and live is not None and live.jail.dying:
            self._perform(self.pool.close(session))  # its worker has ended, only its last process has not
        elif session is not None and live is not None and self._is_guarded(live):
            self._run(live, call)
            return
        self._perform(self.pool.place(key, call))

    def run_out(self, call: Call) -> None:
        """The call has reached its deadline."""
        live = self._live.get(call.session)
        dying = live is not None and live.jail.dying
        self._perform(self._machine.run_out(call, self._loop.time(), dying=dying))

    def cancel(self, call: Call) -> None:
        """Nobody wants the call any more: its handler is asked to stop."""
        self._perform(self._machine.cancel(call, self._loop.time()))

    def _is_guarded(self, live: LiveSession) -> bool:
        """Whether what was hidden from this jail, or read-only for it, still is. If not, somebody replaced it: a jail
        that sees what it must not ends, and every jail that can write there takes no more calls.
        """
        if not self._is_blind(live):
            return False
        folders = live.jail.plan.request.named
        if self._stays.intact(folders):
            return not live.session.closed
        for other in list(self._live.values()):
            if not set(folders).isdisjoint(other.jail.plan.request.named):
                self._perform(self.pool.close(other.session))
        return False

    def _is_blind(self, live: LiveSession) -> bool:
        """Whether a jail still sees nothing of what is hidden from it; one that does is ended."""
        seen = live.hiding.broken()
        if seen is not None and not live.jail.dying:
            reason = f"{seen}, which no tool may see, was made or replaced while the jail could see what it lies in"
            self._break_off(live, tool_error("E_SANDBOX_DENIED", reason, name="SandboxDenied"), reason)
        return seen is None

    def _run(self, live: LiveSession, call: Call) -> None:
        """Hand a call to its jail."""
        session, now = live.session, self._loop.time()
        self._machine.enter(session, call, now)
        call.denied_before = 0 if live.network is None else live.network.denied_count
        worker: Jail | Cell = live.jail
        sent = live.messages
        if live.cells is not None:
            try:
                worker, sent = live.cells.enter(call.worker_call_id), SentMessages()
            except OSError as error:
                self._perform(self._machine.not_started(session, call, error.strerror or str(error), now))
                return
        message_id = None
        if call.message_id is not None:
            name = (call.agent, call.instance_key, call.message_id)
            message_id, is_new = sent.name(name, self._messages.get(name))
            if is_new:
                worker.send(Message(message_id or "", Raw(self._messages.get(name) or b"\xc0")))
        worker.send(wording.worker_call(live, call, message_id, now))
        if live.cells is not None and not session.closed:
            with suppress(OSError):  # the next call asks for its own
                live.cells.prepare()
        self._watch.wake()

    # --- what the machine decides

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case machine.Conclude():  # first, since nearly every call ends so
                    self._conclude(action)
                case Assign() | Start() | machine.Again() | End():
                    self._place_or_end(action)
                case machine.Finish():
                    self._answers.finish(action.call, action.payload)
                case machine.Answer():
                    self._answer_call(action)
                case machine.Tell() | machine.LeaveCall() | machine.EndCall():
                    self._tell_call(action)
                case _:
                    self._tell_jail(action)

    def _place_or_end(self, action: Assign | Start | machine.Again | End) -> None:
        """What the pool decided, and calls that run once more."""
        if isinstance(action, Assign):
            if action.call.state == "done":
                return
            live = self._live.get(action.session.number)
            if live is not None and self._is_guarded(live):  # it was when the call came, which may be long ago
                self._run(live, action.call)
            else:
                self.place(action.call)
        elif isinstance(action, Start):
            launching = self._loop.create_task(self._start(action.session, action.call))
            self._launching.add(launching)
            launching.add_done_callback(self._launching.discard)
        elif isinstance(action, machine.Again):
            self._asking.drop(action.call)
            self.place(action.call)
        else:
            live = self._live.get(action.session.number)
            if live is not None and not live.jail.dying:
                self._perform(self._machine.end(action.session))

    def _conclude(self, action: machine.Conclude) -> None:
        live, result = self._live[action.session.number], action.result
        if live.network is None or (result.error is None and memoryview(action.payload).nbytes > SETTLED_BYTES):
            self._answers.conclude(action.call, action.work, action.payload)
        else:  # what was reached, and whether it was the sandbox that refused, the proxy says after the fact
            self._egress.settle(live.jail.pid, lambda: self._settled(live, action.call, action.work, result))

    def _settled(self, live: LiveSession, call: Call, work: Work | None, result: Result) -> None:
        """Finish a call in a jail with a network, now that everything reached and denied there is known."""
        if result.error is not None and live.network is not None:
            denied = live.network.denied_since(call.denied_before)
            result = msgspec.structs.replace(result, error=with_denial(result.error, denied))
        self._answers.conclude(call, work, shape(result, live.receipt(call, self._loop.time()), call.tool))

    def _answer_call(self, action: machine.Answer) -> None:
        live = None if action.session is None else self._live.get(action.session.number)
        receipt = None if live is None else live.receipt(action.call, self._loop.time(), action.cause)
        self._answers.fail(action.call, action.error, receipt, action.work)

    def _tell_call(self, action: machine.Tell | machine.LeaveCall | machine.EndCall) -> None:
        """What a call's worker is told, or the processes of its own."""
        live = self._live.get(action.session.number)
        if live is None:
            return
        cell = None if live.cells is None else live.cells.of(action.call.worker_call_id)
        if isinstance(action, machine.Tell):
            if live.cells is None:
                live.jail.send(action.frame)
            elif cell is not None:
                cell.send(action.frame)
        elif cell is not None:
            if isinstance(action, machine.EndCall):
                cell.kill(action.reason)
            else:
                cell.leave()

    def _tell_jail(
        self, action: machine.Leave | machine.Kill | machine.Note | machine.Wait | machine.WaitForStop
    ) -> None:
        live = self._live.get(action.session.number)
        if live is None:
            return
        if isinstance(action, machine.Kill):
            live.jail.kill(action.reason)
        elif isinstance(action, machine.Leave):
            live.jail.send(Exit())
        elif isinstance(action, machine.Note):
            live.ledger.ended(action.cause)
        elif isinstance(action, machine.Wait):
            self._wait(live, action.seconds, action.then)
        else:
            self._loop.call_later(action.seconds, self._did_not_stop, live, action.call)

    def _wait(self, live: LiveSession, seconds: float, then: Waiting) -> None:
        live.stop_timer()
        live.timer = self._loop.call_later(seconds, self._waited, live, then)

    def _waited(self, live: LiveSession, then: Waiting) -> None:
        self._perform(self._machine.waited(live.session, then, live.jail.name))

    def _did_not_stop(self, live: LiveSession, call: Call) -> None:
        if not live.jail.dying:
            self._perform(self._machine.did_not_stop(live.session, call))

    def _break_off(self, live: LiveSession, error: ToolError, reason: str) -> None:
        """End a jail that is good for nothing; all of its calls get `error`, and new ones another jail."""
        self._perform(self._machine.break_off(live.session, error, reason))

    # --- the start of a jail

    async def _start(self, session: Session, call: Call) -> None:
        """Launch the jail of a session, for this call and whoever else waits for it."""
        tool = call.tool
        claim: Claim | None = None
        try:
            if self._facts is None:
                raise GoondanError(error_payload("E_SANDBOX_UNAVAILABLE", "no jail can be started"))
            await last_one_ended(self._live.values(), call.workdir, CLOSE_S)
            claim = await self._sized.claim(tool, call.workdir_base or call.workdir, self._spec)
            niceness = self._watch.niceness_of_next(len(self._launching) - 1)
            jail, hiding = await start_jail(
                tool, call.workdir, self._spec, self._facts, self._powers, self._stays, owner=self, niceness=niceness,
                base=call.workdir_base, sized=claim is not None and claim.sized,
            )  # fmt: skip
        except Exception as error:
            self._sized.release(claim)
            self._not_launched(session, tool, error)
            return
        alone = tool.sandbox.isolation != "shared"
        # A shared jail is everybody's: whatever was asked for, it has none.
        live = self.adopt(session, jail, tool.sandbox.permissions if alone else (), hiding, claim)
        load(live, tool, self._environment, self, self._loop)
        self._wait(live, LOAD_TIMEOUT_S, "load")
        actions = self.pool.launched(session, self._loop.time())
        if self._closing:
            jail.kill("the tool host was stopped")
        else:
            self._perform(actions)

    def adopt(
        self, session: Session, jail: Jail, permissions: Sequence[str], hiding: Hiding, claim: Claim | None = None
    ) -> LiveSession:
        """The session's jail is there: from here on it is watched and heard."""
        session.permissions = permissions
        live = self._live[session.number] = LiveSession(session, jail, hiding, claim)
        self._by_jail[jail] = self._by_usage[jail.usage] = live
        jail.usage.running = session.under_way
        self._watch.add(jail.usage)
        return live

    def _not_launched(self, session: Session, tool: ToolSpec, error: Exception) -> None:
        if not isinstance(error, GoondanError | OSError):  # a bug of ours costs these calls, and no place for a jail
            context = {"message": f"a jail of {tool.name} could not be started", "exception": error}
            self._loop.call_exception_handler(context)
        calls, actions = self.pool.failed(session)
        if not self._closing:
            for waiting in calls:
                self._answers.fail(waiting, refusal(why_not(error)))
            self._perform(actions)
        self._note_gone()

    # --- networks and limits

    def jail_found(self, jail: Jail, pid: int) -> None:
        """The namespaces of a jail are there (jail.Owner)."""
        live = self._by_jail[jail]
        if live.network is not None:
            self._by_pid[jail.pid] = live
            self._egress.attach(jail.pid, pid, live.network, partial(self._network_up, live))

    def _network_up(self, live: LiveSession, problem: str | None) -> None:
        """The jail has its network, or cannot have it."""
        if problem is None:
            (live.cells or live.jail).release()
            return
        message = f"the tool {live.jail.name} has a network grant, and its jail has no network: {problem}"
        error = tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable")
        self._break_off(live, error, "has no network")

    def _network_lost(self, number: int) -> None:
        """The egress proxy has ended. What runs in the jail sees its connections end; new calls get another one."""
        if (live := self._by_pid.get(number)) is not None:
            self._perform(self.pool.close(live.session))

    def _network_news(self, number: int, news: Denied | Failed) -> None:
        if (live := self._by_pid.get(number)) is not None:
            self._on_log(wording.network_line(live, news))

    def _over_limit(self, usage: JailUsage, limit: str, names: list[str] | None) -> None:
        """A jail has reached one of its limits, or these calls in it one of theirs (watch.Report)."""
        live = self._by_usage.get(usage)
        if live is None or live.jail.dying:
            return
        error = limit_error(limit, usage.limits)
        if names is None:
            self._break_off(live, error, error.message)
        else:
            self._perform(self._machine.calls_over_limit(live.session, error, names, self._loop.time()))

    # --- from the worker of a jail

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        """Frames of a worker (jail.Owner)."""
        live = self._by_jail[jail]
        for frame in frames:
            try:
                if live.cells is not None:
                    self._from_server(live, live.cells, frame)
                elif type(frame) is Result:
                    self._result(live, frame)
                else:
                    self._news(live, frame)
            except Violation as violation:
                self.jail_broken(jail, violation)
                return

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        """The worker broke the protocol: its calls end here and now (jail.Owner)."""
        self._break_off(self._by_jail[jail], wording.protocol_error(violation, "its jail was ended"), str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        """Something came over the jail's standard output or error (jail.Owner)."""
        for line in wording.printed_lines(self._by_jail[jail], text):
            self._on_log(line)

    def jail_gone(self, jail: Jail, cause: str) -> None:
        """The last process of a jail has ended (jail.Owner)."""
        live = self._by_jail[jail]
        live.gone.set()
        live.stop_timer()
        del self._by_usage[jail.usage]
        self._sized.release(live.claim)
        self._watch.remove(jail.usage)
        self._powers.offload.submit(partial(self._stays.end, jail.plan.request.named))
        if live.network is not None:
            self._by_pid.pop(jail.pid, None)
            self._egress.detach(jail.pid)
        if (news := live.ended(cause)) is not None:
            self._on_worker(news)
        live.ledger.ended(cause)
        if self._closing:
            live.session.calls.clear()  # whoever made them decides, with the next incarnation of this host
        if live.cells is not None:
            live.cells.close(cause)  # what they have sent counts
        replaced = jail.was_replaced
        self._perform(self._machine.gone(live.session, live.ending(cause), replaced=replaced, closing=self._closing))
        del self._by_jail[jail], self._live[live.session.number]
        self._note_gone()

    def _note_gone(self) -> None:
        if self._closing and self.jail_count == 0:
            self._all_gone.set()

    def _news(self, live: LiveSession, frame: WorkerFrame, cell: Cell | None = None) -> None:
        """Anything but a result, from a jail's worker or from that of one call. Raises Violation."""
        session, worker = live.session, cell or live.jail
        if isinstance(frame, Log | Progress):
            own = None if cell is None else session.own.get(cell.name or "")
            call = session.calls.get((frame.call_id or "") if cell is None else cell.name or "")
            if isinstance(frame, Log):
                self._on_log(wording.log_line(live, own or call, frame))
            elif call is not None:
                self._progress(call, frame)
        elif isinstance(frame, Ask):
            self._ask(live, frame, cell)
        elif isinstance(frame, Ready):
            if worker.live or frame.protocol != WORKER_PROTOCOL:
                raise Violation("the worker said `ready` twice, or for another protocol")
            self._ready(live, cell)
        elif isinstance(frame, LoadFailed):
            if worker.live:
                raise Violation("the worker said `load_failed` after `ready`")
            error = wording.load_error(live.jail.name, frame)
            if cell is None:
                self._break_off(live, error, "could not be loaded")
            else:
                self._call_failed(cell, error, "could not be loaded")
        else:
            raise Violation("the worker sent a frame that is none of its")

    def _from_server(self, live: LiveSession, cells: Cells, frame: WorkerFrame) -> None:
        """From the fork server of a jail. Raises Violation."""
        if isinstance(frame, Ended):
            cells.ended(frame)
        elif isinstance(frame, Forked):
            cells.forked(frame)
        elif isinstance(frame, Ready) and not live.jail.live and frame.protocol == WORKER_PROTOCOL:
            self._ready(live)
        else:
            raise Violation("the fork server sent a frame that is none of its")

    def _ready(self, live: LiveSession, cell: Cell | None = None) -> None:
        if cell is not None:
            cell.live = True
            return
        live.jail.mark_live()
        live.stop_timer()
        self._machine.ready(live.session)
        if (news := live.started()) is not None:
            self._on_worker(news)

    def _result(self, live: LiveSession, result: Result) -> None:
        """A call has ended, or goes on after its answer. Raises Violation."""
        session, now = live.session, self._loop.time()
        call = session.calls.get(result.call_id)
        if call is None:
            self._perform(self._machine.late_result(session, result.call_id))
            return
        said = result.error
        if said is not None:
            result = msgspec.structs.replace(result, error=live.explained(said))
        payload = shape(result, live.receipt(call, now), call.tool)
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
        self._perform(self._machine.result(session, call, result, payload, spent=spent, now=now))

    def _progress(self, call: Call, progress: Progress) -> None:
        """A call is under way; not every report is passed on."""
        now = self._loop.time()
        if now - call.progress_at >= PROGRESS_S:
            call.progress_at = now
            self._send_frame(wording.progress_frame(call, progress))

    def _ask(self, live: LiveSession, ask: Ask, cell: Cell | None = None) -> None:
        """A handler asks something of the bus; one with a cell of its own, in the name of its own call.

        Raises Violation.
        """
        own = None if cell is None else live.session.own[cell.name or ""]
        call = self._machine.asker(live.session, ask.call_id, own)
        if call is None:
            self._answer(live, cell, call_ended(ask))
        else:
            self._asking.ask(call, ask, partial(self._answer, live, cell))

    def _answer(self, live: LiveSession, cell: Cell | None, answer: Answer) -> None:
        worker = cell or live.jail
        if live.jail.dying or worker.dying:
            return
        if worker.unread <= MAX_UNREAD:
            worker.send(answer)
            return
        message = "the worker does not read what it has asked for"
        if cell is not None:
            cell.broken(Violation(message))
        else:
            self._break_off(live, tool_error("E_TOOL_CRASHED", message, name="ToolProtocolError"), message)

    # --- from the worker of one call, whose faults end that call alone

    def cell_frames(self, cell: Cell, frames: list[WorkerFrame]) -> None:
        """Frames of the worker of one call (cells.Owner). Whatever it names, it can only speak of that one."""
        live, name = self._by_jail[cell.jail], cell.name or ""
        for frame in frames:
            try:
                if type(frame) is not Result:
                    self._news(live, frame, cell)
                elif frame.call_id != name:
                    raise Violation("the worker sent a result for a call that it does not run")
                elif name in live.session.abandoned:
                    cell.leave()
                    return
                else:
                    self._result(live, frame)
            except Violation as violation:
                cell.broken(violation)
                return

    def cell_broken(self, cell: Cell, violation: Violation) -> None:
        """The worker of one call broke the protocol: that call ends here and now (cells.Owner)."""
        self._call_failed(cell, wording.protocol_error(violation, "its processes were ended"), str(violation))

    def cell_printed(self, cell: Cell, text: str) -> None:
        """Something came over the standard output or error of one call (cells.Owner)."""
        live = self._by_jail[cell.jail]
        for line in wording.printed_lines(live, text, live.session.own.get(cell.name or "")):
            self._on_log(line)

    def cell_gone(self, cell: Cell, cause: str) -> None:
        """The last process of one call has ended (cells.Owner)."""
        live = self._by_jail.get(cell.jail)
        if live is None or cell.name is None:
            return
        live.session.abandoned.discard(cell.name)
        if not cell.jail.dying:  # else all of its calls end alike
            self._call_failed(cell, live.ending(cause, cell), cause)
        live.session.own.pop(cell.name, None)

    def _call_failed(self, cell: Cell, error: ToolError, cause: str) -> None:
        """End a call with `error` unless it has its result, and all of its processes; its jail goes on."""
        session = self._by_jail[cell.jail].session
        cell.kill(cause)
        if (call := session.own.get(cell.name or "")) is not None:
            self._perform(self._machine.call_failed(session, call, error, cause, self._loop.time()))
