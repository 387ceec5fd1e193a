"""Reading what models have used out of the conversation files of a workspace, while agents write them.

The sums of an instance are rows of its file; what a running turn has used is in its notes; the usage of a turn that has
ended is in its answer. All of a file is read at one moment, so nothing is counted twice.

Source: docs/design/traces.md section 4; schemas/wire/usage.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.trace_files import conversation_files, read_file
from goondan.kernel.usage import Found, Sum, TurnSum
from goondan.schemas.traces.turn_notes import used_by_note
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.usage import ROWS, Part, Usage, Used, part_of, read_used, used_of

_SUMS: Final = "SELECT name, value FROM meta WHERE name >= ? AND name < ?"
_TURNS: Final = "SELECT turn_id, event_key, started_at, status, answer, trace_id, first_note FROM turns"
#: A running turn is the last one of its instance.
_NOTES: Final = "SELECT at, detail FROM runtime_events WHERE seq >= ? AND turn_id = ? AND type LIKE 'model.%'"


class _Answer(Struct):
    """Of an Answer, what is looked at here."""

    #: See goondan.schemas.wire.frames.Answer.
    usage: Usage | None = None


class _Event(Struct):
    """Of an AgentEvent, what is looked at here."""

    #: See goondan.schemas.wire.frames.AgentEvent.
    answer: _Answer | None = None


_decode: Final = msgspec.msgpack.Decoder(_Event).decode


def look(state_dir: str, *, turns: bool) -> Found:
    """Everything in the workspace. The turns that have ended are read only if wanted: there may be many."""
    found = Found()
    for place in sorted(conversation_files(state_dir, None, None), key=lambda place: place.path):
        try:
            read = read_file(place, _Reader(place.agent, turns).read)
        except GoondanError as error:
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
    except DECODE_ERRORS:
        return []
    if said is None or said.usage is None:
        return []
    currency, used = used_of(said.usage)
    return [(Part("", "", currency), used)]
