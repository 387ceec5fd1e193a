"""`gdn usage`: the tokens that models have used, and what they cost (api.py).

Source: docs/usage.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final, cast

import click

from goondan.features.usage.api import By, day_of, look, report
from goondan.kernel.cli import operator_question, options, state
from goondan.kernel.cli.output import emit, filled, money, width_of
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.paths import find_bundle

#: Rows that a person is shown. --json has all.
MAX_ROWS: Final = 50
#: The most of a name that is shown (characters). It is text from outside.
_MAX_NAME: Final = 60
_HEAD: Final = ("calls", "in", "cached", "out", "reasoning", "cost")


@click.command()
@click.option(
    "--by",
    type=click.Choice(["day", "model", "agent", "tree"]),
    default="day",
    show_default=True,
    help="What a row is of; a tree is everything that one message set going.",
)
@click.option("--since", metavar="DAY", help="Only what was used on this day (UTC) and later: 2026-11-23, 7d, today.")
@options.bundle
@options.json
def usage(by: str, since: str | None, bundle: str | None) -> None:
    """Show how many tokens models have read and written, and what they cost where the Model has prices."""
    day = None if since is None else day_of(since, datetime.datetime.now(datetime.UTC).date())
    found = look(state.state_of(find_bundle(bundle)), turns=by == "tree")
    document = report(found, cast(By, by), day)
    limits, lines = operator_question.learned(bundle)
    if limits:
        document["learnedLimits"] = limits
    emit(document, [*render(document), *lines])


def render(document: Mapping[str, Any]) -> list[str]:
    """The table for a person, with the total below it."""
    rows, by = document["rows"], document["by"]
    unread = [f"not read: {one_line(text, 200)}" for text in document.get("unread", ())]
    if not rows:
        return ["no model was asked" + (f" since {document['since']}" if "since" in document else ""), *unread]
    lines: list[tuple[str, ...]] = [(by, *_HEAD)]
    lines += [(one_line(_name(row, by), _MAX_NAME), *_cells(row)) for row in rows[:MAX_ROWS]]
    if len(rows) > 1:
        lines.append(("total", *_cells(document["total"])))
    widths = [max(width_of(line[column]) for line in lines) for column in range(len(lines[0]))]
    more = [f"and {len(rows) - MAX_ROWS} more; --json has them"] if len(rows) > MAX_ROWS else []
    table = [
        "  ".join([filled(line[0], widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return [*table, *more, *unread]


def _name(row: Mapping[str, Any], by: str) -> str:
    return f"{row['traceId']} {row['startedAt'][:16]} {row['eventId']}" if by == "tree" else str(row[by])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (row[name] for name in ("modelCalls", "inputTokens"))
    return (
        *(f"{count:,}" for count in counts),
        f"{row.get('cachedTokens', 0):,}",
        f"{row['outputTokens']:,}",
        f"{row.get('reasoningTokens', 0):,}",
        _cost(row),
    )


def _cost(row: Mapping[str, Any]) -> str:
    if "costs" in row:
        return " + ".join(money(cost, currency) for currency, cost in row["costs"].items())
    return money(row["cost"], row.get("currency")) if "cost" in row else "-"


COMMANDS = {"usage": usage}
