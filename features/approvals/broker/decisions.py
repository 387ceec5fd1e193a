"""Items that wait for a person, and what people have decided: an item's states, its records, the call that it is bound
to and what answers fit it; the history of all decisions; and what they mean for other calls of a script. Pure.

What a check of an answer can cost is bounded by schemas/bundle/schema_limits.py, because a server may have written the
schema, and everybody shares the broker's loop. The library that checks is loaded with the first question.

The history.
- Each decision is written down with the call that it is about, also when the kernel decides because nobody answered.
- The user is the one whose token decided. The token is signed, and lies in a file that only this user and root can
  read. What a client says about itself does not count.
- Answers are not kept. The beginning of arguments and reasons is kept, without keys of models.
- The last MAX_KEPT are kept. They stay when the items have ended with their events.

Calls of scripts (code mode).
- A decision about a call of a script holds for calls of the same tool that the same rule wants a person to decide,
  made by the same script: yes for COVERED of them in all, no for all of them. Then a person is asked again.
- While a person is asked, other such calls of the script wait for the same decision.
- Decisions end with their script. They are kept in memory only: a new broker asks again.

Source: docs/approvals.md, "Who may answer"; docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from goondan.features.approvals import wire
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.entities import Connection, Event
from goondan.kernel.broker.state.parts import fitting
from goondan.kernel.broker.state.records import Deadline, Put, Retire, encode
from goondan.kernel.broker.state.records import Item as Writes
from goondan.schemas.bundle.json_values import rename_aliases
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire.codec import check_depth, check_json, encode_value, from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import NO_PAYLOAD, Frame, OptionalRaw, ToolCallPayload

# --- what an item is --------------------------------------------------------------------------------------------------


#: - `staged`: the item is on its way into the journal.
#: - `waits`: it waits for a person.
#: - `deciding`: a decision is on its way into the journal.
#: - `approved`, `denied`, `answered`: it is decided.
#: - `starting`: its use is on its way into the journal.
#: - `started`: it is used.
ItemState = Literal["staged", "waits", "deciding", "approved", "denied", "answered", "starting", "started"]
#: States without a decision of a person.
OPEN: Final[frozenset[ItemState]] = frozenset({"staged", "waits", "deciding"})

#: What a call's payload has besides its arguments (bytes): the message that makes the call, which repeats them, and ids
#: of 1,024 characters at most.
_BESIDE_BYTES: Final = wire.MAX_ARGS_BYTES + (16 << 10)
#: A value that is no object is checked as the one property of an object of this name.
_ANSWER: Final = "answer"
#: Issues that a person is told of.
_TOLD: Final = 5
_ordered: Final = msgspec.msgpack.Encoder(order="deterministic")
#: The subjects of records: of items, and of decisions that are kept.
_ITEM: Final = "approval:"
_REMEMBERED: Final = "approval-decided:"


class ApprovalAsked(Struct, frozen=True, array_like=True, tag="approvals/asked", kw_only=True):
    """A person is asked about a call, or asked a question in the name of one."""

    #: The event whose turn makes the call.
    event_id: str
    #: The agent that makes the call.
    agent: str
    #: Its instance key.
    key: str
    #: The callId of the call.
    call_id: str
    #: Whether a person approves the call, or answers a question in its name.
    kind: Literal["approval", "question"]
    #: The tool of the call.
    tool: str
    #: SHA-256 of tool, working directory and arguments (hexadecimal).
    digest: str
    #: The arguments of the call.
    args: Raw = NO_PAYLOAD
    #: The working directory of the call.
    workdir: str | None = None
    #: When the person was asked.
    asked: Deadline
    #: When it counts as denied; None: it waits as long as its event does.
    expires: Deadline | None = None
    #: Questions only: the text.
    message: str | None = None
    #: Questions only: the JSON Schema of the answer.
    schema: OptionalRaw = None
    #: The reason that the rule gives.
    reason: str | None = None
    #: Of a call that a script makes: the callId of the script.
    within: str | None = None
    #: Of such a call: the rule that wants a person to decide.
    rule: str = ""
    #: Of such a call: the script, as the person is shown it.
    script: str | None = None


class ApprovalAnswered(Struct, frozen=True, array_like=True, tag="approvals/answered"):
    """A person has decided, or the kernel in the person's place."""

    #: The event whose turn makes the call.
    event_id: str
    #: The decision.
    how: Literal["approved", "denied", "answered"]
    #: The user who decided; None for the kernel.
    uid: int | None
    #: When (milliseconds since 1970).
    at_ms: int
    #: The reason that the person gave.
    reason: str | None = None
    #: The answer to a question.
    answer: OptionalRaw = None
    #: The code of the lasting yes that this is, or by which it was decided.
    always: str = ""


class ApprovalStarted(Struct, frozen=True, array_like=True, tag="approvals/used"):
    """The call may start: the approval is used."""

    #: The event whose turn makes the call.
    event_id: str
    #: When it was used.
    at: Deadline


class ApprovalRemembered(Struct, frozen=True, array_like=True, tag="approvals/remembered", kw_only=True):
    """Who has decided what. The record stays when the item has ended with its event."""

    #: Nothing: its event has ended, or may end without it.
    concerns: str = ""
    #: The number of the item.
    number: int
    #: The decision.
    decided: wire.ApprovalDecided


OfItem = ApprovalAsked | ApprovalAnswered | ApprovalStarted
_decoder: Final[msgspec.msgpack.Decoder[OfItem]] = msgspec.msgpack.Decoder(OfItem)


def decode(data: bytes) -> OfItem:
    """The record of an item that these bytes are. Raises msgspec.DecodeError and its kin."""
    return _decoder.decode(data)


def approval_subject(agent: str, key: str, call_id: str) -> str:
    """The subject of an item that waits for a person. Instance keys may hold slashes, and no zero byte."""
    return f"{_ITEM}{agent}/{key}\0{call_id}"


def item_over(subject: str) -> Writes:
    """The turn of an item has ended."""
    return Writes((Retire(subject),))


class Group(NamedTuple):
    """Calls that one decision is for."""

    #: Agent, instance key, and the callId of the script.
    script: tuple[str, str, str]
    #: Full name of the tool.
    tool: str
    #: The rule that wants a person to decide (goondan.features.approvals.wire.Decision.rule).
    rule: str


class Script(NamedTuple):
    """A script that makes calls."""

    #: Its callId.
    call_id: str
    #: What it says. None: it is larger than a person is shown, or not known here.
    text: str | None


class Wanted(NamedTuple):
    """A call that a person has to decide about, or a question."""

    #: The event whose turn makes the call.
    event: Event
    #: The callId of the call.
    call_id: str
    #: Full name of the tool.
    tool: str
    #: What the decision is bound to (`digest_of`).
    digest: str
    #: The arguments of the call.
    args: bytes
    #: The working directory of the call.
    workdir: str
    #: What the rules say of the call.
    decision: wire.Decision
    #: The script that makes the call; None for a call of the model.
    script: Script | None
    #: What the agent asks. None for a call of a tool host.
    asked: wire.ApprovalAsk | None = None

    @property
    def kind(self) -> wire.Kind:
        """Whether a person approves the call, or answers a question in its name."""
        return "approval" if self.asked is None else self.asked.kind

    @property
    def group(self) -> Group | None:
        """The calls that a decision about this call is for. None: it is for this call alone."""
        if self.kind == "question" or self.script is None or self.script.text is None:
            return None
        instance = self.event.instance
        return Group((instance.agent, instance.key, self.script.call_id), self.tool, self.decision.rule)


class Item(Struct):
    """One item. Times without a unit in their name are seconds on the broker's clock."""

    #: The subject of its records in the journal.
    subject: str
    #: The callId of the call.
    id: str
    #: A short name that people can type (`code_of`).
    code: str
    #: The event whose turn asks.
    event: Event
    #: Whether a person approves the call, or answers a question in its name.
    kind: wire.Kind
    #: The tool of the call.
    tool: str
    #: What the decision is bound to (`digest_of`).
    digest: str
    #: When the person was asked.
    asked: float
    #: When it counts as denied. None: it waits as long as its event does.
    expires: float | None
    #: Bytes that it holds in the journal.
    size: int
    #: The state of the item.
    state: ItemState = "staged"
    #: The decision; None while there is none.
    decided: ApprovalAnswered | None = None
    #: A decision on its way into the journal; it becomes `decided` when the journal has it.
    deciding: ApprovalAnswered | None = None
    #: When the call was allowed to start (milliseconds of CLOCK_BOOTTIME); 0 if that was before this boot.
    started_ms: int = 0
    #: True when an earlier broker allowed the call to start, so it may have run.
    restored: bool = False
    #: True while the time of its event's budgets stands still for this item.
    holds_time: bool = False
    #: True when its turn was told of the decision.
    told: bool = False
    #: The frame of its agent that waits for the decision, and its connection.
    asker: tuple[Connection, Frame] | None = None
    #: Connection and frame id of operators who wait until their decision is journaled.
    operators: list[tuple[Connection, str]] = []
    #: The events whose clocks stand still for it: its own event, and those whose turns wait for that one.
    chain: list[Event] = []
    #: Of a call that a script makes: the callId of the script.
    within: str | None = None
    #: Of such a call: the calls that the decision is for. None: it is for this call alone.
    group: Group | None = None
    #: Frames of other calls of the group that are told when the item waits, and their connections.
    others: list[tuple[Connection, Frame]] = []
    #: How many other calls of the group its yes was used for.
    covered: int = 0

    @property
    def open(self) -> bool:
        """Whether a person still has to decide."""
        return self.state in OPEN


class CallContent(Struct, frozen=True):
    """The content of a call."""

    #: The arguments as rules see them.
    args: Any
    #: The same arguments as bytes.
    data: bytes
    #: The payload that goes on to a tool host.
    payload: ToolCallPayload | None


def read_call(frame: Frame, aliases: dict[str, str]) -> CallContent:
    """The content of a `tool.call`. Arguments in a file, or larger than a person is shown, are UNREADABLE.

    The bytes are encoded again from the arguments that were read. So a trick in the encoding cannot make the shown call
    differ from the call that runs.

    Raises GoondanError E_FRAME_INVALID.
    """
    if frame.blob is not None or len(memoryview(frame.payload)) > wire.MAX_ARGS_BYTES + _BESIDE_BYTES:
        return CallContent(wire.UNREADABLE, b"", None)  # to look through a payload of a MiB takes the loop too long
    payload = from_raw(frame.payload, ToolCallPayload)
    if len(memoryview(payload.args)) > wire.MAX_ARGS_BYTES:
        return CallContent(wire.UNREADABLE, b"", payload)
    args, data = read_args(payload.args, aliases)
    payload.args = Raw(data)
    return CallContent(args, data, payload)


def read_args(raw: Raw, aliases: dict[str, str]) -> tuple[Any, bytes]:
    """The arguments as rules see them (aliases renamed), and their bytes. Raises GoondanError E_FRAME_INVALID."""
    check_depth(bytes(raw))
    args = from_raw(raw, dict)
    check_json(args, "args")
    if aliases:
        args = rename_aliases(args, aliases)
    return args, encode_value(args)


def digest_of(tool: str, workdir: str, data: bytes) -> str:
    """The digest that an approval is bound to (SHA-256, hexadecimal)."""
    args = msgspec.msgpack.decode(data) if data else None
    return hashlib.sha256(_ordered.encode([tool, workdir, args])).hexdigest()


def read_ask(frame: Frame) -> tuple[wire.ApprovalAsk, Any, bytes, bytes]:
    """What an `approval.ask` asks, its arguments as a value and as bytes, and the bytes of its schema.

    Raises GoondanError E_FRAME_INVALID, E_TOOL_LIMIT, E_CONFIG_SCHEMA.
    """
    asked = from_raw(frame.payload, wire.ApprovalAsk)
    args, data = read_args(asked.args, {})
    schema = b"" if asked.schema is None else bytes(asked.schema)
    if asked.expires_s is not None and not isfinite(asked.expires_s):
        raise fail("E_FRAME_INVALID", "expiresS is a number of seconds")
    if len(data) + len(schema) > wire.MAX_ARGS_BYTES or len(asked.message or "") > wire.MAX_MESSAGE:
        raise fail("E_TOOL_LIMIT", f"a person is shown at most {wire.MAX_ARGS_BYTES} bytes")
    if asked.schema is not None and not asked.over:
        check_schema(from_raw(asked.schema, object))
    return asked, args, data, schema


def check_schema(schema: Any) -> None:
    """Raise GoondanError E_CONFIG_SCHEMA for what is no JSON Schema, or costs too much to check against."""
    from goondan.schemas.bundle.arguments import compile_arguments

    compile_arguments(schema, {}).compile()


def issues_of(schema: Any, answer: Any) -> list[str]:
    """What does not fit, in words; empty when the answer fits. Raises GoondanError as `check_schema`."""
    from goondan.schemas.bundle.arguments import compile_arguments

    if isinstance(answer, dict):
        _, issues = compile_arguments(schema, {}).apply(answer)
    else:
        wrapped = {"type": "object", "properties": {_ANSWER: schema}}
        _, issues = compile_arguments(wrapped, {}).apply({_ANSWER: answer})
    return [issue.replace(f"args.{_ANSWER}", _ANSWER, 1).replace("args", _ANSWER, 1) for issue in issues[:_TOLD]]


def check_answer(schema: Any, answer: Any) -> None:
    """Raise GoondanError E_USAGE for an answer that does not fit."""
    issues = issues_of(schema, answer)
    if issues:
        message = f"the answer does not fit the question: {'; '.join(issues)}"
        raise fail("E_USAGE", message, suggestion="`gdn approve show` has the schema of the answer.")


#: Decisions that are remembered: some weeks for a person who is asked often. Each takes about a KiB.
MAX_KEPT: Final = 1000
#: Characters that are kept of arguments, of a question and of a reason.
MAX_TEXT: Final = 300
#: Calls that one yes is for.
COVERED: Final = 20
#: Characters of a script that a person is shown. A longer one is decided call by call.
MAX_SCRIPT: Final = 65_536
#: Bytes of a call with a script that are opened: the script, and the message that made the call.
MAX_PAYLOAD: Final = 768 << 10


class History:
    """The last decisions, the oldest first."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: deque[ApprovalRemembered] = deque()

    def restore(self, subject: str, record: ApprovalRemembered) -> None:
        """Take over a record of an earlier broker; they come in the order of their numbers."""
        self._kept.append(record)

    def add(self, item: Item, decided: ApprovalAnswered, asked: ApprovalAsked | None, asked_ms: int) -> None:
        """Write a decision down. `asked` is the journal's record of the item."""
        redact = redactor(self._bus)
        instance = item.event.instance
        entry = wire.ApprovalDecided(
            code=item.code,
            id=item.id,
            kind=item.kind,
            agent=instance.agent,
            instance_key=instance.key,
            event_id=item.event.id,
            tool=item.tool,
            digest=item.digest,
            what=beginning(asked, redact),
            asked_ms=asked_ms,
            decided_ms=decided.at_ms,
            how=decided.how,
            uid=decided.uid,
            reason=None if decided.reason is None else redact(decided.reason)[:MAX_TEXT],
            always=decided.always,
        )
        record = ApprovalRemembered(number=self._kept[-1].number + 1 if self._kept else 1, decided=entry)
        self._kept.append(record)
        writes: list[Put | Retire] = [Put(f"{_REMEMBERED}{record.number}", encode(record))]
        while len(self._kept) > MAX_KEPT:
            writes.append(Retire(f"{_REMEMBERED}{self._kept.popleft().number}"))
        self._bus.stage(Writes(tuple(writes)))

    def listed(self) -> dict[str, Any]:
        """The last decisions, as many as fit in one answer, the oldest first. `more`: how many came before them."""
        newest = fitting(record.decided for record in reversed(self._kept))
        return {"answered": newest[::-1], "more": len(self._kept) - len(newest)}


def redactor(bus: Bus) -> Redactor:
    """What takes the keys of models out of texts."""
    return Redactor(*(model.api_key for spec in bus.plan.agents.values() for model in spec.models))


def beginning(asked: ApprovalAsked | None, redact: Callable[[str], str]) -> str:
    """The beginning of a call's arguments as JSON, or of a question."""
    if asked is None:
        return ""
    if asked.message is not None:
        return redact(asked.message)[:MAX_TEXT]
    try:
        return redact(msgspec.json.encode(from_raw(asked.args, object)).decode())[:MAX_TEXT]
    except (GoondanError, msgspec.EncodeError, TypeError, ValueError):
        return ""


class ScriptDecisions:
    """The decisions about calls of scripts that run."""

    def __init__(self) -> None:
        #: The item about which a person was asked last.
        self._items: dict[Group, Item] = {}

    def look(self, group: Group) -> Item | None:
        """The item whose decision is for such a call: it is open, denied, or approved (and one more call is counted).
        None: a person has to be asked.
        """
        item = self._items.get(group)
        if item is None or item.open or item.state == "denied":
            return item
        if item.covered >= COVERED - 1:  # the call that was asked about is one of those that the yes is for
            return None
        item.covered += 1
        return item

    def asked(self, item: Item) -> None:
        """A person is asked about a call of a script."""
        if item.group is not None:
            self._items[item.group] = item

    def forget(self, item: Item) -> None:
        """Nobody is asked about this item any more, or could be."""
        if item.group is not None and self._items.get(item.group) is item:
            del self._items[item.group]

    def over(self, script: tuple[str, str, str]) -> None:
        """A script has ended."""
        for group in [group for group in self._items if group.script == script]:
            del self._items[group]


def read_script(payload: bytes) -> str | None:
    """The script in the payload of its call, for a person: None when it cannot be read, or is too long."""
    if not 0 < len(payload) <= MAX_PAYLOAD:
        return None
    try:
        args = from_raw(from_raw(Raw(payload), ToolCallPayload).args, dict)
    except GoondanError:
        return None
    code = args.get("code")
    return code if isinstance(code, str) and len(code) <= MAX_SCRIPT else None
