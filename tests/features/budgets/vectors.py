"""Frames about budgets."""

from __future__ import annotations

from goondan.features.budgets.wire import BudgetGranted, BudgetLeft, BudgetReserve, BudgetSettle
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame

KINDS = (BudgetReserve, BudgetGranted, BudgetSettle)


def frames() -> list[tuple[str, Frame, str | None]]:
    """What it shows, the frame, the struct of its payload."""
    reserve = BudgetReserve("0f3a", "model", 1200, 8192)
    granted = BudgetGranted(4096, 60000, [BudgetLeft("coder", "tokens", 5296.0, 20000.0)])
    settle = BudgetSettle("0f3a", False, True, 1180, 310)
    return [
        (
            "budget.reserve",
            Frame("budget.reserve", id="x.19", event_id="e-1", epoch=7, payload=to_raw(reserve)),
            "BudgetReserve",
        ),
        (
            "reply to budget.reserve",
            Frame("reply", id="b.19", in_reply_to="x.19", payload=to_raw(granted)),
            "BudgetGranted",
        ),
        ("budget.settle", Frame("budget.settle", id="x.20", event_id="e-1", payload=to_raw(settle)), "BudgetSettle"),
    ]
