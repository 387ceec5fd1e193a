"""Ends events: the journal writes the end, with its answer, before anybody is told. Pure.

The holder of an event ends it. The broker ends it instead at its deadline, when its agent cannot take it, and after too
many attempts. The asker gets an answer in every case.

Source: docs/design/delivery.md sections 2 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from msgspec import Raw

from goondan.kernel.broker.answers import failure_answer, no_room_answer
from goondan.kernel.broker.blobs import size_of
from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.entities import Connection, Event, Finish, State
from goondan.kernel.broker.journal.interface import Item
from goondan.kernel.broker.late_answers import late_answer
from goondan.kernel.broker.parts import EventHooks
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Blob


class Ends:
    """Stages the ends of events."""

    def __init__(self, bus: Bus, finished: Callable[[Finish, bool], None], hooks: EventHooks) -> None:
        """`finished` acts on an end when the journal has it (events.py)."""
        self._follows = hooks.follows
        self._bus = bus
        self._mailbox = bus.mailbox
        self._ledger = bus.ledger
        self._finished = finished

    def end(self, event: Event, state: Literal["expired", "dead"], code: str, message: str) -> None:
        """End an event instead of its agent. The sender gets an answer, too."""
        if not event.ending:
            self._mailbox.contents.recall(event)
            answer = failure_answer(event, error_payload(code, message))
            self.stage(event, state, answer, None, cause=f"{code}: {message}")

    def without_agent(self) -> None:
        """After a restart: events for agents that are no longer in the bundle become dead letters."""
        for event in list(self._mailbox.events.values()):
            if not event.ending and event.instance.agent not in self._bus.plan.agents:
                message = f"the bundle has no agent {event.instance.agent!r} any more"
                self.end(event, "dead", "E_AGENT_NOT_FOUND", message)

    def stage(
        self,
        event: Event,
        state: State,
        answer: Raw,
        blob: Blob | None,
        *,
        cause: str = "",
        conn: Connection | None = None,
        frame_id: str = "",
    ) -> None:
        """Have the journal write an end. A second end of the same event waits for the first and changes nothing."""
        item, follow = Item(()), None
        if not event.ending:
            self._mailbox.contents.recall(event)
            if event.asking is not None and not self._mailbox.keeps(event, answer, blob):
                self._bus.counters["answers_too_large"] += 1
                self._mailbox.blobs.discard(blob)
                answer, blob = no_room_answer(event, len(memoryview(answer)) + size_of(blob)), None
            follow = late_answer(self._bus, event, answer, blob)
            if follow is not None:
                for follows in self._follows:
                    follows(follow, event)
            item = self._ledger.finished(event, state, answer, blob, cause, self._bus.now, follow)
            event.end = state
        finish = Finish(event, state, answer, blob, conn, frame_id, follow)
        self._bus.stage(item, partial(self._finished, finish))

    def expire(self, event: Event) -> None:
        """End an event whose deadline has passed while it waited."""
        self.end(event, "expired", "E_AGENT_TIMEOUT", "the deadline passed before the agent could take the event")
