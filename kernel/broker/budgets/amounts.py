"""Amounts that budgets count, and their limits. Pure values.

Source: docs/decisions/070.
"""

# Annotations are no text here (`from __future__ import annotations`): records.py stores these structs.

from typing import Literal

from msgspec import Struct

from goondan.schemas.budgets import BudgetLimits
from goondan.schemas.wire.usage import NANO

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
