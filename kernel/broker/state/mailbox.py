"""The mailbox: the states, leases, epochs, contents and retention of events. Pure; intake.py and events.py call it.

Rules.
- First in, first out per instance, one lease at a time; an event that comes back goes to the front.
- The epoch of an instance grows whenever a holder is lost, so that later frames of the old holder are recognised.
- An attempt counts only if the holder died and had stored no message since it got the event.
- A finished request of a turn is kept with its answer until the event of that turn has ended: the turn may run again in
  another process, which sends the request again. Every other finished event is in the journal only.
- Large payloads count with their size, wherever they are. The events and answers that refer to one hold it.
- An instance stays with one tool host while the broker knows both, so that its jails stay warm.

Source: docs/design/delivery.md sections 1 to 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

from msgspec import Raw, Struct

from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.blobs import HeldBlobs, size_of
from goondan.kernel.broker.state.entities import (
    ANSWER_ROOM,
    Connection,
    Content,
    Event,
    Instance,
    State,
    unknown_session,
)
from goondan.kernel.broker.state.ledger import content_of
from goondan.kernel.broker.state.records import Accepted, Archive, JournalFailed
from goondan.kernel.broker.state.shares import Places, Pool, kept_of
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob
from goondan.schemas.wire.questions import ANSWER_SUFFIX

Item = TypeVar("Item")

#: When the heap has so many more entries than things that wait, it is made again.
_STALE: Final = 64


class Due(Generic[Item]):
    """Things that have one moment each (seconds on the broker's clock). `waits(item)` is False for a thing that no
    longer matters.
    """

    def __init__(self, waits: Callable[[Item], bool]) -> None:
        self._waits = waits
        self._heap: list[tuple[float, int, Item]] = []
        self._order = count()  # things with one moment are not compared
        self._limit = _STALE

    def add(self, moment: float, item: Item) -> None:
        """Add a thing that is due at `moment`."""
        heappush(self._heap, (moment, next(self._order), item))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._waits(entry[2])]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + _STALE

    def take(self, now: float) -> Iterator[Item]:
        """Remove and yield the things that are due, the earliest first. Things that no longer matter are left out."""
        while self._heap and self._heap[0][0] <= now:
            item = heappop(self._heap)[2]
            if self._waits(item):
                yield item


#: The largest integer that every language reads exactly. A higher epoch cannot be right.
MAX_EPOCH: Final = (1 << 53) - 1


class Epochs:
    """The counter of epochs. `reserved` is the highest epoch that the journal has reserved."""

    def __init__(self, reserved: int, wall_ms: int) -> None:
        self.last = max(reserved, wall_ms)
        self.reserved = reserved

    def next(self) -> int:
        """A new epoch, higher than all earlier ones."""
        self.last += 1
        return self.last

    def raise_above(self, epoch: int) -> bool:
        """Make later epochs higher than this one, which somebody has seen. False when it is impossibly high."""
        if epoch > MAX_EPOCH // 2:
            return False
        self.last = max(self.last, epoch)
        return True

    def to_reserve(self, block: int) -> int | None:
        """The epoch up to which the journal must reserve now; None while enough epochs are reserved."""
        if self.last + block // 2 <= self.reserved:
            return None
        self.reserved = self.last + block
        return self.reserved


class Assignments:
    """Instances by the address of their tool host. The same host stands in `Instance.host`."""

    def __init__(self) -> None:
        self._served: dict[str, dict[Instance, None]] = {}
        #: Names of agents whose instances of one key are served by one host, because they share an MCP server.
        self.together: frozenset[str] = frozenset()
        #: Instances of these agents that have a host, by their key.
        self._by_key: dict[str, dict[Instance, None]] = {}

    def assign(self, instance: Instance, host: Connection) -> None:
        """This host serves the instance from now on."""
        self.release(instance)
        instance.host = host
        self._served.setdefault(host.address, {})[instance] = None
        if instance.agent in self.together:
            self._by_key.setdefault(instance.key, {})[instance] = None

    def release(self, instance: Instance) -> None:
        """No host serves the instance any more."""
        if instance.host is None:
            return
        served = self._served[instance.host.address]
        del served[instance]
        if not served:
            del self._served[instance.host.address]
        instance.host = None
        others = self._by_key.get(instance.key)
        if others is not None:
            others.pop(instance, None)
            if not others:
                del self._by_key[instance.key]

    def host_for(self, instance: Instance, hosts: Iterable[Connection]) -> Connection | None:
        """The tool host of an instance. It is the same one while it lives, so that the instance's jails stay warm. None
        where there is no host.
        """
        if instance.host is None:
            others = self._by_key.get(instance.key, ()) if instance.agent in self.together else ()
            host = next((other.host for other in others if other.host is not None), None) or self.lightest(hosts)
            if host is not None:
                self.assign(instance, host)
        return instance.host

    def release_all(self, address: str, of: Callable[[Connection], bool] = lambda host: True) -> None:
        """The host at this address serves nobody any more. With `of`, only connections for which it is true count."""
        for instance in list(self._served.get(address, ())):
            if instance.host is not None and of(instance.host):
                self.release(instance)

    def served(self, address: str) -> int:
        """How many instances the host at this address serves."""
        return len(self._served.get(address, ()))

    def lightest(self, hosts: Iterable[Connection]) -> Connection | None:
        """The host that serves the fewest instances; None where there is none."""
        return min(hosts, key=lambda host: (self.served(host.address), host.address), default=None)


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
            event.content_here = None
            return
        content.payload = content.payload.copy()  # else it would keep the whole frame in memory
        self._kept[event] = size
        self.kept_bytes += size

    def recall(self, event: Event) -> None:
        """Make sure that the content is in memory: the event is handed over, or ends, or somebody asks for it.

        Raises JournalFailed when the journal does not have it: the next broker checks the whole file and reports that.
        """
        if event in self._kept:
            self.moves(event)
        if event.content_here is None:
            event.content_here = self._read(event)

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


#: Deliveries without progress after which an event is a dead letter (docs/design/delivery.md section 4).
MAX_ATTEMPTS: Final = 5
#: A holder that is silent for so long counts as hung (seconds). Turns renew their lease every 10 s.
LEASE_S: Final = 30.0
#: Events that may wait for one instance. More are refused with E_OVERLOADED.
MAX_QUEUED: Final = 10_000
#: Bytes of all answers that turns got and may ask for again: in memory until they were read, in files as long as the
#: turn lasts. The second is a quarter of the folder of large payloads, as for clients.
MAX_TURN_ANSWERS: Final = 256 << 20
#: Requests that one instance sent without waiting, together with their answers that wait for it: as many as the pieces
#: of pending work that it may have.
MAX_LATE: Final = 256
#: The number of dead letters, and their bytes. They stay until a person has looked. An agent that never starts must not
#: fill the disk with the events that others send it.
MAX_DEAD: Final = 4096
MAX_DEAD_BYTES: Final = 256 << 20


class Quotas(Struct, frozen=True):
    """The amounts that the mailbox shares out."""

    #: Unfinished events.
    open_events: int
    #: Bytes of unfinished events.
    mailbox_bytes: int
    #: Places for turns.
    live_agents: int
    #: Further places that are kept for operators.
    kept_agents: int


class Mailbox:
    """All instances and events, with the shares of room and places."""

    def __init__(self, epochs: Epochs, quotas: Quotas, archive: Archive) -> None:
        """`archive` is the journal, which has the contents of waiting events."""
        self.contents = Contents(archive)
        self.instances: dict[tuple[str, str], Instance] = {}
        #: Event id -> unfinished events, and finished ones whose answer a turn may ask for again.
        self.events: dict[str, Event] = {}
        #: Dead letters by event id.
        self.dead: dict[str, Event] = {}
        #: How many of them each agent has; their number and bytes, by session and by root.
        self._dead_of: Counter[str] = Counter()
        self.dead_events = Pool(MAX_DEAD, kept_of(MAX_DEAD))
        self.dead_bytes = Pool(MAX_DEAD_BYTES, kept_of(MAX_DEAD_BYTES))
        #: Unfinished events, their bytes, and the places of turns: by session and by root.
        self.open = Pool(quotas.open_events, kept_of(quotas.open_events))
        self.held = Pool(quotas.mailbox_bytes, kept_of(quotas.mailbox_bytes))
        self.answers = Pool(MAX_TURN_ANSWERS, kept_of(MAX_TURN_ANSWERS))
        self.places: Places[Instance] = Places(quotas.live_agents, quotas.kept_agents)
        self.blobs = HeldBlobs()
        self.hosts = Assignments()
        self.epochs = epochs
        #: Called when an event that is not over is held by no process any more (`left` of parts.OfEvents).
        self.on_left: Sequence[Callable[..., None]] = ()
        #: Instances with an event that is leased.
        self.holding: dict[Instance, None] = {}
        #: Queued events with a deadline.
        self.deadlines: Due[Event] = Due(lambda event: event.state == "accepted" and not event.held)
        #: Root -> its session, and the number of its unfinished events without the root event itself.
        self._roots: dict[str, tuple[str, int]] = {}
        #: (agent, key) -> requests that it sent without waiting: those that are unfinished, and answers that wait.
        self._late: dict[tuple[str, str], int] = {}

    def session_of(self, root: str) -> str:
        """The session of a root. A root whose session is not known gets a name of its own."""
        event = self.events.get(root)
        if event is not None and not event.finished:
            return event.session
        session, _ = self._roots.get(root, (unknown_session(root), 0))
        return session

    def late_of(self, instance: Instance) -> int:
        """How many requests without waiting, or answers to such, this instance has on the way."""
        return self._late.get((instance.agent, instance.key), 0)

    def stage(self, event: Event) -> None:
        """Hold the place of an event while the journal writes it."""
        self.events[event.id] = event
        if event.asking is not None:
            event.asking.work.requests[event] = None
        self._opened(event)
        if event.blob is not None or event.files is not None:
            self.blobs.hold(event.blob, event.files)

    def unstage(self, event: Event) -> None:
        """Remove an event again, because the journal has no room for it."""
        del self.events[event.id]
        if event.asking is not None:
            event.asking.work.requests.pop(event, None)
        self._closed(event)
        self.blobs.release(event.blob, event.files)

    def _opened(self, event: Event) -> None:
        """Count an unfinished event."""
        event.instance.open += 1
        self.open.take(event.session, event.root, 1)
        self.held.take(event.session, event.root, event.size)
        if event.id != event.root:
            session, count = self._roots.get(event.root, (event.session, 0))
            self._roots[event.root] = (session, count + 1)
        elif event.root in self._roots:
            self._roots[event.root] = (event.session, self._roots[event.root][1])
        if (asker := event.late_for) is not None:
            self._late[asker] = self._late.get(asker, 0) + 1

    def _closed(self, event: Event) -> None:
        """Count an event no more: it is finished, or the journal has no room for it."""
        event.instance.open -= 1
        self.open.give(event.session, event.root, 1)
        self.held.give(event.session, event.root, event.size)
        if event.id != event.root:
            session, count = self._roots.pop(event.root)
            if count > 1:
                self._roots[event.root] = (session, count - 1)
        if (asker := event.late_for) is not None:
            left = self._late.pop(asker) - 1
            if left:
                self._late[asker] = left

    def unwanted(self, event: Event) -> None:
        """The instance that sent this request without waiting is gone: free the room for the answer."""
        self._closed(event)
        event.asynchronous = event.wants_answer = False
        self._opened(event)

    def awaited_no_more(self, event: Event) -> None:
        """The turn that sent this request does not wait any more: the answer becomes an event, and has its room."""
        if event.asking is not None:
            event.asking.work.requests.pop(event, None)
        self._closed(event)
        event.asking, event.depth, event.asynchronous = None, 0, True
        self._opened(event)

    def accept(self, event: Event) -> None:
        """The journal has the event: queue it."""
        event.state = "accepted"
        event.instance.queue.append(event)
        if event.deadline is not None:
            self.deadlines.add(event.deadline, event)

    def lease(self, event: Event, now: float) -> None:
        """Lease `event`, the first of its queue, to its instance, which has a place or gets one."""
        instance = event.instance
        self.contents.recall(event)
        if not self.places.holds(instance):
            self.places.force(instance, event.claim)
        instance.queue.popleft()
        instance.leased = event
        self.holding[instance] = None
        event.state = "leased"
        work = event.work
        work.progressed, work.wait, work.tells, work.lease_until = False, None, event.live, now + LEASE_S

    def give_back(self, instance: Instance) -> None:
        """The leased event was not delivered, or was released: put it back to the front. No attempt is counted."""
        event = instance.leased
        if event is None:
            return
        self._rests(instance)
        event.state = "accepted"
        instance.queue.appendleft(event)
        if event.deadline is not None:
            self.deadlines.add(event.deadline, event)
        for left in self.on_left:
            left(event, ended=False)

    def _rests(self, instance: Instance) -> None:
        """The instance holds no event any more, so it needs no place."""
        instance.leased = None
        del self.holding[instance]
        self.places.release(instance)

    def lose_holder(self, instance: Instance, *, counts: bool) -> Event | None:
        """The holder is gone: the instance gets a new epoch, and its event goes to the front of the queue.

        Returns the event if the journal must write it: the attempt counts, or the turn has made progress.
        """
        instance.epoch, event = self.epochs.next(), instance.leased
        self.give_back(instance)
        if event is None or event.cancelled or event.ending:
            return None
        if event.work.progressed:
            return event
        if not counts:
            return None
        if event.standing is not None and event.standing.lost():
            return None
        event.work.attempts += 1
        return event

    def finish(self, event: Event, state: State, answer: Raw, blob: Blob | None = None) -> None:
        """End an event in any state. Keep it with its answer (`blob` if that is large) if a turn may ask for it again.

        The requests of its own turn are forgotten, because nobody sends them again.
        """
        instance = event.instance
        if instance.leased is event:
            self._rests(instance)
        elif event.state == "accepted":
            self.contents.moves(event)
            instance.queue.remove(event)
        self._closed(event)
        self.places.over(event.id)
        event.state = state
        work = event.work
        work.answer, work.answer_blob = answer, blob
        if (content := event.content_here) is not None:
            content.payload = NO_PAYLOAD  # nobody reads it again
        work.calls.clear()
        for asked in work.answered:
            self._forget(asked)
        for asked in work.requests:
            asked.asking = None  # it goes on, and nobody waits for it
        work.answered.clear()
        work.requests.clear()
        if blob is not None:
            self.blobs.hold(blob)
        if state == "dead":
            self._bury(event)
        elif event.blob is not None or event.files is not None:
            self._release_payload(event)
        if event.asking is None:
            self._forget(event)
        else:
            event.asking.work.requests.pop(event, None)
            event.asking.work.answered[event] = None
            work.kept_here, work.kept_in_file = len(memoryview(answer)), size_of(blob)
            self.answers.take(event.session, event.root, work.kept_here + work.kept_in_file)

    def _forget(self, event: Event) -> None:
        """Forget a finished event: the journal has all that is still needed."""
        self.events.pop(event.id, None)
        work = event.work
        if kept := work.kept_here + work.kept_in_file:
            self.answers.give(event.session, event.root, kept)
            work.kept_here = work.kept_in_file = 0
        if work.answer_blob is not None:
            let_go = self.blobs.leave if event.keeps_answer else self.blobs.release
            let_go(work.answer_blob)

    def _bury(self, event: Event) -> None:
        self.dead[event.id] = event
        size = event.work.dead_bytes = event.size
        self._dead_of[event.instance.agent] += 1
        self.dead_events.take(event.session, event.root, 1)
        self.dead_bytes.take(event.session, event.root, size)

    def may_die(self, event: Event) -> bool:
        """Whether there would be room for this event as a dead letter, with those that its agent already has."""
        if not self._dead_of.get(event.instance.agent):
            return True
        session, root, operator = event.session, event.root, event.by_operator
        return self.dead_events.may_take(session, root, 1, operator=operator) and self.dead_bytes.may_take(
            session, root, event.size, operator=operator
        )

    def drop_dead(self, event: Event) -> None:
        """A person has requeued or dropped a dead letter."""
        del self.dead[event.id]
        self._dead_of[event.instance.agent] -= 1
        self.dead_events.give(event.session, event.root, 1)
        self.dead_bytes.give(event.session, event.root, event.work.dead_bytes)
        self._release_payload(event)

    def _release_payload(self, event: Event) -> None:
        """Nobody needs the event's files any more."""
        self.blobs.release(event.blob, event.files)
        event.blob = event.files = None

    def answer_read(self, answer_id: str) -> None:
        """A turn has read an answer that it may ask for again. From now on only the journal has its bytes."""
        event = self.events.get(answer_id.removesuffix(ANSWER_SUFFIX))
        if event is not None and event.finished:
            work = event.work
            work.answer = None
            if work.kept_here:
                self.answers.give(event.session, event.root, work.kept_here)
                work.kept_here = 0

    def keeps(self, event: Event, answer: Raw, blob: Blob | None) -> bool:
        """Whether there is room to keep an answer of this size for the turn that asked."""
        size = len(memoryview(answer)) + size_of(blob)
        return size <= ANSWER_ROOM or self.answers.may_take(event.session, event.root, size, operator=False)

    def forget_idle(self, instance: Instance) -> None:
        """Forget an instance that has no events and no process."""
        busy = instance.wanted or instance.open or instance.conn is not None or instance.requested or instance.leaving
        if not busy and not instance.deleting and instance.spawned is None:
            self.hosts.release(instance)
            self.instances.pop((instance.agent, instance.key), None)
