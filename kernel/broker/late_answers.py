"""Late answers: answers to requests that an agent sent without waiting. Each becomes an event of its own. Pure.

Rules.
- The end of the request and the event of its answer are written together: the journal has both or none.
- The event goes to the asking instance like any other event: it waits in the queue, starts a process, and survives
  restarts. A running turn of the instance is told at once as well (`news`).
- The event has the answer's id. No sender may use such an id, so a repeat is never a second answer.
- The request reserves room for an ordinary answer from the beginning (mailbox.py). A larger answer needs room within
  the shares when it comes. Otherwise an error replaces it: one turn could else ask for more than all may hold.

Source: docs/design/delivery.md section 5; requirement AGENTS-16.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from msgspec import Raw

from goondan.kernel.broker.answers import no_room_answer
from goondan.kernel.broker.blobs import size_of
from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.contents import Contents
from goondan.kernel.broker.entities import Content, Event, Instance, size_in_memory
from goondan.kernel.broker.journal.records import event_digest
from goondan.kernel.broker.presence import agent_address
from goondan.schemas.wire.frames import Blob, Frame, Source

#: A turn is told of at most so many late answers when it begins. Later ones get turns of their own.
MAX_NEWS: Final = 64


def late_answer(bus: Bus, event: Event, answer: Raw, blob: Blob | None) -> Event | None:
    """The event with the answer to `event`. None when `event` is no such request, or the asker's agent is gone."""
    asker = event.source
    reply_to = event.content.reply_to if event.asynchronous else None
    if reply_to is None or asker is None or asker.kind != "agent":
        return None
    if asker.name not in bus.plan.agents or asker.instance_key is None:
        bus.counters["answers_lost"] += 1
        return None
    agent, key = event.instance.agent, event.instance.key
    sender = agent_address(agent, key)
    payload, size = answer, size_in_memory(answer, event.content.auth) + size_of(blob)
    more = size - event.size
    if more > 0 and not bus.mailbox.held.may_take(event.session, event.root, more, operator=False):
        bus.counters["answers_too_large"] += 1
        payload, blob = no_room_answer(event, size), None
    return Event(
        event.answer_id,
        bus.instance(asker.name, asker.instance_key, bus.now),
        sender=sender,
        content=Content(
            from_=agent,
            payload=payload,
            auth=event.content.auth,
            workdir=event.content.workdir,
            trace_id=event.content.trace_id,
            parent_span_id=event.content.parent_span_id,  # the call that asked
            digest=event_digest(asker.name, asker.instance_key, sender, None),
        ),
        source=Source("agent", agent, key),
        blob=blob,
        root=event.root,
        session=event.session,
        in_reply_to=reply_to.correlation_id,
        since=bus.now,
    )


def news(event: Event) -> Frame:
    """The frame that tells a running turn of a late answer. It has no epoch, because the event is not handed over."""
    content = event.content
    return Frame(
        "event",
        from_=content.from_,
        to=event.instance.agent,
        instance_key=event.instance.key,
        event_id=event.id,
        in_reply_to=event.in_reply_to,
        trace_id=content.trace_id,
        source=event.source,
        payload=content.payload,
        blob=event.blob,
        root_event=event.root,
        asynchronous=True,
    )


def waiting_news(instance: Instance, contents: Contents) -> list[Frame]:
    """Frames about the late answers at the front of an instance's queue."""
    frames = []
    for event in islice(instance.queue, MAX_NEWS):
        if event.in_reply_to is not None:
            contents.recall(event)
            frames.append(news(event))
            contents.rests(event)
    return frames
