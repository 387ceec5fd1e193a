"""Exports turns: takes up rows of the index, reads turns, sends batches, and moves the position on.

- Of what is not sent only the position is kept: while the collector is gone, one batch waits in memory, and nothing
  more is read. What is older than MAX_AGE_S when the collector is back is given up and counted.
- A turn that runs is read again after a quarter of its age, and 30 s later at most. So a thousand turns that run for
  long cost some milliseconds a second.
- Batches are bounded in spans and bytes. One that the collector finds too large is halved.

It blocks, so it has a thread of its own. `clock` gives seconds since 1970.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Final, Protocol

from goondan.features.telemetry.process import position as positions
from goondan.features.telemetry.process.reading import Reading, Turn
from goondan.features.telemetry.process.rules import Span
from goondan.features.telemetry.wire import Condition, Exporting
from goondan.kernel.traces.rules.turn import moment
from goondan.schemas.system import trace_index
from goondan.schemas.wire.errors import GoondanError

#: Spans and bytes of one request, by its larger texts. Servers take several MiB.
MAX_SPANS: Final = 512
MAX_BYTES: Final = 1 << 20
#: What a span has besides its texts (bytes), about.
_SPAN_BYTES: Final = 300
#: Rows of the index that are taken up at once.
ROWS: Final = 256
#: How often the index is looked at (seconds).
LOOK_S: Final = 1.0
#: How long at most a turn that runs is not looked at (seconds).
MAX_LOOK_S: Final = 30.0
#: For how long what could not be sent is worth sending (seconds).
MAX_AGE_S: Final = 24 * 3600.0
#: How long a turn of the index may have no row in its file yet (seconds).
BEGINS_S: Final = 60.0
#: How often a file that cannot be read is tried again.
MAX_FAULTS: Final = 10
#: The pauses before the collector is asked again (seconds): twice as long each time.
FIRST_WAIT_S: Final = 1.0
MOST_WAIT_S: Final = 60.0
#: How often a batch is sent that the server seems to break at: some minutes.
MAX_BROKEN: Final = 8

log = logging.getLogger("telemetry")


class Takes(Protocol):
    """The collector (collector.py)."""

    def send(self, batch: list[tuple[str, Span]]) -> tuple[str, int, float, str]:
        """See Collector."""


class Exporter:
    """The exporter of one workspace. `since`: turns of a new position began then (RFC 3339)."""

    def __init__(
        self, state_dir: str, collector: Takes, clock: Callable[[], float], *, since: str, contents: bool
    ) -> None:
        self._state_dir = state_dir
        self._collector = collector
        self._clock = clock
        self._contents = contents
        self._position = positions.read(state_dir) or positions.Position(at=since)
        self._readings = {turn.seq: Reading(turn) for turn in self._position.turns}
        self._due: dict[int, float] = {}
        self._faults: dict[int, int] = {}
        self._seen: object = None  # what the index looked like when it had no more rows
        #: What is sent next, and how far each turn has come when that is done. None: the turn is over.
        self._batch: list[tuple[str, Span]] = []
        self._marks: dict[int, int | None] = {}
        self._most = MAX_SPANS
        self._tries = 0
        self._rest_until = 0.0
        self._since = 0.0
        self._why = ""
        self._sent = 0

    def says(self) -> Exporting:
        """How it does."""
        condition: Condition = "waiting" if self._since else "exporting"
        return Exporting(
            condition=condition,
            since_ms=round(self._since * 1000),
            why=self._why,
            sent=self._sent,
            dropped=self._position.dropped,
            dropped_turns=self._position.dropped_turns,
        )

    def step(self, *, last: bool = False) -> float:
        """Do a piece of work; how long there is none (seconds). `last`: every turn is looked at, and the collector is
        asked once.
        """
        now = self._clock()
        if now < self._rest_until and not last:
            return self._rest_until - now
        if not self._batch and not self._marks:
            self._take_up(now)
            self._fill(now, everything=last)
        if self._batch:
            self._send(now)
        if not self._batch and self._marks:
            self._settle()
            return 0.0
        return max(0.0, self._rest_until - now) if self._batch else LOOK_S

    # --- reading

    def _take_up(self, now: float) -> None:
        """Take up new rows of the index."""
        looks = _looks(f"{self._state_dir}/{trace_index.FOLDER}")
        if looks == self._seen:
            return
        at = self._position
        open_turns = {(turn.agent, turn.instance_key, turn.event_id) for turn in at.turns}
        rows = trace_index.behind(self._state_dir, at.seq, at.turn_id, at.at, ROWS)
        for row in rows:
            if at.seq and row.seq > at.seq + 1 and row.at >= at.at:
                at.dropped_turns += row.seq - at.seq - 1  # the index has forgotten them
            at.seq, at.turn_id, at.at = row.seq, row.turn_id, row.at
            if (row.agent, row.instance_key, row.event_id) in open_turns:
                continue  # a turn that was cut off in its beginning has a row for each time that it began
            if now - _seconds(row.at, now) > MAX_AGE_S:
                at.dropped_turns += 1
                continue
            turn = Turn(
                seq=row.seq,
                at=row.at,
                trace_id=row.trace_id,
                event_id=row.event_id,
                agent=row.agent,
                instance_key=row.instance_key,
            )
            at.turns.append(turn)
            open_turns.add((turn.agent, turn.instance_key, turn.event_id))
            self._readings[turn.seq] = Reading(turn)
        while len(at.turns) > positions.MAX_TURNS:
            at.dropped_turns += 1
            self._forget(at.turns[0].seq)
        self._seen = looks if len(rows) < ROWS else None

    def _fill(self, now: float, *, everything: bool) -> None:
        """Read turns that are due, until there is enough for a request."""
        size = 0
        for turn in list(self._position.turns):
            if self._due.get(turn.seq, 0.0) > now and not everything:
                continue
            reading = self._readings[turn.seq]
            while len(self._batch) < MAX_SPANS and size < MAX_BYTES:
                try:
                    found = reading.read(self._state_dir, contents=self._contents)
                except GoondanError as error:
                    self._fault(turn, error, now)
                    break
                fresh = [span for span in found if now - span.end_ms / 1000 <= MAX_AGE_S]
                self._position.dropped += len(found) - len(fresh)
                self._batch += [(turn.trace_id, span) for span in fresh]
                size += sum(map(_size, fresh))
                age = now - _seconds(turn.at, now)
                if reading.over or (reading.missing and age > BEGINS_S):
                    self._marks[turn.seq] = None
                    break
                if reading.spans is not None and reading.spans.done_seq > turn.sent:
                    self._marks[turn.seq] = reading.spans.done_seq
                if reading.missing or not reading.more:
                    self._due[turn.seq] = now + min(max(LOOK_S, age / 4), MAX_LOOK_S)
                    break
            else:
                return  # full; the next turns come with the next batch

    def _fault(self, turn: Turn, error: GoondanError, now: float) -> None:
        """A file cannot be read now, or ever."""
        self._faults[turn.seq] = self._faults.get(turn.seq, 0) + 1
        self._due[turn.seq] = now + MAX_LOOK_S
        if self._faults[turn.seq] == 1:
            log.warning("a turn of %s cannot be read: %s", turn.agent, error.info.message)
        elif self._faults[turn.seq] >= MAX_FAULTS:
            self._position.dropped_turns += 1
            self._marks[turn.seq] = None

    def _settle(self) -> None:
        """Everything of the batch is done: move the position on."""
        for seq, sent in self._marks.items():
            if sent is None:
                self._forget(seq)
            else:
                self._readings[seq].turn.sent = sent
        self._marks = {}
        self._most = MAX_SPANS
        try:
            positions.write(self._state_dir, self._position)
        except OSError as error:
            log.warning("the position cannot be written, and some spans may be sent again: %s", error.strerror)

    def _forget(self, seq: int) -> None:
        self._position.turns = [turn for turn in self._position.turns if turn.seq != seq]
        for table in (self._readings, self._due, self._faults):
            table.pop(seq, None)

    # --- sending

    def _send(self, now: float) -> None:
        """Send the beginning of the batch. What the collector does not take stays."""
        count, size = 0, 0
        for _, span in self._batch[: self._most]:
            size += _size(span)
            if count and size > MAX_BYTES:
                break
            count += 1
        outcome, refused, retry_s, why = self._collector.send(self._batch[:count])
        if outcome == "taken":
            self._sent += count - refused
            self._position.dropped += refused
        elif outcome == "smaller" and count > 1:
            self._most = count // 2
            return
        elif outcome == "later" or (outcome == "broken" and self._tries + 1 < MAX_BROKEN):
            self._wait(now, max(retry_s, 0.0), why)
            return
        else:
            self._position.dropped += count
            log.warning("%d spans were given up: the collector does not take them: %s", count, why)
        if self._since:
            log.info("the collector takes spans again")
        self._tries, self._since, self._why, self._rest_until = 0, 0.0, "", 0.0
        del self._batch[:count]

    def _wait(self, now: float, retry_s: float, why: str) -> None:
        if not self._since:
            log.warning("the collector does not take spans: %s", why)
            self._since = now
        pause = min(FIRST_WAIT_S * 2 ** min(self._tries, 10), MOST_WAIT_S) * random.uniform(0.8, 1.2)
        self._tries, self._why = self._tries + 1, why
        self._rest_until = now + max(retry_s, pause)
        fresh = [item for item in self._batch if now - item[1].end_ms / 1000 <= MAX_AGE_S]
        self._position.dropped += len(self._batch) - len(fresh)
        self._batch = fresh


def _size(span: Span) -> int:
    texts = [value for value in span.attributes.values() if isinstance(value, str)]
    return _SPAN_BYTES + sum(map(len, texts))


def _seconds(at: str, otherwise: float) -> float:
    found = moment(at)
    return otherwise if found is None else found / 1000


def _looks(folder: str) -> object:
    """What the files of the index look like: another answer after each row."""
    found = []
    for name in ("index.db", "index.db-wal"):
        try:
            state = os.stat(f"{folder}/{name}")
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return found
