"""What a holder of an event is told of it, and where that is while the event waits. Pure.

Everything that is durable can be read back from the journal, so a queue of 100,000 events need not hold its contents.
What waits is kept as far as KEPT_BYTES reach, which is more than an ordinary load has. The rest is read back when it is
needed: one look for one event, at the moment in which it is handed over or ends. A look reads by name, in a transaction
of its own, so it holds up no checkpoint; it is like the look for a known id that every new event takes.

Source: docs/decisions/061.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from kernel.broker.entities import Content, Event
from kernel.broker.journal import records
from kernel.broker.journal.interface import Archive, JournalFailed
from kernel.broker.journal.records import Accepted
from schemas.codec import DECODE_ERRORS
from schemas.errors import GoondanError
from schemas.frames import NO_PAYLOAD
from schemas.spans import is_trace_id, trace_id_of

#: Of events that wait, so much is kept in memory (bytes): some 5,000 ordinary messages.
KEPT_BYTES: Final = 4 << 20
#: What the header fields of one take, near enough to budget by (bytes).
_HEADER_BYTES: Final = 768


class Contents:
    """Lets go of the contents of events that wait, and brings them back."""

    def __init__(self, archive: Archive) -> None:
        """`archive` has what was accepted."""
        self._archive = archive
        #: Events whose contents are kept while they wait -> what they take.
        self._kept: dict[Event, int] = {}
        self.kept_bytes = 0
        #: How often one was read back.
        self.recalled = 0

    def rests(self, event: Event) -> None:
        """The event is in the journal, and waits."""
        content = event.content_here
        if content is None or content.changed or event.ending or event in self._kept:
            return
        size = _HEADER_BYTES + len(memoryview(content.payload))
        if self.kept_bytes + size > KEPT_BYTES:
            event.let_go()
            return
        content.payload = content.payload.copy()  # else it would keep the whole frame in memory
        self._kept[event] = size
        self.kept_bytes += size

    def recall(self, event: Event) -> None:
        """The event is handed over, or ends, or somebody asks for it: from now on its content is there.

        Raises JournalFailed when the journal does not have it: the next broker looks at the whole file, and says so.
        """
        self.moves(event)
        if event.content_here is None:
            self.recalled += 1
            event.content = self._read(event)

    def moves(self, event: Event) -> None:
        """The event waits no more."""
        self.kept_bytes -= self._kept.pop(event, 0)

    def _read(self, event: Event) -> Content:
        try:
            for data in self._archive.find_records(records.event_subject(event.id)):
                record = records.decode(data)
                if isinstance(record, Accepted):
                    return content_of(record, event.id)
        except GoondanError as error:
            raise JournalFailed(error.info.message) from None
        except DECODE_ERRORS as error:
            raise JournalFailed(f"a record of event {event.id[:100]!r} cannot be read: {error}") from None
        raise JournalFailed(f"the record of event {event.id[:100]!r} is gone")


def content_of(record: Accepted, event_id: str) -> Content:
    """The content of this event, which was accepted."""
    return Content(
        from_=record.from_,
        payload=record.payload.copy(),  # else it would keep the whole record in memory
        reply_to=record.reply_to,
        chain=record.chain,
        auth=optional(record.auth),
        workdir=record.workdir,
        trace_id=kept_trace(record.trace_id, record.root or event_id),
        parent_span_id=record.parent_span_id,
        digest=record.digest,
    )


def kept_trace(trace_id: str | None, root: str) -> str:
    """The trace of an event in the journal: earlier versions wrote none, or whatever a client had sent."""
    return trace_id if trace_id is not None and is_trace_id(trace_id) else trace_id_of(root)


def optional(value: Raw | None) -> Raw | None:
    """An optional payload as it was before it was written: nil stands for none."""
    return None if value is None or value == NO_PAYLOAD else value
