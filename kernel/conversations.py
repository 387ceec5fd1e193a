"""Reading the messages of an instance's conversation, while its agent writes them. Nothing is changed.

Messages are shown as they are stored (agentproc/conversation.py), whatever fields a version of it has.

Source: docs/design/turns.md section 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, structs

from goondan.kernel.trace_files import place_of, read_file
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.usage import ROWS, Usage, part_of, read_used, total_of


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
    try:
        return [msgspec.msgpack.decode(row) for row in rows]
    except DECODE_ERRORS as error:
        raise fail("E_STATE", f"{place.path}: a message cannot be read: {error}") from None


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
    except DECODE_ERRORS:
        return None


class _Made(Struct, rename="camel"):
    """The part of a message that says when it was made."""

    #: RFC 3339 in UTC.
    created_at: str


def _used(db: sqlite3.Connection) -> Usage | None:
    """What all model calls of ended turns have used."""
    # A range, and not LIKE: the names of rows are told apart by letter case.
    rows = db.execute("SELECT name, value FROM meta WHERE name >= ? AND name < ?", (ROWS, ROWS[:-1] + "0"))
    parts = [(part, used) for name, value in rows if (part := part_of(name)) and (used := read_used(value))]
    return total_of(parts) if parts else None
