"""What is counted, and how much of it is allowed. Pure values.

Money is counted in billionths of its unit, as whole numbers: sums of fractions would drift.

Source: docs/decisions/070.
"""

# Annotations are no text here (`from __future__ import annotations`): records.py stores these structs.

from typing import Final, Literal

from msgspec import Struct

from schemas.budgets import BudgetLimits, Pricing

#: Billionths of a unit of money in one.
NANO: Final = 1_000_000_000
#: Tokens that a price is for.
_PRICED: Final = 1_000_000

#: The names of bundles, in the order in which they are looked at.
Dimension = Literal["calls", "modelCalls", "toolCalls", "tokens", "inputTokens", "outputTokens", "money", "wallSeconds"]


class Spend(Struct, array_like=True):
    """An amount of everything that is counted. `money` is in billionths."""

    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    money: int = 0

    @property
    def calls(self) -> int:
        """Of models and of tools."""
        return self.model_calls + self.tool_calls

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.input_tokens + self.output_tokens

    def add(self, other: "Spend") -> None:
        """Count `other`, too."""
        self.model_calls += other.model_calls
        self.tool_calls += other.tool_calls
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.money += other.money

    def take(self, other: "Spend") -> None:
        """Count `other`, which was added, no more."""
        self.model_calls -= other.model_calls
        self.tool_calls -= other.tool_calls
        self.input_tokens -= other.input_tokens
        self.output_tokens -= other.output_tokens
        self.money -= other.money

    def of(self, dimension: Dimension) -> int:
        """What it has of one dimension; money in billionths. Of `wallSeconds` nothing."""
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
    """Upper bounds of one budget; None: no bound. `money` in billionths of `currency`, `wall_ms` in milliseconds."""

    calls: int | None = None
    model_calls: int | None = None
    tool_calls: int | None = None
    tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    money: int | None = None
    wall_ms: int | None = None
    currency: str = "USD"

    @property
    def rows(self) -> list[tuple[Dimension, int]]:
        """The bounds that there are. `wallSeconds` in milliseconds, `money` in billionths."""
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
    """The bounds that a bundle gives."""
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
    """Billionths for a million tokens."""

    input: int = 0
    output: int = 0
    cached_input: int = 0
    cache_write: int = 0

    def cost(self, fresh: int, output: int, cached: int = 0, written: int = 0) -> int:
        """Billionths, rounded up. `fresh` tokens were read for the first time, `cached` from the vendor's cache, and
        `written` were put into it.
        """
        whole = fresh * self.input + output * self.output + cached * self.cached_input + written * self.cache_write
        return -(-whole // _PRICED)

    def affordable_output(self, money: int) -> int | None:
        """How many tokens a model may write for so much; None: any number."""
        return None if not self.output else max(0, money) * _PRICED // self.output


FREE: Final = Prices()


def prices_of(pricing: Pricing | None) -> Prices:
    """The prices of a model; one that names none costs nothing."""
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
