"""All items: from the question to a person to the end of the event. Pure.

Rules.
- An item is journaled before anybody is told of it. So is each decision, and so is its single use: the call goes to a
  tool host when the journal has the use.
- While a person is asked, the clocks of the event and of those that wait for it stand still.
- An expired item counts as denied.
- An event whose calls wait is handed over again when one of its items was decided.
- An item ends with its event. What a script has asked ends with the script.

Source: docs/approvals.md, docs/decisions/069.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Raw

from goondan.features.approvals.broker import always, decisions
from goondan.features.approvals.wire import MAX_EXPIRY_S, WAITS, ApprovalAlways, ApprovalState, code_of
from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.bus import Core, Lossy
from goondan.kernel.broker.state.entities import CLIENTS, Connection, Event, Standing
from goondan.kernel.broker.state.parts import OfCalls, OfEvents, Part, Record
from goondan.kernel.broker.state.shares import Pool, kept_of
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import Frame, Hello

#: The number of waiting items, and their bytes. They are shared by session and root, so that one turn cannot flood a
#: person with items.
MAX_ITEMS: Final = 4096
MAX_ITEM_BYTES: Final = 64 << 20
#: The same for one event, with its decided items: they stay in the journal until the event ends.
MAX_OF_EVENT: Final = 1024
MAX_BYTES_OF_EVENT: Final = 32 << 20


class Items(Part, OfEvents, OfCalls):
    """All items."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._bus = bus = core.bus
        self._clocks = core.clocks
        #: Items that wait for a person, and decided items whose turn still goes on: by subject, the oldest first.
        self.all: dict[str, decisions.Item] = {}
        self.history = decisions.History(bus)
        self.scripts = decisions.ScriptDecisions()
        self.always = always.Always(bus)
        self._pool = Pool(MAX_ITEMS, kept_of(MAX_ITEMS))
        self._bytes = Pool(MAX_ITEM_BYTES, kept_of(MAX_ITEM_BYTES))
        #: The connections of operators that watch the list.
        self._watchers: dict[bytes, Connection] = {}
        #: Records of an earlier broker, until the whole journal was read.
        self._found: list[tuple[str, decisions.OfItem]] = []
        self.records = (
            Record(decisions.ApprovalAsked, self._restore),
            Record(decisions.ApprovalAnswered, self._restore),
            Record(decisions.ApprovalStarted, self._restore),
            Record(decisions.ApprovalRemembered, self.history.restore),
            Record(always.ApprovalLasts, self.always.restore),
        )

    # --- a person is asked

    def ask_person(self, wanted: decisions.Wanted, now: float, yes: ApprovalAlways | None = None) -> decisions.Item:
        """A new item. With a lasting yes nobody is asked: it is decided and used when the journal has it.

        Raises GoondanError E_TOOL_LIMIT when too many wait.
        """
        event, asked, script = wanted.event, wanted.asked, wanted.script
        instance = event.instance
        expires_s = wanted.decision.expires_s if asked is None or asked.expires_s is None else asked.expires_s
        expires = now + min(max(1.0, expires_s), MAX_EXPIRY_S)
        record = decisions.ApprovalAsked(
            agent=instance.agent,
            key=instance.key,
            event_id=event.id,
            call_id=wanted.call_id,
            kind=wanted.kind,
            tool=wanted.tool,
            digest=wanted.digest,
            args=Raw(wanted.args),
            workdir=wanted.workdir,
            asked=self._bus.ledger.moment(now),
            expires=self._bus.ledger.moment(expires),
            message=None if asked is None else asked.message,
            schema=None if asked is None or asked.schema is None else Raw(bytes(asked.schema)),
            reason=wanted.decision.reason,
            within=None if script is None else script.call_id,
            rule=wanted.decision.rule,
            script=None if script is None else script.text,
        )
        item = _item_of(record, event, now, expires)
        size = item.size
        standing = event.standing = event.standing or Standing()
        if standing.asked >= MAX_OF_EVENT or standing.asked_bytes + size > MAX_BYTES_OF_EVENT:
            message = f"this turn has asked people about {standing.asked} calls, {standing.asked_bytes} bytes"
            raise fail("E_TOOL_LIMIT", message, suggestion="End the turn, and go on with another message.")
        for pool, amount in ((self._pool, 1), (self._bytes, size)) if yes is None else ():
            if pool.shortage(event.session, event.root, amount, operator=event.by_operator) is not None:
                raise fail("E_TOOL_LIMIT", "too many calls of this work wait for a person", suggestion="Wait for some.")
        self._keep(item)
        if yes is not None:
            decided = decisions.ApprovalAnswered(event.id, "approved", yes.uid, self.wall_ms(), always=yes.code)
            used = decisions.ApprovalStarted(event.id, self._bus.ledger.moment(now))
            item.state, item.decided, item.told, item.started_ms = "starting", decided, True, int(now * 1000)
            self._stage(item, record, decided, used)
            self._notice(item, decided)
            return item
        item.group = wanted.group
        self._stop_clocks(item)
        self.scripts.asked(item)
        self._stage(item, record)
        self._bus.counters["approvals_asked"] += 1
        return item

    def decide(self, item: decisions.Item, decided: decisions.ApprovalAnswered, *also: records.Put) -> None:
        """Have the journal write a decision, with what belongs to it. It counts when the journal has it."""
        item.state, item.deciding = "deciding", decided
        self.history.add(item, decided, self.record_of(item), self.wall_ms(item.asked))
        self._stage(item, decided, also=also)
        self._release_time(item)  # into the journal together: a crash loses no time that stood still

    def use(self, item: decisions.Item, connection: Connection, frame: Frame, now: float) -> None:
        """Use an approval: the call starts when the journal has the use."""
        item.state = "starting"
        item.asker = connection, frame
        item.started_ms = int(now * 1000)
        self.mark_told(item)
        self._stage(item, decisions.ApprovalStarted(item.event.id, self._bus.ledger.moment(now)))

    def mark_told(self, item: decisions.Item | None) -> None:
        """The turn of the item knows the decision."""
        if item is not None and not item.open and not item.told:
            item.told = True
            if item.event.standing is not None:
                item.event.standing.unread -= 1

    def denied(self, item: decisions.Item, why: str) -> decisions.ApprovalAnswered:
        """The decision of the kernel, in a person's place."""
        return decisions.ApprovalAnswered(item.event.id, "denied", None, self.wall_ms(), why)

    def record_of(self, item: decisions.Item) -> decisions.ApprovalAsked | None:
        """The journal's record of a waiting item."""
        found = (decisions.decode(data) for data in self._bus.archive.find_records(item.subject))
        return next((record for record in found if isinstance(record, decisions.ApprovalAsked)), None)

    def wall_ms(self, moment: float | None = None) -> int:
        """A moment of the broker's clock, now by default, as milliseconds since 1970."""
        return int((self._bus.booted_at + (self._bus.now if moment is None else moment)) * 1000)

    def _keep(self, item: decisions.Item) -> None:
        """Add an item. It stays until its event ends."""
        self.all[item.subject] = item
        standing = item.event.standing = item.event.standing or Standing()
        standing.asked += 1
        standing.asked_bytes += item.size

    def _stop_clocks(self, item: decisions.Item) -> None:
        """The item waits for a person: count it, and stop the clocks."""
        event = item.event
        self._pool.take(event.session, event.root, 1)
        self._bytes.take(event.session, event.root, item.size)
        item.chain = self._clocks.hold(event, item.asked)
        self._clocks.tell_call(item.id, "held")
        self._core.held(event, item.asked)
        item.holds_time = True
        standing = event.standing = event.standing or Standing()
        standing.items += 1
        standing.inner += item.within is not None

    def _release_clocks(self, item: decisions.Item, now: float) -> None:
        """The item does not wait any more."""
        event = item.event
        self._pool.give(event.session, event.root, 1)
        self._bytes.give(event.session, event.root, item.size)
        if event.standing is not None:
            event.standing.items -= 1
            event.standing.inner -= item.within is not None
        chain, item.chain = item.chain, []
        self._clocks.release(chain, now)
        self._clocks.tell_call(item.id, "runs")
        self._release_time(item)

    def _release_time(self, item: decisions.Item) -> None:
        """Let the time of other parts go on, if it stood still for this item."""
        if item.holds_time:
            item.holds_time = False
            self._core.held(item.event, None)

    # --- the journal's word

    def _stage(self, item: decisions.Item, *said: decisions.OfItem, also: Sequence[records.Put] = ()) -> None:
        writes = (records.Put(item.subject, records.encode(record)) for record in said)
        refusable = isinstance(said[0], decisions.ApprovalAsked)
        self._bus.stage(records.Item((*writes, *also), refusable), partial(self._journaled, item))

    def _journaled(self, item: decisions.Item, kept: bool) -> None:
        """The journal has the last staged change of this item, or no room for it."""
        now = self._bus.now
        if self.all.get(item.subject) is not item:
            return  # its event has ended meanwhile
        if not kept:
            self._refuse(item)
        elif item.state == "staged":
            item.state = "waits"
            self.tell_waits(item)
            self.tell_watchers()
        elif item.state == "deciding" and item.deciding is not None:
            self._decided(item, item.deciding, now)
        elif item.state == "starting":
            item.state = "started"
            self._go_on(item)

    def _refuse(self, item: decisions.Item) -> None:
        """The disk has no room for a new item."""
        if item.open:  # a lasting yes has stopped no clock
            self._release_clocks(item, self._bus.now)
        self.scripts.forget(item)
        del self.all[item.subject]
        if item.event.standing is not None:
            item.event.standing.asked -= 1
            item.event.standing.asked_bytes -= item.size
        for connection, frame in [*([] if item.asker is None else [item.asker]), *item.others]:
            info = error_payload("E_DISK_FULL", "the disk of the state directory is full; nobody could be asked")
            self._bus.error(connection.cls, connection.ident, info, frame)

    def _decided(self, item: decisions.Item, decided: decisions.ApprovalAnswered, now: float) -> None:
        event = item.event
        item.state, item.decided, item.deciding = decided.how, decided, None
        self._notice(item, decided)
        self._release_clocks(item, now)
        if event.standing is not None:
            event.standing.unread += 1
            event.standing.ready = True
        for connection, frame_id in item.operators:
            self.tell_decision(connection, frame_id, item)
        item.operators = []
        self._tell_holder(event)
        self.tell_watchers()
        self._bus.due[event.instance] = None

    def _notice(self, item: decisions.Item, decided: decisions.ApprovalAnswered) -> None:
        by = "the kernel" if decided.uid is None else f"uid {decided.uid}"
        always = decided.always and f", always ({decided.always})"
        where = f"{item.event.instance.address} {item.tool} {item.id} sha256:{item.digest}"
        self._bus.notices.append(f"approval {item.code}: {decided.how} by {by}{always}: {where}")

    def _go_on(self, item: decisions.Item) -> None:
        """The use is journaled: the call goes on, if its process still waits."""
        asker, item.asker = item.asker, None
        if asker is None:
            return
        connection, frame = asker
        if frame.type == "approval.ask":
            self._bus.reply(connection, frame.id, ApprovalState(state="run"))
        else:
            self._core.call_goes_on(connection, frame)

    # --- who is told

    def tell_waits(self, item: decisions.Item) -> None:
        """Tell the asking processes that a person was asked."""
        told, item.others = item.others, []
        asker, item.asker = item.asker, None
        for connection, frame in [*([] if asker is None else [asker]), *told]:
            self.tell_wait_of(item, connection, frame)

    def tell_wait_of(self, item: decisions.Item, connection: Connection, frame: Frame) -> None:
        """Tell a process that a call of it waits for the decision about this item."""
        if frame.type == "approval.ask":
            self._bus.reply(connection, frame.id, ApprovalState(state="waits"))
            return
        info = error_payload(WAITS, f"{item.tool}: a person has to approve this call ({item.code})")
        self._bus.error(connection.cls, connection.ident, info, frame)

    def _tell_holder(self, event: Event) -> None:
        """Tell the process of the turn about decided calls that it does not know of."""
        instance = event.instance
        if instance.leased is not event or instance.conn is None:
            return
        calls = [i.id for i in self.all.values() if i.event is event and not i.open and not i.told]
        if calls:
            self._bus.send(instance.conn, Frame("approval.news", event_id=event.id, epoch=instance.epoch, calls=calls))

    def watch(self, connection: Connection) -> None:
        """Tell this connection of an operator of every change of the list from now on."""
        self._watchers[connection.ident] = connection

    def tell_watchers(self) -> None:
        """Tell operators that the list has changed. This may be lost: they ask for the list at every connect."""
        for connection in self._watchers.values():
            if self._is_here(connection):
                data = encode_value(Frame("approval.news", id=self._bus.next_id()))
                self._bus.out.append((CLIENTS, connection.ident, Lossy(data)))

    def tell_decision(self, connection: Connection, frame_id: str, item: decisions.Item) -> None:
        """Tell an operator the state of the item that he or she has decided about."""
        decided = item.decided
        state = item.state if decided is None else decided.how
        self._bus.reply(connection, frame_id, {"id": item.id, "code": item.code, "state": state})

    def _is_here(self, connection: Connection) -> bool:
        return self._bus.presence.connections[CLIENTS].get(connection.ident) is connection

    # --- events and calls

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """A process holds an event, perhaps after a reconnect."""
        if peer.instance is not None and peer.instance.leased is not None:
            self.handed(peer.instance.leased)

    def handed(self, event: Event) -> None:
        """A process holds this event, perhaps after a reconnect. It may not know the decisions that came meanwhile."""
        standing = event.standing
        if standing is None:
            return
        standing.ready = False
        if standing.holds:
            self._clocks.tell_holder(event)
        if standing.unread:
            self._tell_holder(event)

    def left(self, event: Event, *, ended: bool) -> None:
        """If the event has ended: withdraw its items."""
        if event.standing is None or not ended:
            return
        gone = [item for item in self.all.values() if item.event is event]
        for item in gone:
            self._withdraw(item, "the turn that asked has ended")
            if item.within is not None:
                self.scripts.over((event.instance.agent, event.instance.key, item.within))
        if gone:
            self.tell_watchers()

    def over(self, event: Event, call_id: str) -> None:
        """A call has ended, or is given up. If it is a script: what it has asked a person is withdrawn."""
        standing = event.standing
        if standing is None:
            return
        self.scripts.over((event.instance.agent, event.instance.key, call_id))
        mine = [item for item in self.all.values() if item.event is event and item.within == call_id]
        gone = [item for item in mine if item.open or item.state == "approved"]
        for item in gone:
            if not item.open and not item.told:
                standing.unread -= 1
            self._withdraw(item, "the script that asked has ended")
        if gone:
            self.tell_watchers()

    def keeps(self, event: Event, call_id: str) -> bool:
        """Whether a person was asked about this call: it runs only once, whatever its agent says."""
        instance = event.instance
        return (
            event.standing is not None and decisions.approval_subject(instance.agent, instance.key, call_id) in self.all
        )

    def _withdraw(self, item: decisions.Item, why: str) -> None:
        """Nobody needs a decision about this item any more."""
        if item.open:
            self._release_clocks(item, self._bus.now)
            for connection, frame_id in item.operators:
                info = error_payload("E_APPROVAL_NOT_FOUND", why)
                self._bus.error(connection.cls, connection.ident, info, Frame("admin", id=frame_id))
        self.scripts.forget(item)
        del self.all[item.subject]
        self._bus.stage(decisions.item_over(item.subject))

    # --- time, and what an earlier broker knew

    def tick(self, now: float) -> None:
        """Deny items that have waited too long, and forget watchers that are gone."""
        for item in list(self.all.values()):
            if item.state == "waits" and item.expires is not None and item.expires <= now:
                self.decide(item, self.denied(item, "nobody answered in time"))
        for ident, connection in list(self._watchers.items()):
            if not self._is_here(connection):
                del self._watchers[ident]

    def _restore(self, subject: str, record: decisions.OfItem) -> None:
        self._found.append((subject, record))

    def resumed(self, now: float) -> None:
        """Restore the items of an earlier broker from their records, in order."""
        restored, self._found = self._found, []
        for subject, record in restored:
            item = self.all.get(subject)
            if isinstance(record, decisions.ApprovalAsked):
                event = self._bus.mailbox.events.get(record.event_id)
                if event is None or event.finished:
                    self._bus.stage(decisions.item_over(subject))
                else:
                    self._keep(self._restored(record, event))
            elif item is not None and isinstance(record, decisions.ApprovalAnswered):
                item.state, item.decided = record.how, record
            elif item is not None and isinstance(record, decisions.ApprovalStarted):
                item.state, item.restored, item.told = "started", True, True
                item.started_ms = self._bus.ledger.boot_ms(record.at)
        for item in self.all.values():
            standing = item.event.standing = item.event.standing or Standing()
            if item.open:
                self._stop_clocks(item)
            elif not item.told:
                standing.unread += 1
                standing.ready = True

    def _restored(self, record: decisions.ApprovalAsked, event: Event) -> decisions.Item:
        ledger = self._bus.ledger
        expires = None if record.expires is None else ledger.on_clock(record.expires)
        item = _item_of(record, event, ledger.on_clock(record.asked), expires)
        item.state = "waits"
        return item


def _item_of(record: decisions.ApprovalAsked, event: Event, asked: float, expires: float | None) -> decisions.Item:
    """The item of a record."""
    schema = b"" if record.schema is None else record.schema
    return decisions.Item(
        decisions.approval_subject(record.agent, record.key, record.call_id),
        record.call_id,
        code_of(record.agent, record.key, record.call_id),
        event,
        record.kind,
        record.tool,
        record.digest,
        asked,
        expires,
        len(memoryview(record.args)) + len(memoryview(schema)) + len((record.script or "").encode()),
        within=record.within,
    )
