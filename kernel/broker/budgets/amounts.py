"""Amounts that budgets count, their limits and prices. Pure values.

Money is counted in billionths of its unit, as whole numbers: sums of fractions would become inexact.

Source: docs/decisions/070.
"""

# Annotations are no text here (`from __future__ import annotations`): records.py stores these structs.

from typing import Final, Literal

from msgspec import Struct

from schemas.budgets import BudgetLimits, Pricing

#: Billionths in one unit of money.
NANO: Final = 1_000_000_000
#: A price is for so many tokens.
_PRICED: Final = 1_000_000

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


class Prices(Struct, frozen=True):
    """The prices of a model, in billionths for a million tokens."""

    #: Tokens that the model reads for the first time.
    input: int = 0
    #: Tokens that the model writes.
    output: int = 0
    #: Tokens that it reads from the vendor's cache.
    cached_input: int = 0
    #: Tokens that are put into this cache.
    cache_write: int = 0

    def cost(self, fresh: int, output: int, cached: int = 0, written: int = 0) -> int:
        """Billionths, rounded up. `fresh` tokens were read for the first time, `cached` from the vendor's cache, and
        `written` were put into it.
        """
        whole = fresh * self.input + output * self.output + cached * self.cached_input + written * self.cache_write
        return -(-whole // _PRICED)

    def affordable_output(self, money: int) -> int | None:
        """How many tokens a model may write for this amount of money; None: any number."""
        return None if not self.output else max(0, money) * _PRICED // self.output


FREE: Final = Prices()


def prices_of(pricing: Pricing | None) -> Prices:
    """The prices of a model. A model without prices costs nothing."""
    if pricing is None:
        return FREE
    cached = pricing.input_per_million if pricing.cached_input_per_million is None else pricing.cached_input_per_million
    written = pricing.input_per_million if pricing.cache_write_per_million is None else pricing.cache_write_per_million
    return Prices(
        round(pricing.input_per_million * NANO),
        round(pricing.output_per_million * NANO),
        round(cached * NANO),
        round(written * NANO),
    )
