"""The tool host's decisions about calls, put into effect: frames in, jails started and ended, results out.

It holds no socket of the bus: `send` is how results leave, `on_frame` how calls arrive, so that it runs the same with
a link, in a test, and in front of a fake. Which call goes where is pool.py's affair, what a callId means calls.py's,
what a jail sees policy.py's.

Rules.
- Every call ends in exactly one result, whatever its jail does.
- A call that reaches its deadline ends its jail. The others in that jail get SIBLING_GRACE_S to finish; after that
  they run again if their export is idempotent, and else their outcome is unknown.
- A cancelled call is answered at once. Its handler is asked to stop, and after CANCEL_GRACE_S its jail ends like that.
- Without a sandbox nothing runs: each call is answered with the reason, and the host goes on serving.

Source: delivery.md section 5; sandbox.md section 5; design sections 6 and 7.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from schemas.codec import from_raw
from schemas.errors import GoondanError, error_payload, tool_error
from schemas.frames import Frame, ToolCallPayload, ToolError
from schemas.hosts import read_network
from schemas.launch import DEFAULT_ERROR_LIMIT, ToolHostSpec, ToolSpec
from schemas.worker_frames import (
    WORKER_PROTOCOL,
    Cancel,
    Exit,
    LoadFailed,
    Log,
    Message,
    Progress,
    Ready,
    Result,
    WorkerFrame,
)
from toolhost.calls import Call, CallBook, Kept
from toolhost.channel import Violation
from toolhost.completions import Announce, Completions, is_polling
from toolhost.denials import with_denial
from toolhost.egress.messages import Denied, Failed
from toolhost.exports import Exports, Refused, arguments
from toolhost.facts import look_up
from toolhost.jail import Jail
from toolhost.limits.account import Account
from toolhost.limits.decide import limit_error
from toolhost.limits.watch import Watch
from toolhost.messages import MessageCache
from toolhost.network import Egress, JailNetwork
from toolhost.pending import PENDING_S, Promise, Work
from toolhost.policy import HostFacts, plan
from toolhost.pool import Action, Assign, Pool, Slot, Start, key_of
from toolhost.results import error_result, output_limit, refusal, shape
from toolhost.tenancy import LogLine, Tenancy, WorkerNews, ending, explained, receipt, started, sweep, under_way
from toolhost.wording import log_line, network_line, progress_frame, worker_call, worker_init

#: What siblings of a call that ran out of time may still take (seconds): most calls take less.
SIBLING_GRACE_S: Final = 5.0
#: What a cancelled handler may take to stop before its jail is ended (seconds).
CANCEL_GRACE_S: Final = 2.0
#: What a worker that was told to leave may take (seconds): enough to run exit handlers, short for whoever waits.
EXIT_GRACE_S: Final = 0.3
#: What a tool's module may take to load when none of its calls has a deadline (seconds).
LOAD_TIMEOUT_S: Final = 60.0
#: How often idle jails, strays and kept results are looked at (seconds).
TICK_S: Final = 1.0
#: Results up to this size wait for news of the network; larger ones would be looked through twice (bytes).
SETTLED_BYTES: Final = 65536
#: Progress frames of one call that are passed on (seconds between two).
PROGRESS_S: Final = 0.05
#: How long `close` waits for the last process of the last jail (seconds); they were all killed at once.
CLOSE_S: Final = 3.0


class Host:
    """Serves calls of the tools in a ToolHostSpec. Use from the loop's thread only."""

    def __init__(
        self,
        spec: ToolHostSpec,
        facts: HostFacts | None,
        *,
        send: Callable[[Frame], bool],
        on_log: Callable[[LogLine], None] = lambda line: None,
        on_worker: Callable[[WorkerNews], None] = lambda news: None,
        announce: Announce = lambda event, told: None,
        remember: Callable[[list[Promise]], None] = lambda promises: None,
        environment: Mapping[str, str] | None = None,
        unavailable: GoondanError | None = None,
    ) -> None:
        """`facts` None means that no jail can be made, for the reason `unavailable`. Calls wait until `open`.

        `announce` and `remember`: see completions.py.
        """
        self._loop = asyncio.get_running_loop()
        self._send_frame = send
        self._on_log = on_log
        self._on_worker = on_worker
        self._environment = os.environ if environment is None else environment
        self._facts = facts
        self._unavailable = unavailable
        self._book = CallBook()
        self.completions = Completions(finish=self._finish, announce=announce, remember=remember)
        self._messages = MessageCache()
        self._pool = Pool(spec.max_jails)
        self._egress = Egress(self._loop, self._network_lost, self._network_news)
        self._networked: dict[int, Tenancy] = {}
        self._watch = Watch(self._loop, self._over_limit)
        self._held: list[Call] | None = []  # calls that came before it was known whether jails can be made
        self._next_jail_id = 0
        self._tools: dict[str, ToolSpec] = {}
        self._generations: dict[str, str] = {}
        self._generation = 0
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_at = float("inf")
        self._ticker: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_gone: asyncio.Future[None] | None = None
        self.configure(spec)

    # --- life

    def configure(self, spec: ToolHostSpec) -> None:
        """Serve the tools of `spec` from now on; jails of tools that changed finish what they run."""
        before = self._tools
        self.spec = spec
        self._generation += 1
        self._tools = {tool.name: tool for tool in spec.tools}
        for name, tool in self._tools.items():
            if before.get(name) != tool:
                self._generations[name] = str(self._generation)
        self._exports = Exports(spec, self._generations)
        self._pool.max_jails = max(1, spec.max_jails)
        changed = {name for name, tool in before.items() if self._tools.get(name) != tool}
        for slot in self._pool.slots():
            if slot.key[0] in changed:
                self._perform(self._pool.close(slot))

    def open(self, facts: HostFacts | None, unavailable: GoondanError | None = None) -> None:
        """It is known now whether jails can be made: run what has waited for that."""
        self._facts, self._unavailable = facts, unavailable
        held, self._held = self._held or [], None
        for call in held:
            if call.state != "done":
                self._place(call)

    async def close(self) -> None:
        """Kill every jail and wait until all of their processes are gone, CLOSE_S at most. Calls are not answered."""
        self._closing = True
        for timer in (self._deadline_timer, self._ticker):
            if timer is not None:
                timer.cancel()
        slots = [slot for slot in self._pool.slots() if slot.jail is not None]
        if slots:
            self._all_gone = self._loop.create_future()
            for slot in slots:
                slot.jail.jail.kill("the tool host was stopped")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone, CLOSE_S)
        self._egress.close()
        self._watch.close()

    @property
    def jail_count(self) -> int:
        """Jails whose processes are not all gone."""
        return len(self._pool.slots())

    def call_ids(self) -> list[str]:
        """What `hello` names: calls that are open here, and results that nobody has acknowledged."""
        return self._book.known_ids()

    def resend(self) -> None:
        """After a reconnect: results that may have been lost on the way."""
        for kept in self._book.kept():
            self._send_kept(kept)

    # --- from the bus

    def on_frame(self, frame: Frame) -> None:
        """A frame from the broker. Never raises; what cannot be served is answered or dropped."""
        kind = frame.type
        if kind == "tool.call":
            if self._closing:
                return  # the next incarnation of this host answers, or the broker
            try:
                self._tool_call(frame)
            except Refused as refused:
                self._refuse(frame, refused.error)
            except GoondanError as error:
                self._refuse(frame, refusal(error.info))
        elif kind == "tool.cancel":
            if frame.call_id is not None:
                self._cancel(frame.call_id)
        elif kind == "ack" and frame.stage == "result":
            self._book.acknowledge(frame.calls or ([frame.call_id] if frame.call_id else []))

    def _tool_call(self, frame: Frame) -> None:
        call_id, agent, instance_key = frame.call_id, frame.from_, frame.instance_key
        if not call_id or agent is None or instance_key is None:
            raise GoondanError(error_payload("E_FRAME_INVALID", "a tool.call needs callId, from and instanceKey"))
        known = self._book.get(call_id)
        if known is not None:
            self._repeat(known, (agent, instance_key))
            return
        entry = self._exports.find(frame.tool, frame.from_)
        if entry is None:
            raise GoondanError(error_payload("E_TOOL_NOT_FOUND", f"there is no tool {str(frame.tool)[:100]!r} here"))
        payload = from_raw(frame.payload, ToolCallPayload)
        args = arguments(entry, str(frame.tool), payload.args)
        tool = entry.tool
        milliseconds = tool.sandbox.limits.wall_seconds * 1000
        if frame.deadline_ms is not None and frame.deadline_ms < milliseconds:
            milliseconds = max(0, frame.deadline_ms)
        now = self._loop.time()
        if payload.message is not None and payload.message_id is not None:
            self._messages.put((agent, instance_key, payload.message_id), bytes(payload.message))
        call = Call(
            id=call_id,
            agent=agent,
            instance_key=instance_key,
            tool=tool,
            export=entry.export,
            args=args,
            turn_id=payload.turn_id,
            tool_call_id=payload.tool_call_id,
            message_id=payload.message_id,
            workdir=None if entry.isolation == "shared" else frame.workdir,
            deadline=now + milliseconds / 1000,
            allowed_ms=milliseconds,
            generation=entry.generation,
        )
        self._book.open(call)
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        if call.deadline is not None and call.deadline < self._deadline_at:
            self._set_deadline_timer()
        if is_polling(tool):
            self.completions.poll(call)
        else:
            self._place(call)

    def _repeat(self, known: Call | Kept, owner: tuple[str, str]) -> None:
        """A callId that was here before: attach, or the same result again."""
        if known.owner != owner:
            raise GoondanError(error_payload("E_FORBIDDEN", "the callId is in use"))
        if isinstance(known, Kept):
            self._send_kept(known)

    def _refuse(self, frame: Frame, error: ToolError) -> None:
        """Answer a call that was never taken on."""
        entry = self._exports.find(frame.tool, frame.from_)
        limit = DEFAULT_ERROR_LIMIT if entry is None else entry.tool.error_message_limit
        payload = error_result(error, limit)
        self._send_result(frame.call_id or "", frame.from_, frame.instance_key, payload)

    # --- placing

    def _place(self, call: Call) -> None:
        if self._held is not None:
            self._held.append(call)
            return
        if self._unavailable is not None:
            self._fail(call, refusal(self._unavailable.info))
            return
        key = key_of(call)
        slot = self._pool.find(key)
        if slot is not None and slot.jail.jail.dying:
            self._perform(self._pool.close(slot))  # its worker has ended, only its last process has not
            slot = None
        if slot is not None:
            self._run(slot, call)
        else:
            self._perform(self._pool.place(key, call))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                if action.call.state != "done":
                    self._run(action.slot, action.call)
            elif isinstance(action, Start):
                self._start(action.slot, actions)
            else:
                self._end(action.slot)

    def _start(self, slot: Slot, actions: list[Action]) -> None:
        """Start the jail of a slot for the first call that is assigned to it."""
        first = next(action.call for action in actions if isinstance(action, Assign) and action.slot is slot)
        tool = first.tool
        try:
            if self._facts is None or self._closing:
                raise GoondanError(error_payload("E_SANDBOX_UNAVAILABLE", "no jail can be started"))
            launch_plan = plan(look_up(tool, first.workdir, self.spec, self._facts), self._facts)
            limit = output_limit(tool.sandbox.limits.output_mb)
            jail = Jail(launch_plan, self, self._loop, output_limit=limit, name=tool.name)
        except (GoondanError, OSError) as error:
            info = error.info if isinstance(error, GoondanError) else error_payload("E_SANDBOX_UNAVAILABLE", str(error))
            for action in actions:
                if isinstance(action, Assign) and action.slot is slot:
                    self._fail(action.call, refusal(info))
            self._perform(self._pool.gone(slot))
            return
        tenancy = slot.jail = Tenancy(slot, jail)
        jail.tenant = jail.account.tenant = tenancy
        jail.account.running = partial(under_way, tenancy)
        self._watch.add(jail.account)
        granted = {name: self._environment[name] for name in tool.sandbox.env if name in self._environment}
        if launch_plan.layout is not None:
            jail.hold()  # until its sockets are there
            tenancy.network = JailNetwork(read_network(tool.sandbox.network), launch_plan.layout)
            granted = {**launch_plan.layout.environment, **granted}
        jail.send(worker_init(tenancy, tool, granted, limit))
        tenancy.grace = self._loop.call_later(LOAD_TIMEOUT_S, self._load_timeout, tenancy)

    def _run(self, slot: Slot, call: Call) -> None:
        """Hand a call to its jail."""
        tenancy: Tenancy | None = slot.jail
        if tenancy is None:
            return  # the start failed, and with it the call
        jail = tenancy.jail
        self._next_jail_id += 1
        jail_id = call.jail_id = str(self._next_jail_id)
        self._pool.enter(slot, jail_id, call)
        call.slot = slot
        call.state = "running"
        call.attempts += 1
        now = call.started = self._loop.time()
        call.denied_before = 0 if tenancy.network is None else tenancy.network.denied_count
        tenancy.clean = False
        message_id = None
        if call.message_id is not None:
            name = (call.agent, call.instance_key, call.message_id)
            message_id, is_new = tenancy.messages.name(name, self._messages.get(name))
            if is_new:
                jail.send(Message(message_id or "", Raw(self._messages.get(name) or b"\xc0")))
        if call.export.background:
            tenancy.background = True
        jail.send(worker_call(tenancy, call, message_id, now))
        self._watch.wake()

    def _end(self, slot: Slot) -> None:
        """End a jail that runs nothing: politely first, so that its exit handlers run."""
        tenancy: Tenancy | None = slot.jail
        if tenancy is None:
            self._perform(self._pool.gone(slot))
            return
        jail = tenancy.jail
        if jail.dying:
            return
        if tenancy.abandoned or not jail.live:
            jail.kill("not needed any more")
            return
        jail.send(Exit())
        self._grace(tenancy, EXIT_GRACE_S, lambda: jail.kill("not needed any more"))

    def _grace(self, tenancy: Tenancy, delay_s: float, action: Callable[[], None]) -> None:
        if tenancy.grace is not None:
            tenancy.grace.cancel()
        tenancy.grace = self._loop.call_later(delay_s, action)

    # --- from jails

    def jail_found(self, jail: Jail, pid: int) -> None:
        """The namespaces of a jail are there (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        if tenancy.network is not None:
            self._networked[jail.pid] = tenancy
            self._egress.attach(jail.pid, pid, tenancy.network, lambda problem: self._network_up(tenancy, problem))

    def _network_up(self, tenancy: Tenancy, problem: str | None) -> None:
        """The jail has its network, or cannot have it."""
        if problem is None:
            tenancy.jail.release()
            return
        message = f"the tool {tenancy.jail.name} has a network grant, and its jail has no network: {problem}"
        self._break(tenancy, tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable"), "has no network")

    def _network_lost(self, number: int) -> None:
        """The egress proxy has ended. What runs in the jail sees its connections end; new calls get another one."""
        tenancy = self._networked.get(number)
        if tenancy is not None:
            self._perform(self._pool.close(tenancy.slot))

    def _network_news(self, number: int, news: Denied | Failed) -> None:
        tenancy = self._networked.get(number)
        if tenancy is not None:
            self._on_log(network_line(tenancy, news))

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        """Frames of a worker (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        for frame in frames:
            try:
                if type(frame) is Result:
                    self._result(tenancy, frame)
                else:
                    self._news(tenancy, frame)
            except Violation as violation:
                self.jail_broken(jail, violation)
                return

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        """The worker broke the protocol: its calls end here and now (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        name = "OutputTooLarge" if violation.code == "E_TOOL_LIMIT" else "ToolProtocolError"
        self._break(tenancy, tool_error(violation.code, f"{violation}; its jail was ended", name=name), str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        """Something came over the jail's standard output or error (jail.Owner)."""
        for line in text.splitlines():
            if line.strip():
                self._on_log(LogLine(time=time.time(), level="info", message=line[:8192], tool=jail.name))

    def jail_gone(self, jail: Jail, cause: str) -> None:
        """The last process of a jail has ended (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        slot = tenancy.slot
        self._watch.remove(jail.account)
        if tenancy.grace is not None:
            tenancy.grace.cancel()
        if tenancy.network is not None:
            self._networked.pop(jail.pid, None)
            self._egress.detach(jail.pid)
        if jail.worker_pid is not None:
            self._on_worker(WorkerNews(op="exit", pid=jail.worker_pid, tool=jail.name, cause=cause))
        running = [call for call in slot.calls.values() if call.state == "running"]
        again = [call for call in running if tenancy.rerun and call.export.idempotent]
        if self._closing:
            slot.calls.clear()  # whoever made them decides, with the next incarnation of this host
            again = []
        for call in again:
            call.state = "waiting"
        slot.calls = {name: call for name, call in slot.calls.items() if call.state != "waiting"}
        tenancy.ledger.ended(cause)
        self._fail_all(tenancy, ending(tenancy, cause))
        actions = self._pool.gone(slot)
        if not self._closing:
            self._perform(actions)
            for call in again:
                self._place(call)
        if self._all_gone is not None and not self._all_gone.done() and self.jail_count == 0:
            self._all_gone.set_result(None)

    def _result(self, tenancy: Tenancy, result: Result) -> None:
        slot = tenancy.slot
        call = slot.calls.get(result.call_id)
        if call is None:
            if result.call_id not in tenancy.abandoned:
                raise Violation("the worker sent a result for a call that it does not run")
            tenancy.abandoned.discard(result.call_id)
            if not slot.calls and not tenancy.abandoned and slot.closed:
                tenancy.jail.kill("not needed any more")
            return
        said = result.error
        if said is not None:
            result = msgspec.structs.replace(result, error=explained(tenancy, said))
        now = self._loop.time()
        payload = shape(result, receipt(tenancy, call, now), call.tool)
        work = tenancy.pending.get(result.call_id)
        if result.continues:
            self._go_on(tenancy, call, result, payload, work)
            return
        if work is not None and result.status == "pending":
            raise Violation("the worker said `pending` twice")
        tenancy.pending.pop(result.call_id, None)
        actions = self._pool.leave(slot, result.call_id, now)
        if tenancy.network is not None and (result.error is not None or memoryview(payload).nbytes <= SETTLED_BYTES):
            # What was reached, and whether it was the sandbox that refused, the proxy says after the fact.
            self._egress.settle(tenancy.jail.pid, lambda: self._explained(tenancy, call, work, result))
        else:
            self._conclude(call, work, payload)
        # A jail that has met one of its own limits may hold what nobody can sweep; a large output harms nobody.
        spent = said is not result.error and result.error is not None and result.error.code == "E_TOOL_LIMIT"
        if spent or call.tool.sandbox.isolation == "call":
            actions += self._pool.close(slot)
        if actions:
            self._perform(actions)

    def _go_on(self, tenancy: Tenancy, call: Call, result: Result, payload: Raw, work: Work | None) -> None:
        """The call is answered with `pending`, and stays in its jail until its work has ended."""
        if result.status != "pending" or work is not None:
            raise Violation("the worker sent a result that continues without being the first `pending`")
        begun = self.completions.begin(call, result.handle or "")
        if isinstance(begun, ToolError):
            self._fail(call, begun)
            self._abandon(tenancy.slot, call)
            return
        tenancy.pending[result.call_id] = begun
        self._finish(call, payload)

    def _conclude(self, call: Call, work: Work | None, payload: Raw) -> None:
        """The end of a call, or of the work that went on after it."""
        if work is None:
            self._finish(call, payload)
        else:
            self.completions.end(work, payload)

    def _explained(self, tenancy: Tenancy, call: Call, work: Work | None, result: Result) -> None:
        """Finish a call in a jail with a network, now that everything reached and denied there is known."""
        if result.error is not None and tenancy.network is not None:
            denied = tenancy.network.denied_since(call.denied_before)
            result = msgspec.structs.replace(result, error=with_denial(result.error, denied))
        self._conclude(call, work, shape(result, receipt(tenancy, call, self._loop.time()), call.tool))

    def _news(self, tenancy: Tenancy, frame: WorkerFrame) -> None:
        jail = tenancy.jail
        if isinstance(frame, Log | Progress):
            call = tenancy.slot.calls.get(frame.call_id or "")
            if isinstance(frame, Progress):
                if call is not None:
                    self._progress(call, frame)
                return
            self._on_log(log_line(tenancy, call, frame))
        elif isinstance(frame, Ready):
            if jail.live or frame.protocol != WORKER_PROTOCOL:
                raise Violation("the worker said `ready` twice, or for another protocol")
            self._ready(tenancy)
        elif isinstance(frame, LoadFailed):
            if jail.live:
                raise Violation("the worker said `load_failed` after `ready`")
            message = f"the tool {jail.name} could not be loaded: {frame.message[:4096]}"
            self._break(tenancy, tool_error("E_CONFIG_ENTRY", message, name="ToolLoadError"), "could not be loaded")

    def _ready(self, tenancy: Tenancy) -> None:
        tenancy.jail.mark_live()
        if tenancy.grace is not None:
            tenancy.grace.cancel()
            tenancy.grace = None
        if (news := started(tenancy)) is not None:
            self._on_worker(news)

    def _progress(self, call: Call, progress: Progress) -> None:
        now = self._loop.time()
        if now - call.progress_at < PROGRESS_S:
            return
        call.progress_at = now
        self._send_frame(progress_frame(call, progress))

    # --- deadlines and cancelling

    def _set_deadline_timer(self) -> None:
        when = self._book.next_deadline()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline_at = float("inf") if when is None else when
        if when is not None and not self._closing:
            self._deadline_timer = self._loop.call_at(when, self._deadlines)

    def _deadlines(self) -> None:
        self._deadline_timer = None
        # libuv's clock has milliseconds; what is due within the next one is due.
        for call in self._book.due(self._loop.time() + 0.001):
            slot: Slot | None = call.slot if call.state == "running" else None
            where = "before it could start" if slot is None else "and its jail was ended"
            message = f"the call ran out of its {call.allowed_ms} ms {where}"
            if slot is not None:
                slot.jail.ledger.ended("a call ran out of time")
            self._fail(call, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"))
            if slot is None:
                self._pool.withdraw(key_of(call), call)
            else:
                self._abandon(slot, call)
                self._give_up(slot.jail)
        self._set_deadline_timer()

    def _cancel(self, call_id: str) -> None:
        call = self._book.get(call_id)
        if not isinstance(call, Call):
            return
        slot: Slot | None = call.slot if call.state == "running" else None
        self._fail(call, tool_error("E_CANCELLED", "the call was cancelled", name="ToolCancelled"))
        if slot is None:
            self._pool.withdraw(key_of(call), call)
            return
        tenancy: Tenancy = slot.jail
        tenancy.jail.send(Cancel(call.jail_id))
        jail_id = call.jail_id
        self._abandon(slot, call)

        def late() -> None:
            if jail_id in tenancy.abandoned:
                self._give_up(tenancy)

        self._loop.call_later(CANCEL_GRACE_S, late)

    def _abandon(self, slot: Slot, call: Call) -> None:
        """Nobody waits for this call any more, but its handler still runs."""
        tenancy: Tenancy = slot.jail
        tenancy.abandoned.add(call.jail_id)
        actions = self._pool.leave(slot, call.jail_id, self._loop.time())
        self._perform(actions)

    def _give_up(self, tenancy: Tenancy) -> None:
        """A handler does not end: its jail must. What else runs there gets a last chance."""
        slot, jail = tenancy.slot, tenancy.jail
        if jail.dying:
            return
        tenancy.rerun = True
        tenancy.reason = tool_error(
            "E_TOOL_OUTCOME_UNKNOWN",
            "the jail was ended because another call in it did not end",
            name="ToolInterrupted",
        )
        self._perform(self._pool.close(slot))
        if not slot.calls:
            jail.kill("a call did not end")
        else:
            self._grace(tenancy, SIBLING_GRACE_S, lambda: jail.kill("a call did not end"))

    def _over_limit(self, account: Account, limit: str, jail_ids: list[str] | None) -> None:
        """A jail has reached one of its limits, or these calls in it one of theirs (watch.Report)."""
        tenancy: Tenancy = account.tenant
        slot, error = tenancy.slot, limit_error(limit, account.limits)
        if tenancy.jail.dying:
            return
        if jail_ids is None:
            self._break(tenancy, error, error.message)
            return
        tenancy.ledger.ended(error.message)
        for jail_id in jail_ids:
            call = slot.calls.get(jail_id)
            if call is not None:
                work = tenancy.pending.pop(jail_id, None)
                told = receipt(tenancy, call, self._loop.time())
                self._conclude(call, work, error_result(error, call.tool.error_message_limit, told))
                self._abandon(slot, call)
        self._give_up(tenancy)

    def _load_timeout(self, tenancy: Tenancy) -> None:
        message = f"the tool {tenancy.jail.name} did not load in {LOAD_TIMEOUT_S:g} s"
        self._break(tenancy, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), "did not load in time")

    def _break(self, tenancy: Tenancy, error: ToolError, reason: str) -> None:
        """End a jail that is good for nothing; all of its calls get `error`, and new ones another jail."""
        tenancy.jail.kill(reason)
        tenancy.ledger.ended(reason)
        self._fail_all(tenancy, error)
        self._perform(self._pool.close(tenancy.slot))

    # --- results

    def _finish(self, call: Call, payload: Raw) -> None:
        if self._book.close(call, payload, self._loop.time()):
            self._send_result(call.id, call.agent, call.instance_key, payload)

    def _fail(self, call: Call, error: ToolError) -> None:
        tenancy: Tenancy | None = call.slot.jail if call.state == "running" else None
        told = None if tenancy is None else receipt(tenancy, call, self._loop.time())
        self._finish(call, error_result(error, call.tool.error_message_limit, told))

    def _fail_all(self, tenancy: Tenancy, error: ToolError) -> None:
        calls = list(tenancy.slot.calls.values())
        tenancy.slot.calls.clear()
        pending, tenancy.pending = tenancy.pending, {}
        for call in calls:
            told = receipt(tenancy, call, self._loop.time())
            self._conclude(call, pending.get(call.jail_id), error_result(error, call.tool.error_message_limit, told))

    def _send_kept(self, kept: Kept) -> None:
        payload = kept.payload
        if payload is None:
            message = "the call has run, but its result was not kept"
            payload = error_result(
                tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="ToolResultDropped"), DEFAULT_ERROR_LIMIT
            )
        self._send_result(kept.id, kept.agent, kept.instance_key, payload)

    def _send_result(self, call_id: str, agent: str | None, instance_key: str | None, payload: Raw) -> None:
        self._send_frame(Frame("tool.result", call_id=call_id, to=agent, instance_key=instance_key, payload=payload))

    # --- now and then

    def _tick(self) -> None:
        now = self._loop.time()
        self._perform(self._pool.retire(now - self.spec.jail_idle_s))
        self._book.expire(now)
        overdue = self.completions.overdue()
        for late in [slot.jail for slot in self._pool.slots() if overdue and slot.jail is not None]:
            if any(work in overdue for work in late.pending.values()):
                message = f"pending work ran for more than {PENDING_S:g} s"
                self._break(late, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), message)
        for slot in self._pool.idle():
            tenancy: Tenancy | None = slot.jail
            looked_at = tenancy is None or tenancy.clean or tenancy.background or not tenancy.jail.live
            if tenancy is not None and not looked_at and not sweep(tenancy):
                self._perform(self._pool.close(slot))
                tenancy.jail.kill("left processes behind that would not end")
        more = self._pool.slots() or not self._book.empty or not self.completions.empty
        self._ticker = self._loop.call_later(TICK_S, self._tick) if more else None
