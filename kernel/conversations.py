"""Reading the messages of an instance's conversation, while its agent writes them. Nothing is changed.

Messages are shown as they are stored (agentproc/conversation.py), whatever fields a version of it has.

Source: docs/design/turns.md section 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from kernel.trace_files import place_of, read_file
from schemas.codec import DECODE_ERRORS
from schemas.errors import fail
from schemas.traces import ModelDetail

#: The kinds of notes that have numbers of tokens.
_MODEL_ENDS: Final = "SELECT detail FROM runtime_events WHERE type IN ('model.answered', 'model.failed')"


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
    #: Model calls of the instance that said how many tokens they took, as far as their notes are kept.
    model_calls: int = 0
    #: Tokens that those calls read.
    input_tokens: int = 0
    #: Tokens that those calls wrote.
    output_tokens: int = 0


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
    used = _tokens(db)
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


def _tokens(db: sqlite3.Connection) -> Overview:
    """The tokens of all model calls whose notes are kept."""
    calls = read = written = 0
    for (detail,) in db.execute(_MODEL_ENDS):
        try:
            ended = msgspec.json.decode(detail or "", type=ModelDetail)
        except DECODE_ERRORS:
            continue  # another version has written it
        if ended.input_tokens is None and ended.output_tokens is None:
            continue
        calls, read, written = calls + 1, read + (ended.input_tokens or 0), written + (ended.output_tokens or 0)
    return Overview(model_calls=calls, input_tokens=read, output_tokens=written)
