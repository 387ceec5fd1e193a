"""What model calls have used: the parts that an instance keeps, and the sum that stands in an answer. Pure.

A part is what one day's calls of one model have used. An instance's conversation file has a row for each part in its
table `meta`, and the transaction that stores the end of a turn adds the turn's calls to it. So a call is counted once,
whatever was killed, for as long as the instance is there. What a turn has used by itself stands in its answer.

Source: docs/design/traces.md section 4.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from collections.abc import Iterable
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta, Struct

#: Billionths in one unit of money.
NANO: Final = 1_000_000_000
#: The highest cost that is counted (billionths): the highest limit of money. The journal's numbers have 64 bits.
MAX_COST: Final = 10**9 * NANO
#: What is more than any sum of amounts. Such a number in a file would be no float.
_NO_AMOUNT: Final = 1 << 100
#: A price is for so many tokens.
_PRICED: Final = 1_000_000


class Pricing(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What a model costs, for a million tokens each."""

    input_per_million: Annotated[float, Meta(ge=0, le=10**9, description="For tokens that it reads.")]
    output_per_million: Annotated[float, Meta(ge=0, le=10**9, description="For tokens that it writes.")]
    cached_input_per_million: Annotated[
        Annotated[float, Meta(ge=0, le=10**9)] | None,
        Meta(description="For tokens that it reads from the vendor's cache; without it as much as for others."),
    ] = None
    cache_write_per_million: Annotated[
        Annotated[float, Meta(ge=0, le=10**9)] | None,
        Meta(description="For tokens that are put into the vendor's cache; without it as much as for others."),
    ] = None
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$", description="Its code: three capital letters.")] = "USD"


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
        """Billionths, rounded up, at most MAX_COST. `fresh` tokens were read for the first time, `cached` from the
        vendor's cache, and `written` were put into it.
        """
        whole = fresh * self.input + output * self.output + cached * self.cached_input + written * self.cache_write
        return min(-(-whole // _PRICED), MAX_COST)


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


#: The names of the rows begin with this.
ROWS: Final = "usage/"
#: Stands in a row's name for a model without a price.
_UNPRICED: Final = "-"


class Part(Struct, frozen=True):
    """What an amount is of."""

    #: The day of the calls, in UTC: `2026-11-23`.
    day: str
    #: The model that answered, as `provider/name`.
    model: str
    #: The currency of its price; None: it has none.
    currency: str | None = None

    @property
    def row(self) -> str:
        """The name of the row that keeps it."""
        return f"{ROWS}{self.day}/{self.currency or _UNPRICED}/{self.model}"


def part_of(row: str) -> Part | None:
    """The part that a row of this name keeps; None when the name is of something else."""
    fields = row.removeprefix(ROWS).split("/", 2)
    if not row.startswith(ROWS) or len(fields) != 3:
        return None
    day, currency, model = fields
    return Part(day, model, None if currency == _UNPRICED else currency)


class Used(Struct, array_like=True):
    """An amount."""

    #: Model calls that have ended.
    model_calls: int = 0
    #: All tokens that models read.
    input_tokens: int = 0
    #: All tokens that models wrote.
    output_tokens: int = 0
    #: The part of `input_tokens` that came from the vendor's cache.
    cached_tokens: int = 0
    #: The part of `input_tokens` that was put into the vendor's cache.
    cache_write_tokens: int = 0
    #: The part of `output_tokens` that was reasoning.
    reasoning_tokens: int = 0
    #: What it cost: billionths of the currency.
    money: int = 0

    def add(self, other: Self) -> None:
        """Add `other`."""
        self.model_calls += other.model_calls
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.cache_write_tokens += other.cache_write_tokens
        self.reasoning_tokens += other.reasoning_tokens
        self.money += other.money

    def cost(self, pricing: Pricing | None) -> int:
        """What these tokens cost: billionths of the currency, rounded up."""
        fresh = max(0, self.input_tokens - self.cached_tokens - self.cache_write_tokens)
        return prices_of(pricing).cost(fresh, self.output_tokens, self.cached_tokens, self.cache_write_tokens)


class Usage(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What was used, as it is shown: in answers, and by `gdn usage`."""

    #: All tokens that models read.
    input_tokens: int
    #: All tokens that models wrote.
    output_tokens: int
    #: The part of the input that came from the vendor's cache.
    cached_tokens: int = 0
    #: The part of the input that was put into the vendor's cache.
    cache_write_tokens: int = 0
    #: The part of the output that was reasoning.
    reasoning_tokens: int = 0
    #: Model calls that have ended.
    model_calls: int
    #: What the calls of models with a price cost; None: no model has one, or they have several currencies.
    cost: float | None = None
    #: The currency of `cost`, unless it is USD.
    currency: str | None = None


def encode_used(used: Used) -> bytes:
    """The value of a row."""
    return msgspec.json.encode(used)


def read_used(value: object) -> Used | None:
    """The amount in a row; None when it cannot be read."""
    try:
        used = msgspec.json.decode(value, type=Used) if isinstance(value, bytes | str) else None
    except (msgspec.DecodeError, UnicodeError):
        return None
    return used if used is None or max(map(abs, msgspec.structs.astuple(used))) < _NO_AMOUNT else None


def used_of(usage: Usage) -> tuple[str | None, Used]:
    """The amount of an answer's usage, and its currency."""
    money = 0 if usage.cost is None else round(usage.cost * NANO)
    currency = None if usage.cost is None else usage.currency or "USD"
    used = Used(
        usage.model_calls,
        usage.input_tokens,
        usage.output_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
        money,
    )
    return currency, used


def total_of(parts: Iterable[tuple[Part, Used]]) -> Usage:
    """The sum of some parts."""
    whole, currencies = Used(), set[str]()
    for part, used in parts:
        whole.add(used)
        if part.currency is not None:
            currencies.add(part.currency)
    currency = currencies.pop() if len(currencies) == 1 else None
    return Usage(
        input_tokens=whole.input_tokens,
        output_tokens=whole.output_tokens,
        cached_tokens=whole.cached_tokens,
        cache_write_tokens=whole.cache_write_tokens,
        reasoning_tokens=whole.reasoning_tokens,
        model_calls=whole.model_calls,
        cost=None if currency is None else whole.money / NANO,
        currency=None if currency == "USD" else currency,
    )
