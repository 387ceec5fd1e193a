"""Observers: clients of operators that hear of turns which others have asked for. Pure.

Rules.
- A subscription is for all turns, or for those of an agent, of an instance or of a root event. It ends with its
  connection. Its pieces of news are numbered from 1, whether they are sent or not.
- Its window says how many events and bytes may be on their way to it, sent and not said to be read. What does not fit
  is missed, and so is everything after it until half of the window is read: then one frame says which numbers were
  missed. So a slow observer costs two numbers, and nobody waits for it.
- The windows bound what waits in the transport, so frames to observers are not dropped there.
- Who observes an agent has it send live events, also in the middle of a turn. While all its observers miss them, and
  when there are none any more, it is told to stop. It begins again at a tick: often, it would tell its step's text anew
  for each place in a window.
- Without subscriptions this part has no hooks in the life of events, and live events do not come here.

Source: docs/design/wire.md section 8; PROTOCOL-OPERATORS.md "Observing"; decision 171.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct, field

from goondan.kernel.broker.routing.clients import Live, span_of
from goondan.kernel.broker.state.bus import Bus, overloaded
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, Connection, Event
from goondan.kernel.broker.state.parts import SHORT_BYTES, OfEvents, Op, Part, Take
from goondan.schemas.wire import codec
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame, Hello
from goondan.schemas.wire.runtime_events import Gap, Observe, RuntimeEvent

#: Subscriptions of one connection. Who has more to look at observes all, and sorts it by itself.
MAX_SUBSCRIPTIONS: Final = 256
#: Bytes of the windows of one connection: half of what may wait for a peer before it is given up.
MAX_WINDOWS: Final = 16 << 20
#: Bytes of all windows. The rest of what may wait for all peers is for those that answers wait for.
MAX_ALL_WINDOWS: Final = 64 << 20
#: How long an observer waits for room (milliseconds).
RETRY_AFTER_MS: Final = 1000


class Window(Struct):
    """How much one subscription may get, and what it has missed."""

    #: The most events that are sent and not read.
    events: int
    #: The most bytes of them.
    bytes: int
    #: The number of the last piece of news.
    number: int = 0
    #: The highest number that was told: of a piece that was sent, or of the last one that was missed.
    told: int = 0
    #: The number of the first piece that was missed and is not told; 0: none was.
    missed: int = 0
    #: The bytes of what was sent and is not read.
    held: int = 0
    #: What was sent and is not read, in order: numbers and bytes.
    sent: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        """Whether the next piece is missed, whatever its size."""
        return self.missed > 0 or len(self.sent) >= self.events

    def take(self, size: int) -> bool:
        """The next piece of news, of so many bytes. Whether it is sent; else it is missed."""
        self.number += 1
        if self.full or self.held + size > self.bytes:
            self.missed = self.missed or self.number
            return False
        self.sent.append((self.number, size))
        self.held += size
        self.told = self.number
        return True

    def read(self, number: int) -> None:
        """Everything up to this number is read. Raises GoondanError E_FRAME_INVALID for a number that was not told."""
        if not 0 <= number <= self.told:
            raise fail("E_FRAME_INVALID", f"up to {number} is read, and {self.told} is the last number that was told")
        while self.sent and self.sent[0][0] <= number:
            self.held -= self.sent.popleft()[1]

    @property
    def ready(self) -> bool:
        """Whether what was missed is to be told now: half of the window is read."""
        return self.missed > 0 and 2 * len(self.sent) <= self.events and 2 * self.held <= self.bytes

    def tell(self) -> Gap:
        """What was missed. It is told now."""
        gap, self.missed, self.told = Gap(self.missed, self.number), 0, self.number
        return gap


class Subscription(Struct, eq=False):
    """What one client hears."""

    #: The client.
    connection: Connection
    #: The id of the frame that has asked.
    name: str
    #: What it is for.
    wish: Observe
    #: How much it may get.
    window: Window

    @property
    def key(self) -> tuple[str | None, str | None]:
        """The agent and the root event that it is for; None: any."""
        return self.wish.agent, self.wish.root_event

    def hears(self, event: Event) -> bool:
        """Whether it is for this event."""
        wish, instance = self.wish, event.instance
        return (
            wish.agent in (None, instance.agent)
            and wish.instance_key in (None, instance.key)
            and wish.root_event in (None, event.root)
        )


class Observers(Part, OfEvents):
    """All subscriptions. `choose` has the hooks of parts chosen anew: with the first one, and without the last one."""

    def __init__(self, bus: Bus, live: Live, choose: Callable[[], None]) -> None:
        self._bus = bus
        self._live = live
        self._choose = choose
        self._clients = bus.presence.connections[CLIENTS]
        #: By routing id and name.
        self._known: dict[bytes, dict[str, Subscription]] = {}
        #: By agent and root event, as the subscription names them.
        self._by_wish: dict[tuple[str | None, str | None], dict[Subscription, None]] = {}
        self._bytes = 0  # of all windows
        #: Those that miss what comes.
        self._behind: dict[Subscription, None] = {}
        self.ops = (
            Op("observe", self._observe, most_bytes=SHORT_BYTES),
            Op("unobserve", self._unobserve, most_bytes=SHORT_BYTES),
        )
        self.takes = (Take((CLIENTS,), "observed", self._read, SHORT_BYTES),)

    def applies(self) -> bool:
        """Whether there is a subscription."""
        return bool(self._known)

    def tick(self, now: float) -> None:
        """Tell those that have read what they have missed, and go on."""
        ready = [one for one in self._behind if one.window.ready]
        asleep = self._asleep() if ready else []
        for one in ready:
            del self._behind[one]
            gap = one.window.tell()
            frame = Frame("observed", in_reply_to=one.name, stage="gap", position=gap.last, payload=codec.to_raw(gap))
            self._bus.send(one.connection, frame)
        self._wake(asleep)

    def gone(self, peer: Connection, now: float) -> None:
        """Its subscriptions are over."""
        if self._known and peer.cls == CLIENTS:
            self._end(list(self._of(peer).values()))

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """An agent's process is back, perhaps with a turn: it may not have heard that somebody listens."""
        event = None if peer.instance is None else peer.instance.leased
        if self._known and event is not None and self._wanted(event):
            self._tell_holders([event], live=True)

    # --- subscriptions

    def _observe(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "observe", agent?, instanceKey?, rootEvent?, events, bytes}`."""
        try:
            wish = msgspec.convert(asked, Observe)
        except msgspec.ValidationError as error:
            raise fail("E_FRAME_INVALID", f"observe: {error}") from None
        mine = self._of(connection)
        if not frame.id:
            raise fail("E_FRAME_INVALID", "observe needs an id: it is the name of the subscription")
        if frame.id not in mine:
            self._check_room(mine, wish)
            self._add(Subscription(connection, frame.id, wish, Window(wish.events, wish.bytes)))
        self._bus.reply(connection, frame.id, {"events": wish.events, "bytes": wish.bytes})

    def _check_room(self, mine: dict[str, Subscription], wish: Observe) -> None:
        if len(mine) >= MAX_SUBSCRIPTIONS:
            raise fail("E_FRAME_INVALID", f"one connection has at most {MAX_SUBSCRIPTIONS} subscriptions")
        if sum(one.window.bytes for one in mine.values()) + wish.bytes > MAX_WINDOWS:
            raise fail("E_FRAME_INVALID", f"the windows of one connection have at most {MAX_WINDOWS} bytes")
        if self._bytes + wish.bytes > MAX_ALL_WINDOWS:
            raise overloaded(f"the windows of all observers have at most {MAX_ALL_WINDOWS} bytes", RETRY_AFTER_MS)

    def _unobserve(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "unobserve", subscription}`. One that has ended is as good."""
        name = asked.get("subscription")
        found = self._of(connection).get(name) if isinstance(name, str) else None
        self._end([] if found is None else [found])
        self._bus.reply(connection, frame.id, {"ended": found is not None})

    def _of(self, connection: Connection) -> dict[str, Subscription]:
        """The subscriptions of a connection. Those of an earlier one with its routing id are over."""
        known = self._known.get(connection.ident, {})
        if any(one.connection is not connection for one in known.values()):
            self._end(list(known.values()))
            return {}
        return known

    def _add(self, new: Subscription) -> None:
        asleep = self._asleep()
        self._known.setdefault(new.connection.ident, {})[new.name] = new
        self._by_wish.setdefault(new.key, {})[new] = None
        self._bytes += new.window.bytes
        if self._live.observed is None:
            self._live.observed = self._relay
            self._choose()
        self._wake(asleep)

    def _end(self, over: list[Subscription]) -> None:
        awake = [event for event in self._running() if self._wanted(event)] if over else []
        for one in over:
            mine, alike = self._known[one.connection.ident], self._by_wish[one.key]
            del mine[one.name], alike[one]
            if not mine:
                del self._known[one.connection.ident]
            if not alike:
                del self._by_wish[one.key]
            self._behind.pop(one, None)
            self._bytes -= one.window.bytes
        if not self._known and self._live.observed is not None:
            self._live.observed = None
            self._choose()
        self._tell_holders([event for event in awake if not self._wanted(event)], live=False)

    def _read(self, connection: Connection, frame: Frame, now: float) -> None:
        """`observed` of a client: it has read up to `position`. Of a subscription that is over nothing is said."""
        one = self._of(connection).get(frame.in_reply_to or "")
        if one is not None:
            one.window.read(frame.position or 0)

    # --- agents

    def _running(self) -> Iterator[Event]:
        """The events that processes work on now."""
        for connection in self._bus.presence.connections[AGENTS].values():
            instance = connection.instance
            if instance is not None and instance.leased is not None and instance.conn is connection:
                yield instance.leased

    def _asleep(self) -> list[Event]:
        """The events of which nobody hears now while processes work on them."""
        return [event for event in self._running() if not self._wanted(event)]

    def _wake(self, asleep: Iterable[Event]) -> None:
        """Somebody may hear of these from now on."""
        self._tell_holders([event for event in asleep if self._wanted(event)], live=True)

    def _tell_holders(self, events: Iterable[Event], *, live: bool) -> None:
        """Tell the processes of these events that somebody listens, or nobody does any more. Where the asker does, they
        know.
        """
        for event in events:
            connection = event.instance.conn
            if connection is not None and not event.live:
                self._bus.send(connection, Frame("listen", event_id=event.id, epoch=event.instance.epoch, live=live))

    def leased(self, event: Event, frame: Frame | None) -> None:
        """A process gets the event: it is to send live events if somebody listens. One that has it already is told when
        it is here.
        """
        if frame is not None and not frame.live:
            frame.live = self._wanted(event)

    # --- news

    def kept(self, event: Event) -> None:
        """The event was accepted."""
        content = event.content_here
        span = None if content is None else content.parent_span_id
        self._tell(event, codec.to_raw(RuntimeEvent(kind="event.accepted")), None, span)

    def left(self, event: Event, *, ended: bool) -> None:
        """The event has ended, if it is over and was accepted."""
        if ended and event.finished:
            self._tell(event, codec.to_raw(RuntimeEvent(kind="event.ended", state=event.state)), None, None)

    def _relay(self, event: Event, frame: Frame) -> None:
        """News of a turn."""
        self._tell(event, frame.payload, span_of(frame.span_id), span_of(frame.parent_span_id))

    def _tell(self, event: Event, payload: Raw, span: str | None, parent: str | None) -> None:
        clients, out, counters = self._clients, self._bus.out, self._bus.counters
        for one in self._heard(event):
            if clients.get(one.connection.ident) is not one.connection:
                continue  # it said goodbye, or hello again
            if not one.window.full:
                data = self._encoded(one, event, payload, span, parent)
                if one.window.take(len(data)):
                    counters["observed"] += 1
                    out.append((CLIENTS, one.connection.ident, data))
                    continue
            else:
                one.window.take(0)
            counters["observed_missed"] += 1
            if one not in self._behind:
                self._behind[one] = None
                self._tell_holders([asleep for asleep in self._asleep() if one.hears(asleep)], live=False)

    def _encoded(self, one: Subscription, event: Event, payload: Raw, span: str | None, parent: str | None) -> bytes:
        content = event.content_here
        frame = Frame(
            "observed",
            id=self._bus.next_id(),
            from_=event.instance.agent,
            instance_key=event.instance.key,
            event_id=event.id,
            in_reply_to=one.name,
            trace_id=None if content is None else content.trace_id,
            span_id=span,
            parent_span_id=parent,
            payload=payload,
            root_event=event.root,
            position=one.window.number + 1,
        )
        return codec.encode_value(frame)

    def _wanted(self, event: Event) -> bool:
        """Whether somebody hears what its turn tells now."""
        return any(not one.window.missed for one in self._heard(event))

    def _heard(self, event: Event) -> list[Subscription]:
        """The subscriptions that are for this event."""
        agent, root, by = event.instance.agent, event.root, self._by_wish
        keys = ((None, None), (agent, None), (None, root), (agent, root))
        return [one for key in keys for one in by.get(key, ()) if one.hears(event)]
