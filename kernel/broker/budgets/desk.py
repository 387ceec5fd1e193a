"""Answers the budget frames of agents, and writes budgets to the journal. Pure; book.py has the rules.

- A tool call is counted when its own frame comes; it needs no budget frame.
- A model call is reserved by `budget.reserve` and settled by `budget.settle`. Each is answered when the journal has it.
- Model calls that wait for others are tried again, in the order in which they came, when another one has settled.

Source: docs/decisions/070; PROTOCOL-AGENTS.md "Budgets".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from goondan.kernel.broker.acting import Actor
from goondan.kernel.broker.budgets.amounts import Spend, limits_of
from goondan.kernel.broker.budgets.book import (
    MAX_CHARGED,
    MAX_HOLDS,
    BudgetHold,
    BudgetLine,
    BudgetTree,
    Hold,
    Shortage,
    Tree,
    hold_written,
    holds_over,
    tree_over,
    tree_written,
)
from goondan.kernel.broker.budgets.messages import budget_spent, left_of, report
from goondan.kernel.broker.bus import MAX_ID, RETRY_AFTER_MS, Bus
from goondan.kernel.broker.calls import Call
from goondan.kernel.broker.entities import AGENTS, Connection, Event
from goondan.kernel.broker.journal.interface import Item
from goondan.kernel.broker.one_frame import fitting
from goondan.kernel.broker.parts import SHORT_BYTES, OfCalls, OfEvents, Op, Part, Record, Take, Waiting
from goondan.schemas.budgets import BudgetGranted, BudgetReserve, BudgetSettle
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.usage import prices_of

#: The name under which an event keeps the agents whose budgets it is charged to, the outermost first.
FEATURE: Final = "budgets"
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


class _Waiting(Struct):
    """A model call that waits for what others may give back."""

    #: The connection that asked.
    connection: Connection
    #: The id of its frame.
    frame_id: str
    #: The event whose turn asks.
    event: Event
    #: The accounts that the turn is charged to.
    line: BudgetLine
    #: What was asked for.
    request: BudgetReserve
    #: When it began to (seconds on the broker's clock).
    since: float


class Budgets(Part, OfEvents, OfCalls):
    """The budgets of the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._book = bus.budgets
        #: Frames to answer when the journal has it, by the model call that they are about.
        self._asked: dict[str, list[tuple[Connection, str]]] = {}
        self._waiting: dict[str, _Waiting] = {}
        self.takes = (
            Take((AGENTS,), "budget.reserve", self.reserve, SHORT_BYTES),
            Take((AGENTS,), "budget.settle", self.settle, SHORT_BYTES),
        )
        self.ops = (Op("budget", self.tell),)
        self.records = (
            Record(BudgetTree, self._restore),
            Record(BudgetHold, self._restore),
        )
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the budgets and prices of `plan` from now on."""
        specs = plan.agents.values()
        self._book.revise(
            {spec.name: limits_of(spec.budget) for spec in specs if spec.budget is not None},
            {
                (spec.name, name): prices_of(model.pricing)
                for spec in specs
                for model in spec.models
                for name in (model.document, *([""] if model is spec.model else []))
            },
        )

    def _restore(self, subject: str, record: BudgetTree | BudgetHold) -> None:
        if isinstance(record, BudgetTree):
            self._book.restore(record)
        else:
            self._book.restore_hold(record)

    def resumed(self, now: float) -> None:
        """See Part. Accepted events have the agents whose budgets they are charged to with them."""
        bus, book = self._bus, self._book
        events = bus.mailbox.events
        book.adopt_holds()
        for event in events.values():
            kept, event.parts = event.parts or {}, None
            path = from_raw(kept[FEATURE], tuple[str, ...]) if FEATURE in kept else ()
            if not event.finished and (path or event.root in book.trees):
                event.budget = book.line(event.root, path, event.instance.agent, self._ms(event.since))
        for tree in list(book.trees.values()):
            for hold in list(tree.holds.values()):
                known = events.get(hold.event_id)
                if known is None or known.finished:
                    book.lose(hold)
        book.restored()
        for tree in list(book.trees.values()):
            self._look(tree)
        self.flush()

    # --- what is asked

    def accepts(self, event: Event, actor: Actor) -> None:
        """Charge a new event, if it is known already to what; `leased` does the rest. Raises GoondanError
        E_BUDGET_SPENT when a turn asks and no more work may start.
        """
        if actor.root is not None and (self._book.limits or self._book.trees):
            _charge(event, self._line_of(event, actor.root, actor.turn))

    def follows(self, answer: Event, request: Event) -> None:
        """The path is the asker's own, whatever the asked agent has spent."""
        path = () if request.budget is None else request.budget.path
        _charge(answer, self._book.line(request.root, path, answer.instance.agent, self._ms(self._bus.now)))

    def _line_of(self, event: Event, root: str, turn: Event | None) -> BudgetLine | None:
        """`root` is the event that the sender's work began with. `turn` is the asking turn."""
        book, agent = self._book, event.instance.agent
        now_ms = self._ms(self._bus.now)
        if turn is None:
            return book.line(event.root, book.path_of(root, agent), agent, now_ms)
        line = book.line(event.root, () if turn.budget is None else turn.budget.names, agent, now_ms)
        if line is not None and (shortage := book.spent(line, now_ms)) is not None:
            raise self._spent(line, shortage, agent)
        return line

    def opens(self, call: Call, frame: Frame, now: float) -> None:
        """Count a tool call of a turn."""
        if (line := call.event.budget) is not None:
            self.start_call(line, call.event, call.id, frame, now)

    def stored(self, event: Event, call_ids: Sequence[str]) -> None:
        """These calls are not sent again, so that nothing need be known of them."""
        if event.budget is not None:
            self._book.stored(event.budget, event.id, call_ids)

    def start_call(self, line: BudgetLine, event: Event, call_id: str, frame: Frame, now: float) -> None:
        """Count a tool call of a turn that starts now.

        Raises GoondanError E_BUDGET_SPENT, E_OVERLOADED, E_TOOL_LIMIT.
        """
        agent = event.instance.agent
        book, now_ms = self._book, self._ms(now)
        verdict = book.charge_tool(line, agent, event.id, call_id, now_ms)
        if book.dirty:
            self.flush()
        if verdict is None:
            left = self._wall_left(line, now_ms)
            if left is not None and (frame.deadline_ms is None or frame.deadline_ms > left):
                frame.deadline_ms = left
            return
        if isinstance(verdict, Shortage):
            raise self._spent(line, verdict, agent)
        if verdict == "results":
            message = f"the turn has {MAX_CHARGED} calls whose results are not stored"
            raise fail("E_TOOL_LIMIT", message, suggestion="Make fewer calls in one step.")
        message = "the budget waits for the journal"
        raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=JOURNAL_MS))

    def reserve(self, connection: Connection, frame: Frame, now: float) -> None:
        """`budget.reserve` from an agent."""
        instance = connection.instance
        event = instance.leased if instance is not None else None
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise fail("E_LEASE_LOST", "a call needs the lease of its event")
        request = from_raw(frame.payload, BudgetReserve)
        line = event.budget
        if line is None:
            self._grant(connection, frame.id, None)
        elif request.kind == "tool":
            if not 0 < len(request.id) <= MAX_ID:
                raise fail("E_FRAME_INVALID", f"a call needs an id of 1 to {MAX_ID} characters")
            self.start_call(line, event, request.id, frame, now)
            self._grant(connection, frame.id, None, line)
        else:
            self._reserve_model(connection, frame, event, line, request)

    def _reserve_model(
        self, connection: Connection, frame: Frame, event: Event, line: BudgetLine, request: BudgetReserve
    ) -> None:
        _check_id(request.id)
        hold_id = f"{event.id}/{request.id}"
        hold = line.tree.holds.get(hold_id)
        if hold is not None:
            if hold_id in self._asked:
                self._asked[hold_id].append((connection, frame.id))
            else:
                self._grant(connection, frame.id, hold)
            return
        waiting = _Waiting(connection, frame.id, event, line, request, self._bus.now)
        if (earlier := self._waiting.get(hold_id)) is not None:
            waiting.since = earlier.since
        else:
            held = sum(hold.event_id == event.id for hold in line.tree.holds.values())
            if held + sum(other.event is event for other in self._waiting.values()) >= MAX_HOLDS:
                message = f"a turn has {MAX_HOLDS} model calls under way at most"
                raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))
        self._waiting[hold_id] = waiting
        self._judge(hold_id, waiting)

    def settle(self, connection: Connection, frame: Frame, now: float) -> None:
        """`budget.settle` from an agent."""
        request = from_raw(frame.payload, BudgetSettle)
        _check_id(request.id)
        event = self._bus.mailbox.events.get(frame.event_id or "")
        hold_id = f"{frame.event_id}/{request.id}"
        line = None if event is None or event.instance is not connection.instance else event.budget
        if line is not None:
            waiting = self._waiting.get(hold_id)
            if waiting is not None:  # it was given up before it was its turn
                del self._waiting[hold_id]
            hold = line.tree.holds.get(hold_id)
            if hold is not None:
                self._book.settle(hold, self._amount(hold, request))
                self._asked.pop(hold_id, None)  # who gives a call up does not wait for the word that it may be made
                self._write(line.tree, [hold_id])
                self._retry()
        # What is in the journal before it, is there when this is: a repeat after a crash finds nothing to settle.
        note = Frame("reply", in_reply_to=frame.id)
        if line is None:
            self._bus.send(connection, note)
        else:
            self._bus.stage(Item(()), partial(self._settled, connection, frame.id))

    def _amount(self, hold: Hold, request: BudgetSettle) -> Spend | None:
        if request.unused:
            return Spend()
        if not request.known:
            return None
        cached = min(request.cached_tokens, request.input_tokens)
        written = min(request.cache_write_tokens, request.input_tokens - cached)
        prices = self._book.price(hold.spender, request.model)
        money = prices.cost(request.input_tokens - cached - written, request.output_tokens, cached, written)
        return Spend(1, 0, request.input_tokens, request.output_tokens, money)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """The events whose model calls wait until others give something back."""
        for one in self._waiting.values():
            yield Waiting("budget", one.event, one.since, {"root": one.event.root})

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "budget"}`: the trees that are not over, the newest first, or the last ones where all are over; with
        `eventId` the tree of that event, or the one that began with it. Raises GoondanError E_EVENT_NOT_FOUND.
        """
        book, now_ms, event_id = self._book, self._ms(now), asked.get("eventId")
        if event_id is None:
            open_trees = [tree for tree in book.trees.values() if tree.ended_ms is None]
            trees = (open_trees or list(book.ended))[::-1]
        else:
            event = self._bus.mailbox.events.get(event_id) if isinstance(event_id, str) else None
            root = event_id if event is None else event.root
            if not isinstance(root, str) or root not in book.trees:
                raise fail("E_EVENT_NOT_FOUND", f"nothing is counted for event {str(event_id)[:100]!r}")
            trees = [book.trees[root]]
        listed = fitting(report(tree, self._lasted_ms(tree, now_ms)) for tree in trees[:MAX_LISTED])
        body = {"trees": listed, "more": len(trees) - len(listed)}
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw(body)))

    # --- what becomes of it

    def _written(self, tree: Tree, kept: bool) -> None:
        """The journal has a record of this tree."""
        self._book.written(tree)

    def _settled(self, connection: Connection, frame_id: str, kept: bool) -> None:
        """The journal has what a model call has used."""
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id))

    def _held(self, hold_id: str, kept: bool) -> None:
        """The journal has that a model call is about to be made, or no room for it."""
        hold, asked = self._hold(hold_id), self._asked.pop(hold_id, ())
        if kept:
            for connection, frame_id in asked:
                self._grant(connection, frame_id, hold)
            return
        if hold is not None:
            self._book.settle(hold, Spend())
        for connection, frame_id in asked:
            info = error_payload("E_DISK_FULL", "the disk of the state directory is full; no model call is made")
            self._bus.error(connection.cls, connection.ident, info, Frame("budget.reserve", id=frame_id))

    def leased(self, event: Event, *, anew: bool) -> None:
        """A process holds the event now. The account is opened only now, because most events only wait.

        `anew`: another process may have held the event before. The calls that it had under way count.
        """
        if event.budget is None and self._book.limits:
            event.budget = self._book.line(event.root, (), event.instance.agent, self._ms(event.since))
        elif event.budget is not None and anew:
            self._book.left(event.budget, event.id)

    def left(self, event: Event, *, ended: bool) -> None:
        """An event is over, or was never accepted."""
        line = event.budget
        if line is None or not ended:
            return
        self._book.event_over(line, event.id)
        self._look(line.tree)

    def held(self, event: Event, since: float | None) -> None:
        """Time stands still while a person is asked. The journal gets this together with the decision."""
        if since is None:
            self._book.go_on(event.root, self._ms(self._bus.now))
        else:
            self._book.stand_still(event.root, self._ms(since))
        self.flush()

    def tick(self, now: float) -> None:
        """Write down the calls that were lost with a process, and try waiting model calls again."""
        book = self._book
        if book.dirty or book.lost:
            self.flush()
        if self._waiting:
            self._retry()
        while book.ended:
            tree = next(iter(book.ended))
            if len(book.ended) <= MAX_ENDED and self._ms(now) - (tree.ended_ms or 0) < KEEP_MS:
                break
            book.forget(tree)
            self._bus.stage(tree_over(tree.root))

    def flush(self) -> None:
        """Stage records of all trees that have changed."""
        book = self._book
        lost, book.lost = book.lost, []
        gone: dict[Tree, list[str]] = {}
        for hold in lost:
            gone.setdefault(hold.line.tree, []).append(hold.id)
        for tree in [*book.dirty]:
            self._write(tree, gone.pop(tree, []))
        for ids in gone.values():
            self._bus.stage(holds_over(ids))

    # --- inside

    def _judge(self, hold_id: str, waiting: _Waiting) -> None:
        event, line, request = waiting.event, waiting.line, waiting.request
        if event.instance.leased is not event:
            del self._waiting[hold_id]
            return
        agent = event.instance.agent
        wanted = (request.input_tokens, request.output_tokens)
        verdict = self._book.reserve(line, agent, event.id, hold_id, wanted, self._ms(self._bus.now), request.model)
        if isinstance(verdict, str):
            return
        del self._waiting[hold_id]
        connection = waiting.connection
        if isinstance(verdict, Shortage):
            info = self._spent(line, verdict, agent).info
            self._bus.error(connection.cls, connection.ident, info, Frame("budget.reserve", id=waiting.frame_id))
            return
        tree = line.tree
        if not tree.known:
            self._write(tree, [])
        record = BudgetHold(
            root=tree.root,
            event_id=event.id,
            id=hold_id,
            agent=agent,
            accounts=list(line.names),
            amount=verdict.amount,
        )
        self._asked[hold_id] = [(connection, waiting.frame_id)]
        self._bus.stage(hold_written(record), partial(self._held, hold_id))

    def _retry(self) -> None:
        for hold_id, waiting in list(self._waiting.items()):
            self._judge(hold_id, waiting)

    def _lasted_ms(self, tree: Tree, now_ms: int) -> int:
        return self._book.lasted_ms(tree, now_ms if tree.ended_ms is None else tree.ended_ms)

    def _write(self, tree: Tree, over: list[str]) -> None:
        record = self._book.record(tree)
        self._bus.stage(tree_written(record, over), partial(self._written, tree))

    def _look(self, tree: Tree) -> None:
        """End a tree without unfinished events. A tree that has used nothing is forgotten."""
        if self._bus.mailbox.open.of_root(tree.root):
            return
        for hold in list(tree.holds.values()):
            self._book.lose(hold)
        if tree.known or any(account.by for account in tree.accounts.values()):
            self._book.tree_over(tree, self._ms(self._bus.now))
        else:
            self._book.forget(tree)

    def _grant(self, connection: Connection, frame_id: str, hold: Hold | None, line: BudgetLine | None = None) -> None:
        granted = BudgetGranted()
        line = line or (None if hold is None else hold.line)
        if line is not None:
            now_ms = self._ms(self._bus.now)
            output = None if hold is None else hold.amount.output_tokens
            lasted_ms = self._book.lasted_ms(line.tree, now_ms)
            granted = BudgetGranted(output, self._wall_left(line, now_ms), left_of(line, lasted_ms))
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id, payload=to_raw(granted)))

    def _wall_left(self, line: BudgetLine, now_ms: int) -> int | None:
        """How long a call that starts now may take (milliseconds, at least 1); None: any time."""
        limits = [account.limits.wall_ms for account in line.accounts if account.limits is not None]
        bounds = [limit for limit in limits if limit is not None]
        return max(1, min(bounds) - self._book.lasted_ms(line.tree, now_ms)) if bounds else None

    def _spent(self, line: BudgetLine, shortage: Shortage, agent: str) -> GoondanError:
        self._bus.counters["budget_refusals"] += 1
        return budget_spent(line.tree.root, shortage, agent)

    def _hold(self, hold_id: str) -> Hold | None:
        event = self._bus.mailbox.events.get(hold_id.rpartition("/")[0])
        return None if event is None or event.budget is None else event.budget.tree.holds.get(hold_id)

    def _ms(self, now: float) -> int:
        return int((self._bus.booted_at + now) * 1000)


def _charge(event: Event, line: BudgetLine | None) -> None:
    """A new event is charged to these accounts. The journal keeps with it the agents whose budgets led to it."""
    event.budget = line
    if line is not None and line.path:
        event.parts = {FEATURE: to_raw(line.path)}


def _check_id(name: str) -> None:
    """Raise GoondanError for what is no name of a model call."""
    if not 0 < len(name) <= MAX_HOLD_ID or "/" in name:
        raise fail("E_FRAME_INVALID", f"a model call needs an id of 1 to {MAX_HOLD_ID} characters without a slash")
