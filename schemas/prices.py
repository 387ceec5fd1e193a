"""What tokens cost. Pure.

Money is counted in billionths of its unit, as whole numbers: sums of fractions would become inexact.

Source: docs/decisions/070; docs/design/traces.md section 4.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from goondan.schemas.budgets import Pricing

#: Billionths in one unit of money.
NANO: Final = 1_000_000_000
#: A price is for so many tokens.
_PRICED: Final = 1_000_000


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
