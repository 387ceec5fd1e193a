"""Which conversations the door knows, and which responses: one SQLite file in the kernel's state.

It survives the door's end. Of a conversation it has digests (rules/conversations.py), of a response what a client may
ask for again. Both are bounded, and the oldest are forgotten first: then a client's next message begins a new instance
that is told the history in words, and a forgotten response is not found. So nothing is synced to the disk, and a file
that cannot be read is begun anew.

Source: rules/conversations.py; docs/decisions/159 for a table that is a hint.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules.conversations import MAX_PART, Place
from goondan.features.openai_door.door.rules.requests import Said
from goondan.schemas.wire.errors import fail

FILE: Final = "openai-door.db"
#: Conversations that are known. With their digests, some 40 MiB.
MAX_CONVERSATIONS: Final = 100_000
#: Responses that are kept, and how large all of them may be (bytes).
MAX_RESPONSES: Final = 20_000
MAX_BYTES: Final = 256 << 20
#: How often the oldest are looked for (additions).
SWEEP: Final = 512
#: How long a write waits for another door at the same kernel (seconds).
BUSY_S: Final = 2.0
#: The longest line of responses that is told in words.
MAX_EARLIER: Final = 1_000

_SCHEMA: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = OFF",
    "CREATE TABLE IF NOT EXISTS conversations (number INTEGER PRIMARY KEY AUTOINCREMENT, caller TEXT NOT NULL, "
    "agent TEXT NOT NULL, instance TEXT NOT NULL, turns INTEGER NOT NULL, told BLOB, part TEXT, "
    "answered INTEGER NOT NULL, root BLOB, used INTEGER NOT NULL, UNIQUE (caller, agent, instance))",
    "CREATE INDEX IF NOT EXISTS of_root ON conversations (root)",
    "CREATE INDEX IF NOT EXISTS by_use ON conversations (used)",
    "CREATE TABLE IF NOT EXISTS tips (digest BLOB NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (digest, number)) "
    "WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS of_number ON tips (number)",
    "CREATE TABLE IF NOT EXISTS responses (seq INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, caller TEXT NOT NULL, "
    "number INTEGER NOT NULL, turns INTEGER NOT NULL, previous TEXT, event_id TEXT NOT NULL, said BLOB NOT NULL, "
    "response BLOB NOT NULL)",
)
_FIND: Final = (
    "SELECT number, instance, turns, told, part, answered FROM conversations JOIN tips USING (number) "
    "WHERE digest = ? AND caller = ? AND agent = ? ORDER BY used DESC LIMIT 16"
)
_NAMED: Final = (
    "SELECT number, instance, turns, told, part, answered FROM conversations "
    "WHERE caller = ? AND agent = ? AND instance = ?"
)
_NUMBERED: Final = "SELECT number, instance, turns, told, part, answered FROM conversations WHERE number = ?"
_BEGIN: Final = (
    "INSERT INTO conversations (caller, agent, instance, turns, told, answered, root, used) "
    "VALUES (?, ?, ?, 1, ?, 0, ?, (SELECT ifnull(max(used), 0) + 1 FROM conversations)) "
    "ON CONFLICT (caller, agent, instance) DO UPDATE SET turns = turns + 1, told = ifnull(excluded.told, told), "
    "answered = 0, part = NULL, root = ifnull(excluded.root, root), used = excluded.used "
    "RETURNING number, instance, turns, told, part, answered"
)
_OLDEST: Final = (
    "DELETE FROM conversations WHERE number IN (SELECT number FROM conversations ORDER BY used DESC LIMIT -1 OFFSET ?)"
)
_OLDEST_RESPONSES: Final = (
    "DELETE FROM responses WHERE seq IN (SELECT seq FROM (SELECT seq, count(*) OVER newer AS rows, "
    "sum(length(said) + length(response)) OVER newer AS bytes FROM responses WINDOW newer AS (ORDER BY seq DESC)) "
    "WHERE rows > ? OR bytes > ?)"
)


class Response(Struct, frozen=True):
    """A response that is kept."""

    #: Its id.
    name: str
    #: The number of its conversation.
    number: int
    #: How many turns that had with it.
    turns: int
    #: The id of the response that it follows.
    previous: str | None
    #: The id of its event.
    event_id: str
    #: What was said to the agent.
    said: list[Said]
    #: The response as a client gets it.
    response: dict[str, Any]


class Begun(NamedTuple):
    """A turn that has begun in a conversation."""

    #: Where the conversation is now.
    place: Place
    #: Its tip and its place before; None: it is new.
    before: tuple[Place, list[bytes]] | None


class Known:
    """The file. Its methods raise GoondanError E_DISK_FULL, E_STATE."""

    def __init__(self, state_dir: str) -> None:
        self._path = f"{state_dir}/{FILE}"
        self._additions = {"conversations": 0, "responses": 0}
        try:
            self._db = self._opened()
        except sqlite3.DatabaseError:
            for end in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.unlink(self._path + end)
            self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            for statement in _SCHEMA:
                db.execute(statement)
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Nothing is asked any more."""
        self._db.close()

    # --- conversations

    def find(self, caller: str, agent: str, digest: bytes) -> list[Place]:
        """The conversations whose tip this digest is, the one that was used last first."""
        return [_place(row) for row in self._run(_FIND, digest, caller, agent)]

    def named(self, caller: str, agent: str, instance: str) -> Place | None:
        """The conversation of this instance."""
        return next((_place(row) for row in self._run(_NAMED, caller, agent, instance)), None)

    def numbered(self, number: int) -> Place | None:
        """The conversation of this number."""
        return next((_place(row) for row in self._run(_NUMBERED, number)), None)

    def is_root(self, digest: bytes) -> bool:
        """Whether a conversation begins with this."""
        return bool(self._run("SELECT 1 FROM conversations WHERE root = ? LIMIT 1", digest))

    def begin(
        self, caller: str, agent: str, instance: str, *, told: bytes | None, root: bytes | None, asked: bytes | None
    ) -> Begun:
        """A turn begins. `asked`: the digest that stands for the conversation from now on."""
        was = self.named(caller, agent, instance)
        before = None if was is None else (was, self._tips(was.number))
        place = _place(self._run(_BEGIN, caller, agent, instance, told, root)[0])
        self._set_tips(place.number, [asked] if asked else [])
        self._sweep("conversations", _OLDEST, MAX_CONVERSATIONS)
        return Begun(place, before)

    def take_back(self, begun: Begun) -> None:
        """The turn was not accepted."""
        if begun.before is None:
            self._run("DELETE FROM conversations WHERE number = ?", begun.place.number)
            self._set_tips(begun.place.number, [])
            return
        was, tips = begun.before
        change = "UPDATE conversations SET turns = ?, told = ?, part = ?, answered = ? WHERE number = ?"
        self._run(change, was.turns, was.told, was.part, was.answered, was.number)
        self._set_tips(was.number, tips)

    def end(self, place: Place, tips: Iterable[bytes], *, answered: bool, part: str | None = None) -> None:
        """A turn has ended. `tips` stand for the conversation beside what was asked. `part`: what a client has of an
        answer that it did not wait for.
        """
        change = "UPDATE conversations SET answered = ?, part = ? WHERE number = ? AND turns = ?"
        kept = None if part is None else part[:MAX_PART]
        self._run(change, answered, kept, place.number, place.turns)
        self._run_many("INSERT OR IGNORE INTO tips VALUES (?, ?)", [(tip, place.number) for tip in tips])

    def _tips(self, number: int) -> list[bytes]:
        return [row[0] for row in self._run("SELECT digest FROM tips WHERE number = ?", number)]

    def _set_tips(self, number: int, tips: Iterable[bytes]) -> None:
        self._run("DELETE FROM tips WHERE number = ?", number)
        self._run_many("INSERT OR IGNORE INTO tips VALUES (?, ?)", [(tip, number) for tip in tips])

    # --- responses

    def keep(self, caller: str, kept: Response) -> None:
        """Keep a response, or what it has become."""
        said = msgspec.msgpack.encode([(one.role, _text_of(one)) for one in kept.said])
        row = (kept.name, caller, kept.number, kept.turns, kept.previous, kept.event_id, said)
        self._run(
            "INSERT INTO responses (name, caller, number, turns, previous, event_id, said, response) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET response = excluded.response",
            *row,
            msgspec.msgpack.encode(kept.response),
        )
        self._sweep("responses", _OLDEST_RESPONSES, MAX_RESPONSES, MAX_BYTES)

    def response(self, caller: str, name: str) -> Response | None:
        """A response of this caller."""
        asked = (
            "SELECT name, number, turns, previous, event_id, said, response FROM responses "
            "WHERE name = ? AND caller = ?"
        )
        rows = self._run(asked, name, caller)
        if not rows:
            return None
        name, number, turns, previous, event_id, encoded, kept = rows[0]
        said = [Said(role, text) for role, text in msgspec.msgpack.decode(encoded)]
        return Response(name, number, turns, previous, event_id, said, msgspec.msgpack.decode(kept))

    def forget(self, caller: str, name: str) -> bool:
        """Forget a response. Returns whether it was there."""
        return bool(self._run("DELETE FROM responses WHERE name = ? AND caller = ? RETURNING 1", name, caller))

    def up_to(self, caller: str, kept: Response) -> list[Said] | None:
        """All that was said up to this response. None: a response of it is not kept any more."""
        line = [kept]
        while (previous := line[-1].previous) is not None and len(line) < MAX_EARLIER:
            earlier = self.response(caller, previous)
            if earlier is None:
                return None
            line.append(earlier)
        said: list[Said] = []
        for one in reversed(line):
            said += [*one.said, Said("assistant", text_of(one.response))]
        return said

    # --- inside

    def _run(self, statement: str, *values: Any) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _failed(error) from None

    def _run_many(self, statement: str, rows: list[Any]) -> None:
        try:
            self._db.executemany(statement, rows)
        except sqlite3.Error as error:
            raise _failed(error) from None

    def _sweep(self, table: str, statement: str, *bounds: int) -> None:
        self._additions[table] += 1
        if self._additions[table] % SWEEP == 0:
            self._run(statement, *bounds)
            self._run("DELETE FROM tips WHERE number NOT IN (SELECT number FROM conversations)")


def text_of(response: dict[str, Any]) -> str:
    """All text of a response, as `output_text` of the packages has it."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "\n\n".join([part["text"] for part in parts])


def _text_of(said: Said) -> str:
    return said.text + (f"\n[{len(said.files)} files came with it]" if said.files else "")


def _place(row: tuple[Any, ...]) -> Place:
    number, instance, turns, told, part, answered = row
    return Place(number, instance, turns, told, part, bool(answered))


def _failed(error: sqlite3.Error) -> Exception:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return fail("E_DISK_FULL", "the door cannot note where conversations are: the disk is full")
    return fail("E_STATE", f"the door cannot note where conversations are: {error}")
