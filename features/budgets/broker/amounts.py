"""Amounts that budgets count, their limits, and what the journal keeps of them. Pure values.

Source: docs/decisions/070.
"""

# Annotations are no text here (`from __future__ import annotations`): the journal stores these structs.

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from goondan.features.budgets.wire import BudgetLimits
from goondan.kernel.broker.state.records import Item, Put, Retire, encode
from goondan.schemas.wire.usage import NANO

#: The subjects of records: of trees, and of model calls that may be under way.
_TREE: Final = "budget:"
_HOLD: Final = "budget-hold:"

#: The dimensions as bundles name them, in the order in which they are checked.
Dimension = Literal["calls", "modelCalls", "toolCalls", "tokens", "inputTokens", "outputTokens", "money", "wallSeconds"]


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

    @property
    def calls(self) -> int:
        """Calls of models and of tools together."""
        return self.model_calls + self.tool_calls

    @property
    def tokens(self) -> int:
        """Tokens that were read and written, together."""
        return self.input_tokens + self.output_tokens

    def add(self, other: "Spend") -> None:
        """Add `other`."""
        self.model_calls += other.model_calls
        self.tool_calls += other.tool_calls
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.money += other.money

    def take(self, other: "Spend") -> None:
        """Subtract `other`, which was added before."""
        self.model_calls -= other.model_calls
        self.tool_calls -= other.tool_calls
        self.input_tokens -= other.input_tokens
        self.output_tokens -= other.output_tokens
        self.money -= other.money

    def of(self, dimension: Dimension) -> int:
        """The amount of one dimension; money in billionths, 0 for `wallSeconds`."""
        match dimension:
            case "calls":
                return self.calls
            case "modelCalls":
                return self.model_calls
            case "toolCalls":
                return self.tool_calls
            case "tokens":
                return self.tokens
            case "inputTokens":
                return self.input_tokens
            case "outputTokens":
                return self.output_tokens
            case "money":
                return self.money
            case "wallSeconds":
                return 0


class Limits(Struct, frozen=True):
    """The limits of one budget. None: no limit."""

    #: Calls of models and of tools together.
    calls: int | None = None
    #: Calls of models.
    model_calls: int | None = None
    #: Calls of tools.
    tool_calls: int | None = None
    #: Tokens that models read and write, together.
    tokens: int | None = None
    #: Tokens that models read.
    input_tokens: int | None = None
    #: Tokens that models write.
    output_tokens: int | None = None
    #: Billionths of `currency`.
    money: int | None = None
    #: Time of the tree (milliseconds).
    wall_ms: int | None = None
    #: The currency of `money`.
    currency: str = "USD"

    @property
    def rows(self) -> list[tuple[Dimension, int]]:
        """The limits that are set. `wallSeconds` in milliseconds, `money` in billionths."""
        rows: list[tuple[Dimension, int | None]] = [
            ("calls", self.calls),
            ("modelCalls", self.model_calls),
            ("toolCalls", self.tool_calls),
            ("tokens", self.tokens),
            ("inputTokens", self.input_tokens),
            ("outputTokens", self.output_tokens),
            ("money", self.money),
            ("wallSeconds", self.wall_ms),
        ]
        return [(dimension, limit) for dimension, limit in rows if limit is not None]


def limits_of(written: BudgetLimits) -> Limits:
    """The limits that a bundle gives."""
    return Limits(
        calls=written.calls,
        model_calls=written.model_calls,
        tool_calls=written.tool_calls,
        tokens=written.tokens,
        input_tokens=written.input_tokens,
        output_tokens=written.output_tokens,
        money=None if written.money is None else round(written.money * NANO),
        wall_ms=None if written.wall_seconds is None else round(written.wall_seconds * 1000),
        currency=written.currency,
    )


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


def tree_written(record: BudgetTree, settled: Iterable[str] = ()) -> Item:
    """The use of a tree of work up to now. The model calls `settled` are not under way any more."""
    subject = _TREE + record.root
    return Item((*(Retire(_HOLD + hold_id) for hold_id in settled), Retire(subject), Put(subject, encode(record))))


def tree_over(root: str) -> Item:
    """The use of a tree of work is not needed any more."""
    return Item((Retire(_TREE + root),))


def hold_written(record: BudgetHold) -> Item:
    """A model call is about to be made."""
    return Item((Put(_HOLD + record.id, encode(record)),), refusable=True)


def holds_over(hold_ids: Iterable[str]) -> Item:
    """Model calls are not under way any more."""
    return Item(tuple(Retire(_HOLD + hold_id) for hold_id in hold_ids))
