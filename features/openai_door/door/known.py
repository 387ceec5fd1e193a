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
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules.conversations import Place
from goondan.features.openai_door.door.rules.requests import Said
from goondan.schemas.wire.blobs import MAX_REQUEST_BYTES
from goondan.schemas.wire.errors import fail

FILE: Final = "openai-door.db"
#: Conversations that are known. With their digests, some 40 MiB.
MAX_CONVERSATIONS: Final = 100_000
#: How large all responses that are kept may be (bytes).
MAX_BYTES: Final = 256 << 20
#: How often the oldest are looked for: after so many additions. Of a response each 16 KiB count as one.
SWEEP: Final = 512
#: How long a write waits for another door at the same kernel (seconds).
BUSY_S: Final = 2.0
#: The most that is kept of an answer whose client has left (characters). Of all conversations that is 0.4 GB.
MAX_PART: Final = 4_000

_SCHEMA: Final = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS conversations (
  number INTEGER PRIMARY KEY AUTOINCREMENT, caller TEXT, agent TEXT, instance TEXT, turns INTEGER, told BLOB, part TEXT,
  answered INTEGER, root BLOB, used INTEGER, UNIQUE (caller, agent, instance));
CREATE INDEX IF NOT EXISTS by_use ON conversations (used);
CREATE TABLE IF NOT EXISTS tips (digest BLOB, number INTEGER, PRIMARY KEY (digest, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_number ON tips (number);
CREATE TABLE IF NOT EXISTS responses (seq INTEGER PRIMARY KEY, name TEXT UNIQUE, caller TEXT, kept BLOB);
"""
_PLACES: Final = "SELECT number, instance, turns, told, part, answered FROM conversations "
_OF_TIP: Final = "JOIN tips USING (number) WHERE digest = ? AND caller = ? AND agent = ? ORDER BY used DESC LIMIT 16"
_NAMED: Final = "WHERE caller = ? AND agent = ? AND instance = ?"
_BEGIN: Final = """
INSERT INTO conversations (caller, agent, instance, turns, told, answered, root, used)
VALUES (?, ?, ?, 1, ?, 0, ?, (SELECT ifnull(max(used), 0) + 1 FROM conversations))
ON CONFLICT (caller, agent, instance) DO UPDATE SET turns = turns + 1, told = ifnull(excluded.told, told),
  answered = 0, part = NULL, root = ifnull(excluded.root, root), used = excluded.used
RETURNING number, instance, turns, told, part, answered
"""
_OLDEST: Final = "DELETE FROM conversations WHERE used <= (SELECT max(used) FROM conversations) - ?"
_OLDEST_RESPONSES: Final = """
DELETE FROM responses WHERE seq IN (SELECT seq FROM (
  SELECT seq, sum(length(kept)) OVER (ORDER BY seq DESC) AS bytes FROM responses) WHERE bytes > ?)
"""


class Response(Struct, frozen=True):
    """A response that is kept."""

    #: Its id.
    name: str
    #: The number of its conversation.
    number: int
    #: How many turns that had with it.
    turns: int
    #: What was said to the agent, as pairs of role and text.
    said: list[tuple[Any, str]]
    #: The response as a client gets it.
    response: dict[str, Any]


class Known:
    """The file. Its methods raise GoondanError E_STATE."""

    def __init__(self, state_dir: str) -> None:
        self._path = f"{state_dir}/{FILE}"
        self._db: sqlite3.Connection | None = None  # until it is used: before the first kernel there is no state
        self._additions = 0

    def _opened(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        # Another thread never uses it, but may find that nobody does any more.
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        weakref.finalize(self, db.close)
        db.executescript(_SCHEMA)
        return db

    # --- conversations

    def find(self, caller: str, agent: str, digest: bytes) -> list[Place]:
        """The conversations whose tip this digest is, the one that was used last first."""
        return self._places(_PLACES + _OF_TIP, digest, caller, agent)

    def named(self, caller: str, agent: str, instance: str) -> Place | None:
        """The conversation of this instance."""
        return next(iter(self._places(_PLACES + _NAMED, caller, agent, instance)), None)

    def numbered(self, number: int) -> Place | None:
        """The conversation of this number."""
        return next(iter(self._places(_PLACES + "WHERE number = ?", number)), None)

    def is_root(self, digest: bytes) -> bool:
        """Whether a conversation begins with this."""
        return bool(self._places(_PLACES + "WHERE root = ? LIMIT 1", digest))

    def begin(
        self, caller: str, agent: str, instance: str, told: bytes | None, root: bytes | None, asked: bytes | None
    ) -> Place:
        """A turn begins. `asked`: the digest that stands for the conversation from now on."""
        [place] = self._places(_BEGIN, caller, agent, instance, told, root)
        self._run("DELETE FROM tips WHERE number = ?", place.number)
        self._tips(place, [asked] if asked else [])
        self._sweep(1)
        return place

    def end(self, place: Place, tips: Iterable[bytes], *, answered: bool, part: str | None = None) -> None:
        """A turn has ended. `tips` stand for the conversation beside what was asked. `part`: what a client has of an
        answer that it did not wait for.
        """
        change = "UPDATE conversations SET answered = ?, part = ? WHERE number = ?"
        self._run(change, answered, part and part[:MAX_PART], place.number)
        self._tips(place, tips)

    def _places(self, statement: str, *values: Any) -> list[Place]:
        rows = self._run(statement, *values)
        return [Place(number, key, turns, told, part, bool(done)) for number, key, turns, told, part, done in rows]

    def _tips(self, place: Place, tips: Iterable[bytes]) -> None:
        for tip in tips:
            self._run("INSERT OR IGNORE INTO tips VALUES (?, ?)", tip, place.number)

    # --- responses

    def keep(self, caller: str, kept: Response) -> None:
        """Keep a response, or what it has become."""
        encoded = msgspec.msgpack.encode(kept)
        self._run("INSERT OR REPLACE INTO responses (name, caller, kept) VALUES (?, ?, ?)", kept.name, caller, encoded)
        self._sweep(1 + (len(encoded) >> 14))

    def response(self, caller: str, name: str) -> Response | None:
        """A response of this caller."""
        rows = self._run("SELECT kept FROM responses WHERE name = ? AND caller = ?", name, caller)
        return msgspec.msgpack.decode(rows[0][0], type=Response) if rows else None

    def forget(self, caller: str, name: str) -> bool:
        """Forget a response. Returns whether it was there."""
        return bool(self._run("DELETE FROM responses WHERE name = ? AND caller = ? RETURNING 1", name, caller))

    def up_to(self, caller: str, kept: Response) -> list[Said] | None:
        """All that was said up to this response. None: a response of it is not kept any more, or it is too much."""
        line, size = [kept], 0
        while previous := line[-1].response["previous_response_id"]:
            earlier = self.response(caller, previous)
            if earlier is None or size > MAX_REQUEST_BYTES:
                return None
            size += sum(len(text) for _, text in earlier.said)
            line.append(earlier)
        said: list[Said] = []
        for one in reversed(line):
            said += [Said(role, text) for role, text in one.said]
            said += [Said("assistant", item["content"][0]["text"]) for item in one.response["output"]]
        return said

    # --- inside

    def _run(self, statement: str, *values: Any, again: bool = True) -> list[Any]:
        try:
            self._db = self._db or self._opened()
            return self._db.execute(statement, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            if again and type(error) is sqlite3.DatabaseError:  # it is damaged, perhaps in its middle, or no database
                if self._db is not None:
                    self._db.close()
                self._db = None
                for end in ("", "-wal", "-shm"):
                    Path(self._path + end).unlink(missing_ok=True)
                return self._run(statement, *values, again=False)
            raise fail("E_STATE", f"the door cannot note where conversations are: {error}") from None

    def _sweep(self, added: int) -> None:
        """Forget what is too old, now and then."""
        self._additions += added
        if self._additions >= SWEEP:
            self._additions = 0
            self._run(_OLDEST, MAX_CONVERSATIONS)
            self._run("DELETE FROM tips WHERE number NOT IN (SELECT number FROM conversations)")
            self._run(_OLDEST_RESPONSES, MAX_BYTES)
