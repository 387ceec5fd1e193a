"""What an event that waits takes in the memory of a broker that was restarted."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from goondan.kernel.broker.routing.recovery import restore
from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.ledger import Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.kernel.broker.state.records import Accepted, Row
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, ReplyTo, Source
from tests.unit.kernel.broker.memory_journal import MemoryJournal
from tests.unit.kernel.broker.swarm import plan

EVENTS = 3_000
#: Its 230 bytes of payload and its header lie in the journal. It was 1,400 when they did not.
MAX_BYTES_EACH = 560


def waiting() -> Iterator[Row]:
    for number in range(EVENTS):
        name = f"evt-{number:032x}"
        event = AgentEvent(id=name, type="user", created_at="2026-01-01T00:00:00Z", input="x" * 100)
        record = Accepted(
            agent="coder",
            key=f"key{number % 100}",
            instance_workdir="/state/instances/coder/key/workdir",
            sender="client",
            from_="client:abcdef0123456789",
            payload=to_raw(event),
            source=Source("client", "operator"),
            reply_to=ReplyTo("client", f"corr-{number:032x}"),
            digest=b"d" * 16,
            root=name,
            session="client/abcdef0123456789",
            trace_id=f"{number:032x}",
        )
        yield Row(number, records.event_subject(name), records.encode(record))


def test_an_event_that_waits_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    journal, ledger = MemoryJournal(), Ledger("b", 0)
    bus = Bus(
        plan(max_open_events=EVENTS),
        b"s" * 32,
        broker_id="b",
        started_ms=0,
        epochs=Epochs(0, 0),
        archive=journal,
        ledger=ledger,
    )
    tracemalloc.start()
    try:
        restore(bus, waiting(), [], lambda bad: None)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bus.mailbox.events) == EVENTS
    assert taken / EVENTS < MAX_BYTES_EACH
