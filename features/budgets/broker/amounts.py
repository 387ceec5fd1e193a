"""What budgets count: amounts, limits, the accounts of a tree of work, their records, and how people read them. Pure.

A tree is all work that began with one event (`rootEvent`). An account is the budget of one agent in one tree. A chain
has the accounts that a turn is charged to: that of its own agent, and those of all agents whose turns led to it.

Source: docs/decisions/070.
"""

# Annotations are no text here (`from __future__ import annotations`): the journal stores these structs.

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from goondan.features.budgets.wire import BudgetLeft, BudgetLimits
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.wire import errors, usage

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
    of: Callable[["Spend"], int]
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
    "money": _Counted(attrgetter("money"), "", usage.NANO),
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

    def add(self, other: "Spend", sign: Literal[1, -1] = 1) -> None:
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
        return f"{amount / usage.NANO:.6f}".rstrip("0").rstrip(".") + (f" {currency}" if currency else "")
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
        """Add an amount that this agent has spent. Money is counted up to MAX_COST."""
        for spent in (self.spent, self.by.setdefault(spender, Spend())):
            spent.add(amount)
            spent.money = min(spent.money, usage.MAX_COST)


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


def budget_spent(root: str, shortage: Shortage, agent: str) -> errors.GoondanError:
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
    return errors.GoondanError(errors.error_payload("E_BUDGET_SPENT", message, suggestion=suggestion))


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
                "currency": account.limits.currency if "money" in account.limits.rows else None,
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
