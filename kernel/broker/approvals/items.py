"""Items that wait for a person: what an item is bound to, and its states. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from goondan.kernel.broker.entities import Connection, Event
from goondan.schemas.aliases import rename_aliases
from goondan.schemas.approval_rules import UNREADABLE
from goondan.schemas.approvals import MAX_ARGS_BYTES, Kind
from goondan.schemas.codec import check_depth, check_json, encode_value, from_raw
from goondan.schemas.frames import Frame, ToolCallPayload

#: - `staged`: the item is on its way into the journal.
#: - `waits`: it waits for a person.
#: - `deciding`: a decision is on its way into the journal.
#: - `approved`, `denied`, `answered`: it is decided.
#: - `starting`: its use is on its way into the journal.
#: - `started`: it is used.
ItemState = Literal["staged", "waits", "deciding", "approved", "denied", "answered", "starting", "started"]
#: States without a decision of a person.
OPEN: Final[frozenset[ItemState]] = frozenset({"staged", "waits", "deciding"})

#: What a call's payload has besides its arguments (bytes): ids, of 1,024 characters at most.
_NAMES_BYTES: Final = 16 << 10
_ordered: Final = msgspec.msgpack.Encoder(order="deterministic")
_Decision = Literal["approved", "denied", "answered"]


class Decided(Struct, frozen=True):
    """A decision about an item."""

    #: The decision.
    how: _Decision
    #: The user who decided; None when the kernel decided in the person's place.
    uid: int | None
    #: When (milliseconds since 1970).
    at_ms: int
    #: The person's reason.
    reason: str | None = None
    #: The person's answer to a question.
    answer: Raw | None = None


class Group(NamedTuple):
    """Calls that one decision is for."""

    #: Agent, instance key, and the callId of the script.
    script: tuple[str, str, str]
    #: Full name of the tool.
    tool: str
    #: The rule that wants a person to decide (goondan.schemas.approval_rules.Decision.rule).
    rule: str


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
    kind: Kind
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
    decided: Decided | None = None
    #: A decision on its way into the journal; it becomes `decided` when the journal has it.
    deciding: Decided | None = None
    #: When the call was allowed to start (milliseconds of CLOCK_BOOTTIME); 0 if that was before this boot.
    started_ms: int = 0
    #: True when an earlier broker allowed the call to start, so it may have run.
    restored: bool = False
    #: True while the time of its event's budgets stands still for this item.
    holds_budgets: bool = False
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
    if frame.blob is not None or len(memoryview(frame.payload)) > MAX_ARGS_BYTES + _NAMES_BYTES:
        return CallContent(UNREADABLE, b"", None)  # to look through a payload of a MiB takes the loop too long
    payload = from_raw(frame.payload, ToolCallPayload)
    if len(memoryview(payload.args)) > MAX_ARGS_BYTES:
        return CallContent(UNREADABLE, b"", payload)
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
