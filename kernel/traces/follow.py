"""Turns one after another, as they end, for a program that does something with each: behind a position that it keeps.

- The position is on disk. It is moved on when the program is done with a turn, so after a crash it gets some turns once
  more, and none is left out.
- A turn that runs is looked at after a quarter of its age, 30 s later at most. Each look is one short read, so no agent
  waits for it, and a thousand turns that run for long cost some milliseconds a second.
- What is older than MAX_AGE_S when it is taken up is given up, and counted.

Source: docs/design/traces.md; schemas/system/trace_index.py.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from goondan.kernel.traces.conversations import place_of, read_file
from goondan.kernel.traces.rules.tree import grow
from goondan.kernel.traces.rules.turn import Trace, moment
from goondan.kernel.traces.search import Which, answer_of, read_turns
from goondan.schemas.system import trace_index
from goondan.schemas.system.directories import replace_file
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.frames import Answer

#: Rows of the index that are taken up at once.
ROWS: Final = 256
#: Turns that are not done, those that run among them; the oldest are given up.
MAX_TURNS: Final = 4096
#: How old a turn is at most when it is taken up (seconds).
MAX_AGE_S: Final = 24 * 3600.0
#: The shortest and the longest time until a turn is looked at again (seconds).
LOOK_S: Final = 1.0
MAX_LOOK_S: Final = 30.0
#: How old a turn is at most that has no row in its file: its beginning was not stored (seconds).
BEGINS_S: Final = 600.0
_log = logging.getLogger("traces")
_STATE: Final = "SELECT status, answer FROM turns WHERE event_key = ?"


#: What SQLite and a frame can have.
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Position(Struct, kw_only=True):
    """How far it has come, as it is kept on disk."""

    #: The number of the last row of the index that was taken up; 0: none.
    seq: _Number = 0
    #: The turn of that row.
    turn_id: str = ""
    #: When that turn began: RFC 3339. Without a row: since when turns count.
    at: str
    #: Turns up to that row that are not done.
    turns: list[trace_index.NumberedRow] = []
    #: Turns that were given up.
    given_up: _Number = 0


class Ended(Struct, frozen=True):
    """A turn that is over; nothing is told of one that was never stored."""

    #: What it did, without the turns that it asked for.
    turns: list[Trace]
    #: How it ended, as its agent said.
    answer: Answer | None = None


class Follower:
    """Follows the turns of one workspace. `path`: the file of the position. `since`: turns of a new position began then
    (RFC 3339). Times are seconds since 1970.
    """

    def __init__(self, state_dir: str, path: str, since: str) -> None:
        self._state_dir, self._path = state_dir, path
        self.position = Position(at=since)
        with suppress(OSError, msgspec.DecodeError, UnicodeError, RecursionError), open(path, "rb") as source:
            self.position = msgspec.json.decode(source.read(), type=Position)
        self._due: dict[int, float] = {}

    def take_up(self, now: float) -> bool:
        """Take up new turns; whether there are more."""
        at = self.position
        # A clock that was ahead may have written it.
        since = at.at if at.at <= rfc3339(now) else rfc3339(now - BEGINS_S)
        rows = trace_index.behind(self._state_dir, at.seq, at.turn_id, since, ROWS)
        if rows:
            at.seq, at.turn_id, at.at = rows[-1].seq, rows[-1].turn_id, rows[-1].at
        at.turns += [row for row in rows if age(row, now) <= MAX_AGE_S]
        too_many = at.turns[:-MAX_TURNS]
        at.given_up += sum(age(row, now) > MAX_AGE_S for row in rows) + len(too_many)
        self._forget(too_many)
        return len(rows) == ROWS

    def due(self, now: float) -> list[trace_index.NumberedRow]:
        """The turns to look at now: no later one is right, so a clock that was put back holds nothing up."""
        return [row for row in self.position.turns if not 0 < self._due.get(row.seq, 0.0) - now <= MAX_LOOK_S]

    def look_at_all(self) -> None:
        """Every turn is due."""
        self._due.clear()

    def read(self, row: trace_index.NumberedRow, now: float) -> Ended | None:
        """The turn, if it is over. Raises GoondanError E_STATE."""
        old = age(row, now)
        self._due[row.seq] = now + min(max(LOOK_S, old / 4), MAX_LOOK_S)
        place = place_of(self._state_dir, row.agent, row.instance_key)
        found = read_file(place, lambda db: db.execute(_STATE, (row.event_id,)).fetchone())
        if found is None:
            return Ended([]) if old > BEGINS_S else None
        if found[0] == "running":
            return None
        turns = read_turns(place, Which(events=[row.event_id]), None)
        return Ended(grow(turns, row.at), answer_of(found[1]))

    def settle(self, done: list[trace_index.NumberedRow]) -> None:
        """These turns are done. If that cannot be written down, they come again after a crash."""
        if not done:
            return
        self._forget(done)
        try:
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(self.position))
        except OSError as error:
            _log.warning("the position in the traces cannot be written: %s", error.strerror)

    def _forget(self, rows: list[trace_index.NumberedRow]) -> None:
        gone = {row.seq for row in rows}
        self.position.turns = [row for row in self.position.turns if row.seq not in gone]
        self._due = {seq: due for seq, due in self._due.items() if seq not in gone}


def age(row: trace_index.IndexRow, now: float) -> float:
    """How long ago a turn began (seconds); 0 when that is no time."""
    began = moment(row.at)
    return 0.0 if began is None else now - began / 1000
