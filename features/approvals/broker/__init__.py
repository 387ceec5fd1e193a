"""Approvals in the broker: which calls wait for a person, what an agent asks a person itself, and what operators ask
and decide. Pure.

Rules.
- The bundle has the rules. The broker enforces them on every `tool.call`, whatever the agent says. It opens the payload
  of a call only if a rule could forbid the call.
- An item is bound to its instance, its event, its callId, and the digest of tool, working directory and arguments. The
  same callId with anything else is refused.
- A call runs once. Later frames of it may only attach to it.
- Only operators decide.

Source: docs/approvals.md, docs/decisions/069.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal

from msgspec import Raw
from msgspec.structs import replace

from goondan.features.approvals import wire
from goondan.features.approvals.broker import decisions
from goondan.features.approvals.broker.decisions import COVERED, ApprovalAnswered, Item, check_answer
from goondan.features.approvals.broker.items import Items
from goondan.features.approvals.wire import (
    MAX_ANSWER_BYTES,
    MAX_ARGS_BYTES,
    MAX_MESSAGE,
    ApprovalDecision,
    ApprovalItem,
)
from goondan.kernel.broker.routing.calls import refuse_call
from goondan.kernel.broker.state.bus import MAX_ID, Bus, Core, join, outer_call, overloaded
from goondan.kernel.broker.state.entities import AGENTS, Call, Connection, Event
from goondan.kernel.broker.state.parts import (
    LIST_BYTES,
    LISTS_BYTES,
    SHORT_BYTES,
    UTF8_BYTES,
    OfCalls,
    Op,
    Part,
    Take,
    Waiting,
    fitting,
)
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload, Frame

#: Why a question that nobody waits for any more counts as denied.
WITHDRAWN: Final = "the call that asked has ended"


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    items = Items(core)
    return (items, GatedCalls(core, items), Operators(core.bus, items))


class GatedCalls(Part, OfCalls):
    """The calls that rules are about."""

    def __init__(self, core: Core, items: Items) -> None:
        self._bus = core.bus
        self._clocks = core.clocks
        self._items = items
        #: Agent -> its policies, for agents that have any.
        self.policies: dict[str, list[wire.Policy]] = {}
        self._aliases: dict[tuple[str, str], dict[str, str]] = {}
        most_bytes = wire.MAX_ARGS_BYTES + UTF8_BYTES * wire.MAX_MESSAGE + SHORT_BYTES
        self.takes = (Take((AGENTS,), "approval.ask", self.ask, most_bytes, confined="no"),)
        self.revise(core.bus.plan)

    def revise(self, plan: KernelPlan) -> None:
        """Use the rules of this plan's agents from now on."""
        agents = plan.agents
        self.policies = {name: found for name, spec in agents.items() if (found := wire.policies_of(spec.parts))}
        self._aliases = {
            (name, item.name): item.aliases for name in self.policies for item in agents[name].registry if item.aliases
        }

    def applies(self) -> bool:
        """See Part."""
        return bool(self.policies or self._items.all)

    # --- calls of a tool host

    def admits(self, connection: Connection, event: Event, frame: Frame, place: Workdir, now: float) -> bool:
        """Whether this `tool.call` goes on to a tool host. Otherwise it is answered here, now or later.

        Raises GoondanError for a call that nobody can be asked about.
        """
        instance = event.instance
        if instance.agent not in self.policies and event.standing is None:
            return True
        tool, call_id = frame.tool or "", frame.call_id or ""
        item = self._items.all.get(decisions.approval_subject(instance.agent, instance.key, call_id))
        policies = self.policies.get(instance.agent, [])
        if item is None and not wire.concerns(policies, tool):
            return True
        if not call_id or len(call_id) > MAX_ID:
            raise fail("E_FRAME_INVALID", f"a call needs a callId of 1 to {MAX_ID} characters")
        call = decisions.read_call(frame, self._aliases.get((instance.agent, tool), {}))
        decision = wire.decide(policies, tool, call.args)
        if item is None:
            if decision.action != "allow" and call.args is wire.UNREADABLE:
                most = f"larger than a person is shown ({wire.MAX_ARGS_BYTES} bytes)"
                decision = wire.Decision("deny", f"its arguments, or all calls of its step, are {most}")
            digest = "" if decision.action != "ask" else decisions.digest_of(tool, place.path, call.data)
            wanted = partial(decisions.Wanted, event, call_id, tool, digest, call.data, place.path)
            state = self._asks(connection, frame, event, decision, wanted, now)
            if state is not None and state.state == "run":
                _read_as(frame, call)
                return True
            if state is not None:
                refuse_call(self._bus, connection, frame, _denied(tool, state.reason))
            return False
        refusal = _refusal(item, event, tool, decisions.digest_of(tool, place.path, call.data), decision)
        if refusal is not None:
            refuse_call(self._bus, connection, frame, refusal)
            self._items.mark_told(item)
            return False
        if item.open or item.state == "starting":
            item.asker = connection, frame
            if item.state in ("waits", "deciding"):
                self._items.tell_waits(item)
            return False
        if item.state == "approved":
            self._items.use(item, connection, frame, now)
            return False
        _read_as(frame, call)
        frame.first_sent_ms = item.started_ms
        frame.attach = item.restored or event.work.calls.get(call_id) is not None
        return True

    def _asks(
        self,
        connection: Connection,
        frame: Frame,
        event: Event,
        decision: wire.Decision,
        wanted: Callable[[wire.Decision, decisions.Script | None], decisions.Wanted],
        now: float,
    ) -> wire.ApprovalState | None:
        """What the rules say of a call about which nobody was asked, or what a person has said of others of its script.
        None: the call waits for a person, and is told so when the journal has the item.
        """
        if decision.action == "allow":
            return wire.ApprovalState(state="run")
        if decision.action == "deny":
            return wire.ApprovalState(state="denied", reason=decision.reason or "a rule of the bundle")
        within = frame.within
        script = (
            None
            if within is None
            else decisions.Script(within, decisions.read_script(outer_call(self._bus, event, within).script))
        )
        asked = wanted(decision, script)
        known = None if asked.group is None else self._items.scripts.look(asked.group)
        if known is None:
            self._items.ask_person(asked, now, self._items.always.look(asked)).asker = connection, frame
        elif known.state == "staged":
            known.others.append((connection, frame))
        elif known.open:
            self._items.tell_wait_of(known, connection, frame)
        elif known.state == "denied":
            return wire.ApprovalState(state="denied", reason=None if known.decided is None else known.decided.reason)
        else:
            return wire.ApprovalState(state="run")
        return None

    def opens(self, call: Call, frame: Frame, now: float) -> None:
        """Remember a script: a person is shown it with the calls that it makes."""
        if (
            call.event.instance.agent in self.policies
            and frame.blob is None
            and self._bus.calls.may_make_calls(frame.tool)
        ):
            call.script = bytes(frame.payload)

    # --- calls that run in the agent, and questions

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`approval.ask` from an agent."""
        instance, call_id, tool = connection.instance, frame.call_id or "", frame.tool or ""
        event = None if instance is None else instance.leased
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise fail("E_LEASE_LOST", "to ask a person needs the lease of an event")
        if not 0 < len(call_id) <= MAX_ID or not 0 < len(tool) <= MAX_ID:
            raise fail("E_FRAME_INVALID", f"callId and tool have 1 to {MAX_ID} characters")
        asked, args, data, schema = decisions.read_ask(frame)
        place = instance.workdir.path
        digest = decisions.digest_of(tool, place, encode_value([asked.kind, asked.message, schema, data]))
        item = self._items.all.get(decisions.approval_subject(instance.agent, instance.key, call_id))
        if asked.over:
            self._question_over(item, event)
            self._reply(connection, frame, wire.ApprovalState(state="denied", reason=WITHDRAWN))
        elif item is None:
            policies = self.policies.get(instance.agent, [])
            decision = wire.Decision("ask") if asked.kind == "question" else wire.decide(policies, tool, args)
            wanted = partial(decisions.Wanted, event, call_id, tool, digest, data, place, asked=asked)
            state = self._asks(connection, frame, event, decision, wanted, now)
            if state is not None:
                self._reply(connection, frame, state)
        elif item.event is not event or item.tool != tool or item.digest != digest:
            raise fail("E_APPROVAL_MISMATCH", f"the callId {call_id[:100]!r} was asked about with another content")
        else:
            self._ask_again(connection, frame, item, now)

    def _ask_again(self, connection: Connection, frame: Frame, item: decisions.Item, now: float) -> None:
        """The same `approval.ask` as before: the asker hears what has become of it."""
        if item.open or item.state == "starting":
            item.asker = connection, frame
            self._clocks.tell_call(item.id, "held")
            if item.state in ("waits", "deciding"):
                self._items.tell_waits(item)
        elif item.state == "approved":
            self._items.use(item, connection, frame, now)
        else:
            self._reply(connection, frame, _state_of(item))
            self._items.mark_told(item)

    def _question_over(self, item: decisions.Item | None, event: Event) -> None:
        """Nobody wants the answer to a question any more. One that is decided stays so."""
        if item is not None and item.event is event and item.kind == "question" and item.state == "waits":
            self._items.decide(item, self._items.denied(item, WITHDRAWN))

    def _reply(self, connection: Connection, frame: Frame, state: wire.ApprovalState) -> None:
        self._bus.reply(connection, frame.id, state)


def _read_as(frame: Frame, call: decisions.CallContent) -> None:
    """Let the tool host get exactly the bytes that were checked."""
    if call.payload is not None and call.args is not wire.UNREADABLE:
        frame.payload = to_raw(call.payload)


def _refusal(
    item: decisions.Item, event: Event, tool: str, digest: str, decision: wire.Decision
) -> ErrorPayload | None:
    """Why a call gets an error as its result about which a person was asked; None when it does not."""
    if item.event is not event or item.tool != tool or item.digest != digest:
        return error_payload("E_APPROVAL_MISMATCH", f"{tool}: the call is another one than a person was asked about")
    if item.state == "denied":
        return _denied(tool, None if item.decided is None else item.decided.reason)
    if item.state == "approved" and decision.action == "deny":
        return _denied(tool, decision.reason or "a rule of the bundle")
    return None


def _denied(tool: str, reason: str | None) -> ErrorPayload:
    return error_payload(wire.DENIED, f"{tool}: the call was not approved: {reason or 'a person said no'}")


def _state_of(item: decisions.Item) -> wire.ApprovalState:
    """What is said again of a decided item."""
    decided = item.decided
    if item.state == "denied":
        if decided is None:
            return wire.ApprovalState(state="denied")
        return wire.ApprovalState(state="denied", reason=decided.reason, expired=decided.uid is None)
    if item.state == "answered":
        return wire.ApprovalState(state="answered", answer=None if decided is None else decided.answer)
    return wire.ApprovalState(state="run", again=True)


#: Items in one answer; bytes of the arguments, and of the schema, that it has of each item.
MAX_LISTED: Final = 500
MAX_LISTED_ARGS: Final = 2 << 10
#: The user of an operator's token that names no user, because somebody who has the kernel's secret made it by hand.
UNKNOWN_USER: Final = -1
#: Items and tools that are named of a turn that waits for a person.
MAX_SHOWN: Final = 20
#: Characters of the name of a tool in such words.
MAX_NAME: Final = 80


class Operators(Part):
    """Answers `approve.*`."""

    def __init__(self, bus: Bus, items: Items) -> None:
        self._bus = bus
        self._items = items
        self.ops = (
            Op("approve.list", self.listed),
            Op("approve.show", self.show),
            Op("approve.watch", self.watch),
            Op("approve.answer", self.answer, most_bytes=MAX_ANSWER_BYTES + UTF8_BYTES * MAX_MESSAGE + LISTS_BYTES),
        )

    def listed(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.list`: the waiting items, the oldest first. With `all`, also decided items whose turn goes on.
        With `answered`: the history of decisions. With `always`: the lasting yeses. `blocked` has the roots that only a
        person can bring further.
        """
        if asked.get("always") is True:
            self._bus.reply(connection, frame.id, self._items.always.listed())
            return
        if asked.get("answered") is True:
            self._bus.reply(connection, frame.id, self._items.history.listed())
            return
        every = [item for item in self._items.all.values() if item.state != "staged"]
        items = every if asked.get("all") else [item for item in every if item.open]
        listed = fitting(self._shown(item, MAX_LISTED_ARGS) for item in items[:MAX_LISTED])
        blocked = fitting(self._blocked(), LIST_BYTES // 8)
        body = {"items": listed, "more": len(items) - len(listed), "blocked": blocked}
        self._bus.reply(connection, frame.id, body)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """The events whose calls wait for a person, and how many messages wait behind them."""
        waiting: dict[Event, list[Item]] = {}
        for item in self._items.all.values():
            if item.open:
                waiting.setdefault(item.event, []).append(item)
        for event, items in waiting.items():
            codes = [item.code for item in items][:MAX_SHOWN]
            tools = sorted({item.tool for item in items})[:MAX_SHOWN]
            behind = sum(not other.ending and other is not event for other in event.instance.queue)
            more = {
                "items": codes,
                "tools": tools,
                "calls": len(items),
                "messages": behind,
                "text": _wait_text(codes, tools, len(items), behind),
                "live": True,
            }
            yield Waiting("approval", event, min(item.asked for item in items), more)

    def _blocked(self) -> list[str]:
        """Roots that only a person can bring further: they have waiting items, and no other work goes on."""
        roots = {item.event.root for item in self._items.all.values() if item.open}
        for event in self._bus.mailbox.events.values() if roots else ():
            if event.finished or event.root not in roots or event.waits:
                continue
            if event.state != "leased" or not event.held or event.work.open_calls:
                roots.discard(event.root)
        return sorted(roots)

    def show(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.show`: one item with all of its arguments, or a lasting yes."""
        always, name = self._items.always, str(asked.get("id"))
        yes = always.all.get(name)
        if yes is not None and any(name in (item.id, item.code) for item in self._items.all.values()):
            raise fail("E_USAGE", f"a call and a lasting yes are both named {name}")  # agents choose ids of calls
        found = self._shown(self._find(name), MAX_ARGS_BYTES) if yes is None else always.shown(yes)
        self._bus.reply(connection, frame.id, found)

    def watch(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.watch`: from now on this connection gets `approval.news` whenever the list changes."""
        self._items.watch(connection)
        self._bus.reply(connection, frame.id, {})

    def answer(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.answer`: take a decision. It is answered when the journal has it."""
        decision = from_raw(frame.payload, ApprovalDecision)
        uid = UNKNOWN_USER if connection.claims.uid is None else connection.claims.uid
        if decision.decision == "revoke":
            self._revoke(connection, frame, decision.id, uid)
            return
        item = self._find(decision.id)
        decided = self._read(decision, item, uid)
        yes = None if item.state == "staged" else self._lasting(decision, item, decided)
        decided = decided if yes is None else replace(decided, always=yes.code)
        if item.state == "deciding" and item.deciding is not None and _agree(item.deciding, decided):
            join(item.operators, connection, frame, "item")
        elif item.decided is not None and _agree(item.decided, decided):
            self._items.tell_decision(connection, frame.id, item)
        elif item.state == "staged":
            raise overloaded("it is just being asked")
        elif item.state != "waits":
            how = (item.decided or item.deciding or decided).how
            raise fail("E_APPROVAL_DECIDED", f"{item.code} was {how} already")
        else:
            item.operators.append((connection, frame.id))
            self._items.decide(item, decided, *(() if yes is None else self._items.always.keep(yes)))

    def _lasting(self, decision: ApprovalDecision, item: Item, decided: ApprovalAnswered) -> wire.ApprovalAlways | None:
        """The lasting yes that a decision is; None for one about this call alone."""
        if decision.always is None:
            return None
        record = self._items.record_of(item)
        if decided.how != "approved" or decided.uid is None or record is None:
            raise fail("E_USAGE", "only a yes to a call can be a lasting one")
        return self._items.always.made(item, record, decision.always, decided.uid, decided.at_ms)

    def _revoke(self, connection: Connection, frame: Frame, code: str, uid: int) -> None:
        """Take a lasting yes back. It is answered when the journal has it."""
        told = {"id": code, "code": code, "state": "revoked"}
        yes = self._items.always.take_back(code, lambda kept: self._bus.reply(connection, frame.id, told))
        self._bus.notices.append(f"approval: always ({code}) revoked by uid {uid}: {yes.agent} {yes.tool}")
        self._items.tell_watchers()

    def _read(self, decision: ApprovalDecision, item: Item, uid: int) -> ApprovalAnswered:
        reason = None if decision.reason is None else decision.reason[:MAX_MESSAGE]
        decided = ApprovalAnswered(item.event.id, "denied", uid, self._items.wall_ms(), reason)
        if decision.decision == "no":
            return decided
        if (decision.decision == "answer") is not (item.kind == "question"):
            what = "a question: answer it" if item.kind == "question" else "no question: say yes or no"
            raise fail("E_USAGE", f"{item.code} is {what}", suggestion=f"See gdn approve show {item.code}.")
        if decision.decision == "yes":
            return replace(decided, how="approved")
        if decision.answer is None or len(memoryview(decision.answer)) > MAX_ANSWER_BYTES:
            raise fail("E_USAGE", f"an answer is a JSON value of at most {MAX_ANSWER_BYTES} bytes")
        record = self._items.record_of(item)
        if record is not None and record.schema is not None:
            check_answer(from_raw(record.schema, object), from_raw(decision.answer, object))
        return replace(decided, how="answered", answer=Raw(bytes(decision.answer)))

    def _find(self, name: Any) -> Item:
        """Find an item by id or code. Raises GoondanError E_APPROVAL_NOT_FOUND."""
        found = [item for item in self._items.all.values() if name in (item.id, item.code)]
        if not found:
            raise fail("E_APPROVAL_NOT_FOUND", f"nothing waits under {str(name)[:100]!r}")
        if len(found) > 1:
            codes = ", ".join(item.code for item in found[:5])
            raise fail("E_USAGE", f"several items have the id {str(name)[:100]!r}: {codes}", suggestion="Name a code.")
        return found[0]

    def _shown(self, item: Item, most: int) -> ApprovalItem:
        record = self._items.record_of(item)
        event, instance, decided = item.event, item.event.instance, item.decided
        contents = self._bus.mailbox.contents
        contents.recall(event)  # of many that wait, what they say is in the journal only
        chain = list(event.content.chain or [])
        if event.state == "accepted":
            contents.rests(event)
        size = 0 if record is None else len(memoryview(record.args))
        schema = None if record is None else record.schema
        if schema is not None and len(memoryview(schema)) > most:
            schema = None
        return ApprovalItem(
            id=item.id,
            code=item.code,
            kind=item.kind,
            agent=instance.agent,
            instance_key=instance.key,
            event_id=event.id,
            tool=item.tool,
            digest=item.digest,
            asked_ms=self._items.wall_ms(item.asked),
            state=_shown_state(item),
            root_event=event.root,
            waited_for_by=chain,
            workdir=None if record is None else record.workdir,
            args=None if record is None or size > most else from_raw(record.args, object),
            args_bytes=size,
            message=None if record is None else record.message,
            schema=None if schema is None else from_raw(schema, object),
            reason=None if record is None else record.reason,
            expires_ms=None if item.expires is None else self._items.wall_ms(item.expires),
            uid=None if decided is None else decided.uid,
            decided_ms=None if decided is None else decided.at_ms,
            decided_reason=None if decided is None else decided.reason,
            script=None if record is None or len(record.script or "") > most else record.script,
            covers=0 if item.group is None else COVERED,
            always="" if decided is None else decided.always,
        )


def _wait_text(codes: Sequence[str], tools: Sequence[str], number: int, behind: int) -> str:
    """What a turn waits for, in words."""
    calls = "1 call" if number == 1 else f"{number} calls"
    names = ", ".join(tool[:MAX_NAME] for tool in tools)
    messages = "" if not behind else "; 1 message behind it" if behind == 1 else f"; {behind} messages behind it"
    return f"waits for a person to approve {calls} of {names} (gdn approve: {', '.join(codes)}){messages}"


def _shown_state(item: Item) -> Literal["waits", "approved", "denied", "answered", "started"]:
    match item.state:
        case "staged" | "waits" | "deciding":
            return "waits"
        case "starting":
            return "started"
        case state:
            return state


def _agree(one: ApprovalAnswered, other: ApprovalAnswered) -> bool:
    return (one.how, one.answer, one.always) == (other.how, other.answer, other.always)
