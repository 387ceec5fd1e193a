"""Live jails: started for the calls that need them, and ended. What they say is reports.py's affair.

Which call goes where is pool.py's affair, what a jail sees the policy's, how one lives jail.py's.

Rules.
- Every call that is placed here ends in exactly one result, whatever its jail does.
- A jail that is ended for one call's sake gives the others in it SIBLING_GRACE_S to finish; after that they run again
  if their export is idempotent, and else their outcome is unknown.
- A cancelled call's handler is asked to stop, and after CANCEL_GRACE_S its jail ends like that.
- Without a sandbox nothing runs: each call is answered with the reason.

Source: sandbox.md section 5; design section 6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from schemas.errors import GoondanError, error_payload, fail, tool_error
from schemas.frames import Frame, ToolError
from schemas.hosts import read_network
from schemas.launch import ToolHostSpec
from schemas.worker_frames import (
    Cancel,
    Exit,
    Message,
    WorkerFrame,
)
from toolhost import offload
from toolhost.calls.answers import Answers
from toolhost.calls.asking import Asking
from toolhost.calls.messages import MessageCache, SentMessages
from toolhost.calls.pending import PENDING_S
from toolhost.calls.results import error_result, output_limit, refusal
from toolhost.calls.taken import Call
from toolhost.calls.wording import (
    network_line,
    printed_lines,
    protocol_error,
    worker_call,
    worker_init,
)
from toolhost.egress.messages import Denied, Failed
from toolhost.jails.cells import Cells
from toolhost.jails.channel import Violation
from toolhost.jails.forked import ForkedCalls
from toolhost.jails.jail import Jail
from toolhost.jails.pool import Action, Assign, Pool, Slot, Start, instance_of, key_of
from toolhost.jails.reports import Reports
from toolhost.jails.sized_workdirs import Claim, SizedWorkdirs
from toolhost.jails.starting import start_jail
from toolhost.jails.stays import Stays
from toolhost.jails.tenancy import LogLine, Tenancy, WorkerNews, ending, receipt, sweep, under_way
from toolhost.limits.account import Account
from toolhost.limits.decide import limit_error
from toolhost.limits.watch import Watch
from toolhost.network import Egress, JailNetwork
from toolhost.policy.plan import forks
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers

#: What siblings of a call that ran out of time may still take (seconds): most calls take less.
SIBLING_GRACE_S: Final = 5.0
#: What a cancelled handler may take to stop before its jail is ended (seconds).
CANCEL_GRACE_S: Final = 2.0
#: What a worker that was told to leave may take (seconds): enough to run exit handlers, short for whoever waits.
EXIT_GRACE_S: Final = 0.3
#: How often a call goes to a new jail because a place of the last one was replaced while it was made: an editor that
#: saves does that once, a hostile neighbour for ever.
MAX_MADE: Final = 3
#: What a tool's module may take to load when none of its calls has a deadline (seconds).
LOAD_TIMEOUT_S: Final = 60.0
#: What the system says of a jail that could not be started may name a long path (characters).
MAX_REASON: Final = 1000
#: How long is waited for the last process of jails that were killed (seconds): it takes milliseconds.
CLOSE_S: Final = 3.0


class Jails:
    """All live jails of one tool host, and the calls in them. Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        messages: MessageCache,
        asking: Asking,
        *,
        spec: ToolHostSpec,
        facts: HostFacts | None,
        powers: Powers,
        unavailable: GoondanError | None,
        send: Callable[[Frame], bool],
        on_log: Callable[[LogLine], None],
        on_worker: Callable[[WorkerNews], None],
        environment: Mapping[str, str],
        stays: Stays | None,
        sized: SizedWorkdirs | None,
    ) -> None:
        """`facts` None means that no jail can be made, for the reason `unavailable`. Calls wait until `open`."""
        self._loop = loop
        self._answers = answers
        self._messages = messages
        self._asking = asking
        self._spec = spec
        self._facts = facts
        self._powers = powers
        self._unavailable = unavailable
        self._on_log = on_log
        self._on_worker = on_worker
        self._environment = environment
        self._stays = Stays(None, powers) if stays is None else stays
        self._sized = SizedWorkdirs(powers) if sized is None else sized
        self.pool = Pool(spec.max_jails)
        self._egress = Egress(self._loop, powers.launcher, self._network_lost, self._network_news)
        self._networked: dict[int, Tenancy] = {}
        self._watch = Watch(self._loop, self._over_limit, powers.launcher.put_first)
        self._reports = reports = Reports(
            loop,
            self.pool,
            answers,
            asking,
            settle=self._egress.settle,
            perform=self._perform,
            abandon=self._abandon,
            end=self._break,
            send=send,
            on_log=on_log,
            on_worker=on_worker,
        )
        self._forked = ForkedCalls(
            loop,
            self.pool,
            answers,
            on_log=on_log,
            perform=self._perform,
            result=reports.result,
            ask=reports.ask,
            progress=reports.progress,
        )
        self._held: list[Call] | None = []  # calls that came before it was known whether jails can be made
        self._next_jail_id = 0
        self._launching: set[asyncio.Task[None]] = set()
        self._closing = False
        self._all_gone: asyncio.Future[None] | None = None

    # --- life

    def configure(self, spec: ToolHostSpec, changed: Iterable[str]) -> None:
        """Jails of tools that changed (by name) finish what they run."""
        self._spec = spec
        self._sized.configure(spec)
        self.pool.max_jails = max(1, spec.max_jails)
        names = frozenset(changed)
        for slot in self.pool.slots():
            if slot.key[0] in names:
                self._perform(self.pool.close(slot))

    def open(self, facts: HostFacts | None, unavailable: GoondanError | None = None) -> None:
        """It is known now whether jails can be made: run what has waited for that."""
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
        if self.pool.slots():
            self._all_gone = self._loop.create_future()
            for slot in self.pool.slots():
                if slot.jail is not None:  # else it is being launched, and killed when it is there
                    slot.jail.jail.kill("the tool host was stopped")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone, CLOSE_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._sized.settled(), CLOSE_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(offload.settled(), CLOSE_S)
        self._egress.close()
        self._watch.close()

    async def end_all_of(self, owner: tuple[str, str]) -> None:
        """End the jails of an agent instance, and wait until their last processes are gone; shared ones are not its."""
        while slots := [slot for slot in self.pool.slots() if instance_of(slot.key) == owner]:
            for slot in slots:
                self._perform(self.pool.close(slot))
                tenancy: Tenancy | None = slot.jail
                if tenancy is not None and (tenancy.slot.calls or tenancy.abandoned):
                    tenancy.jail.kill("its instance was deleted")
            # What is being launched ends when it is there.
            await asyncio.gather(*(slot.jail.gone.wait() for slot in slots if slot.jail is not None))
            if self._launching and all(slot.jail is None for slot in slots):
                await asyncio.wait(self._launching, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)

    @property
    def jail_count(self) -> int:
        """Jails whose processes are not all gone."""
        return len(self.pool.slots())

    def tick(self) -> None:
        """Now and then: retire what is idle, end what runs for too long, sweep what calls have left behind."""
        self._perform(self.pool.retire(self._loop.time() - self._spec.jail_idle_s))
        self._stays.beat()
        for slot in self.pool.slots():
            if slot.jail is not None:
                self._is_blind(slot.jail)
        overdue = self._answers.completions.overdue()
        for late in [slot.jail for slot in self.pool.slots() if overdue and slot.jail is not None]:
            if any(work in overdue for work in late.pending.values()):
                message = f"pending work ran for more than {PENDING_S:g} s"
                self._break(late, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), message)
        for slot in self.pool.idle():
            tenancy: Tenancy | None = slot.jail
            looked_at = tenancy is None or tenancy.clean or tenancy.background or not tenancy.jail.live
            if tenancy is not None and not looked_at and not sweep(tenancy):
                self._perform(self.pool.close(slot))
                tenancy.jail.kill("left processes behind that would not end")

    # --- placing

    def place(self, call: Call) -> None:
        """Run a call in the jail that it belongs to, or fail it."""
        if self._held is not None:
            self._held.append(call)
            return
        if self._unavailable is not None:
            self._answers.fail(call, refusal(self._unavailable.info))
            return
        key = call.key = key_of(call, forks=self._facts is not None and forks(call.tool, self._facts))
        slot = self.pool.find(key)
        if slot is not None and slot.jail.jail.dying:
            self._perform(self.pool.close(slot))  # its worker has ended, only its last process has not
            slot = None
        elif slot is not None and not self._is_guarded(slot):
            slot = None
        if slot is not None:
            self._run(slot, call)
        else:
            self._perform(self.pool.place(key, call))

    def _is_guarded(self, slot: Slot) -> bool:
        """Whether what was hidden from this slot's jail, or read-only for it, still is. If not, somebody replaced it: a
        jail that sees what it must not ends, and every jail that can write there takes no more calls.
        """
        if not self._is_blind(slot.jail):
            return False
        folders = slot.jail.jail.plan.named
        if self._stays.intact(folders):
            return not slot.closed
        for other in self.pool.slots():
            if other.jail is not None and not set(folders).isdisjoint(other.jail.jail.plan.named):
                self._perform(self.pool.close(other))
        return False

    def _is_blind(self, tenancy: Tenancy) -> bool:
        """Whether a jail still sees nothing of what is hidden from it; one that does is ended."""
        seen = tenancy.hiding.broken()
        if seen is not None and not tenancy.jail.dying:
            reason = f"{seen}, which no tool may see, was made or replaced while the jail could see what it lies in"
            self._break(tenancy, tool_error("E_SANDBOX_DENIED", reason, name="SandboxDenied"), reason)
        return seen is None

    def _perform(self, actions: list[Action]) -> None:
        """Do what the pool decided."""
        for action in actions:
            if isinstance(action, Assign):
                if action.call.state == "done":
                    continue
                if self._is_guarded(action.slot):  # it was when the call came, which may be long ago
                    self._run(action.slot, action.call)
                else:
                    self.place(action.call)
            elif isinstance(action, Start):
                launching = self._loop.create_task(self._start(action.slot, action.call))
                self._launching.add(launching)
                launching.add_done_callback(self._launching.discard)
            else:
                self._end(action.slot)

    async def _start(self, slot: Slot, call: Call) -> None:
        """Launch the jail of a slot, for this call and whoever else waits for it."""
        tool = call.tool
        claim: Claim | None = None
        try:
            if self._facts is None:
                raise GoondanError(error_payload("E_SANDBOX_UNAVAILABLE", "no jail can be started"))
            await self._last_one_ended(call.workdir)
            claim = await self._sized.claim(tool, call.workdir_base or call.workdir, self._spec)
            niceness = self._watch.niceness_of_next(len(self._launching) - 1)
            jail, hiding = await start_jail(
                tool, call.workdir, self._spec, self._facts, self._powers, self._stays, owner=self, niceness=niceness,
                base=call.workdir_base, sized=claim is not None and claim.sized,
            )  # fmt: skip
        except Exception as error:
            self._sized.release(claim)
            if isinstance(error, GoondanError):
                info = error.info
            elif isinstance(error, OSError):
                info = error_payload("E_SANDBOX_UNAVAILABLE", str(error)[:MAX_REASON])
            else:  # a bug of ours costs these calls, and no place for a jail
                context = {"message": f"a jail of {tool.name} could not be started", "exception": error}
                self._loop.call_exception_handler(context)
                info = error_payload("E_INTERNAL", f"a jail could not be started: {type(error).__name__}")
            calls, actions = self.pool.failed(slot)
            if not self._closing:
                for waiting in calls:
                    self._answers.fail(waiting, refusal(info))
                self._perform(actions)
            self._note_gone()
            return
        # A shared jail is everybody's: whatever was asked for, it has neither.
        alone = tool.sandbox.isolation != "shared"
        permissions = tool.sandbox.permissions if alone else []
        tenancy = slot.jail = Tenancy(slot, jail, permissions, hiding)
        tenancy.claim = claim
        jail.tenant = jail.account.tenant = tenancy
        jail.account.running = partial(under_way, tenancy)
        self._watch.add(jail.account)
        names = tool.sandbox.env if alone else []
        granted = {name: self._environment[name] for name in names if name in self._environment}
        if jail.plan.layout is not None:
            tenancy.network = JailNetwork(read_network(tool.sandbox.network), jail.plan.layout)
            granted = {**jail.plan.layout.environment, **granted}
        limit = output_limit(tool.sandbox.limits.output_mb)
        init = worker_init(tenancy, tool, granted, limit)
        workers: Jail | Cells = jail
        if jail.plan.calls is None:
            jail.send(init)
        else:
            workers = tenancy.cells = Cells(jail, self._forked, self._loop, limit, init)
            jail.account.cells = tenancy.cells.processes
        if tenancy.network is not None:
            workers.hold()  # until its sockets are there
        tenancy.grace = self._loop.call_later(LOAD_TIMEOUT_S, self._load_timeout, tenancy)
        actions = self.pool.launched(slot, self._loop.time())
        if self._closing:
            jail.kill("the tool host was stopped")
        else:
            self._perform(actions)

    async def _last_one_ended(self, workdir: str | None) -> None:
        """Wait, CLOSE_S at most, for jails in this workdir that are being ended: what those still write to it would
        count as the growth of the next one, and would change files under it.

        Raises GoondanError E_SANDBOX_UNAVAILABLE when one does not end: the kernel cannot kill it, for example while a
        disk does not answer.
        """
        there = [slot.jail for slot in self.pool.slots() if slot.jail is not None]
        try:
            async with asyncio.timeout(CLOSE_S):
                for tenancy in there:
                    if tenancy.jail.dying and workdir is not None and tenancy.jail.plan.workdir == workdir:
                        await tenancy.gone.wait()
        except TimeoutError:
            message = f"the jail before this one does not end in {workdir}; it was waited for {CLOSE_S:g} s"
            suggestion = (
                "Call again later, or in another instance. If it stays so, look for what its processes wait for."
            )
            raise fail("E_SANDBOX_UNAVAILABLE", message, suggestion=suggestion) from None

    def _run(self, slot: Slot, call: Call) -> None:
        """Hand a call to its jail."""
        tenancy: Tenancy = slot.jail
        jail = tenancy.jail
        self._next_jail_id += 1
        jail_id = call.jail_id = str(self._next_jail_id)
        self.pool.enter(slot, jail_id, call)
        call.slot = slot
        call.state = "running"
        call.attempts += 1
        now = call.started = self._loop.time()
        call.denied_before = 0 if tenancy.network is None else tenancy.network.denied_count
        send, sent = jail.send, tenancy.messages
        if tenancy.cells is None:
            tenancy.clean = False
            if call.export.background:
                tenancy.background = True
        else:
            try:
                call.cell = tenancy.cells.enter(call)
            except OSError as error:
                message = f"the call could not be started: {error.strerror}"
                self._answers.fail(call, tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable"))
                self._perform(self.pool.leave(slot, jail_id, now))
                return
            send, sent = call.cell.send, SentMessages()
        message_id = None
        if call.message_id is not None:
            name = (call.agent, call.instance_key, call.message_id)
            message_id, is_new = sent.name(name, self._messages.get(name))
            if is_new:
                send(Message(message_id or "", Raw(self._messages.get(name) or b"\xc0")))
        send(worker_call(tenancy, call, message_id, now))
        if tenancy.cells is not None and not slot.closed:
            with suppress(OSError):  # the next call asks for its own
                tenancy.cells.prepare()
        self._watch.wake()

    def _end(self, slot: Slot) -> None:
        """End a jail that runs nothing: politely first, so that its exit handlers run."""
        tenancy: Tenancy = slot.jail
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
            (tenancy.cells or tenancy.jail).release()
            return
        message = f"the tool {tenancy.jail.name} has a network grant, and its jail has no network: {problem}"
        self._break(tenancy, tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable"), "has no network")

    def _network_lost(self, number: int) -> None:
        """The egress proxy has ended. What runs in the jail sees its connections end; new calls get another one."""
        tenancy = self._networked.get(number)
        if tenancy is not None:
            self._perform(self.pool.close(tenancy.slot))

    def _network_news(self, number: int, news: Denied | Failed) -> None:
        tenancy = self._networked.get(number)
        if tenancy is not None:
            self._on_log(network_line(tenancy, news))

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        """Frames of a worker (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        for frame in frames:
            try:
                self._reports.hear(tenancy, frame)
            except Violation as violation:
                self.jail_broken(jail, violation)
                return

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        """The worker broke the protocol: its calls end here and now (jail.Owner)."""
        self._break(jail.tenant, protocol_error(violation, "its jail was ended"), str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        """Something came over the jail's standard output or error (jail.Owner)."""
        for line in printed_lines(jail.tenant, text):
            self._on_log(line)

    def jail_gone(self, jail: Jail, cause: str) -> None:
        """The last process of a jail has ended (jail.Owner)."""
        tenancy: Tenancy = jail.tenant
        slot = tenancy.slot
        tenancy.gone.set()
        self._sized.release(tenancy.claim)
        self._watch.remove(jail.account)
        offload.soon(partial(self._stays.end, jail.plan.named))
        if tenancy.grace is not None:
            tenancy.grace.cancel()
        if tenancy.network is not None:
            self._networked.pop(jail.pid, None)
            self._egress.detach(jail.pid)
        if jail.worker_pid is not None:
            self._on_worker(WorkerNews(op="exit", pid=jail.worker_pid, tool=jail.name, cause=cause))
        running = [call for call in slot.calls.values() if call.state == "running"]
        again = [call for call in running if tenancy.rerun and call.export.idempotent]
        if jail.was_replaced:
            again = [call for call in running if call.attempts < MAX_MADE]
        if self._closing:
            slot.calls.clear()  # whoever made them decides, with the next incarnation of this host
            again = []
        for call in again:
            call.state = "waiting"
            self._asking.drop(call)
        slot.calls = {name: call for name, call in slot.calls.items() if call.state != "waiting"}
        tenancy.ledger.ended(cause)
        if tenancy.cells is not None:
            tenancy.cells.close(cause)
        self._fail_all(tenancy, ending(tenancy, cause))
        actions = self.pool.gone(slot)
        if not self._closing:
            self._perform(actions)
            for call in again:
                self.place(call)
        self._note_gone()

    def _note_gone(self) -> None:
        if self._all_gone is not None and not self._all_gone.done() and self.jail_count == 0:
            self._all_gone.set_result(None)

    # --- calls that end before their handlers do

    def run_out(self, call: Call) -> None:
        """The call has reached its deadline."""
        slot: Slot | None = call.slot if call.state == "running" else None
        where = "before it could start"
        if slot is not None:
            where = "and its jail was ended" if call.cell is None else "and its processes were ended"
        message = f"the call ran out of its {call.allowed_ms} ms {where}"
        if slot is not None and call.cell is None:
            slot.jail.ledger.ended("a call ran out of time")
        cause = None if call.cell is None else "it ran out of time"
        self._answers.fail(call, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), cause)
        if slot is None:
            self.pool.withdraw(call.key, call)
        else:
            self._abandon(slot, call)
            self._give_up(slot.jail, call)

    def cancel(self, call: Call) -> None:
        """Nobody wants the call any more: answer it, ask its handler to stop, and see to it that it does."""
        slot: Slot | None = call.slot if call.state == "running" else None
        self._answers.fail(call, tool_error("E_CANCELLED", "the call was cancelled", name="ToolCancelled"))
        if slot is None:
            self.pool.withdraw(call.key, call)
            return
        tenancy: Tenancy = slot.jail
        (call.cell or tenancy.jail).send(Cancel(call.jail_id))
        jail_id = call.jail_id
        self._abandon(slot, call)

        def late() -> None:
            if jail_id in tenancy.abandoned:
                self._give_up(tenancy, call)

        self._loop.call_later(CANCEL_GRACE_S, late)

    def _abandon(self, slot: Slot, call: Call) -> None:
        """Nobody waits for this call any more, but its handler still runs."""
        tenancy: Tenancy = slot.jail
        tenancy.abandoned.add(call.jail_id)
        actions = self.pool.leave(slot, call.jail_id, self._loop.time())
        self._perform(actions)

    def _give_up(self, tenancy: Tenancy, *calls: Call) -> None:
        """Handlers do not end: their cells must, or else their jail. What else runs there gets a last chance."""
        slot, jail = tenancy.slot, tenancy.jail
        if jail.dying:
            return
        if tenancy.cells is not None:
            for call in calls:
                call.cell.kill("it did not end")
            return
        tenancy.rerun = True
        tenancy.reason = tool_error(
            "E_TOOL_OUTCOME_UNKNOWN",
            "the jail was ended because another call in it did not end",
            name="ToolInterrupted",
        )
        self._perform(self.pool.close(slot))
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
        if tenancy.cells is None:
            tenancy.ledger.ended(error.message)
        calls = [slot.calls[jail_id] for jail_id in jail_ids if jail_id in slot.calls]
        for call in calls:
            work = tenancy.pending.pop(call.jail_id, None)
            told = receipt(tenancy, call, self._loop.time(), None if call.cell is None else error.message)
            self._answers.conclude(call, work, error_result(error, call.tool.error_message_limit, told))
            self._abandon(slot, call)
        self._give_up(tenancy, *calls)

    def _load_timeout(self, tenancy: Tenancy) -> None:
        message = f"the tool {tenancy.jail.name} did not load in {LOAD_TIMEOUT_S:g} s"
        self._break(tenancy, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), "did not load in time")

    def _break(self, tenancy: Tenancy, error: ToolError, reason: str) -> None:
        """End a jail that is good for nothing; all of its calls get `error`, and new ones another jail."""
        tenancy.jail.kill(reason)
        tenancy.ledger.ended(reason)
        self._fail_all(tenancy, error)
        self._perform(self.pool.close(tenancy.slot))

    def _fail_all(self, tenancy: Tenancy, error: ToolError) -> None:
        calls = list(tenancy.slot.calls.values())
        tenancy.slot.calls.clear()
        tenancy.slot.pending.clear()
        pending, tenancy.pending = tenancy.pending, {}
        for call in calls:
            told = receipt(tenancy, call, self._loop.time())
            self._answers.conclude(
                call, pending.get(call.jail_id), error_result(error, call.tool.error_message_limit, told)
            )
