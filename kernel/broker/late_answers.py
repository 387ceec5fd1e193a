"""Answers to requests whose asker went on without waiting: each is an event of its own. Pure.

Rules.
- The end of the request and its answer's event are one journal record: neither is there without the other.
- The event goes to the instance that asked, like any other event, so it waits its turn, starts a process, and survives
  what events survive. A turn of that instance that runs hears of it at once as well (`news`).
- It has the answer's id, which no sender may give an event: a repeat is never a second answer.
- The request holds room for a usual answer from the beginning (mailbox.py). A larger one needs room within the shares
  when it comes, or an error takes its place: else one turn could ask for more than all may hold.

Source: docs/design/delivery.md section 5; requirement AGENTS-16.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from msgspec import Raw

from kernel.broker.answers import no_room_answer
from kernel.broker.blobs import size_of
from kernel.broker.bus import Bus
from kernel.broker.contents import Contents
from kernel.broker.entities import Content, Event, Instance, size_in_memory
from kernel.broker.journal.records import event_digest
from kernel.broker.presence import agent_address
from schemas.frames import Blob, Frame, Source

#: Answers that a turn hears of when it begins; what waits behind them has turns of its own.
MAX_NEWS: Final = 64


def late_answer(bus: Bus, event: Event, answer: Raw, blob: Blob | None) -> Event | None:
    """The event that carries the answer of `event`; None when nobody asked so, or the asker's agent is gone."""
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
    follow = Event(
        event.answer_id,
        bus.instance(asker.name, asker.instance_key, bus.now),
        sender=sender,
        content=Content(
            from_=agent,
            payload=payload,
            auth=event.content.auth,
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
    path = () if event.budget is None else event.budget.path  # the asker's own, whatever the asked agent has spent
    follow.budget = bus.budgets.line(event.root, path, asker.name, int((bus.booted_at + bus.now) * 1000))
    return follow


def news(event: Event) -> Frame:
    """What a turn that runs is told of a late answer: without an epoch, because it is not handed over."""
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
    """The late answers that wait at the front of an instance's queue."""
    frames = []
    for event in islice(instance.queue, MAX_NEWS):
        if event.in_reply_to is not None:
            contents.recall(event)
            frames.append(news(event))
            contents.rests(event)
    return frames
