"""Answers the budget frames of agents, and writes budgets to the journal. Pure; accounts.py has the rules.

- A tool call is counted when its own frame comes; it needs no budget frame.
- A model call is reserved by `budget.reserve` and settled by `budget.settle`. Each is answered when the journal has it.
- Model calls that wait for others are tried again, in the order in which they came, when another one has settled.

Source: docs/decisions/070; PROTOCOL-AGENTS.md "Budgets".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from goondan.features.budgets.broker import amounts
from goondan.features.budgets.broker.accounts import MAX_CHARGED, MAX_HOLDS, Accounts
from goondan.features.budgets.wire import FEATURE, BudgetGranted, BudgetLimits, BudgetReserve, BudgetSettle
from goondan.kernel.broker.state.bus import MAX_ID, Bus, Core, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Actor, Call, Connection, Event
from goondan.kernel.broker.state.parts import SHORT_BYTES, OfCalls, OfEvents, Op, Part, Record, Take, Waiting, fitting
from goondan.kernel.broker.state.records import Item
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.usage import prices_of

#: How long ended trees are kept (milliseconds), and how many at most: for `gdn budget`, and for pending work that ends
#: later.
KEEP_MS: Final = 7 * 24 * 3600 * 1000
MAX_ENDED: Final = 1024
#: Trees in one answer: it must fit in one frame, however many agents have spent something.
MAX_LISTED: Final = 50
#: A tool call that is too far ahead of the journal is sent again after this time (milliseconds): about one write.
JOURNAL_MS: Final = 2
#: Characters of an id that an agent gives a model call.
MAX_HOLD_ID: Final = 64


class _Waiting(NamedTuple):
    """A model call that waits for what others may give back."""

    #: The connection that asked.
    connection: Connection
    #: The id of its frame.
    frame_id: str
    #: The event whose turn asks.
    event: Event
    #: The accounts that the turn is charged to.
    chain: amounts.AccountChain
    #: What was asked for.
    request: BudgetReserve
    #: When it began to (seconds on the broker's clock).
    since: float


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Budgets(core.bus),)


class Budgets(Part, OfEvents, OfCalls):
    """The budgets of the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: What all work has used.
        self.accounts = Accounts()
        #: The accounts that turns of an unfinished event are charged to. An event that no budget counts is not here.
        self.chains: dict[Event, amounts.AccountChain] = {}
        self._waiting: dict[str, _Waiting] = {}
        self.takes = (
            Take((AGENTS,), "budget.reserve", self.reserve, SHORT_BYTES),
            Take((AGENTS,), "budget.settle", self.settle, SHORT_BYTES),
        )
        self.ops = (Op("budget", self.tell),)
        self.records = (
            Record(amounts.BudgetTree, lambda _, tree: self.accounts.restore(tree)),
            Record(amounts.BudgetHold, lambda _, hold: self.accounts.restored_holds.append(hold)),
        )
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the budgets and prices of `plan` from now on."""
        specs = plan.agents.values()
        self.accounts.revise(
            {
                spec.name: amounts.limits_of(from_raw(spec.parts[FEATURE], BudgetLimits))
                for spec in specs
                if FEATURE in spec.parts
            },
            {
                (spec.name, name): prices_of(model.pricing)
                for spec in specs
                for model in spec.models
                for name in (model.document, *([""] if model is spec.model else []))
            },
        )

    def applies(self) -> bool:
        """See Part."""
        return bool(self.accounts.limits or self.accounts.trees)

    def resumed(self, now: float) -> None:
        """See Part. Accepted events have the agents whose budgets they are charged to with them."""
        bus, accounts = self._bus, self.accounts
        events = bus.mailbox.events
        for event in events.values():
            kept = (event.parts or {}).get(FEATURE)
            path = () if kept is None else from_raw(kept, tuple[str, ...])
            if not event.finished and (path or event.root in accounts.trees):
                self._charge(event, accounts.chain_of(event.root, path, event.instance.agent, self._ms(event.since)))
        accounts.restored()
        for tree in list(accounts.trees.values()):
            for event_id in {hold.event_id for hold in tree.holds.values()}:
                known = events.get(event_id)
                if known is None or known.finished:
                    accounts.lose_calls(tree, event_id)
            self._end_if_idle(tree)
        self._flush()

    # --- what is asked

    def accepts(self, event: Event, actor: Actor) -> None:
        """Charge a new event, if it is known already to what; `leased` does the rest. Raises GoondanError
        E_BUDGET_SPENT when a turn asks and no more work may start.
        """
        if actor.root is not None:
            self._charge_new(event, self._chain_for(event, actor.root, actor.turn))

    def follows(self, answer: Event, request: Event) -> None:
        """The path is the asker's own, whatever the asked agent has spent."""
        asked = self.chains.get(request)
        path = () if asked is None else asked.path
        self._charge_new(
            answer, self.accounts.chain_of(request.root, path, answer.instance.agent, self._ms(self._bus.now))
        )

    def _chain_for(self, event: Event, root: str, turn: Event | None) -> amounts.AccountChain | None:
        """`root` is the event that the sender's work began with. `turn` is the asking turn."""
        accounts, agent = self.accounts, event.instance.agent
        now_ms = self._ms(self._bus.now)
        if turn is None:
            return accounts.chain_of(event.root, accounts.path_of(root, agent), agent, now_ms)
        asking = self.chains.get(turn)
        chain = accounts.chain_of(event.root, () if asking is None else asking.names, agent, now_ms)
        if chain is not None and (shortage := accounts.spent(chain, now_ms)) is not None:
            raise self._spent(chain, shortage, agent)
        return chain

    def opens(self, call: Call, frame: Frame, now: float) -> None:
        """Count a tool call of a turn."""
        if (chain := self.chains.get(call.event)) is not None:
            self.start_call(chain, call.event, call.id, frame, now)

    def stored(self, event: Event, call_ids: Sequence[str]) -> None:
        """These calls are not sent again, so that nothing need be known of them."""
        if (chain := self.chains.get(event)) is not None:
            self.accounts.stored(chain, event.id, call_ids)

    def start_call(self, chain: amounts.AccountChain, event: Event, call_id: str, frame: Frame, now: float) -> None:
        """Count a tool call of a turn that starts now.

        Raises GoondanError E_BUDGET_SPENT, E_OVERLOADED, E_TOOL_LIMIT.
        """
        agent = event.instance.agent
        accounts, now_ms = self.accounts, self._ms(now)
        verdict = accounts.charge_tool(chain, agent, event.id, call_id, now_ms)
        self._flush()
        if verdict is None:
            left = self._wall_left(chain, now_ms)
            if left is not None and (frame.deadline_ms is None or frame.deadline_ms > left):
                frame.deadline_ms = left
            return
        if isinstance(verdict, amounts.Shortage):
            raise self._spent(chain, verdict, agent)
        if verdict == "results":
            message = f"the turn has {MAX_CHARGED} calls whose results are not stored"
            raise fail("E_TOOL_LIMIT", message, suggestion="Make fewer calls in one step.")
        raise overloaded("the budget waits for the journal", JOURNAL_MS)

    def reserve(self, connection: Connection, frame: Frame, now: float) -> None:
        """`budget.reserve` from an agent."""
        instance = connection.instance
        event = instance.leased if instance is not None else None
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise fail("E_LEASE_LOST", "a call needs the lease of its event")
        request = from_raw(frame.payload, BudgetReserve)
        chain = self.chains.get(event)
        if chain is None:
            self._bus.reply(connection, frame.id, BudgetGranted())
        elif request.kind == "tool":
            if not 0 < len(request.id) <= MAX_ID:
                raise fail("E_FRAME_INVALID", f"a call needs an id of 1 to {MAX_ID} characters")
            self.start_call(chain, event, request.id, frame, now)
            self._grant(connection, frame.id, chain)
        else:
            self._reserve_model(connection, frame, event, chain, request)

    def _reserve_model(
        self, connection: Connection, frame: Frame, event: Event, chain: amounts.AccountChain, request: BudgetReserve
    ) -> None:
        hold_id, holds, waits = _hold_id(event.id, request.id), chain.tree.holds, self._waiting
        if hold_id in holds:  # a repeat: what the journal gets after the call itself, it has after it
            self._bus.stage(Item(()), partial(self._held, connection, frame.id, chain, hold_id))
            return
        earlier = waits.get(hold_id)
        under_way = sum(hold.event_id == event.id for hold in holds.values())
        if earlier is None and under_way + sum(other.event is event for other in waits.values()) >= MAX_HOLDS:
            raise overloaded(f"a turn has {MAX_HOLDS} model calls under way at most")
        since = self._bus.now if earlier is None else earlier.since
        waits[hold_id] = _Waiting(connection, frame.id, event, chain, request, since)
        self._judge(hold_id)

    def settle(self, connection: Connection, frame: Frame, now: float) -> None:
        """`budget.settle` from an agent."""
        request = from_raw(frame.payload, BudgetSettle)
        hold_id = _hold_id(frame.event_id, request.id)
        event = self._bus.mailbox.events.get(frame.event_id or "")
        chain = None if event is None or event.instance is not connection.instance else self.chains.get(event)
        if chain is not None:
            self._waiting.pop(hold_id, None)  # it may have been given up before it was its turn
            hold = chain.tree.holds.get(hold_id)
            if hold is not None:
                self.accounts.settle(hold, self._amount(hold, request))
                self._flush()
                self._retry()
        # What is in the journal before it, is there when this is: a repeat after a crash finds nothing to settle.
        answer = Frame("reply", in_reply_to=frame.id)
        self._bus.stage(Item(()), lambda kept: self._bus.send(connection, answer))

    def _amount(self, hold: amounts.BudgetHold, request: BudgetSettle) -> amounts.Spend | None:
        if request.unused:
            return amounts.Spend()
        if not request.known:
            return None
        cached = min(request.cached_tokens, request.input_tokens)
        written = min(request.cache_write_tokens, request.input_tokens - cached)
        prices = self.accounts.price(hold.agent, request.model)
        money = prices.cost(request.input_tokens - cached - written, request.output_tokens, cached, written)
        return amounts.Spend(1, 0, request.input_tokens, request.output_tokens, money)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """The events whose model calls wait until others give something back."""
        for one in self._waiting.values():
            root = one.event.root
            text = f"waits for what others may give back to the budget of {root[: amounts.SHOWN]}"
            yield Waiting("budget", one.event, one.since, {"root": root, "text": text})

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "budget"}`: the trees that are not over, the newest first, or the last ones where all are over; with
        `eventId` the tree of that event, or the one that began with it. Raises GoondanError E_EVENT_NOT_FOUND.
        """
        accounts, now_ms, event_id = self.accounts, self._ms(now), asked.get("eventId")
        if event_id is None:
            open_trees = [tree for tree in accounts.trees.values() if tree.ended_ms is None]
            trees = (open_trees or list(accounts.ended))[::-1]
        else:
            event = self._bus.mailbox.events.get(event_id) if isinstance(event_id, str) else None
            root = event_id if event is None else event.root
            if not isinstance(root, str) or root not in accounts.trees:
                raise fail("E_EVENT_NOT_FOUND", f"nothing is counted for event {str(event_id)[:100]!r}")
            trees = [accounts.trees[root]]
        listed = fitting(
            amounts.report(tree, accounts.lasted_ms(tree, now_ms if tree.ended_ms is None else tree.ended_ms))
            for tree in trees[:MAX_LISTED]
        )
        body = {"trees": listed, "more": len(trees) - len(listed)}
        self._bus.reply(connection, frame.id, body)

    # --- what becomes of it

    def _held(
        self, connection: Connection, frame_id: str, chain: amounts.AccountChain, hold_id: str, kept: bool
    ) -> None:
        """The journal has that a model call is about to be made, or no room for it."""
        hold = chain.tree.holds.get(hold_id)
        if kept and hold is not None:
            self._grant(connection, frame_id, chain, hold.amount.output_tokens)
            return
        if hold is not None:
            self.accounts.settle(hold, amounts.Spend())
        # A repeat may have come for a call that was given up, or that the disk had no room for: its link asks again.
        error = overloaded("the model call is over")
        if not kept:
            error = fail("E_DISK_FULL", "the disk of the state directory is full; no model call is made")
        self._bus.error(connection.cls, connection.ident, error.info, Frame("budget.reserve", id=frame_id))

    def leased(self, event: Event, frame: Frame | None) -> None:
        """A process holds the event now. The account is opened only now, because most events only wait."""
        chain = self.chains.get(event)
        if chain is None and self.accounts.limits:
            chain = self.accounts.chain_of(event.root, (), event.instance.agent, self._ms(event.since))
            self._charge(event, chain)
        elif chain is not None and frame is not None:  # calls that another process had under way count
            self.accounts.lose_calls(chain.tree, event.id)
        if frame is not None:
            frame.budget = chain is not None

    def left(self, event: Event, *, ended: bool) -> None:
        """No process holds the event any more: its model calls that are under way count as spent."""
        chain = self.chains.get(event)
        if chain is None:
            return
        self.accounts.lose_calls(chain.tree, event.id)
        if ended:
            del self.chains[event]
            chain.tree.charged.pop(event.id, None)  # nobody sends calls of its turn again
            self._end_if_idle(chain.tree)

    def held(self, event: Event, since: float | None) -> None:
        """Time stands still while a person is asked. The journal gets this together with the decision."""
        if since is None:
            self.accounts.go_on(event.root, self._ms(self._bus.now))
        else:
            self.accounts.stand_still(event.root, self._ms(since))
        self._flush()

    def tick(self, now: float) -> None:
        """Write down the calls that were lost with a process, and try waiting model calls again."""
        accounts = self.accounts
        self._flush()
        self._retry()
        while accounts.ended:
            tree = next(iter(accounts.ended))
            if len(accounts.ended) <= MAX_ENDED and self._ms(now) - (tree.ended_ms or 0) < KEEP_MS:
                break
            accounts.forget(tree)
            self._bus.stage(amounts.tree_over(tree.root))

    # --- inside

    def _charge(self, event: Event, chain: amounts.AccountChain | None) -> None:
        if chain is not None:
            self.chains[event] = chain

    def _charge_new(self, event: Event, chain: amounts.AccountChain | None) -> None:
        """A new event is charged to these accounts. The journal keeps with it the agents whose budgets led to it."""
        self._charge(event, chain)
        if chain is not None and chain.path:
            event.parts = {**(event.parts or {}), FEATURE: to_raw(chain.path)}

    def _judge(self, hold_id: str) -> None:
        """Make a waiting model call, refuse it, or let it wait on."""
        connection, frame_id, event, chain, request, _ = self._waiting[hold_id]
        if event.instance.leased is not event:
            del self._waiting[hold_id]
            return
        agent = event.instance.agent
        wanted = (request.input_tokens, request.output_tokens)
        verdict = self.accounts.reserve(chain, agent, event.id, hold_id, wanted, self._ms(self._bus.now), request.model)
        if isinstance(verdict, str):
            return
        del self._waiting[hold_id]
        if isinstance(verdict, amounts.Shortage):
            info = self._spent(chain, verdict, agent).info
            self._bus.error(connection.cls, connection.ident, info, Frame("budget.reserve", id=frame_id))
            return
        if not chain.tree.known:  # a tree is written before its first model call
            self.accounts.dirty[chain.tree] = None
            self._flush()
        self._bus.stage(amounts.hold_written(verdict), partial(self._held, connection, frame_id, chain, hold_id))

    def _retry(self) -> None:
        for hold_id in list(self._waiting):
            self._judge(hold_id)

    def _flush(self) -> None:
        """Stage records of all trees that have changed."""
        for tree in list(self.accounts.dirty):
            item = amounts.tree_written(*self.accounts.record(tree))
            self._bus.stage(item, tree.written)

    def _end_if_idle(self, tree: amounts.Tree) -> None:
        """End a tree without unfinished events. A tree that has used nothing is forgotten."""
        if self._bus.mailbox.open.of_root(tree.root):
            return
        self.accounts.lose_calls(tree)
        if tree.known or any(account.by for account in tree.accounts.values()):
            self.accounts.tree_over(tree, self._ms(self._bus.now))
        else:
            self.accounts.forget(tree)

    def _grant(
        self, connection: Connection, frame_id: str, chain: amounts.AccountChain, output: int | None = None
    ) -> None:
        now_ms = self._ms(self._bus.now)
        left = amounts.left_of(chain, self.accounts.lasted_ms(chain.tree, now_ms))
        self._bus.reply(connection, frame_id, BudgetGranted(output, self._wall_left(chain, now_ms), left))

    def _wall_left(self, chain: amounts.AccountChain, now_ms: int) -> int | None:
        """How long a call that starts now may take (milliseconds, at least 1); None: any time."""
        limits = [
            account.limits.rows["wallSeconds"] for account in chain.accounts if "wallSeconds" in account.limits.rows
        ]
        return max(1, min(limits) - self.accounts.lasted_ms(chain.tree, now_ms)) if limits else None

    def _spent(self, chain: amounts.AccountChain, shortage: amounts.Shortage, agent: str) -> GoondanError:
        self._bus.counters["budget_refusals"] += 1
        return amounts.budget_spent(chain.tree.root, shortage, agent)

    def _ms(self, now: float) -> int:
        return int((self._bus.booted_at + now) * 1000)


def _hold_id(event_id: str | None, name: str) -> str:
    """The id of a model call of an event. Raises GoondanError for what is no name of one."""
    if not 0 < len(name) <= MAX_HOLD_ID or "/" in name:
        raise fail("E_FRAME_INVALID", f"a model call needs an id of 1 to {MAX_HOLD_ID} characters without a slash")
    return f"{event_id}/{name}"
