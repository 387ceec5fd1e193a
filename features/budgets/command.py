"""`gdn budget [EVENT]`: how much of its budgets the work of one message has used, and which agents used it.

Source: docs/budgets.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from goondan.kernel.cli.operator_question import Document, Op
from goondan.kernel.cli.rules.plain import one_line

#: The most of an id or a name that is shown (characters). Both are text from outside.
_MAX_NAME: Final = 80
#: In the order of the columns; `calls` and `tokens` are sums.
_COLUMNS: Final = ("calls", "modelCalls", "toolCalls", "tokens", "inputTokens", "outputTokens", "money")


def render(answer: Document) -> list[str]:
    """The budgets of each message: one line for each limit, then one for each agent that has spent something."""
    lines: list[str] = []
    for tree in answer["trees"]:
        state = "is worked on" if tree["endedMs"] is None else "is over"
        lines.append(f"{one_line(tree['rootEvent'], _MAX_NAME)} {state}")
        for budget in tree["budgets"]:
            lines.append(f"  budget of {one_line(budget['agent'], _MAX_NAME)}")
            lines += [_limit(budget, name, limit) for name, limit in budget["limits"].items()]
            rows = sorted(budget["by"].items(), key=lambda row: -row[1]["calls"])
            lines += [f"    {one_line(agent, _MAX_NAME)}: {_amounts(amount)}" for agent, amount in rows]
    if answer["more"]:
        lines.append(f"and {answer['more']} more")
    return lines or ["no message has a budget"]


def _limit(budget: Mapping[str, Any], name: str, limit: float) -> str:
    held = budget["held"].get(name, 0)
    unit = f" {budget['currency']}" if name == "money" else ""
    spent = f"{_number(budget['spent'][name])} of {_number(limit)}{unit} spent"
    return f"    {name}: {spent}" + (f", {_number(held)} held" if held else "")


def _amounts(amount: Mapping[str, float]) -> str:
    parts = [f"{name} {_number(amount[name])}" for name in _COLUMNS if amount[name]]
    return ", ".join(parts) or "nothing"


def _number(number: float) -> str:
    return f"{number:,.6f}".rstrip("0").rstrip(".")


COMMANDS = {
    "budget": Op(
        "budget",
        "Show what messages have used of their budgets, and who has used it: of one, or of all that are worked on.",
        lambda answer, _: render(answer),
        (click.argument("event_id", metavar="[EVENT]", required=False),),
        lambda event_id: {} if event_id is None else {"eventId": event_id},
    ).command(),
}
