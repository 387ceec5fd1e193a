"""Calls that need a person's approval, and questions to a person. Pure.

Rules.
- The bundle has the rules. The broker enforces them on every `tool.call`, whatever the agent says. It opens the payload
  of a call only if a rule could forbid the call.
- An item is bound to its instance, its event, its callId, and the digest of tool, working directory and arguments. The
  same callId with anything else is refused.
- An item is journaled before anybody is told of it. So is each decision, and so is its single use: the call goes to a
  tool host when the journal has the use. Later frames of this call may only attach to it.
- Only operators decide (operators.py). An expired item counts as denied.
- An event whose calls wait is handed over again when one of its items was decided.
- An item ends with its event.

Source: docs/approvals.md, docs/decisions/069.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal

from msgspec import Raw

from goondan.kernel.broker.acting import open_script
from goondan.kernel.broker.approvals.history import History
from goondan.kernel.broker.approvals.items import (
    ApprovalAnswered,
    ApprovalAsked,
    ApprovalRemembered,
    ApprovalStarted,
    CallContent,
    Decided,
    Group,
    Item,
    OfItem,
    approval_subject,
    decode,
    digest_of,
    item_over,
    item_written,
    read_ask,
    read_call,
)
from goondan.kernel.broker.approvals.news import OperatorNews
from goondan.kernel.broker.approvals.scripts import Decisions, Script, read_script
from goondan.kernel.broker.bus import MAX_ID
from goondan.kernel.broker.calls import Call
from goondan.kernel.broker.entities import AGENTS, Connection, Event, Instance
from goondan.kernel.broker.parts import SHORT_BYTES, UTF8_BYTES, Core, OfCalls, OfEvents, Part, Record, Take
from goondan.kernel.broker.refused_calls import refuse_call
from goondan.kernel.broker.shares import Pool, kept_of
from goondan.kernel.broker.standing import Standing
from goondan.kernel.broker.workdirs import Workdir
from goondan.schemas.approval_rules import MAX_EXPIRY_S, UNREADABLE, Decision, Policy, concerns, decide
from goondan.schemas.approvals import (
    DENIED,
    MAX_ARGS_BYTES,
    MAX_MESSAGE,
    WAITS,
    ApprovalAsk,
    ApprovalState,
    code_of,
)
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello
from goondan.schemas.wire.tool_asks import CODE_TOOL

#: The number of waiting items, and their bytes. They are shared by session and root, so that one turn cannot flood a
#: person with items.
MAX_ITEMS: Final = 4096
MAX_ITEM_BYTES: Final = 64 << 20
#: The same for one event, with its decided items: they stay in the journal until the event ends.
MAX_OF_EVENT: Final = 1024
MAX_BYTES_OF_EVENT: Final = 32 << 20
#: Why a question that nobody waits for any more counts as denied.
WITHDRAWN: Final = "the call that asked has ended"


class Approvals(Part, OfEvents, OfCalls):
    """All items."""

    def __init__(self, core: Core, news: OperatorNews) -> None:
        self._core = core
        self._bus = bus = core.bus
        self._items = bus.approvals
        self._clocks = core.clocks
        self._pool = Pool(MAX_ITEMS, kept_of(MAX_ITEMS))
        self._bytes = Pool(MAX_ITEM_BYTES, kept_of(MAX_ITEM_BYTES))
        self._news = news
        #: Agent -> its policy, for agents that have one.
        self.policies: dict[str, list[Policy]] = {}
        self.history = History(bus)
        self._scripts = Decisions()
        self._aliases: dict[tuple[str, str], dict[str, str]] = {}
        self.takes = (
            Take(
                (AGENTS,),
                "approval.ask",
                self.ask,
                MAX_ARGS_BYTES + UTF8_BYTES * MAX_MESSAGE + SHORT_BYTES,
                confined="no",
            ),
        )
        #: Records of an earlier broker, until the whole journal was read.
        self._found: list[tuple[str, OfItem]] = []
        self.records = (
            Record(ApprovalAsked, self._restore),
            Record(ApprovalAnswered, self._restore),
            Record(ApprovalStarted, self._restore),
            Record(ApprovalRemembered, self.history.restore),
        )
        self.revise(bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the rules of this plan's agents from now on."""
        agents = plan.agents
        self.policies = {name: spec.approvals for name, spec in agents.items() if spec.approvals}
        self._aliases = {
            (name, item.name): item.aliases for name in self.policies for item in agents[name].registry if item.aliases
        }

    # --- calls of a tool host

    def admits(self, connection: Connection, event: Event, frame: Frame, place: Workdir, now: float) -> bool:
        """Whether this `tool.call` goes on to a tool host. Otherwise it is answered here, now or later.

        Raises GoondanError for a call that nobody can be asked about.
        """
        instance, tool, call_id = event.instance, frame.tool or "", frame.call_id or ""
        if instance.agent not in self.policies and event.standing is None:
            return True
        subject = approval_subject(instance.agent, instance.key, call_id)
        item = self._items.get(subject)
        policies = self.policies.get(instance.agent, [])
        if item is None and not concerns(policies, tool):
            return True
        if not call_id or len(call_id) > MAX_ID:
            raise fail("E_FRAME_INVALID", f"a call needs a callId of 1 to {MAX_ID} characters")
        call = read_call(frame, self._aliases.get((instance.agent, tool), {}))
        decision = decide(policies, tool, call.args)
        if item is None and decision.action == "allow":
            _read_as(frame, call)
            return True
        digest = digest_of(tool, place.path, call.data)
        if item is None and decision.action == "ask" and call.args is not UNREADABLE:
            return self._admit_new(connection, event, frame, call, place.path, digest, decision, now)
        refusal = _refusal(item, event, tool, digest, call, decision)
        if refusal is not None or item is None:
            refuse_call(self._bus, connection, frame, refusal or _denied(tool, "a rule of the bundle"))
            self._heard(item)
            return False
        if item.open:
            item.asker = connection, frame
            if item.state != "staged":
                self._tell_waits(item)
            return False
        if item.state == "approved":
            self._start(item, connection, frame, now)
            return False
        if item.state == "starting":
            item.asker = connection, frame
            return False
        _read_as(frame, call)
        frame.first_sent_ms = item.started_ms
        frame.attach = item.restored or event.work.calls.get(call_id) is not None
        return True

    def _admit_new(
        self,
        connection: Connection,
        event: Event,
        frame: Frame,
        call: CallContent,
        workdir: str,
        digest: str,
        decision: Decision,
        now: float,
    ) -> bool:
        """Whether a call that a rule wants a person to decide goes on. Nobody was asked about it so far."""
        tool = frame.tool or ""
        script = self._script_of(event, frame.within)
        group = _group(event, frame.within, script, tool, decision)
        known = self._join(group, connection, frame)
        if known == "covered":
            _read_as(frame, call)
        elif known == "denied":
            refuse_call(self._bus, connection, frame, _denied(tool, self._scripts.reason(group)))
        elif known == "ask":
            item = self._ask(event, tool, frame.call_id or "", digest, call.data, workdir, decision, now, None, script)
            item.asker = connection, frame
        return known == "covered"

    def opens(self, call: Call, frame: Frame, now: float) -> None:
        """Remember a script: a person is shown it with the calls that it makes."""
        if frame.tool == CODE_TOOL and frame.blob is None and call.event.instance.agent in self.policies:
            call.script = bytes(frame.payload)

    def keeps(self, event: Event, call_id: str) -> bool:
        """Whether a person was asked about this call: it runs only once, whatever its agent says."""
        instance = event.instance
        return event.standing is not None and approval_subject(instance.agent, instance.key, call_id) in self._items

    # --- calls that run in the agent, and questions

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`approval.ask` from an agent."""
        instance, call_id, tool = connection.instance, frame.call_id or "", frame.tool or ""
        event = None if instance is None else instance.leased
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise fail("E_LEASE_LOST", "to ask a person needs the lease of an event")
        if not 0 < len(call_id) <= MAX_ID or not 0 < len(tool) <= MAX_ID:
            raise fail("E_FRAME_INVALID", f"callId and tool have 1 to {MAX_ID} characters")
        asked, args, data, schema = read_ask(frame)
        place = instance.workdir.path
        digest = digest_of(tool, place, encode_value([asked.kind, asked.message, schema, data]))
        subject = approval_subject(instance.agent, instance.key, call_id)
        item = self._items.get(subject)
        if asked.over:
            self._question_over(item, event)
            self._reply(connection, frame.id, ApprovalState(state="denied", reason=WITHDRAWN))
            return
        if item is None:
            decision = Decision("ask") if asked.kind == "question" else decide(self._policies_of(instance), tool, args)
            if decision.action == "allow":
                self._reply(connection, frame.id, ApprovalState(state="run"))
            elif decision.action == "deny":
                reason = decision.reason or "a rule of the bundle"
                self._reply(connection, frame.id, ApprovalState(state="denied", reason=reason))
            else:
                self._ask_about(connection, frame, event, digest, data, decision, now, asked)
            return
        if item.event is not event or item.tool != tool or item.digest != digest:
            raise fail("E_APPROVAL_MISMATCH", f"the callId {call_id[:100]!r} was asked about with another content")
        if item.open or item.state == "starting":
            item.asker = connection, frame
            self._clocks.tell_call(item.id, "held")
            if item.state in ("waits", "deciding"):
                self._tell_waits(item)
        elif item.state == "approved":
            self._start(item, connection, frame, now)
        else:
            self._reply(connection, frame.id, _state_of(item, again=True))
            self._heard(item)

    def _ask_about(
        self,
        connection: Connection,
        frame: Frame,
        event: Event,
        digest: str,
        data: bytes,
        decision: Decision,
        now: float,
        asked: ApprovalAsk,
    ) -> None:
        """A person decides about this `approval.ask`, or has decided about others of its script."""
        tool, place = frame.tool or "", event.instance.workdir.path
        script = self._script_of(event, frame.within)
        group = None if asked.kind == "question" else _group(event, frame.within, script, tool, decision)
        match self._join(group, connection, frame):
            case "covered":
                self._reply(connection, frame.id, ApprovalState(state="run"))
            case "denied":
                self._reply(connection, frame.id, ApprovalState(state="denied", reason=self._scripts.reason(group)))
            case "ask":
                item = self._ask(event, tool, frame.call_id or "", digest, data, place, decision, now, asked, script)
                item.asker = connection, frame

    # --- calls of scripts

    def _script_of(self, event: Event, within: str | None) -> Script | None:
        """The script that makes a call; None for a call of the model."""
        return None if within is None else Script(within, read_script(open_script(self._bus, event, within).script))

    def _join(
        self, group: Group | None, connection: Connection, frame: Frame
    ) -> Literal["covered", "denied", "waits", "ask"]:
        """What decisions about other calls of its script mean for a call. `waits`: it is told so now, or soon."""
        known = None if group is None else self._scripts.look(group)
        if known is None:
            return "ask"
        if not isinstance(known, Item):
            return known
        if known.state == "staged":
            known.others.append((connection, frame))
        else:
            self._tell(known, connection, frame)
        return "waits"

    def over(self, event: Event, call_id: str) -> None:
        """A call has ended, or is given up. If it is a script: what it has asked a person is withdrawn."""
        standing = event.standing
        if standing is None:
            return
        self._scripts.over((event.instance.agent, event.instance.key, call_id))
        mine = [item for item in self._items.values() if item.event is event and item.within == call_id]
        gone = [item for item in mine if item.open or item.state == "approved"]
        for item in gone:
            if not item.open and not item.told:
                standing.unread -= 1
            self._withdraw(item, "the script that asked has ended")
        if gone:
            self._news.changed()

    def _question_over(self, item: Item | None, event: Event) -> None:
        """Nobody wants the answer to a question any more. One that is decided stays so."""
        if item is not None and item.event is event and item.kind == "question" and item.state == "waits":
            self.decide(item, Decided("denied", None, self.wall_ms(), WITHDRAWN))

    def _policies_of(self, instance: Instance) -> list[Policy]:
        return self.policies.get(instance.agent, [])

    # --- items

    def _ask(
        self,
        event: Event,
        tool: str,
        call_id: str,
        digest: str,
        args: bytes,
        workdir: str,
        decision: Decision,
        now: float,
        asked: ApprovalAsk | None = None,
        script: Script | None = None,
    ) -> Item:
        """A new item. Raises GoondanError E_TOOL_LIMIT when too many wait."""
        instance = event.instance
        schema = None if asked is None or asked.schema is None else bytes(asked.schema)
        text = None if script is None else script.text
        size = len(args) + len(schema or b"") + len((text or "").encode())
        standing = event.standing = event.standing or Standing()
        if standing.asked >= MAX_OF_EVENT or standing.asked_bytes + size > MAX_BYTES_OF_EVENT:
            message = f"this turn has asked people about {standing.asked} calls, {standing.asked_bytes} bytes"
            raise fail("E_TOOL_LIMIT", message, suggestion="End the turn, and go on with another message.")
        for pool, amount in ((self._pool, 1), (self._bytes, size)):
            if pool.shortage(event.session, event.root, amount, operator=event.by_operator) is not None:
                raise fail("E_TOOL_LIMIT", "too many calls of this work wait for a person", suggestion="Wait for some.")
        expires_s = decision.expires_s if asked is None or asked.expires_s is None else asked.expires_s
        item = Item(
            approval_subject(instance.agent, instance.key, call_id),
            call_id,
            code_of(instance.agent, instance.key, call_id),
            event,
            "approval" if asked is None else asked.kind,
            tool,
            digest,
            now,
            now + min(max(1.0, expires_s), MAX_EXPIRY_S),
            size,
        )
        if script is not None:
            item.within = script.call_id
            item.group = None if item.kind == "question" else _group(event, item.within, script, tool, decision)
        record = ApprovalAsked(
            agent=instance.agent,
            key=instance.key,
            event_id=event.id,
            call_id=call_id,
            kind=item.kind,
            tool=tool,
            digest=digest,
            args=Raw(args),
            workdir=workdir,
            asked=self._bus.ledger.moment(now),
            expires=None if item.expires is None else self._bus.ledger.moment(item.expires),
            message=None if asked is None else asked.message,
            schema=None if schema is None else Raw(schema),
            reason=decision.reason,
            within=item.within,
            rule=decision.rule,
            script=text,
        )
        self._keep(item)
        self._hold(item)
        self._scripts.asked(item)
        self._stage(item, record, refusable=True)
        self._bus.counters["approvals_asked"] += 1
        return item

    def _keep(self, item: Item) -> None:
        """Add an item. It stays until its event ends."""
        self._items[item.subject] = item
        standing = item.event.standing = item.event.standing or Standing()
        standing.asked += 1
        standing.asked_bytes += item.size

    def _hold(self, item: Item) -> None:
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
        standing.of_scripts += item.within is not None

    def _let_go(self, item: Item, now: float) -> None:
        """The item does not wait any more."""
        event = item.event
        self._pool.give(event.session, event.root, 1)
        self._bytes.give(event.session, event.root, item.size)
        if event.standing is not None:
            event.standing.items -= 1
            event.standing.of_scripts -= item.within is not None
        chain, item.chain = item.chain, []
        self._clocks.release(chain, now)
        self._clocks.tell_call(item.id, "runs")
        self._release_time(item)

    def _release_time(self, item: Item) -> None:
        """Let the time of other parts go on, if it stood still for this item."""
        if item.holds_time:
            item.holds_time = False
            self._core.held(item.event, None)

    def _start(self, item: Item, connection: Connection, frame: Frame, now: float) -> None:
        """Use an approval: the call starts when the journal has the use."""
        item.state = "starting"
        item.asker = connection, frame
        item.started_ms = int(now * 1000)
        self._heard(item)
        self._stage(item, ApprovalStarted(item.event.id, self._bus.ledger.moment(now)))

    def _heard(self, item: Item | None) -> None:
        """The turn of the item knows the decision."""
        if item is not None and not item.open and not item.told:
            item.told = True
            if item.event.standing is not None:
                item.event.standing.unread -= 1

    def _stage(self, item: Item, record: OfItem, *, refusable: bool = False) -> None:
        write = item_written(item.subject, record, refusable=refusable)
        self._bus.stage(write, partial(self._journaled, item))

    # --- the journal's word

    def _journaled(self, item: Item, kept: bool) -> None:
        """The journal has the last staged change of this item, or no room for it."""
        now = self._bus.now
        if self._items.get(item.subject) is not item:
            return  # its event has ended meanwhile
        if not kept:
            self._refuse(item)
        elif item.state == "staged":
            item.state = "waits"
            self._tell_waits(item)
            self._news.changed()
        elif item.state == "deciding" and item.deciding is not None:
            self._decided(item, item.deciding, now)
        elif item.state == "starting":
            item.state = "started"
            self._go_on(item)

    def _refuse(self, item: Item) -> None:
        """The disk has no room for a new item."""
        self._let_go(item, self._bus.now)
        self._scripts.forget(item)
        del self._items[item.subject]
        if item.event.standing is not None:
            item.event.standing.asked -= 1
            item.event.standing.asked_bytes -= item.size
        for connection, frame in [*([] if item.asker is None else [item.asker]), *item.others]:
            info = error_payload("E_DISK_FULL", "the disk of the state directory is full; nobody could be asked")
            self._bus.error(connection.cls, connection.ident, info, frame)

    def _decided(self, item: Item, decided: Decided, now: float) -> None:
        event = item.event
        item.state, item.decided, item.deciding = decided.how, decided, None
        self._scripts.decided(item)
        by = "the kernel" if decided.uid is None else f"uid {decided.uid}"
        where = f"{event.instance.address} {item.tool} {item.id} sha256:{item.digest}"
        self._bus.audit.append(f"approval {item.code}: {decided.how} by {by}: {where}")
        self._let_go(item, now)
        if event.standing is not None:
            event.standing.unread += 1
            event.standing.ready = True
        for connection, frame_id in item.operators:
            self._news.tell_decision(connection, frame_id, item)
        item.operators = []
        self.tell_holder(event)
        self._news.changed()
        self._bus.due[event.instance] = None

    def _go_on(self, item: Item) -> None:
        """The use is journaled: the call goes on, if its process still waits."""
        asker, item.asker = item.asker, None
        if asker is None:
            return
        connection, frame = asker
        if frame.type == "approval.ask":
            self._reply(connection, frame.id, ApprovalState(state="run"))
        else:
            self._core.call_goes_on(connection, frame)

    # --- events

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
            self.tell_holder(event)

    def tell_holder(self, event: Event) -> None:
        """Tell the process of the turn about decided calls that it does not know of."""
        instance = event.instance
        if instance.leased is not event or instance.conn is None:
            return
        calls = [i.id for i in self._items.values() if i.event is event and not i.open and not i.told]
        if calls:
            self._bus.send(instance.conn, Frame("approval.news", event_id=event.id, epoch=instance.epoch, calls=calls))

    def left(self, event: Event, *, ended: bool) -> None:
        """If the event has ended: withdraw its items."""
        if event.standing is None or not ended:
            return
        gone = [item for item in self._items.values() if item.event is event]
        for item in gone:
            self._withdraw(item, "the turn that asked has ended")
            if item.within is not None:
                self._scripts.over((event.instance.agent, event.instance.key, item.within))
        if gone:
            self._news.changed()

    def _withdraw(self, item: Item, why: str) -> None:
        """Nobody needs a decision about this item any more."""
        if item.open:
            self._let_go(item, self._bus.now)
            for connection, frame_id in item.operators:
                info = error_payload("E_APPROVAL_NOT_FOUND", why)
                self._bus.error(connection.cls, connection.ident, info, Frame("admin", id=frame_id))
        self._scripts.forget(item)
        del self._items[item.subject]
        self._bus.stage(item_over(item.subject))

    def decide(self, item: Item, decided: Decided) -> None:
        """Have the journal write a decision. It counts when the journal has it."""
        item.state, item.deciding = "deciding", decided
        self.history.add(item, decided, self.record_of(item), self.wall_ms(item.asked))
        self._stage(
            item,
            ApprovalAnswered(item.event.id, decided.how, decided.uid, decided.at_ms, decided.reason, decided.answer),
        )
        self._release_time(item)  # into the journal together: a crash loses no time that stood still

    def record_of(self, item: Item) -> ApprovalAsked | None:
        """The journal's record of a waiting item."""
        found = (decode(data) for data in self._bus.archive.find_records(item.subject))
        return next((record for record in found if isinstance(record, ApprovalAsked)), None)

    # --- time, and what an earlier broker knew

    def tick(self, now: float) -> None:
        """Deny items that have waited too long."""
        for item in list(self._items.values()):
            if item.state == "waits" and item.expires is not None and item.expires <= now:
                self.decide(item, Decided("denied", None, self.wall_ms(), "nobody answered in time"))

    def _restore(self, subject: str, record: OfItem) -> None:
        self._found.append((subject, record))

    def resumed(self, now: float) -> None:
        """Restore the items of an earlier broker from their records, in order."""
        restored, self._found = self._found, []
        for subject, record in restored:
            item = self._items.get(subject)
            if isinstance(record, ApprovalAsked):
                event = self._bus.mailbox.events.get(record.event_id)
                if event is None or event.finished:
                    self._bus.stage(item_over(subject))
                else:
                    self._keep(self._restored(subject, record, event))
            elif item is not None and isinstance(record, ApprovalAnswered):
                item.state = record.how
                item.decided = Decided(record.how, record.uid, record.at_ms, record.reason, record.answer)
            elif item is not None and isinstance(record, ApprovalStarted):
                item.state, item.restored, item.told = "started", True, True
                item.started_ms = self._bus.ledger.boot_ms(record.at)
        for item in self._items.values():
            standing = item.event.standing = item.event.standing or Standing()
            if item.open:
                self._hold(item)
            elif not item.told:
                standing.unread += 1
                standing.ready = True

    def _restored(self, subject: str, record: ApprovalAsked, event: Event) -> Item:
        ledger = self._bus.ledger
        return Item(
            subject,
            record.call_id,
            code_of(record.agent, record.key, record.call_id),
            event,
            record.kind,
            record.tool,
            record.digest,
            ledger.on_clock(record.asked),
            None if record.expires is None else ledger.on_clock(record.expires),
            len(memoryview(record.args)) + len((record.script or "").encode()),
            state="waits",
            within=record.within,
        )

    # --- words

    def _tell_waits(self, item: Item) -> None:
        """Tell the asking process that a person was asked."""
        told, item.others = item.others, []
        asker, item.asker = item.asker, None
        for connection, frame in [*([] if asker is None else [asker]), *told]:
            self._tell(item, connection, frame)

    def _tell(self, item: Item, connection: Connection, frame: Frame) -> None:
        """Tell a process that a call of it waits for the decision about this item."""
        if frame.type == "approval.ask":
            self._reply(connection, frame.id, ApprovalState(state="waits"))
            return
        info = error_payload(WAITS, f"{item.tool}: a person has to approve this call ({item.code})")
        self._bus.error(connection.cls, connection.ident, info, frame)

    def _reply(self, connection: Connection, frame_id: str, body: Any) -> None:
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id, payload=to_raw(body)))

    def wall_ms(self, moment: float | None = None) -> int:
        """A moment of the broker's clock, now by default, as milliseconds since 1970."""
        return int((self._bus.booted_at + (self._bus.now if moment is None else moment)) * 1000)


def _read_as(frame: Frame, call: CallContent) -> None:
    """Let the tool host get exactly the bytes that were checked."""
    if call.payload is not None and call.args is not UNREADABLE:
        frame.payload = to_raw(call.payload)


def _refusal(
    item: Item | None, event: Event, tool: str, digest: str, call: CallContent, decision: Decision
) -> ErrorPayload | None:
    """Why a call gets an error as its result; None when it does not."""
    if item is None:
        if call.args is UNREADABLE:
            return _denied(tool, f"its arguments are larger than a person is shown ({MAX_ARGS_BYTES} bytes)")
        return _denied(tool, decision.reason or "a rule of the bundle")
    if item.event is not event or item.tool != tool or item.digest != digest:
        message = f"{tool}: the call is another one than a person was asked about"
        return error_payload("E_APPROVAL_MISMATCH", message)
    if item.state == "denied":
        return _denied(tool, None if item.decided is None else item.decided.reason)
    if item.state == "approved" and decision.action == "deny":
        return _denied(tool, decision.reason or "a rule of the bundle")
    return None


def _group(event: Event, within: str | None, script: Script | None, tool: str, decision: Decision) -> Group | None:
    """The calls that a decision about this call is for; None when it is for this call alone."""
    if within is None or script is None or script.text is None:
        return None
    return Group((event.instance.agent, event.instance.key, within), tool, decision.rule)


def _denied(tool: str, reason: str | None) -> ErrorPayload:
    return error_payload(DENIED, f"{tool}: the call was not approved: {reason or 'a person said no'}")


def _state_of(item: Item, *, again: bool) -> ApprovalState:
    decided = item.decided
    if item.state == "denied":
        if decided is None:
            return ApprovalState(state="denied")
        return ApprovalState(state="denied", reason=decided.reason, expired=decided.uid is None)
    if item.state == "answered":
        return ApprovalState(state="answered", answer=None if decided is None else decided.answer)
    return ApprovalState(state="run", again=again)
