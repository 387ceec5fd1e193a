"""Reading turns out of the conversation files of a workspace, while agents write them.

Files are opened read-only and for one short read each; SQLite's WAL lets agents write meanwhile, and a file that
nobody has open is left as it was. One that is being made, or has gone, has no turns.

Source: docs/design/traces.md; schemas/traces/turn_notes.py.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from goondan.kernel.trace import Note, Trace, said_in, tell
from goondan.kernel.trace_tree import moment
from goondan.schemas.bundle.address import instance_dir, path_segment, segment_key
from goondan.schemas.traces.turn_notes import CONVERSATION_FILE, CONVERSATION_FORMAT
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import AgentEvent, Answer

_T = TypeVar("_T")

#: How long a read waits for a file that is being recovered or replaced (seconds).
BUSY_S: Final = 2.0
#: Notes of one turn that are read: more than maxStepsPerTurn steps with a hundred calls each.
MAX_NOTES: Final = 20_000

_LAST: Final = "SELECT seq FROM turns ORDER BY started_at DESC, seq DESC LIMIT 1"
_NAMED: Final = "SELECT seq FROM turns WHERE turn_id = ?1 OR event_key = ?1 ORDER BY started_at DESC, seq DESC LIMIT 1"
_TURN: Final = (
    "SELECT turn_id, event_key, attempt, status, started_at, ended_at, answer, trace_id, parent_span_id, waited_ms, "
    "first_note FROM turns WHERE seq = ?"
)
_NOTES: Final = "SELECT type, at, detail, turn_id FROM runtime_events WHERE seq >= ? ORDER BY seq LIMIT ?"
#: The digits of a position stand between `.` and `.:`.
_MESSAGES: Final = (
    "SELECT message FROM base WHERE id > ?1 AND id < ?2 AND length(message) <= ?4 "
    "UNION ALL SELECT message FROM events WHERE turn_id = ?3 AND length(message) <= ?4"
)
#: The largest message that is read for what a trace shows of it (bytes). It is decoded whole.
MAX_MESSAGE_BYTES: Final = 1 << 20


class ConversationFile(Struct, frozen=True):
    """One conversation file."""

    #: Where it is.
    path: str
    #: The agent.
    agent: str
    #: Its instance. None: the key is too long to stand in a path.
    instance_key: str | None
    #: When it was last written (seconds since 1970).
    written: float = 0.0


class Which(Struct, frozen=True, kw_only=True):
    """The turns that are read from a file. Without any of the three it is the turn that began last."""

    #: The turns of these events.
    events: Sequence[str] = ()
    #: The turns with this id, or whose event has this id.
    name: str | None = None
    #: The turns of this trace.
    trace: str | None = None


def place_of(state_dir: str, agent: str, instance_key: str) -> ConversationFile:
    """The file of an instance, which need not be there."""
    return ConversationFile(f"{instance_dir(state_dir, agent, instance_key)}/{CONVERSATION_FILE}", agent, instance_key)


def conversation_files(state_dir: str, agent: str | None, instance: str | None) -> Iterator[ConversationFile]:
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
            yield ConversationFile(
                str(path), segment_key(agent_dir.name) or agent_dir.name, segment_key(folder.name), written
            )


def _children(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def read_turns(place: ConversationFile, which: Which, since: str | None) -> list[Trace]:
    """Turns of one file. `since` is when the kernel that runs was started, None when none runs: a turn of which nothing
    was heard since then has ended with an earlier one. Raises GoondanError E_STATE.
    """
    return read_file(place, lambda db: _turns(db, place, which, since)) or []


def read_file(place: ConversationFile, read: Callable[[sqlite3.Connection], _T]) -> _T | None:
    """What `read` finds in the file, in one short read transaction. None when there is no file, or it is being made.
    Raises GoondanError E_STATE.
    """
    before = _untouched(place.path)
    try:
        if before is None:
            return _query(place, read, "mode=ro")
        # Nobody has it open. Opened in the usual way it would get a log and an index, which a reader cannot remove.
        try:
            found = _query(place, read, "mode=ro&immutable=1")
        except sqlite3.Error:
            if _untouched(place.path) == before:
                raise
        else:
            if _untouched(place.path) == before:
                return found
        return _query(place, read, "mode=ro")  # an agent opened it meanwhile
    except sqlite3.Error as error:
        if not os.path.exists(place.path):
            return None  # the instance was deleted, or in this moment
        raise fail("E_STATE", f"{place.path}: {error}") from None


def _untouched(path: str) -> tuple[int, int] | None:
    """What tells whether a closed file stays as it is; None for one that somebody has open."""
    try:
        state = os.stat(path)
        return None if os.path.exists(path + "-wal") else (state.st_mtime_ns, state.st_size)
    except OSError:
        return None


def _query(place: ConversationFile, read: Callable[[sqlite3.Connection], _T], options: str) -> _T | None:
    uri = f"{Path(place.path).as_uri()}?{options}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            return None  # it is being made
        if version != CONVERSATION_FORMAT:
            message = f"{place.path} has format {version}, this version reads {CONVERSATION_FORMAT}"
            raise fail("E_STATE", message)
        db.execute("BEGIN")  # one moment for all reads
        return read(db)


def _turns(db: sqlite3.Connection, place: ConversationFile, which: Which, since: str | None) -> list[Trace]:
    return [_turn(db, place, seq, since) for seq in _chosen(db, which)]


def _chosen(db: sqlite3.Connection, which: Which) -> list[int]:
    """The rows of the turns that are wanted."""
    if which.events:
        found = [db.execute("SELECT seq FROM turns WHERE event_key = ?", (event,)).fetchone() for event in which.events]
        return [row[0] for row in found if row is not None]
    if which.trace is not None:
        return [seq for (seq,) in db.execute("SELECT seq FROM turns WHERE trace_id = ? ORDER BY seq", (which.trace,))]
    rows = db.execute(_LAST) if which.name is None else db.execute(_NAMED, (which.name,))
    return [seq for (seq,) in rows]


def _turn(db: sqlite3.Connection, place: ConversationFile, seq: int, since: str | None) -> Trace:
    row = db.execute(_TURN, (seq,)).fetchone()
    turn_id, event_id, attempt, status, started_at, ended_at, answer, trace_id, parent, waited_ms, first_note = row
    said = _answer(answer)
    found = {
        "turnId": turn_id,
        "eventId": event_id,
        "agent": place.agent,
        "instanceKey": place.instance_key,
        "attempt": attempt,
        "status": status,
        "startedAt": started_at,
        "endedAt": ended_at,
        "finishReason": None if said is None else said.finish_reason,
        "error": None if said is None else said.error,
        "traceId": trace_id,
        "parentSpanId": parent,
        "waits": None if waited_ms is None else {"queueMs": waited_ms},
        "steps": [],
    }
    try:
        trace = msgspec.convert(found, Trace)  # SQLite keeps values of any type in any column
    except msgspec.ValidationError as error:
        raise fail("E_STATE", f"{place.path}: a turn cannot be read: {error}") from None
    notes = _notes(db, turn_id, first_note)
    over = _is_over(notes[-1].at if notes else started_at, since)
    return tell(trace, notes, said_in(_messages(db, turn_id)), interrupted=over)


def _messages(db: sqlite3.Connection, turn_id: str) -> Iterator[Any]:
    """The messages of a turn that are still in the conversation, as they are stored; none of the largest."""
    of_turn = (f"{turn_id}.", f"{turn_id}.:", turn_id, MAX_MESSAGE_BYTES)
    for (data,) in db.execute(_MESSAGES, of_turn):
        with suppress(*DECODE_ERRORS):
            yield msgspec.msgpack.decode(data)


def _notes(db: sqlite3.Connection, turn_id: str, first_note: int) -> list[Note]:
    found = []
    for kind, at, detail, whose in db.execute(_NOTES, (first_note, MAX_NOTES)):
        if whose != turn_id:
            break  # an instance has one turn at a time
        if isinstance(kind, str) and isinstance(at, str):
            found.append(Note(kind, at, detail if isinstance(detail, str) else None))
    return found


def _is_over(last_at: str, since: str | None) -> bool:
    """Whether what was last heard of a turn was heard before the kernel that runs began."""
    heard, began = moment(last_at), moment(since)
    return since is None or (heard is not None and began is not None and heard < began)


def _answer(data: bytes | None) -> Answer | None:
    """How the turn ended, as its agent said; None when it says nothing that can be read."""
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=AgentEvent).answer
    except DECODE_ERRORS:
        return None
