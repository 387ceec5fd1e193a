"""The conversation files of a workspace: found, and read while agents write them. Nothing is changed.

Files are opened read-only and for one short read each; SQLite's WAL lets agents write meanwhile, and a file that
nobody has open is left as it was. One that is being made, or has gone, is empty. Messages are shown as they are stored
(agentproc/machine/messages.py), whatever fields a version of it has.

Source: docs/design/turns.md section 4; docs/design/traces.md.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, structs

from goondan.schemas.bundle.address import instance_dir, path_segment, segment_key
from goondan.schemas.text.times import rfc3339
from goondan.schemas.traces.turn_notes import CONVERSATION_FILE, CONVERSATION_FORMAT
from goondan.schemas.wire import codec, errors, frames
from goondan.schemas.wire.usage import ROWS, Part, Usage, Used, part_of, read_used, total_of

_T = TypeVar("_T")

#: How long a read waits for a file that is being recovered or replaced (seconds).
BUSY_S: Final = 2.0


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
        raise errors.fail("E_STATE", f"{place.path}: {error}") from None


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
            raise errors.fail("E_STATE", message)
        db.execute("BEGIN")  # one moment for all reads
        return read(db)


class Instance(Struct, frozen=True):
    """One instance."""

    #: The agent.
    agent: str
    #: Its key. None: it is long, and the folder's name holds only a part of it.
    instance_key: str | None
    #: Its folder.
    folder: str
    #: The size of its conversation, without the workdir.
    bytes: int
    #: When it was last written (seconds since 1970).
    written: float

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "agent": self.agent,
            "instanceKey": self.instance_key,
            "folder": self.folder,
            "bytes": self.bytes,
            "written": rfc3339(self.written),
        }


def instances(state_dir: str, agent: str | None = None, key: str | None = None) -> list[Instance]:
    """Those that have had an event, the one that was written last first; of one agent, or one key, if given.

    Those of `gdn call` are an agent of their own, which is left out unless it is named.
    """
    found = [
        Instance(
            agent=place.agent,
            instance_key=key if key is not None else place.instance_key,
            folder=os.path.dirname(place.path),
            bytes=_size(place.path) + _size(f"{place.path}-wal"),
            written=place.written,
        )
        for place in conversation_files(state_dir, agent, key)
        if agent is not None or place.agent != frames.OPERATOR_AGENT
    ]
    return sorted(found, key=lambda one: -one.written)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it has gone, or there is none
        return 0


class Overview(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A conversation in numbers."""

    #: How many messages it has: of people, of the model, and results of tools.
    messages: int = 0
    #: When its first message was made: RFC 3339 in UTC. None: it has no message.
    since: str | None = None
    #: When its last message was made.
    last: str | None = None
    #: The turn that `undo` would take back. None: there is none.
    last_turn_id: str | None = None
    #: What the model calls of the instance have used in all, what was taken back included. None: nothing.
    usage: Usage | None = None


def overview(state_dir: str, agent: str, key: str, generation: int = 0) -> Overview:
    """The conversation of one instance in numbers. One that nobody has begun is empty, and so is one of a generation
    before `generation` (docs/design/turns.md section 4).

    Raises GoondanError E_STATE.
    """
    return read_file(place_of(state_dir, agent, key), lambda db: _overview(db, generation)) or Overview()


def messages(state_dir: str, agent: str, key: str, generation: int = 0, last: int | None = None) -> list[Any]:
    """The messages of one instance in order, as they are stored; only the `last` ones if that is given.

    Raises GoondanError E_STATE.
    """
    place = place_of(state_dir, agent, key)
    rows = read_file(place, lambda db: list(_rows(db, generation, last))) or []
    return [_decoded(place, row) for row in rows]


#: A page ends before its messages are larger than this together (bytes), with one at least.
MAX_PAGE_BYTES: Final = 8 << 20
_PAGE: Final = "SELECT seq, message FROM base WHERE seq < ? ORDER BY seq DESC LIMIT ?"


def page(
    state_dir: str, agent: str, key: str, generation: int, before: int | None, number: int
) -> tuple[list[Any], int | None]:
    """At most `number` messages of one instance, the ones before a place, in order; and the place before them. None:
    there are none; as an argument: the end. Raises GoondanError E_STATE.
    """
    place, latest = place_of(state_dir, agent, key), (1 << 62 if before is None else before)

    def read(db: sqlite3.Connection) -> tuple[list[bytes], int | None]:
        taken: list[bytes] = []
        size, first = 0, None
        for seq, data in () if _is_earlier(db, generation) else db.execute(_PAGE, (latest, number + 1)):
            size += len(data)
            if len(taken) == number or (taken and size > MAX_PAGE_BYTES):
                return taken, first  # those before it are not read
            taken.append(data)
            first = seq
        return taken, None

    rows, first = read_file(place, read) or ([], None)
    return [_decoded(place, data) for data in reversed(rows)], first


def _decoded(place: ConversationFile, data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except codec.DECODE_ERRORS as error:
        raise errors.fail("E_STATE", f"{place.path}: a message cannot be read: {error}") from None


def turn_messages(state_dir: str, agent: str, key: str, event_id: str) -> list[Any]:
    """The messages of an event's turn in order, as they are stored so far, also while the turn runs.

    Raises GoondanError E_STATE.
    """
    place = place_of(state_dir, agent, key)
    rows = read_file(place, lambda db: db.execute(OF_TURN, (event_id,)).fetchall()) or []
    return [*{message["id"]: message for message in (_decoded(place, row) for (row,) in rows)}.values()]


#: The messages of an event's turn, as far as it is. The digits of a position stand between `.` and `.:`. A message that
#: replaces another one comes behind it.
OF_TURN: Final = (
    "WITH turn(id) AS (SELECT turn_id FROM turns WHERE event_key = ?) "
    "SELECT message FROM (SELECT message FROM base, turn WHERE base.id > turn.id || '.' AND base.id < turn.id || '.:' "
    "ORDER BY seq) UNION ALL SELECT message FROM (SELECT message FROM events, turn WHERE turn_id = turn.id "
    "AND message IS NOT NULL ORDER BY position)"
)


def _rows(db: sqlite3.Connection, generation: int, last: int | None) -> Iterator[bytes]:
    """The stored messages, in order."""
    if _is_earlier(db, generation):
        return
    newest = db.execute("SELECT message FROM base ORDER BY seq DESC LIMIT ?", (-1 if last is None else last,))
    yield from (row[0] for row in reversed(newest.fetchall()))


def _overview(db: sqlite3.Connection, generation: int) -> Overview:
    used = Overview(usage=_used(db))
    ((count, first, last),) = db.execute("SELECT count(*), min(seq), max(seq) FROM base")
    if not count or _is_earlier(db, generation):
        return used
    turn = db.execute("SELECT id FROM base WHERE id LIKE '%.0' ORDER BY seq DESC LIMIT 1").fetchone()
    return structs.replace(
        used,
        messages=count,
        since=_made(db, first),
        last=_made(db, last),
        last_turn_id=None if turn is None else str(turn[0]).removesuffix(".0"),
    )


def _is_earlier(db: sqlite3.Connection, generation: int) -> bool:
    """Whether the conversation begins again as soon as its agent opens the file."""
    row = db.execute("SELECT value FROM meta WHERE name = 'generation'").fetchone()
    known = row[0] if row is not None and isinstance(row[0], int) else 0
    return known < generation


def _made(db: sqlite3.Connection, seq: int) -> str | None:
    """When a message was made; None when it does not say so."""
    (data,) = db.execute("SELECT message FROM base WHERE seq = ?", (seq,)).fetchone()
    try:
        return msgspec.msgpack.decode(data, type=_Made).created_at
    except codec.DECODE_ERRORS:
        return None


class _Made(Struct, rename="camel"):
    """The part of a message that says when it was made."""

    #: RFC 3339 in UTC.
    created_at: str


def used_by(place: ConversationFile) -> list[tuple[Part, Used]]:
    """What all model calls of ended turns of an instance have used, by day, model and currency. Raises GoondanError
    E_STATE.
    """
    return read_file(place, _parts) or []


def _used(db: sqlite3.Connection) -> Usage | None:
    parts = _parts(db)
    return total_of(parts) if parts else None


def _parts(db: sqlite3.Connection) -> list[tuple[Part, Used]]:
    # A range, and not LIKE: the names of rows are told apart by letter case.
    rows = db.execute("SELECT name, value FROM meta WHERE name >= ? AND name < ?", (ROWS, ROWS[:-1] + "0"))
    return [(part, used) for name, value in rows if (part := part_of(name)) and (used := read_used(value))]
