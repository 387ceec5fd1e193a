"""What models have used, put together by day, model, agent or tree. Pure.

A tree is everything that one message set going, in whatever agents: one trace.

Source: docs/design/traces.md section 4.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from msgspec import Struct, to_builtins

from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.usage import Part, Used, total_of

By = Literal["day", "model", "agent", "tree"]
#: What sums may be put together by.
CHOICES: Final[tuple[By, ...]] = ("day", "model", "agent", "tree")
_DAYS: Final = re.compile(r"(\d{1,4})d\Z")


class Sum(Struct, frozen=True):
    """What one agent's calls of one day and one model have used, in one instance."""

    #: The agent.
    agent: str
    #: Day, model and currency.
    part: Part
    #: How much.
    used: Used


class TurnSum(Struct, frozen=True, kw_only=True):
    """What one turn has used."""

    #: The agent.
    agent: str
    #: The trace that the turn belongs to.
    trace_id: str
    #: The event that it was for.
    event_id: str
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: How much, by day, model and currency. Of a turn that has ended only the currency is known.
    used: list[tuple[Part, Used]]


class Found(Struct, frozen=True):
    """Everything that was found in a workspace."""

    #: The sums of instances.
    sums: list[Sum] = []
    #: The turns.
    turns: list[TurnSum] = []
    #: Files that could not be read.
    unread: list[str] = []


def day_of(text: str, today: datetime.date) -> str:
    """The day that `--since` means: `2026-11-23`, `7d` (seven days with today), or `today`. Raises E_USAGE."""
    days = _DAYS.match(text)
    try:
        if text == "today":
            return today.isoformat()
        if days is not None:
            return (today - datetime.timedelta(days=max(0, int(days[1]) - 1))).isoformat()
        return datetime.date.fromisoformat(text).isoformat()
    except (ValueError, OverflowError):
        message = f"{text[:40]!r} is no day"
        raise fail("E_USAGE", message, suggestion="Write for example 2026-11-23, 7d or today.") from None


def report(found: Found, by: By, since: str | None) -> dict[str, Any]:
    """The document of `gdn usage --json`: rows and the total. Days and trees: the latest first; others: the largest."""
    rows = _trees(found.turns, since) if by == "tree" else _parts(found.sums, by, since)
    whole = [pair for _, pairs in rows for pair in pairs]
    document: dict[str, Any] = {"by": by, "rows": [{**about, **_shown(pairs)} for about, pairs in rows]}
    if since is not None:
        document["since"] = since
    if found.unread:
        document["unread"] = found.unread
    return {**document, "total": _shown(whole)}


_Pairs = list[tuple[Part, Used]]


def _parts(sums: Iterable[Sum], by: By, since: str | None) -> list[tuple[dict[str, Any], _Pairs]]:
    groups: dict[str, _Pairs] = {}
    for one in sums:
        if since is None or one.part.day >= since:
            name = one.agent if by == "agent" else one.part.model if by == "model" else one.part.day
            groups.setdefault(name, []).append((one.part, one.used))
    if by == "day":
        ordered = sorted(groups, reverse=True)
    else:
        ordered = sorted(groups, key=lambda name: (-sum(_tokens(used) for _, used in groups[name]), name))
    return [({by: name}, groups[name]) for name in ordered]


def _trees(turns: Iterable[TurnSum], since: str | None) -> list[tuple[dict[str, Any], _Pairs]]:
    groups: dict[str, list[TurnSum]] = {}
    for turn in turns:
        groups.setdefault(turn.trace_id, []).append(turn)
    found = []
    for trace_id, members in groups.items():
        first = min(members, key=lambda turn: (turn.started_at, turn.event_id))
        if since is not None and first.started_at[:10] < since:
            continue
        about = {
            "traceId": trace_id,
            "eventId": first.event_id,
            "startedAt": first.started_at,
            "turns": len(members),
            "agents": sorted({turn.agent for turn in members}),
        }
        found.append((about, [pair for turn in members for pair in turn.used]))
    return sorted(found, key=lambda tree: (tree[0]["startedAt"], tree[0]["traceId"]), reverse=True)


def _shown(pairs: Sequence[tuple[Part, Used]]) -> dict[str, Any]:
    """The sum as it is shown. With several currencies it has `costs`, by currency, in place of `cost`."""
    shown: dict[str, Any] = to_builtins(total_of(pairs))
    currencies = sorted({part.currency for part, _ in pairs if part.currency is not None})
    if len(currencies) > 1:
        shown["costs"] = {
            currency: total_of([pair for pair in pairs if pair[0].currency == currency]).cost for currency in currencies
        }
    return shown


def _tokens(used: Used) -> int:
    return used.input_tokens + used.output_tokens
