"""Exports turns: reads those that are over, and sends their spans.

- While the collector is gone, one batch waits in memory, and nothing more is read: all that is kept is a position. A
  batch that has waited for MAX_AGE_S is given up and counted, and so is each turn that is older when it is taken up.
- What was sent before a crash and is not behind the position yet is sent again with the same ids: it is the same span
  once more.

It blocks, so it has a thread of its own.

Source: docs/design/traces.md; kernel/traces/follow.py.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from goondan.features.telemetry.process.collector import Collector
from goondan.features.telemetry.process.spans import SpansOf
from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.kernel.traces.follow import LOOK_S, MAX_AGE_S, Follower, age
from goondan.schemas.system.trace_index import NumberedRow
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire.errors import GoondanError

#: Spans and bytes of one request, by its texts. Servers take several MiB.
MAX_SPANS: Final = 512
MAX_BYTES: Final = 1 << 20
#: How old a turn is at most whose file cannot be read (seconds).
FAULT_S: Final = 600.0
#: The longest pause before the collector is asked again (seconds). The first is a second, each later one twice as long.
MOST_WAIT_S: Final = 60.0

log = logging.getLogger(TELEMETRY)


class Left(BaseException):
    """The program has to leave."""


class Shell(NamedTuple):
    """What is around the exporter."""

    #: Waits for so long (seconds), or raises Left.
    rest: Callable[[float], None]
    #: Takes how the exporter does.
    tell: Callable[[Exporting], object]
    #: Texts are sent, too.
    contents: bool = False
    #: Seconds since 1970.
    clock: Callable[[], float] = time.time


class Exporter:
    """The exporter of one workspace."""

    def __init__(self, turns: Follower, collector: Collector, resource: Resource, shell: Shell) -> None:
        self._turns, self._collector, self._resource, self._shell = turns, collector, resource, shell
        self._batch: list[ReadableSpan] = []
        self._bytes = self._sent = self._dropped = 0

    def run(self) -> None:
        """Export until the program has to leave, and then what is there once more."""
        with suppress(Left):
            while True:
                self._shell.rest(0.0 if self.round() else LOOK_S)
        with suppress(Left):
            self._turns.look_at_all()
            self.round()

    def round(self) -> bool:
        """Send what there is; whether there is more. Raises Left."""
        now = self._shell.clock()
        more = self._turns.take_up(now)
        done = [row for row in self._turns.due(now) if self._is_read(row, now)]
        self._deliver()
        self._turns.settle(done)
        self._say("exporting")
        return more

    def _is_read(self, row: NumberedRow, now: float) -> bool:
        """Whether a turn is over, and its spans are in the batch. Raises Left."""
        try:
            if (ended := self._turns.read(row, now)) is None:
                return False
            response = "" if ended.answer is None else ended.answer.response or ""
            for turn in ended.turns:
                for span in SpansOf(turn, self._resource, response if self._shell.contents else None):
                    self._add(span)
        except Exception as error:  # a file that cannot be read, or a fault of ours, spoils one turn
            if age(row, now) <= FAULT_S:
                return False
            why = error.info.message if isinstance(error, GoondanError) else type(error).__name__
            log.warning("a turn of %r cannot be read: %r", row.agent, why)
            self._turns.position.given_up += 1
        return True

    def _add(self, span: ReadableSpan) -> None:
        size = 500 + sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
        if self._batch and (len(self._batch) >= MAX_SPANS or self._bytes + size > MAX_BYTES):
            self._deliver()
        self._bytes += size
        self._batch.append(span)

    def _deliver(self) -> None:
        """Send the batch, until the collector has it or it is given up. Raises Left."""
        batch, self._batch, self._bytes = self._batch, [], 0
        most, tries, began = MAX_SPANS, 0, 0.0
        while batch:
            part = batch[:most]
            outcome, retry_s, why = self._collector.deliver(part)
            began = began or self._shell.clock()
            if outcome == "later" and self._shell.clock() - began < MAX_AGE_S:
                self._say(f"waiting for the collector since {rfc3339_seconds(began)}: {why}")
                self._shell.rest(max(retry_s, min(2.0**tries, MOST_WAIT_S) * random.uniform(0.8, 1.2)))
                tries = min(tries + 1, 10)
            elif outcome == "smaller" and len(part) > 1:
                most = len(part) // 2
            else:
                if lost := 0 if outcome == "taken" else len(part):
                    log.warning("%d spans were given up: the collector does not take them: %s", lost, why)
                self._sent, self._dropped = self._sent + len(part) - lost, self._dropped + lost
                batch, tries, began = batch[len(part) :], 0, 0.0

    def _say(self, text: str) -> None:
        self._shell.tell(Exporting(text, self._sent, self._dropped, self._turns.position.given_up))
