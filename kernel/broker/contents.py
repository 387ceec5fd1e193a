"""The contents of waiting events: in memory or only in the journal. Pure.

A content can be read back from the journal, so a queue of 100,000 events need not keep its contents in memory.
Up to KEPT_BYTES of the contents of waiting events stay in memory, which is more than an ordinary load has. The rest is
read back when it is needed: one read for one event, when the event is handed over or ends. A read goes by name, in its
own transaction, so it delays no checkpoint. Every new event needs a similar read to look for a known id.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from goondan.kernel.broker.entities import Content, Event
from goondan.kernel.broker.journal import records
from goondan.kernel.broker.journal.interface import Archive, JournalFailed
from goondan.kernel.broker.journal.records import Accepted
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import NO_PAYLOAD

#: Contents of waiting events that stay in memory (bytes): about 5,000 ordinary messages.
KEPT_BYTES: Final = 4 << 20
#: The approximate size of the header fields of one event (bytes).
_HEADER_BYTES: Final = 768


class Contents:
    """Drops the contents of waiting events from memory, and reads them back."""

    def __init__(self, archive: Archive) -> None:
        """`archive` is the journal that has the accepted events."""
        self._archive = archive
        #: Waiting events whose contents are in memory -> their size (bytes).
        self._kept: dict[Event, int] = {}
        self.kept_bytes = 0

    def rests(self, event: Event) -> None:
        """The event is in the journal and begins to wait."""
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
        """Make sure that the content is in memory: the event is handed over, or ends, or somebody asks for it.

        Raises JournalFailed when the journal does not have it: the next broker checks the whole file and reports that.
        """
        self.moves(event)
        if event.content_here is None:
            event.content = self._read(event)

    def moves(self, event: Event) -> None:
        """The event does not wait any more."""
        self.kept_bytes -= self._kept.pop(event, 0)

    def _read(self, event: Event) -> Content:
        try:
            for data in self._archive.find_records(records.event_subject(event.id)):
                record = records.decode(data)
                if isinstance(record, Accepted):
                    return content_of(record)
        except GoondanError as error:
            raise JournalFailed(error.info.message) from None
        except DECODE_ERRORS as error:
            raise JournalFailed(f"a record of event {event.id[:100]!r} cannot be read: {error}") from None
        raise JournalFailed(f"the record of event {event.id[:100]!r} is gone")


def content_of(record: Accepted) -> Content:
    """The content of the event, from its record in the journal."""
    return Content(
        from_=record.from_,
        payload=record.payload.copy(),  # else it would keep the whole record in memory
        reply_to=record.reply_to,
        chain=record.chain,
        auth=optional(record.auth),
        workdir=record.workdir,
        trace_id=record.trace_id,
        parent_span_id=record.parent_span_id,
        digest=record.digest,
    )


def optional(value: Raw | None) -> Raw | None:
    """An optional payload as it was before it was written: nil means None."""
    return None if value is None or value == NO_PAYLOAD else value
