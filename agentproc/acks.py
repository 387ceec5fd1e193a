"""Tells the tool host which results are stored, so that it may forget them (docs/design/delivery.md section 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from goondan.schemas.wire.frames import Frame

#: How late the tool host may hear that results are stored (seconds); it keeps them until then.
ACK_DELAY_S: Final = 0.05
#: callIds named in one `ack` frame, so that it stays far below the frame limit.
ACK_BATCH: Final = 1000


class AckLink(Protocol):
    """The methods of a link that are used here (goondan.schemas.transport.link.Link)."""

    def send(self, frame: Frame) -> bool: ...


class ResultAcks:
    """Results that are stored, in batches."""

    def __init__(self, link: AckLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._waiting: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call_ids: Sequence[str]) -> None:
        """These results are stored."""
        self._waiting.extend(call_ids)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)

    def flush(self) -> None:
        """Send the waiting ids. Ids that cannot be sent now are tried again later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            batch = self._waiting[:ACK_BATCH]
            if not self._link.send(Frame("ack", stage="result", calls=batch)):
                self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)
                return
            del self._waiting[:ACK_BATCH]

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
