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
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct, field

from goondan.kernel.broker.routing.clients import Live, relayed
from goondan.kernel.broker.state.bus import Bus, overloaded
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, Connection, Event
from goondan.kernel.broker.state.parts import SHORT_BYTES, OfEvents, Op, Part, Take
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame, Hello
from goondan.schemas.wire.runtime_events import Gap, Observe, RuntimeEvent

#: Subscriptions of one connection: with the largest windows, half of what may wait for a peer before it is given up.
#: Who has more to look at observes all, and sorts it by itself.
MAX_SUBSCRIPTIONS: Final = 16
#: Subscriptions of all connections: each is asked about each live event, and about each turn that runs when one begins.
MAX_ALL_SUBSCRIPTIONS: Final = 256
#: Bytes of all windows: a quarter of what may wait for all peers.
MAX_ALL_WINDOWS: Final = 64 << 20


class Subscription(Struct, eq=False):
    """What a client wants to hear, and how much of it is on the way and missed. `wish` has the size of its window."""

    #: What it is for, and the most events that are sent and not read, and the most bytes of them.
    wish: Observe
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

    def hears(self, event: Event) -> bool:
        """Whether it is for this event."""
        wish, instance = self.wish, event.instance
        return (
            wish.root_event in (None, event.root)
            and wish.agent in (None, instance.agent)
            and wish.instance_key in (None, instance.key)
        )

    @property
    def full(self) -> bool:
        """Whether the next piece is missed, whatever its size."""
        return self.missed > 0 or len(self.sent) >= self.wish.events

    def take(self, size: int) -> bool:
        """The next piece of news, of so many bytes. Whether it is sent; else it is missed."""
        self.number += 1
        if self.full or self.held + size > self.wish.bytes:
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
        return self.missed > 0 and 2 * len(self.sent) <= self.wish.events and 2 * self.held <= self.wish.bytes

    def tell(self) -> Gap:
        """What was missed. It is told now."""
        gap, self.missed, self.told = Gap(self.missed, self.number), 0, self.number
        return gap


class Observers(Part, OfEvents):
    """All subscriptions. `choose` has the hooks of parts chosen anew: with the first one, and without the last one."""

    def __init__(self, bus: Bus, live: Live, choose: Callable[[], None]) -> None:
        self._bus = bus
        self._live = live
        self._choose = choose
        self._clients = bus.presence.connections[CLIENTS]
        #: By client and name.
        self._known: dict[tuple[Connection, str], Subscription] = {}
        ops = {"observe": self._observe, "unobserve": self._unobserve}
        self.ops = [Op(name, handler, most_bytes=SHORT_BYTES) for name, handler in ops.items()]
        self.takes = (Take((CLIENTS,), "observed", self._read, SHORT_BYTES),)

    def applies(self) -> bool:
        """Whether there is a subscription."""
        return bool(self._known)

    # --- subscriptions

    def _observe(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "observe", agent?, instanceKey?, rootEvent?, events, bytes}`."""
        name, wish = (connection, frame.id), from_raw(frame.payload, Observe)
        if name not in self._known:
            if sum(one is connection for one, _ in self._known) >= MAX_SUBSCRIPTIONS:
                raise fail("E_FRAME_INVALID", f"one connection has at most {MAX_SUBSCRIPTIONS} subscriptions")
            windows = sum(one.wish.bytes for one in self._known.values()) + wish.bytes
            if len(self._known) >= MAX_ALL_SUBSCRIPTIONS or windows > MAX_ALL_WINDOWS:
                bounds = f"{MAX_ALL_SUBSCRIPTIONS} subscriptions, with windows of {MAX_ALL_WINDOWS} bytes"
                raise overloaded(f"all observers together have at most {bounds}")
            self._change({**self._known, name: Subscription(wish)})
        self._bus.reply(connection, frame.id, {"events": wish.events, "bytes": wish.bytes})

    def _unobserve(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "unobserve", subscription}`. One that has ended is as good."""
        name = connection, str(asked.get("subscription"))
        there = name in self._known
        if there:
            self._change({one: found for one, found in self._known.items() if one != name})
        self._bus.reply(connection, frame.id, {"ended": there})

    def _change(self, known: dict[tuple[Connection, str], Subscription]) -> None:
        """These are the subscriptions from now on."""
        self._known = known
        self._live.observed = self._relay if known else None
        self._choose()
        self._follow()

    def _read(self, connection: Connection, frame: Frame, now: float) -> None:
        """`observed` of a client: it has read up to `position`. Of a subscription that is over nothing is said."""
        if (one := self._known.get((connection, frame.in_reply_to or ""))) is not None:
            one.read(frame.position or 0)

    def tick(self, now: float) -> None:
        """Forget who is gone. Tell those that have read what they have missed; then they hear again."""
        here = {name: one for name, one in self._known.items() if self._clients.get(name[0].ident) is name[0]}
        if len(here) < len(self._known):
            self._change(here)
        if ready := [(name, one) for name, one in self._known.items() if one.ready]:
            for (connection, name), one in ready:
                gap = one.tell()
                told = Frame("observed", in_reply_to=name, stage="gap", position=gap.last, payload=to_raw(gap))
                self._bus.send(connection, told)
            self._follow()

    # --- agents

    def leased(self, event: Event, frame: Frame | None) -> None:
        """A process gets the event: it is to send live events if somebody listens. One that has it already is told when
        it is here.
        """
        if frame is not None:
            event.work.tells = frame.live = self._is_wanted(event)

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """An agent's process is back, perhaps with a turn: it may not have heard that somebody listens."""
        if self._known and peer.instance is not None and peer.instance.leased is not None:
            peer.instance.leased.work.tells = False
            self._follow()

    def _follow(self) -> None:
        """Tell the processes of which somebody begins to hear, or nobody does any more."""
        for connection in self._bus.presence.connections[AGENTS].values():
            event = None if connection.instance is None else connection.instance.leased
            if event is not None and event.work.tells != self._is_wanted(event):
                tells = event.work.tells = not event.work.tells
                self._bus.send(connection, Frame("listen", event_id=event.id, epoch=event.instance.epoch, live=tells))

    def _is_wanted(self, event: Event) -> bool:
        """Whether its asker wants to hear what its turn tells, or an observer hears it now."""
        return event.live or any(not one.missed and one.hears(event) for one in self._known.values())

    # --- news

    def kept(self, event: Event) -> None:
        """The event was accepted."""
        self._relay(event, Frame("runtime.event", payload=to_raw(RuntimeEvent(kind="event.accepted"))))

    def left(self, event: Event, *, ended: bool) -> None:
        """The event has ended, if it is over and was accepted."""
        if ended and event.finished:
            said = RuntimeEvent(kind="event.ended", state=event.state)
            self._relay(event, Frame("runtime.event", payload=to_raw(said)))

    def _relay(self, event: Event, news: Frame) -> None:
        """The news of an event, by its holder or by this broker."""
        frame = relayed("observed", event, news)
        frame.root_event = event.root
        for (connection, name), one in self._known.items():
            if not one.hears(event):
                continue
            data, behind = b"", one.missed
            if not one.full:
                frame.id, frame.in_reply_to, frame.position = self._bus.next_id(), name, one.number + 1
                data = encode_value(frame)
            if one.take(len(data)):
                self._bus.out.append((CLIENTS, connection.ident, data))
            elif not behind:
                self._follow()
