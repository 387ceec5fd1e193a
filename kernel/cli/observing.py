"""What a command hears of the turns of others: numbered live events, and what it has missed. Session (session.py) has
these, and gives them the frames of the broker.

A subscription ends with its connection. Here it begins again with the next one, and the numbers go on: the listener is
told that something may be missing.

Source: PROTOCOL-OPERATORS.md "Observing"; docs/design/commands.md section 4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import Gap, Observe, RuntimeEvent

#: How soon the broker is told what was read (seconds). A frame for each event would double their number.
READ_S: Final = 0.02


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
    """One subscription, over all connections of its session. It stands in `among` by its name, until it is closed."""

    def __init__(self, wish: Observe, listener: Observer, among: dict[str, Observation]) -> None:
        self._wish = wish
        self._listener = listener
        self._among = among
        self._name = ""  # on the present connection
        self._link: Link | None = None
        self._asked: asyncio.Future[Frame] | None = None
        self._before = 0  # the last number of the connections before
        self._last = 0  # the last number that was heard or missed
        self._read = 0  # up to which number is read
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, link: Link) -> tuple[asyncio.Future[Frame], Frame]:
        """Subscribe. Returns what waits for the answer, and the question."""
        frame = Frame("admin", payload=to_raw(self._wish))
        self._link, self._asked = link, link.post(frame)
        self._among.pop(self._name, None)
        self._name, self._among[frame.id] = frame.id, self
        return self._asked, frame

    def begin_again(self, link: Link) -> None:
        """The connection is new. A question that has no answer is asked again by the link."""
        self._before = self._last
        if self._asked is None or self._asked.done():
            self._listener(Missed(self._last + 1, None))
            self.begin(link)

    def hear(self, frame: Frame) -> None:
        """`observed` of the broker. Raises GoondanError for a gap that cannot be read."""
        if frame.stage == "gap":
            gap = from_raw(frame.payload, Gap)
            self._last = self._before + gap.last
            self._listener(Missed(self._before + gap.first, self._last))
            return
        self._last, event = self._before + (frame.position or 0), None
        with suppress(GoondanError):
            event = from_raw(frame.payload, RuntimeEvent)
        self._listener(Seen(self._last, frame, event))

    def read(self, number: int) -> None:
        """Everything up to this number is read: as much more may come. What is not read in time is missed."""
        self._read = number
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READ_S, self._tell)

    def _tell(self) -> None:
        self._timer, link, number = None, self._link, self._read - self._before
        if link is None or number <= 0:
            return  # it was read over an earlier connection
        if not link.send(Frame("observed", in_reply_to=self._name, position=number)) and link.ready:
            self.read(self._read)  # too much waits to be sent

    def close(self) -> None:
        """Hear nothing more. A question that has no answer may have been heard."""
        if self._among.pop(self._name, None) is not None and self._link is not None:
            self._link.forget(self._name)  # else it would ask the next broker
            if self._link.ready:
                ended = Frame("admin", payload=to_raw({"op": "unobserve", "subscription": self._name}))
                self._link.post(ended)
