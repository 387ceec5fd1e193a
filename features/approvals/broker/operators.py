"""Answers the questions of operators about waiting items, and takes their decisions. Pure.

Source: docs/approvals.md, docs/decisions/069.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from msgspec import Raw
from msgspec.structs import replace

from goondan.features.approvals.broker.decisions import COVERED, ApprovalAnswered, Item, check_answer
from goondan.features.approvals.broker.items import Items
from goondan.features.approvals.wire import (
    MAX_ANSWER_BYTES,
    MAX_ARGS_BYTES,
    MAX_MESSAGE,
    ApprovalDecision,
    ApprovalItem,
)
from goondan.kernel.broker.state.bus import Bus, join, overloaded
from goondan.kernel.broker.state.entities import Connection, Event
from goondan.kernel.broker.state.parts import LIST_BYTES, LISTS_BYTES, UTF8_BYTES, Op, Part, Waiting, fitting
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame

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
        With `answered`: the history of decisions. `blocked` has the roots that only a person can bring further.
        """
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
        """`approve.show`: one item with all of its arguments."""
        self._bus.reply(connection, frame.id, self._shown(self._find(asked.get("id")), MAX_ARGS_BYTES))

    def watch(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.watch`: from now on this connection gets `approval.news` whenever the list changes."""
        self._items.watch(connection)
        self._bus.reply(connection, frame.id, {})

    def answer(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`approve.answer`: take a decision. It is answered when the journal has it."""
        decision = from_raw(frame.payload, ApprovalDecision)
        item = self._find(decision.id)
        uid = connection.claims.uid
        decided = self._read(decision, item, UNKNOWN_USER if uid is None else uid)
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
            self._items.decide(item, decided)

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
    return one.how == other.how and one.answer == other.answer
