"""What a command hears of the turns of others: numbered live events, and what it has missed. Session (session.py) has
these, and gives them the frames of the broker.

A subscription ends with its connection. Here it begins again with the next one, and the numbers go on: the listener is
told that something may be missing.

Source: PROTOCOL-OPERATORS.md "Observing"; docs/design/commands.md section 4.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import Gap, Observe, RuntimeEvent

#: What was read is told when it is so much of the window: a frame for each event would double their number.
_PARTS: Final = 4
#: When it is told again that was not sent (seconds).
_AGAIN_S: Final = 0.1


class Seen(NamedTuple):
    """One live event of a turn."""

    #: Its number, from 1. None is left out but for those that a Missed names.
    number: int
    #: Its agent (`from_`), `instance_key`, `event_id`, `root_event`, `trace_id`, and spans.
    frame: Frame
    #: What happened; None: a kind that this version does not know.
    event: RuntimeEvent | None


class Missed(NamedTuple):
    """Events that did not come."""

    #: The number of the first one.
    first: int
    #: The number of the last one. None: the connection was lost, and nobody knows how many there were; then `first` is
    #: the number of the next event.
    last: int | None


#: Gets what an observer hears, in order, in the loop. It must neither block nor raise.
Observer = Callable[[Seen | Missed], None]


class Observation:
    """One subscription, over all connections of its session. It tells nothing when the session is lost."""

    def __init__(self, wish: Observe, listener: Observer) -> None:
        self._wish = wish
        self._listener = listener
        self._link: Link | None = None
        #: What frames of the present connection call it.
        self.name = ""
        self._asked: asyncio.Future[Frame] | None = None
        self._before = 0  # the last number of the connections before
        self._last = 0  # the last number that was heard or missed
        self._unread: deque[tuple[int, int]] = deque()  # what is not read: numbers and bytes
        self._events = self._bytes = 0  # what is read, and the broker does not know it
        #: Done when the broker has refused it, with the error, or after `close`.
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, link: Link) -> tuple[asyncio.Future[Frame], Frame]:
        """Subscribe. Returns what waits for the answer, and the question."""
        frame = Frame("admin", payload=to_raw(self._wish))
        self._link, self._asked = link, link.post(frame)
        self._asked.add_done_callback(self._answered)
        self.name = frame.id
        return self._asked, frame

    def begin_again(self, link: Link) -> None:
        """The connection is new. A question that has no answer is asked again by the link."""
        self._before, self._events, self._bytes = self._last, 0, 0
        self._unread.clear()
        if self._asked is None or self._asked.done():
            self._listener(Missed(self._last + 1, None))
            self.begin(link)

    def _answered(self, asked: asyncio.Future[Frame]) -> None:
        if not asked.cancelled() and (error := asked.exception()) is not None and not self.over.done():
            self.over.set_exception(error)

    def hear(self, frame: Frame) -> None:
        """`observed` of the broker. Raises GoondanError for a frame that cannot be read."""
        if self.over.done():
            return
        if frame.stage == "gap":
            gap = from_raw(frame.payload, Gap)
            self._last = self._before + gap.last
            self._listener(Missed(self._before + gap.first, self._last))
            return
        self._last = self._before + (frame.position or 0)
        self._unread.append((self._last, len(encode_value(frame))))
        event = None
        with suppress(GoondanError):
            event = from_raw(frame.payload, RuntimeEvent)
        self._listener(Seen(self._last, frame, event))

    def read(self, number: int) -> None:
        """Everything up to this number is read: as much more may come. What is not read in time is missed."""
        while self._unread and self._unread[0][0] <= number:
            self._events += 1
            self._bytes += self._unread.popleft()[1]
        wish = self._wish
        if self._link is None or (self._events * _PARTS < wish.events and self._bytes * _PARTS < wish.bytes):
            return
        told = Frame("observed", in_reply_to=self.name, position=number - self._before)
        if self._link.send(told):
            self._events = self._bytes = 0
        elif self._link.ready:  # too much waits to be sent
            asyncio.get_running_loop().call_later(_AGAIN_S, self.read, number)

    def close(self) -> None:
        """Hear nothing more."""
        if not self.over.done():
            self.over.set_result(None)
            if self._link is not None:
                with suppress(GoondanError):  # the connection is closed, and this with it
                    ended = Frame("admin", payload=to_raw({"op": "unobserve", "subscription": self.name}))
                    self._link.post(ended).add_done_callback(_seen)


def _seen(ended: asyncio.Future[Frame]) -> None:
    if not ended.cancelled():
        ended.exception()
