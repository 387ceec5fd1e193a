"""Budgets in histories of the broker: in every seventh `coder` has one, large enough for all of it."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from goondan.features.budgets.broker import Budgets
from goondan.features.budgets.wire import FEATURE, BudgetLimits
from goondan.schemas.wire.codec import from_raw, to_raw
from tests.unit.kernel.broker.world import World, part_of

#: More calls than any history makes.
ENOUGH_CALLS: Final = 1000


def parts_of(number: int) -> dict[str, Raw]:
    """What the specification of `coder` has in the history of this number."""
    return {FEATURE: to_raw(BudgetLimits(calls=ENOUGH_CALLS))} if number % 7 == 0 else {}


def check(world: World) -> None:
    """Everything is over: each call that ran was counted, and nothing is counted for ever."""
    budgets = part_of(world.router, Budgets)
    trees = budgets.accounts.trees.values()
    assert budgets.chains == {}, "counted for ever"
    if FEATURE not in world.plan.agents["coder"].parts:
        assert not trees
        return
    limits = from_raw(world.plan.agents["coder"].parts[FEATURE], BudgetLimits)
    accounts = [tree.accounts["coder"] for tree in trees]
    counted = sum(account.spent.tool_calls for account in accounts)
    ran = {call_id for _, call_id in world.ran if call_id.startswith("coder/")}
    assert counted >= len(ran), "a call that ran was not counted"
    assert all(account.spent.of("calls") <= (limits.calls or 0) for account in accounts)
    assert all(tree.ended_ms is not None for tree in trees), "an account was left open"
