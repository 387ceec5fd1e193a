"""Finding turns and traces in a workspace: by the index that agents write (schemas/system/trace_index.py), or in the
conversation files, and reading them there.

A turn that the index has forgotten is looked for in every file of a workspace that has few; beside many instances only
if that is wished, since it takes long.

Source: docs/design/traces.md section 3; schemas/traces/turn_notes.py.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from goondan.kernel import lock, paths
from goondan.kernel.traces.conversations import ConversationFile, conversation_files, place_of, read_file
from goondan.kernel.traces.rules.tree import TraceTree, find, grow, total_of, tree_of
from goondan.kernel.traces.rules.turn import Note, Total, Trace, moment, said_in, tell
from goondan.schemas.system import trace_index
from goondan.schemas.system.trace_index import IndexRow
from goondan.schemas.wire import codec, frames, questions, spans
from goondan.schemas.wire.errors import GoondanError, fail

#: The last turn is looked for in this many files, those that were written last. Turns overlap; not this many.
RECENT_FILES: Final = 64
#: Files that are looked through without being asked to: half a second of processor time.
MAX_FILES: Final = 1000
#: Turns of a trace that are shown; the others are counted.
MAX_TURNS: Final = 1000
#: Turns of a trace whose use is added up for a list of traces. A turn takes 1 ms.
MAX_ADDED: Final = 250
#: Turns that began last, as the index says; a line of it may be of a turn whose beginning was not stored.
_LATEST: Final = 8
#: Turns among which the last messages of people are looked for.
_RECENT: Final = 2000
#: The prefix of an event's id in the ids of its answer.
_CORRELATIONS: Final = (questions.correlation(""), questions.handoff_correlation(""))


class Search:
    """Looks into one workspace. `now`: RFC 3339. `everywhere`: look into every file for what is not in the index.

    Every method raises GoondanError: E_TURN_NOT_FOUND, or E_STATE when a file that may hold it cannot be read.
    """

    def __init__(self, state_dir: str, now: str, *, everywhere: bool = False) -> None:
        self._state_dir = state_dir
        self._now = now
        self._everywhere = everywhere
        self._since = running_since(state_dir)

    def trace(self, trace_id: str) -> TraceTree | None:
        """A whole trace; None when there is none with this id."""
        turns, left_out = self._turns_of(trace_id)
        if not turns:
            return None
        return tree_of(trace_id, grow(turns, self._now), left_out, self._now)

    def turn(self, name: str, agent: str | None = None, instance: str | None = None) -> Trace:
        """The turn with this id, or of the event with this id or correlation id, with all that hangs on it."""
        if not paths.is_utf8(name):
            raise fail("E_USAGE", "the id is not UTF-8")
        for read in (self._indexed, self._in_files):
            for known in _names(name):
                if found := read(known, agent, instance):
                    exact = [turn for turn in found if turn.turn_id == known]
                    return self._with_others(max(exact or found, key=lambda turn: turn.started_at))
        raise fail("E_TURN_NOT_FOUND", f"no turn {name}{_of(agent, instance)}", suggestion=self._hint(agent, instance))

    def last(self, agent: str | None = None, instance: str | None = None) -> Trace:
        """The turn that began last, with all that hangs on it; of all agents it is the turn that this one hangs on."""
        found = self.last_alone(agent, instance)
        if agent is not None or instance is not None or found.trace_id is None:
            return self._with_others(found)
        roots = grow(self._turns_of(found.trace_id)[0], self._now)
        return next((root for root in roots if find([root], found.turn_id) is not None), found)

    def last_alone(self, agent: str | None = None, instance: str | None = None) -> Trace:
        """The turn that began last, without others."""
        if agent is None or instance is None:
            for entry in trace_index.last(self._state_dir, _LATEST, agent, instance):
                turns = self._read_entries([entry])
                if turns:
                    return turns[0]
        places = sorted(conversation_files(self._state_dir, agent, instance), key=lambda place: -place.written)
        found = self._read_places(places[:RECENT_FILES], Which())
        if not found:
            raise fail("E_TURN_NOT_FOUND", f"no turn{_of(agent, instance)} yet")
        return max(found, key=lambda trace: trace.started_at)

    def messages(self, number: int) -> list[Trace]:
        """The turns that nobody of the swarm asked for, those of people's messages, the last one first; each with all
        that hangs on it. Calls of operators are left out. Those that began last are looked for among _RECENT turns.
        """
        found: dict[str, Trace] = {}
        seen: set[str] = set()
        for entry in trace_index.last(self._state_dir, _RECENT):
            begun = sorted((turn.started_at for turn in found.values()), reverse=True)
            if len(begun) >= number and entry.at < begun[number - 1]:
                break  # a message has a line of its own, so none of the rest is later
            if entry.agent == frames.OPERATOR_AGENT or entry.trace_id in seen:
                continue
            seen.add(entry.trace_id)
            found |= {turn.turn_id: turn for turn in grow(self._turns_of(entry.trace_id)[0], self._now)}
        return sorted(found.values(), key=lambda turn: turn.started_at, reverse=True)[:number]

    # --- inside

    def _with_others(self, turn: Trace) -> Trace:
        """A turn with all that hangs on it."""
        others = [] if turn.trace_id is None else self._turns_of(turn.trace_id)[0]
        if not any(other.turn_id == turn.turn_id for other in others):
            others.append(turn)
        return find(grow(others, self._now), turn.turn_id) or turn

    def _turns_of(self, trace_id: str) -> tuple[list[Trace], int]:
        """The turns of a trace, and how many more there are."""
        entries = trace_index.of_trace(self._state_dir, trace_id)
        turns = [turn for turn in self._read_entries(entries[:MAX_TURNS]) if turn.trace_id == trace_id]
        if not turns and spans.is_trace_id(trace_id) and (places := self._places(None, None)) is not None:
            turns = self._read_places(places, Which(trace=trace_id))[:MAX_TURNS]
        return turns, max(0, len(entries) - MAX_TURNS)

    def _indexed(self, name: str, agent: str | None, instance: str | None) -> list[Trace]:
        entries = trace_index.named(self._state_dir, name)
        wanted = [one for one in entries if agent in (None, one.agent) and instance in (None, one.instance_key)]
        return self._read_entries(wanted)

    def _in_files(self, name: str, agent: str | None, instance: str | None) -> list[Trace]:
        places = self._places(agent, instance)
        return [] if places is None else self._read_places(places, Which(name=name))

    def _read_entries(self, entries: Iterable[trace_index.IndexRow]) -> list[Trace]:
        by_place: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            by_place.setdefault((entry.agent, entry.instance_key), []).append(entry.event_id)
        found: list[Trace] = []
        for (agent, key), events in by_place.items():
            place = place_of(self._state_dir, agent, key)
            with suppress(GoondanError):  # the others are shown; one that is wanted by itself is looked for once more
                found += read_turns(place, Which(events=list(dict.fromkeys(events))), self._since)
        return found

    def _read_places(self, places: Iterable[ConversationFile], which: Which) -> list[Trace]:
        """The turns in these files. Raises GoondanError E_STATE when there are none and a file cannot be read."""
        found: list[Trace] = []
        problem: GoondanError | None = None
        for place in places:
            try:
                found += read_turns(place, which, self._since)
            except GoondanError as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return found

    def _places(self, agent: str | None, instance: str | None) -> list[ConversationFile] | None:
        """The files that are looked through; None when there are too many."""
        files = conversation_files(self._state_dir, agent, instance)
        places = list(files if self._everywhere else islice(files, MAX_FILES + 1))
        return places if self._everywhere or len(places) <= MAX_FILES else None

    def _hint(self, agent: str | None, instance: str | None) -> str | None:
        """The suggestion for a turn that was not found."""
        if self._places(agent, instance) is not None:
            return None
        return "Check the id. An old turn is found with --search, which reads the files of all instances."


def _names(name: str) -> list[str]:
    """What a name can mean: a turn or an event; the event of a correlation id; the event of an answer's id."""
    names = [name, *(name.removeprefix(prefix) for prefix in _CORRELATIONS if name.startswith(prefix))]
    if name.endswith(questions.ANSWER_SUFFIX):
        names.append(names[-1].removesuffix(questions.ANSWER_SUFFIX))
    return names


def running_since(state_dir: str) -> str | None:
    """When the kernel of a workspace was started; None when none runs."""
    try:
        record = lock.read_record(state_dir)
        return record.started_at if record is not None and lock.is_held(state_dir) else None
    except GoondanError:
        return None  # others may have written it: it says nothing about turns


def _of(agent: str | None, instance: str | None) -> str:
    return "" if agent is None and instance is None else f" of {agent or 'any agent'}/{instance or 'any instance'}"


#: Notes of one turn that are read: all that an instance keeps.
MAX_NOTES: Final = 50_000


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


class Which(Struct, frozen=True, kw_only=True):
    """The turns that are read from a file. Without any of the three it is the turn that began last."""

    #: The turns of these events.
    events: Sequence[str] = ()
    #: The turns with this id, or whose event has this id.
    name: str | None = None
    #: The turns of this trace.
    trace: str | None = None


def read_turns(place: ConversationFile, which: Which, since: str | None) -> list[Trace]:
    """Turns of one file. `since` is when the kernel that runs was started, None when none runs: a turn of which nothing
    was heard since then has ended with an earlier one. Raises GoondanError E_STATE.
    """
    return read_file(place, lambda db: _turns(db, place, which, since)) or []


def brief_turns(state_dir: str, row: IndexRow, since: str | None, is_wanted: Callable[[Trace], bool]) -> list[Trace]:
    """The turns of a row of the index that are wanted, without their steps, with what they have used in all; none of a
    file that cannot be read. `since`: as `read_turns`.
    """
    try:
        turns = read_turns(place_of(state_dir, row.agent, row.instance_key), Which(events=[row.event_id]), since)
    except GoondanError:
        return []
    return [structs.replace(turn, total=total_of(turn), steps=[], turns=[]) for turn in turns if is_wanted(turn)]


def first_turns(state_dir: str, names: Sequence[str], shown: Callable[[str], bool], *, alone: bool) -> list[Trace]:
    """The turns with these ids (`names`) without their steps, with what they have used `alone`; or with what all turns
    of their trace have used in all, the first MAX_ADDED of them. Turns of agents that are not `shown` count nowhere.
    None of a file that cannot be read.
    """
    since, wanted, counted = running_since(state_dir), set(names), Counter[str]()
    events, totals, found = dict[ConversationFile, list[str]](), dict[str | None, Total](), list[Trace]()
    for row in trace_index.of_runs(state_dir, names):
        counted[row.trace_id] += shown(row.agent)
        adds = not alone and counted[row.trace_id] <= MAX_ADDED
        if shown(row.agent) and (adds or row.turn_id in wanted):
            events.setdefault(place_of(state_dir, row.agent, row.instance_key), []).append(row.event_id)
    for place, own in events.items():
        with suppress(GoondanError):
            for turn in read_turns(place, Which(events=own), since):
                total = totals.setdefault(turn.turn_id if alone else turn.trace_id, Total(turns=0, agents=[]))
                used = total_of(turn)
                total.add(used, used.costs)
                total.turns, total.agents = total.turns + 1, sorted({*total.agents, turn.agent})
                if turn.turn_id in wanted:
                    found.append(structs.replace(turn, total=total, steps=[]))
    return found


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
    said = answer_of(answer)
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
        with suppress(*codec.DECODE_ERRORS):
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


def answer_of(data: bytes | None) -> frames.Answer | None:
    """How the turn ended, as its agent said; None when it says nothing that can be read."""
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=frames.AgentEvent).answer
    except codec.DECODE_ERRORS:
        return None
