"""The bundled extension `budget`: limits on everything that one message sets going.

The broker counts and refuses, by the limits that the bundle gives to this extension (features/budgets/broker). A
hijacked agent cannot switch that off. This module tells the model when little is left, so that the model can finish by
itself.
"""

from __future__ import annotations

from typing import Any

#: The name of the block that the model reads.
BLOCK = "budget"


def register(api: Any, config: dict[str, Any]) -> None:
    """Listen to how much is left, and tell the model when it is below `config["warnAt"]` of a limit."""
    warn_at = config["warnAt"]
    if not warn_at:
        return
    short: list[str] = []

    def heard(payload: Any) -> None:
        short[:] = [
            f"{_amount(row['left'])} of {_amount(row['limit'])} {row['dimension']}"
            for row in payload["left"]
            if row["left"] < warn_at * row["limit"]
        ]

    def forget(ctx: Any) -> Any:
        short.clear()  # a turn may belong to another message, whose budget is another
        return ctx

    def tell(ctx: Any) -> Any:
        if not short:
            return ctx
        text = f"Little of the budget is left: {'; '.join(short)}. Come to an end now, and say what is still open."
        return ctx.replace(blocks=[*ctx.blocks, {"type": BLOCK, "text": text}])

    api.events.on("budget.left", heard)
    api.pipelines.mutate("turn.pre", forget)
    api.pipelines.mutate("step.blocks", tell)


def _amount(number: float) -> str:
    """A number as text, without digits that are of no use."""
    return f"{number:,.4f}".rstrip("0").rstrip(".")
