"""The tiers of the sandbox, by their names: how strong the walls of a jail are. Pure.

toolhost/policy/plan.py says what each is made of.

Source: docs/design/sandbox.md section 7.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

#: The strongest first.
Tier = Literal["full", "reduced"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
#: What a tool runs behind that asks for no less.
STRONGEST: Final = TIERS[0]


def is_weaker(tier: Tier, than: Tier) -> bool:
    """Whether the walls of `tier` are weaker than those of `than`."""
    return TIERS.index(tier) > TIERS.index(than)
