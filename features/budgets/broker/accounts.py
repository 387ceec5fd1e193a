"""The accounts of budgets: what each tree of work has used, and whether it may use more; their amounts, limits and
records, and how people read them. A pure state machine.

A tree is all work that began with one event (`rootEvent`). An account is the budget of one agent in one tree. A chain
has the accounts that a turn is charged to: that of its own agent, and those of all agents whose turns led to it. Each
account of a chain is charged with the whole amount, and each can refuse.

Rules.
- A tool call is counted when it starts, and stays counted. A call that is sent again under its callId is the same call.
- A model call first holds the most that it may use, and is settled with the amount that it used. When there is no room
  for it, it waits while others hold an amount that they may give back. When nobody does, it is refused, or it may write
  only as much as there is room for.
- A held amount counts as spent when the turn loses its process or ends: nobody knows whether the call was made.
- Tool calls are too frequent to write each of them. The journal has a number that is above the real count. After the
  death of a broker, as many calls count as could have been made, never fewer (`slack`).
- While a person is asked about a call of the tree, the time of the tree stands still.
- When one dimension is spent, no call of this chain starts any more. If only `toolCalls` is spent, models may still be
  asked, so that they can tell what they have found.

Source: docs/decisions/070.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right

# Annotations are no text here (`from __future__ import annotations`): the journal stores these structs.
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

from goondan.features.budgets.wire import BudgetLeft, BudgetLimits
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.usage import FREE, NANO, Prices

#: The name of the spender when nobody knows who it was: a killed broker had counted the calls ahead.
UNKNOWN: Final = ""
#: An error names so many of the agents that have spent a budget, the largest part first.
MAX_SPENDERS: Final = 5
#: Ids and names come from others, so only so many characters of each are shown.
SHOWN: Final = 100

#: The subjects of records: of trees, and of model calls that may be under way.
_TREE: Final = "budget:"
_HOLD: Final = "budget-hold:"

#: A dimension as bundles name it.
Dimension = Literal["calls", "modelCalls", "toolCalls", "tokens", "inputTokens", "outputTokens", "money", "wallSeconds"]


class _Counted(NamedTuple):
    """How a dimension is counted and shown."""

    #: Its amount in a Spend, in counted pieces.
    of: Callable[[Spend], int]
    #: Its name in an error.
    words: str
    #: How many counted pieces are one unit for people: money is counted in billionths, time in milliseconds.
    unit: int = 1


#: In the order in which they are checked.
DIMENSIONS: Final[dict[Dimension, _Counted]] = {
    "calls": _Counted(lambda spend: spend.model_calls + spend.tool_calls, "calls"),
    "modelCalls": _Counted(attrgetter("model_calls"), "model calls"),
    "toolCalls": _Counted(attrgetter("tool_calls"), "tool calls"),
    "tokens": _Counted(lambda spend: spend.input_tokens + spend.output_tokens, "tokens"),
    "inputTokens": _Counted(attrgetter("input_tokens"), "input tokens"),
    "outputTokens": _Counted(attrgetter("output_tokens"), "output tokens"),
    "money": _Counted(attrgetter("money"), "", NANO),
    "wallSeconds": _Counted(lambda spend: 0, "seconds", 1000),
}


class Spend(Struct, array_like=True):
    """An amount of everything that is counted."""

    #: Calls of models.
    model_calls: int = 0
    #: Calls of tools.
    tool_calls: int = 0
    #: Tokens that models read.
    input_tokens: int = 0
    #: Tokens that models wrote.
    output_tokens: int = 0
    #: Billionths of the currency's unit.
    money: int = 0

    def add(self, other: Spend, sign: Literal[1, -1] = 1) -> None:
        """Add `other`; with the sign -1, subtract what was added before."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))

    def of(self, dimension: Dimension) -> int:
        """The amount of one dimension, in counted pieces; 0 for `wallSeconds`."""
        return DIMENSIONS[dimension].of(self)

    def shown(self) -> dict[str, float]:
        """All amounts but time, in units for people."""
        return {name: in_units(name, self.of(name)) for name in DIMENSIONS if name != "wallSeconds"}


class Limits(NamedTuple):
    """The limits of one budget."""

    #: Those that are set, in counted pieces, in the order in which they are checked.
    rows: dict[Dimension, int] = {}
    #: The currency of `money`.
    currency: str = "USD"


def limits_of(written: BudgetLimits) -> Limits:
    """The limits that a bundle gives."""
    named = msgspec.to_builtins(written)  # without those that are not set
    rows = {name: round(named[name] * counted.unit) for name, counted in DIMENSIONS.items() if name in named}
    return Limits(rows, written.currency)


def in_units(dimension: Dimension, amount: int) -> float:
    """So many counted pieces in units for people."""
    unit = DIMENSIONS[dimension].unit
    return amount if unit == 1 else amount / unit


def in_words(dimension: Dimension, amount: int, currency: str = "") -> str:
    """An amount in words; with `currency`, also its unit."""
    if dimension == "money":
        return f"{amount / NANO:.6f}".rstrip("0").rstrip(".") + (f" {currency}" if currency else "")
    number = f"{in_units(dimension, amount):,.0f}"
    return f"{number} {DIMENSIONS[dimension].words}" if currency else number


# --- accounts ---------------------------------------------------------------------------------------------------------


class Account:
    """The budget of one agent in one tree. It has no limits when the bundle does not limit the agent any more."""

    __slots__ = ("agent", "by", "held", "limits", "spent")

    def __init__(self, agent: str, limits: Limits) -> None:
        self.agent = agent
        self.limits = limits
        self.spent = Spend()
        self.held = Spend()
        #: The amounts in `spent` by the agent that spent them.
        self.by: dict[str, Spend] = {}

    def charge(self, spender: str, amount: Spend) -> None:
        """Add an amount that this agent has spent."""
        self.spent.add(amount)
        self.by.setdefault(spender, Spend()).add(amount)


class Shortage(NamedTuple):
    """Why nothing more is given. Money is in billionths, `wallSeconds` in milliseconds."""

    #: The budget that is used up.
    account: Account
    #: The dimension of it that is used up.
    dimension: Dimension
    #: The limit of this dimension.
    limit: int
    #: How much of it is spent.
    spent: int
    #: How much the call would have taken; 0 when nothing at all is left.
    wanted: int = 0


class Tree:
    """All work that began with one event. `began_ms`: when the event was accepted (milliseconds since 1970)."""

    def __init__(self, root: str, began_ms: int) -> None:
        self.root = root
        self.began_ms = began_ms
        #: When its last event ended; None while it has unfinished events.
        self.ended_ms: int | None = None
        #: How long its time has stood still (milliseconds).
        self.stood_ms = 0
        #: Up to which moment that is counted (milliseconds since 1970).
        self.stood_until_ms = 0
        self.accounts: dict[str, Account] = {}
        #: Model calls that are under way, by their ids.
        self.holds: dict[str, BudgetHold] = {}
        #: Model calls that are over: their records in the journal go with the tree's next record.
        self.over: list[str] = []
        #: The path of each agent's last event. The end of pending work needs it, because it knows only the root.
        self.paths: dict[str, tuple[str, ...]] = {}
        #: Event -> counted tool calls of its unfinished turn, which may be sent again.
        self.charged: dict[str, set[bytes]] = {}
        #: Tool calls that this broker has counted.
        self.counted = 0
        #: The highest count that each record allows: the record in the journal, and those on their way there.
        self.ceilings: deque[int] = deque([0])
        #: How many calls the last record allows beyond its own number.
        self.slack = 0
        #: True when the journal was told of this tree.
        self.known = False

    def written(self, kept: bool) -> None:
        """The journal has the next record."""
        self.ceilings.popleft()


class AccountChain(NamedTuple):
    """The accounts that a turn is charged to."""

    #: The work that they belong to.
    tree: Tree
    #: The agents whose budgets led to the turn, the outermost first.
    path: tuple[str, ...]
    #: Those of `path`, and the turn's own.
    accounts: list[Account]

    @property
    def names(self) -> tuple[str, ...]:
        """The agents of these accounts. They are the path of the work that follows from this turn."""
        return tuple(account.agent for account in self.accounts)


# --- the journal ------------------------------------------------------------------------------------------------------


class BudgetTree(Struct, frozen=True, array_like=True, tag="budgets/tree", kw_only=True):
    """What a tree has used: all work that began with one event."""

    #: The event that the tree began with, which the record concerns.
    root: str
    #: When it was accepted (milliseconds since 1970).
    began_ms: int
    #: Agent with a budget -> spending agent -> amount; "" when nobody knows who has spent it.
    accounts: dict[str, dict[str, Spend]]
    #: Agent -> the agents whose budgets its last event is charged to.
    paths: dict[str, list[str]]
    #: Event -> joined digests of tool calls that were counted and may be sent again.
    charged: dict[str, bytes]
    #: So many more tool calls may have been counted before there is a newer record.
    slack: int
    #: When its last event ended (milliseconds since 1970); None while it has unfinished events.
    ended_ms: int | None = None
    #: How long its time stood still while people were asked (milliseconds).
    stood_ms: int = 0
    #: Up to which moment that is counted (milliseconds since 1970).
    stood_until_ms: int = 0


class BudgetHold(Struct, frozen=True, array_like=True, tag="budgets/hold", kw_only=True):
    """A model call that may be under way and is not settled."""

    #: The event that its tree began with, which the record concerns.
    root: str
    #: The event whose turn makes it.
    event_id: str
    #: Its id; no other model call has it.
    id: str
    #: The agent that makes it.
    agent: str
    #: The agents whose budgets it is charged to.
    accounts: list[str]
    #: The most that it may use.
    amount: Spend


def tree_written(record: BudgetTree, over: Iterable[str]) -> Item:
    """The use of a tree of work up to now. The model calls `over` are not under way any more."""
    subject = _TREE + record.root
    return Item((*(Retire(_HOLD + hold_id) for hold_id in over), Retire(subject), Put(subject, encode(record))))


def tree_over(root: str) -> Item:
    """The use of a tree of work is not needed any more."""
    return Item((Retire(_TREE + root),))


def hold_written(hold: BudgetHold) -> Item:
    """A model call is about to be made."""
    return Item((Put(_HOLD + hold.id, encode(hold)),), refusable=True)


# --- in words and numbers, for people and models ----------------------------------------------------------------------


def budget_spent(root: str, shortage: Shortage, agent: str) -> GoondanError:
    """E_BUDGET_SPENT: the budget and its dimension, what was spent and by whom. `agent` wanted more."""
    account, dimension = shortage.account, shortage.dimension
    currency = account.limits.currency
    spent, limit = in_words(dimension, shortage.spent), in_words(dimension, shortage.limit, currency)
    message = f"the budget of agent {account.agent!r} is spent: {spent} of {limit}"
    if spenders := _spenders(account, dimension):
        message += f" ({spenders})"
    if shortage.wanted and shortage.spent < shortage.limit:
        message += f"; the next model call of {agent!r} may take {in_words(dimension, shortage.wanted, currency)}"
    suggestion = (
        f"`gdn budget {root[:SHOWN]}` shows it all. Raise limits.{dimension} of the agent's Extension/budget, or ask "
        "for less."
    )
    return GoondanError(error_payload("E_BUDGET_SPENT", message, suggestion=suggestion))


def left_of(chain: AccountChain, lasted_ms: int) -> list[BudgetLeft]:
    """What is left of each limit of a chain. Its tree has used the time `lasted_ms` (milliseconds)."""
    rows = []
    for account in chain.accounts:
        for name, limit in account.limits.rows.items():
            used = lasted_ms if name == "wallSeconds" else account.spent.of(name) + account.held.of(name)
            rows.append(BudgetLeft(account.agent, name, in_units(name, max(0, limit - used)), in_units(name, limit)))
    return rows


def report(tree: Tree, lasted_ms: int) -> dict[str, Any]:
    """A tree for `gdn budget`: for each budget its limits, what was spent, by whom, and what is held now."""
    return {
        "rootEvent": tree.root,
        "beganMs": tree.began_ms,
        "endedMs": tree.ended_ms,
        "budgets": [
            {
                "agent": account.agent,
                "currency": account.limits.currency,
                "limits": {name: in_units(name, limit) for name, limit in account.limits.rows.items()},
                "spent": {**account.spent.shown(), "wallSeconds": in_units("wallSeconds", lasted_ms)},
                "held": account.held.shown(),
                "by": {spender or "unknown": amount.shown() for spender, amount in account.by.items()},
            }
            for account in tree.accounts.values()
        ],
    }


def _spenders(account: Account, dimension: Dimension) -> str:
    """The agents that have spent it, the largest part first."""
    parts = sorted(((amount.of(dimension), name) for name, amount in account.by.items()), reverse=True)
    named = [(part, name) for part, name in parts if part]
    texts = [
        f"{name[:SHOWN] if name != UNKNOWN else 'unknown after a crash'} {in_words(dimension, part)}"
        for part, name in named[:MAX_SPENDERS]
    ]
    if len(named) > MAX_SPENDERS:
        texts.append(f"{len(named) - MAX_SPENDERS} others")
    return ", ".join(texts)


#: A shorter answer (tokens) is of no use: a model call that could write only less is refused.
MIN_OUTPUT: Final = 256
#: Tool calls that may be counted ahead of the journal: one in so many of the lowest limit, and so many at most. That is
#: also what a broker that is killed costs a budget.
SLACK_PART: Final = 50
MAX_SLACK: Final = 64
#: Model calls that one turn may have under way.
MAX_HOLDS: Final = 16
#: Tool calls of one event that are counted and whose results are not stored: each of them takes memory, and a part of
#: every record of its tree. An agent has some hundred open at once.
MAX_CHARGED: Final = 4096
#: Bytes of the digest that stands for a tool call.
DIGEST_BYTES: Final = 8
#: The limits of tool calls.
_TOOL_LIMITS: Final[tuple[Dimension, ...]] = ("calls", "toolCalls")
#: Without limits.
_UNLIMITED: Final = Limits()

#: Why a call has to wait.
#: - `journal`: the journal must first have a higher number.
#: - `others`: others may give back what they hold.
#: - `results`: results of earlier calls must first be stored.
Wait = Literal["journal", "others", "results"]


class _Standing(Struct):
    """The time of a tree stands still because a person is asked."""

    #: How many calls the person is asked about.
    items: int
    #: Since when (milliseconds since 1970).
    since_ms: int


class Accounts:
    """All trees. Times are milliseconds since 1970."""

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self.limits: dict[str, Limits] = {}
        self.prices: dict[tuple[str, str], Prices] = {}
        #: Trees that have changed, so that the journal needs a new record.
        self.dirty: dict[Tree, None] = {}
        #: Model calls that were under way in an earlier broker. The record of a tree may come after them.
        self.restored_holds: list[BudgetHold] = []
        #: Trees whose time stands still, by their roots. Some have no account yet.
        self._standing: dict[str, _Standing] = {}
        #: Trees that are over; the one that ended first is first.
        self.ended: dict[Tree, None] = {}

    def revise(self, limits: Mapping[str, Limits], prices: Mapping[tuple[str, str], Prices]) -> None:
        """Use these limits and prices of the bundle from now on: limits by agent, prices by agent and Model document
        ("": the agent's own Model).
        """
        self.limits, self.prices = dict(limits), dict(prices)
        for tree in self.trees.values():
            for account in tree.accounts.values():
                account.limits = self.limits.get(account.agent, _UNLIMITED)

    # --- chains

    def chain_of(self, root: str, path: tuple[str, ...], agent: str, at_ms: int) -> AccountChain | None:
        """The accounts that a turn of `agent` is charged to; None when there are none."""
        own = agent if agent in self.limits and agent not in path else None
        if not path and own is None:
            return None
        tree = self.trees.get(root)
        if tree is None:
            tree = self.trees[root] = Tree(root, at_ms)
        if tree.ended_ms is not None:
            tree.ended_ms = None
            self.ended.pop(tree, None)
        tree.paths[agent] = path
        names = path if own is None else (*path, own)
        return AccountChain(tree, path, [self._account(tree, name) for name in names])

    def path_of(self, root: str | None, agent: str) -> tuple[str, ...]:
        """The path of the last event of an agent in this tree."""
        tree = None if root is None else self.trees.get(root)
        return () if tree is None else tree.paths.get(agent, ())

    def _account(self, tree: Tree, agent: str) -> Account:
        account = tree.accounts.get(agent)
        if account is None:
            account = tree.accounts[agent] = Account(agent, self.limits.get(agent, _UNLIMITED))
        return account

    # --- time

    def lasted_ms(self, tree: Tree, now_ms: int) -> int:
        """The time that a tree has used (milliseconds), without the time for which it stood still."""
        standing = self._standing.get(tree.root)
        until = now_ms if standing is None else max(tree.began_ms, standing.since_ms)
        return max(0, until - tree.began_ms - tree.stood_ms)

    def stand_still(self, root: str, since_ms: int) -> None:
        """A person is asked about one more call of this tree."""
        tree = self.trees.get(root)
        if tree is not None:  # after a crash: what the journal has counted of it already
            since_ms = max(since_ms, tree.stood_until_ms)
            if not tree.known:  # the next broker has to know whose time stands still
                self.dirty[tree] = None
        standing = self._standing.get(root)
        if standing is None:
            self._standing[root] = _Standing(1, since_ms)
        else:
            standing.items += 1
            standing.since_ms = min(standing.since_ms, since_ms)

    def go_on(self, root: str, now_ms: int) -> None:
        """A person is no longer asked about one of these calls. Its time is counted, also while others still wait."""
        standing = self._standing.get(root)
        if standing is None:
            return
        tree = self.trees.get(root)
        if tree is not None:
            tree.stood_ms += max(0, now_ms - max(tree.began_ms, standing.since_ms))
            tree.stood_until_ms = now_ms
            self.dirty[tree] = None
        standing.items -= 1
        standing.since_ms = now_ms
        if not standing.items:
            del self._standing[root]

    # --- what is spent

    def spent(self, chain: AccountChain, now_ms: int) -> Shortage | None:
        """The budget that has nothing left; None when all have something. A spent `toolCalls` alone does not count."""
        for account in chain.accounts:
            for dimension, limit in account.limits.rows.items():
                if dimension == "toolCalls":
                    continue
                if dimension == "wallSeconds":
                    used = self.lasted_ms(chain.tree, now_ms)
                else:
                    used = account.spent.of(dimension)
                if dimension in ("calls", "modelCalls"):  # a call that is under way is one, whatever it takes
                    used += account.held.of(dimension)
                if used >= limit:
                    return Shortage(account, dimension, limit, used)
        return None

    # --- tool calls

    def charge_tool(
        self, chain: AccountChain, spender: str, event_id: str, call_id: str, now_ms: int
    ) -> Shortage | Wait | None:
        """Count a tool call that is about to start. None: it may start. So may a call that was counted before."""
        tree = chain.tree
        digest = digest_of(event_id, call_id)
        counted = tree.charged.setdefault(event_id, set())
        if digest in counted:
            return None
        if len(counted) >= MAX_CHARGED:
            return "results"
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        for account in chain.accounts:
            limit = account.limits.rows.get("toolCalls")
            if limit is not None and account.spent.tool_calls >= limit:
                return Shortage(account, "toolCalls", limit, account.spent.tool_calls)
        if tree.counted >= min(tree.ceilings):
            if len(tree.ceilings) == 1:
                self.dirty[tree] = None
            return "journal"
        for account in chain.accounts:  # `charge` would add up five fields, and this is done for every tool call
            account.spent.tool_calls += 1
            account.by.setdefault(spender, Spend()).tool_calls += 1
        counted.add(digest)
        tree.counted += 1
        if 2 * (tree.ceilings[-1] - tree.counted) <= tree.slack:  # half of what the last record allows is used
            self.dirty[tree] = None
        return None

    def stored(self, chain: AccountChain, event_id: str, call_ids: Iterable[str]) -> None:
        """The results of these calls are stored, so nobody sends the calls again."""
        if counted := chain.tree.charged.get(event_id):
            counted.difference_update(digest_of(event_id, call_id) for call_id in call_ids)

    # --- model calls

    def price(self, agent: str, model: str) -> Prices:
        """What this Model of an agent costs; a name that is not among its Models stands for its own."""
        own = self.prices.get((agent, ""), FREE)
        return self.prices.get((agent, model), own)

    def reserve(
        self,
        chain: AccountChain,
        spender: str,
        event_id: str,
        hold_id: str,
        wanted: tuple[int, int],
        now_ms: int,
        model: str = "",
    ) -> BudgetHold | Shortage | Wait:
        """Hold the amount that a model call may use. `wanted`: tokens that it reads, tokens that it may write. `model`:
        the document of the Model.
        """
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        read, output = wanted
        prices = self.price(spender, model)

        def takes(written: int) -> Spend:
            return Spend(1, 0, read, written, prices.cost(read, written))

        least = min(output, MIN_OUTPUT)
        fewest, most, room = takes(least), takes(output), output
        for account in chain.accounts:
            for dimension, limit in account.limits.rows.items():
                if dimension == "toolCalls":
                    continue
                spent, held = account.spent.of(dimension), account.held.of(dimension)
                left = limit - spent
                if left < fewest.of(dimension):
                    return Shortage(account, dimension, limit, spent, fewest.of(dimension))
                if left - held < most.of(dimension):
                    if held:
                        return "others"
                    costs = partial(_taken, takes, dimension)
                    room = min(room, least + bisect_right(range(least, output), left, key=costs) - 1)
        hold = BudgetHold(
            root=chain.tree.root,
            event_id=event_id,
            id=hold_id,
            agent=spender,
            accounts=list(chain.names),
            amount=takes(room),
        )
        self._hold(chain.tree, hold)
        return hold

    def _hold(self, tree: Tree, hold: BudgetHold) -> None:
        tree.holds[hold.id] = hold
        for name in hold.accounts:
            self._account(tree, name).held.add(hold.amount)

    def settle(self, hold: BudgetHold, amount: Spend | None) -> None:
        """A model call has used `amount`. None: nobody knows, so the whole held amount counts. An empty `Spend()`: the
        call was not made.
        """
        tree = self.trees[hold.root]
        if tree.holds.pop(hold.id, None) is None:
            return
        for name in hold.accounts:
            account = tree.accounts[name]
            account.held.add(hold.amount, -1)
            account.charge(hold.agent, hold.amount if amount is None else amount)
        tree.over.append(hold.id)
        self.dirty[tree] = None

    def lose_calls(self, tree: Tree, event_id: str | None = None) -> None:
        """No process holds the turn of this event any more, or of any event of the tree: model calls that are under
        way count as spent.
        """
        for hold in list(tree.holds.values()):
            if event_id in (None, hold.event_id):
                self.settle(hold, None)

    # --- ends

    def tree_over(self, tree: Tree, now_ms: int) -> None:
        """The tree has no unfinished event. Its amounts are kept for people who look, and for pending work."""
        if tree.ended_ms is None:
            tree.ended_ms = now_ms
            self.ended[tree] = None
            self.dirty[tree] = None

    def forget(self, tree: Tree) -> None:
        """Nobody needs the tree any more."""
        self.trees.pop(tree.root, None)
        self.ended.pop(tree, None)
        self.dirty.pop(tree, None)

    # --- the journal

    def record(self, tree: Tree) -> tuple[BudgetTree, list[str]]:
        """The next record of the tree, and the model calls that are over. Until the journal has a newer record, `slack`
        more tool calls may be counted.
        """
        self.dirty.pop(tree, None)
        tree.known = True
        tree.slack = slack_of(tree)
        tree.ceilings.append(tree.counted + tree.slack)
        over, tree.over = tree.over, []
        record = BudgetTree(
            root=tree.root,
            began_ms=tree.began_ms,
            accounts={
                name: {spender: structs.replace(amount) for spender, amount in account.by.items()}
                for name, account in tree.accounts.items()
            },
            paths={agent: list(path) for agent, path in tree.paths.items()},
            charged={event_id: b"".join(sorted(digests)) for event_id, digests in tree.charged.items() if digests},
            slack=tree.slack,
            ended_ms=tree.ended_ms,
            stood_ms=tree.stood_ms,
            stood_until_ms=tree.stood_until_ms,
        )
        return record, over

    def restore(self, record: BudgetTree) -> None:
        """Restore a tree from the journal. Tool calls that may have been counted after the record count as made."""
        tree = self.trees[record.root] = Tree(record.root, record.began_ms)
        tree.paths = {agent: tuple(path) for agent, path in record.paths.items()}
        tree.charged = {
            event_id: {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
            for event_id, data in record.charged.items()
        }
        tree.ended_ms = record.ended_ms
        tree.stood_ms, tree.stood_until_ms = record.stood_ms, record.stood_until_ms
        for name, by in record.accounts.items():
            account = self._account(tree, name)
            for spender, amount in by.items():
                account.charge(spender, amount)
        if tree.ended_ms is not None:
            self.ended[tree] = None
        tree.slack, tree.known = record.slack, True

    def restored(self) -> None:
        """The whole journal was read: model calls that were under way are held again, and tool calls that an earlier
        broker may have counted ahead count as made.
        """
        for hold in self.restored_holds:
            tree = self.trees.get(hold.root)
            if tree is None:  # a tree is written before its first model call, so that was damaged
                tree = self.trees[hold.root] = Tree(hold.root, 0)
            self._hold(tree, hold)
        self.restored_holds.clear()
        for tree in self.trees.values():
            ahead, tree.slack = tree.slack, 0  # what comes now waits for a record of its own
            if tree.ended_ms is not None:
                continue
            for account in tree.accounts.values():
                rooms = [
                    limit - account.spent.of(dimension) - account.held.of(dimension)
                    for dimension, limit in account.limits.rows.items()
                    if dimension in _TOOL_LIMITS
                ]
                if (counted := min([ahead, *rooms])) > 0:
                    account.charge(UNKNOWN, Spend(tool_calls=counted))
            self.dirty[tree] = None


def _taken(takes: Callable[[int], Spend], dimension: Dimension, written: int) -> int:
    """How much of a dimension a call takes that writes so many tokens."""
    return takes(written).of(dimension)


def slack_of(tree: Tree) -> int:
    """How many tool calls of a tree may be counted ahead of the journal; 0 for a tree that is over."""
    if tree.ended_ms is not None:
        return 0
    limits = [
        limit
        for account in tree.accounts.values()
        for dimension, limit in account.limits.rows.items()
        if dimension in _TOOL_LIMITS
    ]
    return min([MAX_SLACK, *(max(1, limit // SLACK_PART) for limit in limits)])


def digest_of(event_id: str, call_id: str) -> bytes:
    """The digest that stands for a call of an event."""
    name = f"{event_id}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
