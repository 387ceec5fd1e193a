"""Reads turns for the exporter: rows of the index, and notes of one turn, a piece at a time.

A piece is read in one short transaction and with no file open afterwards, so no agent waits for the exporter and no log
of SQLite grows because of it.

Source: docs/design/traces.md; schemas/system/trace_index.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.features.telemetry.process import conventions as names
from goondan.features.telemetry.process.rules import Attributes, Note, Span, TurnRow, TurnSpans, message
from goondan.kernel.traces.conversations import place_of, read_file
from goondan.kernel.traces.rules.turn import said_in
from goondan.kernel.traces.search import MAX_MESSAGE_BYTES
from goondan.schemas.wire import codec, frames

#: Notes that are read at once: so many spans at most are made of them, and one for each call that was open.
PIECE: Final = 128

_TURN: Final = (
    "SELECT seq, turn_id, event_key, attempt, status, started_at, ended_at, parent_span_id, first_note, trace_id "
    "FROM turns WHERE event_key = ?"
)
_NOTES: Final = (
    "SELECT seq, type, at, detail, parent_span_id, turn_id FROM runtime_events WHERE seq >= ? ORDER BY seq LIMIT ?"
)
_LAST_NOTE: Final = "SELECT max(seq) FROM runtime_events"
_ANSWER: Final = "SELECT answer FROM turns WHERE seq = ? AND length(answer) <= ?"
#: The digits of a position stand between `.` and `.:`. A turn that runs has its messages in `events`, in this order.
_MESSAGES: Final = (
    "SELECT message FROM (SELECT 0 AS part, seq, message FROM base WHERE id > ?1 AND id < ?2 "
    "UNION ALL SELECT 1, position, message FROM events WHERE turn_id = ?3 AND message IS NOT NULL) "
    "ORDER BY part, seq LIMIT -1 OFFSET ?4"
)
_FIRST: Final = "SELECT message FROM base WHERE id = ? AND length(message) <= ?"


class Turn(Struct, kw_only=True):
    """A turn that is being exported, as it is kept on disk."""

    #: Where it stands in the index.
    seq: int
    #: When it began: RFC 3339.
    at: str
    #: Its trace.
    trace_id: str
    #: Its event.
    event_id: str
    #: The agent.
    agent: str
    #: The instance.
    instance_key: str
    #: The collector has every span that a note up to this one ends.
    sent: int = 0


class Reading:
    """What is read of one turn so far."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        #: Its spans; None: nothing was read yet.
        self.spans: TurnSpans | None = None
        #: The next note that is read.
        self._next = 0
        self._messages = _Messages()
        #: Whether more notes are there, whether the turn is over and all of it was read, and whether there is no such
        #: turn.
        self.more = True
        self.over = False
        self.missing = False

    def read(self, state_dir: str, *, contents: bool) -> list[Span]:
        """The spans of the next piece. Raises GoondanError E_STATE."""
        place = place_of(state_dir, self.turn.agent, self.turn.instance_key)
        found = read_file(place, lambda db: self._piece(db, contents))
        self.missing = found is None
        return [] if found is None else [span for span in found if span.seq > self.turn.sent]

    def _piece(self, db: sqlite3.Connection, contents: bool) -> list[Span] | None:
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        found = db.execute(_TURN, (self.turn.event_id,)).fetchone()
        row = None if found is None else _row(found, self.turn)
        if found is None or row is None:
            return None
        if self.spans is None or self.spans.row.turn_id != row.turn_id:
            self.spans = TurnSpans(row)
            self._next = found[8] if isinstance(found[8], int) else 0
        if contents:
            self._messages.open(db, row.turn_id)
            self.spans.said = self._messages.said
        made: list[Span] = []
        last, count = self._next, 0
        for seq, kind, at, detail, parent_id, turn_id in db.execute(_NOTES, (self._next, PIECE)):
            count += 1
            if turn_id != row.turn_id:
                count = 0  # an instance has one turn at a time
                break
            self._next = last = seq + 1
            if isinstance(kind, str) and isinstance(at, str):
                known = parent_id if isinstance(parent_id, str) else None
                made += self.spans.take(Note(seq, kind, at, detail if isinstance(detail, str) else "", known))
        self.more = count == PIECE
        if not self.more and row.status != "running":
            end = max(last, db.execute(_LAST_NOTE).fetchone()[0] or 0) + 1
            made += self.spans.finish(row, end, _words(db, found[0], row.turn_id) if contents else {})
            self.over = True
        self.spans.said = None
        return made


def _row(found: tuple[Any, ...], turn: Turn) -> TurnRow | None:
    told = dict(
        zip(
            ("turn_id", "event_id", "attempt", "status", "started_at", "ended_at", "parent_id"), found[1:8], strict=True
        )
    )
    with suppress(msgspec.ValidationError):  # SQLite keeps values of any type in any column
        return msgspec.convert({**told, "agent": turn.agent, "instance_key": turn.instance_key}, TurnRow)
    return None


class _Messages:
    """What the messages of a turn say of calls. They are read in their order, as far as somebody asks, and once."""

    def __init__(self) -> None:
        self._read = 0
        self._rows: Iterator[Any] = iter(())
        self._known: dict[str, list[str | None]] = {}

    def open(self, db: sqlite3.Connection, turn_id: str) -> None:
        """Go on where the last reading was."""
        self._rows = db.execute(_MESSAGES, (f"{turn_id}.", f"{turn_id}.:", turn_id, self._read))

    def said(self, tool_call_id: str) -> tuple[str | None, str | None]:
        """Arguments and result of a call as JSON, in short."""
        while self._known.get(tool_call_id, [None, None])[1] is None and (row := next(self._rows, None)) is not None:
            self._read += 1
            said = said_in([_decoded(row[0])])
            for index, texts in enumerate((said.args, said.outputs)):
                for name, text in texts.items():
                    self._known.setdefault(name, [None, None])[index] = text
        args, output = self._known.pop(tool_call_id, (None, None))
        return args, output


def _decoded(data: object) -> Any:
    """A stored message; None for one that cannot be read, or is too large to be read for a trace."""
    if isinstance(data, bytes) and len(data) <= MAX_MESSAGE_BYTES:
        with suppress(*codec.DECODE_ERRORS):
            return msgspec.msgpack.decode(data)
    return None


def _words(db: sqlite3.Connection, seq: int, turn_id: str) -> Attributes:
    """What the turn was asked, and what it has answered."""
    found: Attributes = {}
    for (data,) in db.execute(_FIRST, (f"{turn_id}.0", MAX_MESSAGE_BYTES)):
        asked = _decoded(data)
        inside = asked.get("data") if isinstance(asked, dict) else None
        if isinstance(inside, dict) and isinstance(inside.get("content"), str):
            found[names.INPUT_MESSAGES] = message("user", inside["content"])
    for (data,) in db.execute(_ANSWER, (seq, MAX_MESSAGE_BYTES)):
        with suppress(*codec.DECODE_ERRORS):
            answer = msgspec.msgpack.decode(data, type=frames.AgentEvent).answer
            if answer is not None and answer.response:
                found[names.OUTPUT_MESSAGES] = message("assistant", answer.response)
    return found
