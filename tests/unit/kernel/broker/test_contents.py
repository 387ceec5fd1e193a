"""Events that wait do not hold what they say: it is read back from the journal when it is needed."""

from __future__ import annotations

import pytest

from goondan.kernel.broker.state.entities import Content, Event, Instance
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.mailbox import Contents
from goondan.kernel.broker.state.records import Item, JournalFailed, Put, Retire, event_subject
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import NO_PAYLOAD, ReplyTo
from tests.unit.kernel.broker.memory_journal import MemoryJournal


class Waiting:
    """Events that are in a journal and wait."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.contents = Contents(self.journal)
        self.ledger = Ledger("boot", 0.0)

    def event(self, event_id: str, text: str = "hello") -> Event:
        instance = Instance("coder", "k", Workdir("/w"), 1, 0.0)
        event = Event(event_id, instance, sender="client", content_here=said(text))
        self.journal.append([self.ledger.accepted(event, 0.0)])
        event.state = "accepted"
        return event


def said(text: str) -> Content:
    return Content(
        from_="client:1",
        payload=to_raw({"input": text}),
        reply_to=ReplyTo("client", "corr"),
        chain=["boss/b"],
        auth=to_raw({"user": 1}),
        workdir="/w",
        trace_id="a" * 32,
        parent_span_id="b" * 16,
        digest=b"d" * 16,
    )


def test_everything_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    waiting = Waiting()
    event = waiting.event("e1")
    waiting.contents.rests(event)
    assert event.content_here is None
    assert (event.wants_answer, event.depth) == (True, 1)
    waiting.contents.recall(event)
    assert event.content == said("hello")


def test_an_event_without_anything_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    waiting = Waiting()
    event = Event(
        "e1", Instance("coder", "k", Workdir("/w"), 1, 0.0), sender="client", content_here=Content(trace_id="c" * 32)
    )
    waiting.journal.append([waiting.ledger.accepted(event, 0.0)])
    waiting.contents.rests(event)
    waiting.contents.recall(event)
    assert event.content == Content(trace_id="c" * 32)
    assert (event.content.payload, event.content.auth) == (NO_PAYLOAD, None)


def test_as_much_is_kept_as_there_is_room_for_and_the_first_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 10_000)
    waiting = Waiting()
    events = [waiting.event(f"e{number}", "x" * 1_000) for number in range(20)]
    for event in events:
        waiting.contents.rests(event)
    kept = [event for event in events if event.content_here is not None]
    assert kept == events[:5]
    assert waiting.contents.kept_bytes <= 10_000
    for event in events:
        waiting.contents.recall(event)
        assert event.content == said("x" * 1_000)
    assert waiting.contents.kept_bytes == 0


def test_what_ends_or_says_more_than_its_record_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    waiting = Waiting()
    ending, changed = waiting.event("e1"), waiting.event("e2")
    ending.end = "cancelled"
    changed.content.changed = True
    for event in (ending, changed):
        waiting.contents.rests(event)
        assert event.content_here is not None


@pytest.mark.parametrize("data", [None, b"\x93\x01", b""])
def test_a_record_that_is_gone_or_unreadable_ends_the_broker(
    data: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one looks at the whole file, and names what is wrong with it."""
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    waiting = Waiting()
    event = waiting.event("e1")
    waiting.contents.rests(event)
    subject = event_subject("e1")
    writes = (Retire(subject),) if data is None else (Retire(subject), Put(subject, data))
    waiting.journal.append([Item(writes)])
    with pytest.raises(JournalFailed, match="e1"):
        waiting.contents.recall(event)
