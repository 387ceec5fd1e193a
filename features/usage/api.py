"""What the models of a workspace have used, put together by day, model, agent or tree. No running kernel is needed.

What was used is read out of the conversation files of a workspace, while agents write them. The sums of an instance are
rows of its file; what a running turn has used is in its notes; the usage of a turn that has ended is in its answer. All
of a file is read at one moment, so nothing is counted twice. A tree is everything that one message set going, in
whatever agents: one trace.

Source: docs/usage.md; docs/design/traces.md section 4; schemas/wire/usage.py.
"""

from __future__ import annotations

import datetime
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, to_builtins

from goondan.kernel.traces.conversations import conversation_files, read_file
from goondan.schemas.traces.turn_notes import used_by_note
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.usage import ROWS, Part, Usage, Used, part_of, read_used, total_of, used_of

# --- the sums ---------------------------------------------------------------------------------------------------------


#: What sums may be put together by.
By = Literal["day", "model", "agent", "tree"]
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
        raise errors.fail("E_USAGE", message, suggestion="Write for example 2026-11-23, 7d or today.") from None


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


# --- what is read of the conversation files


class _Answer(Struct):
    """Of an Answer, what is looked at here."""

    #: See goondan.schemas.wire.frames.Answer.
    usage: Usage | None = None


class _Event(Struct):
    """Of an AgentEvent, what is looked at here."""

    #: See goondan.schemas.wire.frames.AgentEvent.
    answer: _Answer | None = None


_SUMS: Final = "SELECT name, value FROM meta WHERE name >= ? AND name < ?"
_TURNS: Final = "SELECT turn_id, event_key, started_at, status, answer, trace_id, first_note FROM turns"
#: A running turn is the last one of its instance.
_NOTES: Final = "SELECT at, detail FROM runtime_events WHERE seq >= ? AND turn_id = ? AND type LIKE 'model.%'"

_decode: Final = msgspec.msgpack.Decoder(_Event).decode


def look(state_dir: str, *, turns: bool) -> Found:
    """Everything in the workspace. The turns that have ended are read only if wanted: there may be many."""
    found = Found()
    for place in sorted(conversation_files(state_dir, None, None), key=lambda place: place.path):
        try:
            read = read_file(place, _Reader(place.agent, turns).read)
        except errors.GoondanError as error:
            found.unread.append(error.info.message)
            continue
        if read is not None:
            found.sums.extend(read.sums)
            found.turns.extend(read.turns)
    return found


class _Reader(Struct, frozen=True):
    """What is read of the file of one instance."""

    #: The agent.
    agent: str
    #: Whether turns that have ended are wanted.
    turns: bool

    def read(self, db: sqlite3.Connection) -> Found:
        """The sums, and the turns."""
        found = Found([], [])
        for name, value in db.execute(_SUMS, (ROWS, ROWS[:-1] + chr(ord(ROWS[-1]) + 1))):
            part, used = part_of(name), read_used(value)
            if part is not None and used is not None:
                found.sums.append(Sum(self.agent, part, used))
        for row in db.execute(_TURNS + ("" if self.turns else " WHERE status = 'running'")):
            self._add_turn(db, row, found)
        return found

    def _add_turn(self, db: sqlite3.Connection, row: tuple[object, ...], found: Found) -> None:
        turn_id, event_id, started_at, status, answer, trace_id, first_note = row
        if not isinstance(trace_id, str) or not isinstance(started_at, str):
            return
        used = list(_noted(db, turn_id, first_note)) if answer is None else _answered(answer)
        if status == "running":
            found.sums.extend(Sum(self.agent, part, amount) for part, amount in used)
        if used:
            turn = TurnSum(
                agent=self.agent, trace_id=trace_id, event_id=str(event_id), started_at=started_at, used=used
            )
            found.turns.append(turn)


def _noted(db: sqlite3.Connection, turn_id: object, first_note: object) -> Iterator[tuple[Part, Used]]:
    for at, detail in db.execute(_NOTES, (first_note if isinstance(first_note, int) else 0, turn_id)):
        counted = used_by_note(at, detail) if isinstance(at, str) and isinstance(detail, str) else None
        if counted is not None:
            yield counted


def _answered(answer: object) -> list[tuple[Part, Used]]:
    try:
        said = _decode(answer).answer if isinstance(answer, bytes) else None
    except codec.DECODE_ERRORS:
        return []
    if said is None or said.usage is None:
        return []
    currency, used = used_of(said.usage)
    return [(Part("", "", currency), used)]
