"""Finding a turn in the conversation files of a workspace, while agents write them.

Files are opened read-only and for one short read each; SQLite's WAL lets agents write meanwhile, and a file that
nobody has open is left as it was. One that is being made, has gone, or has another format is passed over, unless it
is the only place to look.

Source: design sections 10 and 11; schemas/traces.py.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kernel.paths import is_utf8
from kernel.trace import Note, Trace, Turn, tell
from schemas.address import path_segment, segment_key
from schemas.codec import DECODE_ERRORS
from schemas.errors import GoondanError, fail
from schemas.frames import AgentEvent, Answer
from schemas.traces import CONVERSATION_FILE, CONVERSATION_FORMAT

#: How long a read waits for a file that is being recovered or replaced (seconds).
BUSY_S: Final = 2.0
#: The last turn is looked for in this many files, those that were written last. Turns overlap; not this many.
RECENT_FILES: Final = 64
#: Notes of one turn that are read: more than maxStepsPerTurn steps with a hundred calls each.
MAX_NOTES: Final = 20_000

_LAST: Final = (
    "SELECT turn_id, event_key, attempt, status, started_at, ended_at, answer FROM turns "
    "ORDER BY started_at DESC, seq DESC LIMIT 1"
)
_NAMED: Final = (
    "SELECT turn_id, event_key, attempt, status, started_at, ended_at, answer FROM turns "
    "WHERE turn_id = ?1 OR event_key = ?1 ORDER BY started_at DESC, seq DESC LIMIT 1"
)
_NOTES: Final = "SELECT type, at, detail FROM runtime_events WHERE turn_id = ? ORDER BY seq LIMIT ?"


class Place(Struct, frozen=True):
    """One conversation file, and whose it is."""

    path: str
    agent: str
    instance_key: str | None
    written: float


def find_trace(state_dir: str, wanted: str | None, *, agent: str | None, instance: str | None) -> Trace:
    """The turn with this id, or of the event with this id; None: the one that began last.

    `agent` and `instance` narrow the search. Raises GoondanError E_TURN_NOT_FOUND, or E_STATE when a file that may
    hold it cannot be read.
    """
    if wanted is not None and not is_utf8(wanted):
        raise fail("E_USAGE", "the id of the turn is not UTF-8")
    places = sorted(conversation_files(state_dir, agent, instance), key=lambda place: place.written, reverse=True)
    found: list[Trace] = []
    problem: GoondanError | None = None
    for place in places if wanted is not None else places[:RECENT_FILES]:
        try:
            trace = _read(place, wanted)
        except GoondanError as error:
            problem = error
            continue
        if trace is not None:
            found.append(trace)
            if trace.turn_id == wanted:
                break  # a turn's id is made of its instance's name, so there is no other
    if found:
        return max(found, key=lambda trace: trace.started_at)
    if problem is not None:
        raise problem
    where = "" if agent is None and instance is None else f" of {agent or 'any agent'}/{instance or 'any instance'}"
    raise fail("E_TURN_NOT_FOUND", f"no turn {wanted}{where}" if wanted is not None else f"no turn{where} yet")


def conversation_files(state_dir: str, agent: str | None, instance: str | None) -> Iterator[Place]:
    """The conversation files of a workspace, in no order; of one agent, or one instance key, if given."""
    root = Path(state_dir, "instances")
    for agent_dir in _children(root) if agent is None else [root / path_segment(agent)]:
        for folder in _children(agent_dir) if instance is None else [agent_dir / path_segment(instance)]:
            path = folder / CONVERSATION_FILE
            try:
                written = path.stat().st_mtime
            except OSError:
                continue
            with suppress(OSError):  # a file that is closed has no log
                written = max(written, os.stat(f"{path}-wal").st_mtime)
            yield Place(str(path), segment_key(agent_dir.name) or agent_dir.name, segment_key(folder.name), written)


def _children(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _read(place: Place, wanted: str | None) -> Trace | None:
    """The turn in one file. Raises GoondanError E_STATE."""
    before = _untouched(place.path)
    try:
        if before is None:
            return _query(place, wanted, "mode=ro")
        # Nobody has it open. Opened in the usual way it would get a log and an index, which a reader cannot remove.
        try:
            trace = _query(place, wanted, "mode=ro&immutable=1")
        except sqlite3.Error:
            if _untouched(place.path) == before:
                raise
        else:
            if _untouched(place.path) == before:
                return trace
        return _query(place, wanted, "mode=ro")  # an agent opened it meanwhile
    except sqlite3.Error as error:
        if not os.path.exists(place.path):
            return None  # the instance was deleted in this moment
        raise fail("E_STATE", f"{place.path}: {error}") from None


def _untouched(path: str) -> tuple[int, int] | None:
    """What tells whether a closed file stays as it is; None for one that somebody has open."""
    try:
        state = os.stat(path)
        return None if os.path.exists(path + "-wal") else (state.st_mtime_ns, state.st_size)
    except OSError:
        return None


def _query(place: Place, wanted: str | None, options: str) -> Trace | None:
    uri = f"{Path(place.path).as_uri()}?{options}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            return None  # it is being made
        if version > CONVERSATION_FORMAT:
            raise fail("E_STATE", f"{place.path} has format {version}, this version reads up to {CONVERSATION_FORMAT}")
        db.execute("BEGIN")  # one moment for both reads
        row = db.execute(_LAST).fetchone() if wanted is None else db.execute(_NAMED, (wanted,)).fetchone()
        if row is None:
            return None
        turn_id, event_id, attempt, status, started_at, ended_at, answer = row
        notes = [Note(*note) for note in db.execute(_NOTES, (turn_id, MAX_NOTES))]
    said = _answer(answer)
    turn = Turn(
        turn_id=turn_id,
        event_id=event_id,
        agent=place.agent,
        instance_key=place.instance_key,
        attempt=attempt,
        status=status,
        started_at=started_at,
        ended_at=ended_at,
        finish_reason=None if said is None else said.finish_reason,
        error=None if said is None else said.error,
    )
    return tell(turn, notes)


def _answer(data: bytes | None) -> Answer | None:
    """How the turn ended, as its agent said; None when it says nothing that can be read."""
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=AgentEvent).answer
    except DECODE_ERRORS:
        return None
