"""Items that wait for a person: what they are bound to, and what they become. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from kernel.broker.entities import Connection, Event
from kernel.broker.journal.records import ApprovalAsked
from schemas.aliases import rename_aliases
from schemas.approval_rules import UNREADABLE
from schemas.approvals import MAX_ARGS_BYTES, Kind
from schemas.codec import check_depth, check_json, encode_value, from_raw
from schemas.errors import GoondanError
from schemas.frames import Frame, ToolCallPayload

#: `staged`: on its way into the journal. `waits`: for a person. `deciding`: a decision is on its way into the journal.
#: `approved`, `denied`, `answered`: decided. `starting`: its use is on its way into the journal. `started`: used.
ItemState = Literal["staged", "waits", "deciding", "approved", "denied", "answered", "starting", "started"]
#: States in which a person has not decided.
OPEN: Final[frozenset[ItemState]] = frozenset({"staged", "waits", "deciding"})

#: What a call's payload has besides its arguments (bytes): ids, of 1,024 characters at most.
_NAMES_BYTES: Final = 16 << 10
_ordered: Final = msgspec.msgpack.Encoder(order="deterministic")
_Decision = Literal["approved", "denied", "answered"]


class Decided(Struct, frozen=True):
    """How a person decided, or the kernel in the person's place (`uid` None). `at_ms`: milliseconds since 1970."""

    how: _Decision
    uid: int | None
    at_ms: int
    reason: str | None = None
    answer: Raw | None = None


class Item(Struct):
    """One item. Times without a unit in their name are seconds on the broker's clock."""

    subject: str
    id: str
    code: str
    event: Event
    kind: Kind
    tool: str
    digest: str
    asked: float
    #: None: it waits for as long as its event does.
    expires: float | None
    #: Bytes that it holds in the journal.
    size: int
    state: ItemState = "staged"
    decided: Decided | None = None
    #: What becomes `decided` when the journal has it.
    deciding: Decided | None = None
    #: When the call was allowed to start (milliseconds of CLOCK_BOOTTIME); 0 where that was before this boot.
    started_ms: int = 0
    #: Its call was allowed to start by an earlier broker, so it may have run.
    restored: bool = False
    #: The time of the budgets that its event is charged to stands still for it.
    holds_budgets: bool = False
    #: Its turn has been told of the decision.
    told: bool = False
    #: Frames that wait for it: of its agent, and of operators who decide.
    asker: tuple[Connection, Frame] | None = None
    operators: list[tuple[Connection, str]] = []
    #: The events whose clocks it holds: its own, and those that wait for that one.
    chain: list[Event] = []

    @property
    def open(self) -> bool:
        """Whether a person has not decided."""
        return self.state in OPEN


class CallContent(Struct, frozen=True):
    """The content of a call: its arguments for rules, the same as bytes, and the payload that goes on to a tool
    host."""

    args: Any
    data: bytes
    payload: ToolCallPayload | None


def read_call(frame: Frame, aliases: dict[str, str]) -> CallContent:
    """What a `tool.call` says. Arguments that lie in a file, or are larger than a person is shown, are UNREADABLE.

    The bytes are made anew of what was read: so what is shown and what runs cannot differ by how it was encoded.

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
    """Arguments as rules see them (aliases renamed), and their bytes. Raises GoondanError E_FRAME_INVALID."""
    check_depth(bytes(raw))
    args = from_raw(raw, dict)
    check_json(args, "args")
    if aliases:
        args = rename_aliases(args, aliases)
    return args, encode_value(args)


def digest_of(tool: str, workdir: str, data: bytes) -> str:
    """What an approval is bound to (SHA-256, hexadecimal)."""
    args = msgspec.msgpack.decode(data) if data else None
    return hashlib.sha256(_ordered.encode([tool, workdir, args])).hexdigest()


def shown_args(record: ApprovalAsked) -> Any:
    """The arguments of an item as a JSON value."""
    try:
        return from_raw(record.args, object)
    except GoondanError:
        return None
