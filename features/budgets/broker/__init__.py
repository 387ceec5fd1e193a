"""Answers the budget frames of agents, and writes budgets to the journal. Pure; accounts.py has the rules.

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

from goondan.features.budgets.broker.accounts import (
    MAX_CHARGED,
    MAX_HOLDS,
    UNKNOWN,
    Account,
    AccountChain,
    Accounts,
    Hold,
    Shortage,
    Tree,
)
from goondan.features.budgets.broker.amounts import (
    BudgetHold,
    BudgetTree,
    Dimension,
    Spend,
    hold_written,
    holds_over,
    limits_of,
    tree_over,
    tree_written,
)
from goondan.features.budgets.wire import (
    FEATURE,
    BudgetGranted,
    BudgetLeft,
    BudgetLimits,
    BudgetReserve,
    BudgetSettle,
)
from goondan.kernel.broker.state.bus import MAX_ID, RETRY_AFTER_MS, Bus, Core
from goondan.kernel.broker.state.entities import AGENTS, Actor, Call, Connection, Event
from goondan.kernel.broker.state.parts import SHORT_BYTES, OfCalls, OfEvents, Op, Part, Record, Take, Waiting, fitting
from goondan.kernel.broker.state.records import Item
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.usage import NANO, prices_of

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
#: An error names so many of the agents that have spent a budget, the largest part first.
MAX_SPENDERS: Final = 5
#: Ids and names come from others, so only so many characters of each are shown.
_SHOWN: Final = 100
_WORDS: Final[dict[Dimension, str]] = {
    "calls": "calls",
    "modelCalls": "model calls",
    "toolCalls": "tool calls",
    "tokens": "tokens",
    "inputTokens": "input tokens",
    "outputTokens": "output tokens",
    "money": "",
    "wallSeconds": "seconds",
}


class _Waiting(Struct):
    """A model call that waits for what others may give back."""

    #: The connection that asked.
    connection: Connection
    #: The id of its frame.
    frame_id: str
    #: The event whose turn asks.
    event: Event
    #: The accounts that the turn is charged to.
    chain: AccountChain
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
        self.chains: dict[Event, AccountChain] = {}
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
            Record(BudgetHold, lambda _, hold: self.accounts.restore_hold(hold)),
        )
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the budgets and prices of `plan` from now on."""
        specs = plan.agents.values()
        self.accounts.revise(
            {
                spec.name: limits_of(from_raw(spec.parts[FEATURE], BudgetLimits))
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

    def _restore(self, subject: str, record: BudgetTree) -> None:
        self.accounts.restore(record)

    def resumed(self, now: float) -> None:
        """See Part. Accepted events have the agents whose budgets they are charged to with them."""
        bus, accounts = self._bus, self.accounts
        events = bus.mailbox.events
        accounts.adopt_holds()
        for event in events.values():
            kept = (event.parts or {}).get(FEATURE)
            path = () if kept is None else from_raw(kept, tuple[str, ...])
            if not event.finished and (path or event.root in accounts.trees):
                self._charge(event, accounts.chain_of(event.root, path, event.instance.agent, self._ms(event.since)))
        for tree in list(accounts.trees.values()):
            for hold in list(tree.holds.values()):
                known = events.get(hold.event_id)
                if known is None or known.finished:
                    accounts.lose(hold)
        accounts.restored()
        for tree in list(accounts.trees.values()):
            self._end_if_idle(tree)
        self.flush()

    # --- what is asked

    def accepts(self, event: Event, actor: Actor) -> None:
        """Charge a new event, if it is known already to what; `leased` does the rest. Raises GoondanError
        E_BUDGET_SPENT when a turn asks and no more work may start.
        """
        if actor.root is not None and (self.accounts.limits or self.accounts.trees):
            self._charge_new(event, self._chain_for(event, actor.root, actor.turn))

    def follows(self, answer: Event, request: Event) -> None:
        """The path is the asker's own, whatever the asked agent has spent."""
        asked = self.chains.get(request)
        path = () if asked is None else asked.path
        self._charge_new(
            answer, self.accounts.chain_of(request.root, path, answer.instance.agent, self._ms(self._bus.now))
        )

    def _chain_for(self, event: Event, root: str, turn: Event | None) -> AccountChain | None:
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

    def start_call(self, chain: AccountChain, event: Event, call_id: str, frame: Frame, now: float) -> None:
        """Count a tool call of a turn that starts now.

        Raises GoondanError E_BUDGET_SPENT, E_OVERLOADED, E_TOOL_LIMIT.
        """
        agent = event.instance.agent
        accounts, now_ms = self.accounts, self._ms(now)
        verdict = accounts.charge_tool(chain, agent, event.id, call_id, now_ms)
        if accounts.dirty:
            self.flush()
        if verdict is None:
            left = self._wall_left(chain, now_ms)
            if left is not None and (frame.deadline_ms is None or frame.deadline_ms > left):
                frame.deadline_ms = left
            return
        if isinstance(verdict, Shortage):
            raise self._spent(chain, verdict, agent)
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
        chain = self.chains.get(event)
        if chain is None:
            self._grant(connection, frame.id, None)
        elif request.kind == "tool":
            if not 0 < len(request.id) <= MAX_ID:
                raise fail("E_FRAME_INVALID", f"a call needs an id of 1 to {MAX_ID} characters")
            self.start_call(chain, event, request.id, frame, now)
            self._grant(connection, frame.id, None, chain)
        else:
            self._reserve_model(connection, frame, event, chain, request)

    def _reserve_model(
        self, connection: Connection, frame: Frame, event: Event, chain: AccountChain, request: BudgetReserve
    ) -> None:
        _check_id(request.id)
        hold_id = f"{event.id}/{request.id}"
        hold = chain.tree.holds.get(hold_id)
        if hold is not None:
            if hold_id in self._asked:
                self._asked[hold_id].append((connection, frame.id))
            else:
                self._grant(connection, frame.id, hold)
            return
        waiting = _Waiting(connection, frame.id, event, chain, request, self._bus.now)
        if (earlier := self._waiting.get(hold_id)) is not None:
            waiting.since = earlier.since
        else:
            held = sum(hold.event_id == event.id for hold in chain.tree.holds.values())
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
        chain = None if event is None or event.instance is not connection.instance else self.chains.get(event)
        if chain is not None:
            self._waiting.pop(hold_id, None)  # it may have been given up before it was its turn
            hold = chain.tree.holds.get(hold_id)
            if hold is not None:
                self.accounts.settle(hold, self._amount(hold, request))
                self._asked.pop(hold_id, None)  # who gives a call up does not wait for the word that it may be made
                self._write(chain.tree, [hold_id])
                self._retry()
        # What is in the journal before it, is there when this is: a repeat after a crash finds nothing to settle.
        note = Frame("reply", in_reply_to=frame.id)
        if chain is None:
            self._bus.send(connection, note)
        else:
            self._bus.stage(Item(()), lambda kept: self._bus.send(connection, note))

    def _amount(self, hold: Hold, request: BudgetSettle) -> Spend | None:
        if request.unused:
            return Spend()
        if not request.known:
            return None
        cached = min(request.cached_tokens, request.input_tokens)
        written = min(request.cache_write_tokens, request.input_tokens - cached)
        prices = self.accounts.price(hold.spender, request.model)
        money = prices.cost(request.input_tokens - cached - written, request.output_tokens, cached, written)
        return Spend(1, 0, request.input_tokens, request.output_tokens, money)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """The events whose model calls wait until others give something back."""
        for one in self._waiting.values():
            root = one.event.root
            text = f"waits for what others may give back to the budget of {root[:_SHOWN]}"
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
            report(tree, accounts.lasted_ms(tree, now_ms if tree.ended_ms is None else tree.ended_ms))
            for tree in trees[:MAX_LISTED]
        )
        body = {"trees": listed, "more": len(trees) - len(listed)}
        self._bus.reply(connection, frame.id, body)

    # --- what becomes of it

    def _held(self, hold_id: str, tree: Tree, kept: bool) -> None:
        """The journal has that a model call is about to be made, or no room for it."""
        hold, asked = tree.holds.get(hold_id), self._asked.pop(hold_id, ())
        if kept:
            for connection, frame_id in asked:
                self._grant(connection, frame_id, hold)
            return
        if hold is not None:
            self.accounts.settle(hold, Spend())
        for connection, frame_id in asked:
            info = error_payload("E_DISK_FULL", "the disk of the state directory is full; no model call is made")
            self._bus.error(connection.cls, connection.ident, info, Frame("budget.reserve", id=frame_id))

    def leased(self, event: Event, frame: Frame | None) -> None:
        """A process holds the event now. The account is opened only now, because most events only wait."""
        chain = self.chains.get(event)
        if chain is None and self.accounts.limits:
            chain = self.accounts.chain_of(event.root, (), event.instance.agent, self._ms(event.since))
            self._charge(event, chain)
        elif chain is not None and frame is not None:  # calls that another process had under way count
            self.accounts.lose_calls(chain, event.id)
        if frame is not None:
            frame.budget = chain is not None

    def left(self, event: Event, *, ended: bool) -> None:
        """No process holds the event any more: its model calls that are under way count as spent."""
        chain = self.chains.get(event)
        if chain is None:
            return
        self.accounts.lose_calls(chain, event.id)
        if ended:
            del self.chains[event]
            self.accounts.event_over(chain, event.id)
            self._end_if_idle(chain.tree)

    def held(self, event: Event, since: float | None) -> None:
        """Time stands still while a person is asked. The journal gets this together with the decision."""
        if since is None:
            self.accounts.go_on(event.root, self._ms(self._bus.now))
        else:
            self.accounts.stand_still(event.root, self._ms(since))
        self.flush()

    def tick(self, now: float) -> None:
        """Write down the calls that were lost with a process, and try waiting model calls again."""
        accounts = self.accounts
        if accounts.dirty or accounts.lost:
            self.flush()
        if self._waiting:
            self._retry()
        while accounts.ended:
            tree = next(iter(accounts.ended))
            if len(accounts.ended) <= MAX_ENDED and self._ms(now) - (tree.ended_ms or 0) < KEEP_MS:
                break
            accounts.forget(tree)
            self._bus.stage(tree_over(tree.root))

    def flush(self) -> None:
        """Stage records of all trees that have changed."""
        accounts = self.accounts
        lost, accounts.lost = accounts.lost, []
        gone: dict[Tree, list[str]] = {}
        for hold in lost:
            gone.setdefault(hold.chain.tree, []).append(hold.id)
        for tree in [*accounts.dirty]:
            self._write(tree, gone.pop(tree, []))
        for ids in gone.values():
            self._bus.stage(holds_over(ids))

    # --- inside

    def _charge(self, event: Event, chain: AccountChain | None) -> None:
        if chain is not None:
            self.chains[event] = chain

    def _charge_new(self, event: Event, chain: AccountChain | None) -> None:
        """A new event is charged to these accounts. The journal keeps with it the agents whose budgets led to it."""
        self._charge(event, chain)
        if chain is not None and chain.path:
            event.parts = {**(event.parts or {}), FEATURE: to_raw(chain.path)}

    def _judge(self, hold_id: str, waiting: _Waiting) -> None:
        event, chain, request = waiting.event, waiting.chain, waiting.request
        if event.instance.leased is not event:
            del self._waiting[hold_id]
            return
        agent = event.instance.agent
        wanted = (request.input_tokens, request.output_tokens)
        verdict = self.accounts.reserve(chain, agent, event.id, hold_id, wanted, self._ms(self._bus.now), request.model)
        if isinstance(verdict, str):
            return
        del self._waiting[hold_id]
        connection = waiting.connection
        if isinstance(verdict, Shortage):
            info = self._spent(chain, verdict, agent).info
            self._bus.error(connection.cls, connection.ident, info, Frame("budget.reserve", id=waiting.frame_id))
            return
        tree = chain.tree
        if not tree.known:
            self._write(tree, [])
        record = BudgetHold(
            root=tree.root,
            event_id=event.id,
            id=hold_id,
            agent=agent,
            accounts=list(chain.names),
            amount=verdict.amount,
        )
        self._asked[hold_id] = [(connection, waiting.frame_id)]
        self._bus.stage(hold_written(record), partial(self._held, hold_id, tree))

    def _retry(self) -> None:
        for hold_id, waiting in list(self._waiting.items()):
            self._judge(hold_id, waiting)

    def _write(self, tree: Tree, over: list[str]) -> None:
        record = self.accounts.record(tree)
        self._bus.stage(tree_written(record, over), lambda kept: self.accounts.written(tree))

    def _end_if_idle(self, tree: Tree) -> None:
        """End a tree without unfinished events. A tree that has used nothing is forgotten."""
        if self._bus.mailbox.open.of_root(tree.root):
            return
        for hold in list(tree.holds.values()):
            self.accounts.lose(hold)
        if tree.known or any(account.by for account in tree.accounts.values()):
            self.accounts.tree_over(tree, self._ms(self._bus.now))
        else:
            self.accounts.forget(tree)

    def _grant(
        self, connection: Connection, frame_id: str, hold: Hold | None, chain: AccountChain | None = None
    ) -> None:
        granted = BudgetGranted()
        chain = chain or (None if hold is None else hold.chain)
        if chain is not None:
            now_ms = self._ms(self._bus.now)
            output = None if hold is None else hold.amount.output_tokens
            lasted_ms = self.accounts.lasted_ms(chain.tree, now_ms)
            granted = BudgetGranted(output, self._wall_left(chain, now_ms), left_of(chain, lasted_ms))
        self._bus.reply(connection, frame_id, granted)

    def _wall_left(self, chain: AccountChain, now_ms: int) -> int | None:
        """How long a call that starts now may take (milliseconds, at least 1); None: any time."""
        limits = [account.limits.wall_ms for account in chain.accounts if account.limits is not None]
        bounds = [limit for limit in limits if limit is not None]
        return max(1, min(bounds) - self.accounts.lasted_ms(chain.tree, now_ms)) if bounds else None

    def _spent(self, chain: AccountChain, shortage: Shortage, agent: str) -> GoondanError:
        self._bus.counters["budget_refusals"] += 1
        return budget_spent(chain.tree.root, shortage, agent)

    def _ms(self, now: float) -> int:
        return int((self._bus.booted_at + now) * 1000)


def _check_id(name: str) -> None:
    """Raise GoondanError for what is no name of a model call."""
    if not 0 < len(name) <= MAX_HOLD_ID or "/" in name:
        raise fail("E_FRAME_INVALID", f"a model call needs an id of 1 to {MAX_HOLD_ID} characters without a slash")


# --- in words and numbers, for people and models ----------------------------------------------------------------------


def budget_spent(root: str, shortage: Shortage, agent: str) -> GoondanError:
    """E_BUDGET_SPENT: the budget and its dimension, what was spent and by whom. `agent` wanted more."""
    account, dimension = shortage.account, shortage.dimension
    currency = account.limits.currency if account.limits is not None else ""
    spent, limit = _amount(dimension, shortage.spent, ""), _amount(dimension, shortage.limit, currency)
    message = f"the budget of agent {account.agent!r} is spent: {spent} of {limit}"
    if spenders := _spenders(account, dimension):
        message += f" ({spenders})"
    if shortage.wanted and shortage.spent < shortage.limit:
        message += f"; the next model call of {agent!r} may take {_amount(dimension, shortage.wanted, currency)}"
    shown = root[:_SHOWN]
    suggestion = (
        f"`gdn budget {shown}` shows it all. Raise limits.{dimension} of the agent's Extension/budget, or ask for less."
    )
    return GoondanError(error_payload("E_BUDGET_SPENT", message, suggestion=suggestion))


def left_of(chain: AccountChain, lasted_ms: int) -> list[BudgetLeft]:
    """What is left of each limit of a chain. Its tree has used the time `lasted_ms` (milliseconds)."""
    rows = []
    for account in chain.accounts:
        limits = account.limits
        for dimension, limit in [] if limits is None else limits.rows:
            used = lasted_ms if dimension == "wallSeconds" else account.spent.of(dimension)
            left = max(0, limit - used - account.held.of(dimension))
            unit = _unit(dimension)
            rows.append(BudgetLeft(account.agent, dimension, left / unit, limit / unit))
    return rows


def report(tree: Tree, lasted_ms: int) -> dict[str, Any]:
    """A tree for `gdn budget`: for each budget its limits, what was spent, by whom, and what is held now."""
    return {
        "rootEvent": tree.root,
        "beganMs": tree.began_ms,
        "endedMs": tree.ended_ms,
        "budgets": [_account(account, lasted_ms) for account in tree.accounts.values()],
    }


def _account(account: Account, lasted_ms: int) -> dict[str, Any]:
    limits = account.limits
    return {
        "agent": account.agent,
        "currency": None if limits is None else limits.currency,
        "limits": {} if limits is None else {name: limit / _unit(name) for name, limit in limits.rows},
        "spent": {**_amounts(account.spent), "wallSeconds": lasted_ms / 1000},
        "held": _amounts(account.held),
        "by": {spender or "unknown": _amounts(amount) for spender, amount in account.by.items()},
    }


def _amounts(amount: Spend) -> dict[str, float]:
    names = [name for name in _WORDS if name != "wallSeconds"]
    return {name: amount.of(name) / NANO if name == "money" else amount.of(name) for name in names}


def _spenders(account: Account, dimension: Dimension) -> str:
    """The agents that have spent it, the largest part first."""
    parts = sorted(((amount.of(dimension), name) for name, amount in account.by.items()), reverse=True)
    named = [(part, name) for part, name in parts if part]
    texts = [
        f"{name[:_SHOWN] if name != UNKNOWN else 'unknown after a crash'} {_amount(dimension, part, '')}"
        for part, name in named[:MAX_SPENDERS]
    ]
    if len(named) > MAX_SPENDERS:
        texts.append(f"{len(named) - MAX_SPENDERS} others")
    return ", ".join(texts)


def _unit(dimension: Dimension) -> int:
    """How many counted pieces are one unit for people."""
    return NANO if dimension == "money" else 1000 if dimension == "wallSeconds" else 1


def _amount(dimension: Dimension, amount: int, currency: str) -> str:
    """An amount in words; with `currency`, also its unit."""
    if dimension == "money":
        return f"{amount / NANO:.6f}".rstrip("0").rstrip(".") + (f" {currency}" if currency else "")
    number = f"{amount / 1000:.0f}" if dimension == "wallSeconds" else f"{amount:,}"
    return f"{number} {_WORDS[dimension]}" if currency else number
