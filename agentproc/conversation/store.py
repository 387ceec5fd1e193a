"""One instance's conversation on disk: `<state_dir>/instances/<agent>/<key>/conversation.db` (SQLite).

Rules.
- The file is opened at the first turn, never when the process starts. How it is written, and what a failure does, is
  in file.py.
- A turn appends message events at positions of its own; `finish_turn` folds them into the base and stores the answer
  under the event's key, in the same transaction. An event key has at most one row, so a finished event is answered
  again from its row and never run again.
- Only `load_messages` reads the history, so a turn costs the same at any age of the conversation. It reads it once, as
  long as nobody else writes the file, and turns only add to it.

Source: docs/design/turns.md section 4; docs/design/delivery.md sections 2 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, structs

from goondan.agentproc.conversation.file import ConversationFile, Durability
from goondan.agentproc.machine import messages
from goondan.schemas.traces.turn_notes import TurnStatus
from goondan.schemas.transport.link import boottime_ms
from goondan.schemas.wire.usage import ROWS, Part, Used, encode_used, read_used

#: How many answers are kept for events that may be delivered again. The broker forgets an event long before so many
#: others.
KEPT_ANSWERS: Final = 10_000
#: The most bytes of those answers, and of the messages of an instance whose messages no model reads. The broker
#: remembers 64 MiB of finished events, of all instances together.
KEPT_BYTES: Final = 64 << 20
#: How many runtime events are kept.
KEPT_RUNTIME_EVENTS: Final = 50_000
#: How many sums of usage an instance keeps for one day, by model and currency.
MAX_PARTS_OF_A_DAY: Final = 64
#: The name under which the models beyond those are counted.
OTHER_MODELS: Final = "other models"
#: How often the limits above are applied: after so many finished turns, and after so many stored bytes.
_TRIM_EVERY: Final = 256
_TRIM_BYTES: Final = 32 << 20


class TurnRow(Struct, frozen=True):
    """The stored turn of one event."""

    #: The key of the event.
    event_key: str
    #: The id of the turn.
    turn_id: str
    #: The number of the attempt, from 1.
    attempt: int
    #: Whether the turn runs, and how it ended.
    status: TurnStatus
    #: The payload of its `done` or `failed` frame.
    answer: bytes | None = None


class StoredEvent(Struct, frozen=True):
    """A message event of an unfinished turn."""

    #: Its position in the turn.
    position: int
    #: The event.
    event: messages.MessageEvent
    #: When it was stored (CLOCK_BOOTTIME, milliseconds). 0: before the machine's last boot, so earlier than the start
    #: of every process that runs now.
    stored_ms: int
    #: The place in an extension that it came from; None: the turn itself.
    origin: str | None = None


class ConversationStore(ConversationFile):
    """The conversation file in `directory`. Not for use by several threads.

    `kept_messages` limits the base (None: everything is kept). It is for an instance whose messages no model reads.
    `durability` says what the end of a turn survives: `power` a loss of power, `process` the end of the process.
    `max_bytes` limits the file and its log together (None: only the disk limits them). A file of an earlier
    `generation` begins again: its history is moved to EARLIER_FILE (file.py), which nothing reads.
    `large_notes`: runtime events are limited by their bytes, too.

    Every method raises GoondanError E_STATE when the file cannot be read.
    """

    def __init__(
        self,
        directory: str,
        *,
        durability: Durability = "power",
        kept_messages: int | None = None,
        max_bytes: int | None = None,
        generation: int = 0,
        large_notes: bool = False,
    ) -> None:
        self._large_notes = large_notes
        super().__init__(directory, durability, max_bytes, generation)
        self._kept_messages = kept_messages
        self._finished = 0
        self._stored = 0  # bytes since the last trim
        self._base: list[messages.Message] | None = None  # as far as it is known
        self._base_version: int | None = None  # what SQLite called the file when they were read
        self._running: dict[str, TurnRow] | None = None  # by their events, as far as they are known
        self._plain = ""  # the turn that was begun here, as long as it has done nothing but to add messages
        self._used = "", Used()  # the row of usage that was written last

    # --- turns

    def find_turn(self, event_key: str) -> TurnRow | None:
        """The stored turn of an event; None when it was never begun."""
        rows = self.rows("SELECT turn_id, attempt, status, answer FROM turns WHERE event_key = ?", (event_key,))
        return TurnRow(event_key, *rows[0]) if rows else None

    def turn_number(self, event_key: str) -> int:
        """Which turn of the instance the begun turn of an event is, from 1."""
        rows = self.rows(
            "SELECT count(*) FROM turns WHERE seq <= (SELECT seq FROM turns WHERE event_key = ?)", (event_key,)
        )
        return int(rows[0][0])

    def running_turns(self) -> list[TurnRow]:
        """Turns that were begun and have no end. There is at most one, unless an event was taken out of the mailbox."""
        if self._running is None:
            found = "SELECT event_key, turn_id, attempt, status FROM turns WHERE status = 'running' ORDER BY seq"
            self._running = {row[0]: TurnRow(*row) for row in self.rows(found)}
        return list(self._running.values())

    def begin_turn(
        self,
        event_key: str,
        turn_id: str,
        attempt: int,
        at: str,
        *,
        trace_id: str | None = None,
        parent_span_id: str | None = None,
        waited_ms: int | None = None,
    ) -> None:
        """Record that a turn runs (inside `write`), before its first note. A later attempt replaces an
        abandoned one.
        """
        self.execute(
            "INSERT INTO turns "
            "(event_key, turn_id, attempt, status, started_at, trace_id, parent_span_id, waited_ms, first_note) "
            "VALUES (?, ?, ?, 'running', ?, ?, ?, ?, (SELECT coalesce(max(seq), 0) + 1 FROM runtime_events)) "
            "ON CONFLICT (event_key) DO UPDATE SET turn_id = excluded.turn_id, attempt = excluded.attempt, "
            "status = 'running', started_at = excluded.started_at, ended_at = NULL, answer = NULL, "
            "trace_id = excluded.trace_id, parent_span_id = excluded.parent_span_id, waited_ms = excluded.waited_ms, "
            "first_note = excluded.first_note",
            (event_key, turn_id, attempt, at, trace_id, parent_span_id, waited_ms),
        )
        self._plain = turn_id
        if self._running is not None:
            self._running[event_key] = TurnRow(event_key, turn_id, attempt, "running")

    def finish_turn(
        self,
        event_key: str,
        turn_id: str,
        status: TurnStatus,
        at: str,
        *,
        steps: int,
        answer: bytes | None,
        used: Mapping[Part, Used] | None = None,
    ) -> None:
        """Fold the turn's events into the base and store its end and its answer (inside `write(final=True)`). What its
        model calls have `used` is added to the instance's sums.
        """
        self._fold(turn_id)
        for part, more in (used or {}).items():
            self._add_used(part, more)
        if turn_id != self._plain:
            self.execute("DELETE FROM meta WHERE name > ? AND name < ?", (_started(turn_id), f"started:{turn_id}0"))
        if self._running is not None:
            self._running.pop(event_key, None)
        self.execute(
            "UPDATE turns SET status = ?, ended_at = ?, steps = ?, answer = ? WHERE event_key = ?",
            (status, at, steps, answer, event_key),
        )
        self._finished += 1
        self._stored += len(answer or b"")
        if self._finished % _TRIM_EVERY == 0 or self._stored >= _TRIM_BYTES:
            self._trim()
            self._stored = 0

    # --- calls that run in the agent's process

    def record_start(self, turn_id: str, tool_call_id: str) -> None:
        """Record that this call of a running turn begins (inside `write`). The end of the turn forgets it."""
        self._plain = ""
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, 1)", (_started(turn_id) + tool_call_id,))

    def was_started(self, turn_id: str, tool_call_id: str) -> bool:
        """Whether the begin of this call was recorded."""
        return bool(self.rows("SELECT 1 FROM meta WHERE name = ?", (_started(turn_id) + tool_call_id,)))

    # --- messages

    def append(self, turn_id: str, position: int, event: messages.MessageEvent, *, origin: str | None = None) -> None:
        """Store one message event of a running turn (inside `write`). An event with the same position replaces the
        earlier one.
        """
        target: str | None = None
        message: bytes | None = None
        if isinstance(event, messages.Append):
            kind, target, message = "append", event.message.id, messages.encode_message(event.message)
        elif isinstance(event, messages.Replace):
            kind, target, message = "replace", event.target_id, messages.encode_message(event.message)
        elif isinstance(event, messages.Remove):
            kind, target = "remove", event.target_id
        else:
            kind = "truncate"
        if kind != "append":
            self._plain = ""
        self._stored += len(message or b"")
        self.execute(
            "INSERT OR REPLACE INTO events (turn_id, position, type, target, message, stored_ms, origin) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (turn_id, position, kind, target, message, boottime_ms(), origin),
        )

    def turn_events(self, turn_id: str) -> list[StoredEvent]:
        """The message events of a running turn, in the order of their positions."""
        with self.errors:
            rows = self.rows(
                "SELECT position, type, target, message, stored_ms, origin FROM events "
                "WHERE turn_id = ? ORDER BY position",
                (turn_id,),
            )
            return [
                StoredEvent(position, _event(kind, target, message), stored, origin)
                for position, kind, target, message, stored, origin in rows
            ]

    def load_messages(self) -> list[messages.Message]:
        """BaseMessages, in order; the list must not be changed. This is the only read whose cost grows with the
        conversation.
        """
        version = self.rows("PRAGMA data_version")[0][0]  # another one after a commit of any other connection
        if self._base is None or self._base_version != version:
            with self.errors:
                self._base_version = version
                rows = self.rows("SELECT message FROM base ORDER BY seq")
                self._base = [messages.decode_message(row[0]) for row in rows]
        return self._base

    def keep_messages(self, base: list[messages.Message]) -> None:
        """BaseMessages, as the turn that was finished last has left them: its transaction is committed, and it has read
        them by `load_messages`. They need not be read again.
        """
        if self._base_version is not None and self._kept_messages is None:
            self._base = base

    def forget_messages(self) -> None:
        """Hold no message."""
        self._base = None

    def close(self) -> None:
        """See ConversationFile."""
        super().close()
        self._base = self._base_version = self._running = None
        self._plain, self._used = "", ("", Used())

    def ids_of(self, turn_id: str) -> list[str]:
        """The ids among BaseMessages that are those of this turn: an extension may have given them."""
        rows = self.rows("SELECT id FROM base WHERE id > ? AND id < ?", (f"{turn_id}.", f"{turn_id}/"))
        return [row[0] for row in rows]

    def file_names(self) -> set[str]:
        """The files to which a message refers, by `blob.file`. It reads the whole history."""
        with self.errors:
            rows = self.rows("SELECT message FROM base UNION ALL SELECT message FROM events WHERE message IS NOT NULL")
            return {file.blob.file for row in rows for file in messages.files_of(messages.decode_message(row[0]))}

    def remember(self, name: str, value: bytes) -> None:
        """Keep a value under a name (inside `write`). It replaces the earlier value."""
        self.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))

    def remembered(self, name: str) -> bytes | None:
        """The value that is kept under a name."""
        rows = self.rows("SELECT value FROM meta WHERE name = ?", (name,))
        return bytes(rows[0][0]) if rows else None

    def has_message(self, message_id: str) -> bool:
        """Whether a message with this id is in the conversation that finished turns left."""
        return bool(self.rows("SELECT 1 FROM base WHERE id = ?", (message_id,)))

    def model_notes(self, turn_id: str) -> list[tuple[str, str | None]]:
        """Time and detail of the stored notes about ends of a turn's model calls, in their order."""
        return self.rows(
            "SELECT at, detail FROM runtime_events WHERE turn_id = ?1 AND type LIKE 'model.%' "
            "AND seq >= coalesce((SELECT first_note FROM turns WHERE turn_id = ?1), 0) ORDER BY seq",
            (turn_id,),
        )

    def last_step_note(self, turn_id: str) -> tuple[str, str | None] | None:
        """Kind and detail of the last note about a step of a turn."""
        rows: list[tuple[str, str | None]] = self.rows(
            "SELECT type, detail FROM runtime_events WHERE turn_id = ? AND type LIKE 'step.%' "
            "ORDER BY seq DESC LIMIT 1",
            (turn_id,),
        )
        return rows[0] if rows else None

    # --- inside

    def _add_used(self, part: Part, more: Used) -> None:
        """Add to what this instance's model calls have used in all. A server may name its model anew in each answer;
        beyond MAX_PARTS_OF_A_DAY all of these are one.
        """
        row, (known, whole) = part.row, self._used
        if row != known:
            stored = self.remembered(row)
            if stored is None and self._count_parts(part.day) >= MAX_PARTS_OF_A_DAY:
                row = structs.replace(part, model=f"{part.model.partition('/')[0]}/{OTHER_MODELS}").row
                stored = self.remembered(row)
            whole = (None if stored is None else read_used(stored)) or Used()
        whole.add(more)
        self._used = row, whole
        self.remember(row, encode_used(whole))

    def _count_parts(self, day: str) -> int:
        between = f"{ROWS}{day}/", f"{ROWS}{day}0"  # which is what comes behind the slash
        found = self.rows("SELECT count(*) FROM meta WHERE name >= ? AND name < ?", between)
        return int(found[0][0])

    def _fold(self, turn_id: str) -> None:
        self._base = None
        other = "SELECT 1 FROM events WHERE turn_id = ? AND type != 'append' LIMIT 1"
        if turn_id == self._plain or not self.rows(other, (turn_id,)):
            self.execute(
                "INSERT INTO base (id, message) SELECT target, message FROM events WHERE turn_id = ? ORDER BY position "
                "ON CONFLICT (id) DO UPDATE SET message = excluded.message",
                (turn_id,),
            )
        else:
            for stored in self.turn_events(turn_id):
                self._apply(stored.event)
        self.execute("DELETE FROM events WHERE turn_id = ?", (turn_id,))

    def _apply(self, event: messages.MessageEvent) -> None:
        """Apply one event to the base table, with the same effect as conversation.fold."""
        if isinstance(event, messages.Append):
            self.execute(
                "INSERT INTO base (id, message) VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET message = excluded.message",
                (event.message.id, messages.encode_message(event.message)),
            )
        elif isinstance(event, messages.Replace):
            if event.message.id != event.target_id:
                self.execute(
                    "DELETE FROM base WHERE id = ?1 AND EXISTS (SELECT 1 FROM base WHERE id = ?2)",
                    (event.message.id, event.target_id),
                )
            self.execute(
                "UPDATE base SET id = ?, message = ? WHERE id = ?",
                (event.message.id, messages.encode_message(event.message), event.target_id),
            )
        elif isinstance(event, messages.Remove):
            self.execute("DELETE FROM base WHERE id = ?", (event.target_id,))
        else:
            self.execute("DELETE FROM base")

    def _trim(self) -> None:
        self.execute(
            "DELETE FROM turns WHERE status != 'running' AND seq <= (SELECT max(seq) FROM turns) - ?", (KEPT_ANSWERS,)
        )
        self.execute(
            "DELETE FROM runtime_events WHERE seq <= (SELECT max(seq) FROM runtime_events) - ?", (KEPT_RUNTIME_EVENTS,)
        )
        self._trim_bytes("turns", "answer", "status != 'running'")
        if self._large_notes:
            self._trim_bytes("runtime_events", "detail", "true")
        if self._kept_messages is not None:
            self.execute("DELETE FROM base WHERE seq <= (SELECT max(seq) FROM base) - ?", (self._kept_messages,))
            self._trim_bytes("base", "message", "true")

    def _trim_bytes(self, table: str, column: str, among: str) -> None:
        """Delete the oldest rows beyond KEPT_BYTES in `column`. The newest row stays whatever its size."""
        self.execute(
            f"DELETE FROM {table} WHERE {among} AND seq <= (SELECT max(seq) FROM (SELECT seq, "  # noqa: S608 - ours
            f"sum(length({column})) OVER (ORDER BY seq DESC) - length({column}) AS newer FROM {table} "
            f"WHERE {column} IS NOT NULL) WHERE newer >= ?)",
            (KEPT_BYTES,),
        )


def _started(turn_id: str) -> str:
    """The beginning of the names of rows in `meta` that record calls of this turn."""
    return f"started:{turn_id}/"


def _event(kind: str, target: str, message: bytes) -> messages.MessageEvent:
    if kind == "append":
        return messages.Append(messages.decode_message(message))
    if kind == "replace":
        return messages.Replace(target, messages.decode_message(message))
    return messages.Remove(target) if kind == "remove" else messages.Truncate()
