"""The records of the journal: what each decision of the broker looks like on disk. Pure.

A record is a msgpack array whose first element names its kind. New fields come last and have a default, so a file of an
older kernel can be read. A record stands alone: it refers to other things by their ids only.

Source: docs/design/delivery.md section 1.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

import hashlib
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from kernel.broker.budgets.amounts import Spend
from kernel.broker.workdirs import Beneath
from schemas.approvals import ApprovalDecided
from schemas.effective_config import Change
from schemas.frames import NO_PAYLOAD, Blob, ErrorPayload, OptionalRaw, ReplyTo, Source

#: How an event ended. `done` and `failed` are the agent's word, the others the broker's.
End = Literal["done", "failed", "expired", "dead", "cancelled"]
#: Bytes of the digest of an event's instance, and of its sender with what that says of its content.
INSTANCE_DIGEST_BYTES: Final = 8
CONTENT_DIGEST_BYTES: Final = 8


class Deadline(Struct, frozen=True, array_like=True):
    """A moment on three clocks, since each of them can be wrong: the boot clock ends with the machine's boot, and the
    wall clock can be set.
    """

    #: The boot in which `boot_s` counts.
    boot_id: str
    #: Seconds of CLOCK_BOOTTIME.
    boot_s: float
    #: Seconds since 1970.
    wall_s: float

    def on_clock(self, boot_id: str, booted_at: float) -> float:
        """The moment in seconds of CLOCK_BOOTTIME of boot `boot_id`, which began at `booted_at` (since 1970)."""
        return self.boot_s if self.boot_id == boot_id else self.wall_s - booted_at


class Accepted(Struct, frozen=True, array_like=True, tag="accepted", kw_only=True):
    """An event was accepted: everything that the broker must know to deliver it without its sender."""

    #: The instance that it is for.
    agent: str
    key: str
    #: The instance's working directory.
    instance_workdir: str
    #: The principal whose repeat it is (presence.Connection.sender).
    sender: str
    #: What stands in the header's `from`.
    from_: str | None
    payload: Raw = NO_PAYLOAD
    blob: Blob | None = None
    source: Source | None = None
    reply_to: ReplyTo | None = None
    chain: list[str] | None = None
    auth: OptionalRaw = None
    #: The working directory that an operator named for this event.
    workdir: str | None = None
    trace_id: str | None = None
    deadline: Deadline | None = None
    #: The tool call whose handler asked.
    call_id: str | None = None
    #: The event whose turn asked and waits.
    asking: str | None = None
    #: Tells two events of one id apart (event_digest).
    digest: bytes = b""
    #: When it was accepted (milliseconds since 1970).
    at_ms: int = 0
    #: The event that it began with, and whose work that is (mailbox.Event).
    root: str | None = None
    session: str | None = None
    #: Its asker does not wait; of such an answer: the correlation id of what it answers (mailbox.Event).
    asynchronous: bool = False
    in_reply_to: str | None = None
    #: The span that it comes from (tracing.py).
    parent_span_id: str | None = None
    #: How the instance's working directory is reached, where it is another's (workdirs.Workdir).
    instance_beneath: Beneath | None = None
    #: The agents whose budgets led to it, the outermost first.
    budgets: list[str] | None = None


class Attempt(Struct, frozen=True, array_like=True, tag="attempt"):
    """A holder was lost without progress."""

    #: How many were, so far.
    count: int
    #: How many messages the turn had stored.
    position: int = 0


class CancelWish(Struct, frozen=True, array_like=True, tag="cancel"):
    """Somebody who may wishes the event to end."""


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The event ended. It stays until whoever asked has stored the answer, or a person has dealt with a dead letter."""

    state: End
    answer: Raw = NO_PAYLOAD
    blob: Blob | None = None
    #: When it ended (milliseconds since 1970).
    at_ms: int = 0
    #: Why, for dead letters.
    cause: str = ""


class InstanceSpawned(Struct, frozen=True, array_like=True, tag="spawned"):
    """An agent asked for this instance."""

    agent: str
    key: str
    owner_agent: str
    owner_key: str
    #: When (seconds since 1970).
    created: float
    #: The working directory that it was given, and how that is reached; None: its own.
    cwd: str | None = None
    beneath: Beneath | None = None


class InstanceDeleted(Struct, frozen=True, array_like=True, tag="deleted"):
    """An instance is to go, and nothing of it runs any more: its folder may be moved away."""

    agent: str
    key: str
    #: Others work in its workdir, which stays.
    keep_workdir: bool = False


class AnswerUnwanted(Struct, frozen=True, array_like=True, tag="unwanted"):
    """Who asked for an event has gone: its answer becomes no event."""


class RestartWished(Struct, frozen=True, array_like=True, tag="restart"):
    """An agent wishes the kernel to restart, when the turn of this event has left it."""

    reason: str
    event_id: str
    #: When (milliseconds since 1970).
    at_ms: int


class FreshStart(Struct, frozen=True, array_like=True, tag="fresh"):
    """Conversations of this agent, or of all ("" for the name), are of this generation."""

    agent: str
    generation: int


class ConfigPatched(Struct, frozen=True, array_like=True, tag="config", kw_only=True):
    """A patch of an agent's configuration was accepted, and perhaps reverted since; or a proposal was rejected."""

    number: int
    id: str
    agent: str
    #: The instance that it is for; None: all of the agent.
    key: str | None
    change: Change
    #: What of the configuration it touches: names from the outside in.
    touched: list[list[str]]
    #: The revision from which on it does not count; 0: it counts.
    reverted: int = 0
    #: Its operations without their values.
    asked: list[str] = []
    #: Who proposed it: `agent` with the instance's key and what it called its extension, or `operator`.
    by: str = ""
    by_key: str | None = None
    extension: str | None = None
    #: The event whose turn proposed it.
    event_id: str | None = None
    reason: str = ""
    #: The revision that it was made from.
    made_from: int = 0
    #: When (milliseconds since 1970).
    at_ms: int = 0
    #: Tools in it that extensions had registered, and that the bundle does not have.
    dynamic: list[str] = []
    #: Why it was rejected.
    error: ErrorPayload | None = None


class DeadlineMoved(Struct, frozen=True, array_like=True, tag="moved"):
    """The event's deadline is this one: its clock stood still for a while."""

    deadline: Deadline


class ApprovalAsked(Struct, frozen=True, array_like=True, tag="asked", kw_only=True):
    """A person is asked about a call, or asked a question in the name of one."""

    #: Whose call it is, and in which turn.
    agent: str
    key: str
    event_id: str
    call_id: str
    kind: Literal["approval", "question"]
    tool: str
    #: SHA-256 of tool, working directory and arguments (hexadecimal).
    digest: str
    args: Raw = NO_PAYLOAD
    workdir: str | None = None
    asked: Deadline
    #: When it counts as denied.
    expires: Deadline | None = None
    #: Of a question: its text, and the JSON Schema of its answer.
    message: str | None = None
    schema: OptionalRaw = None
    #: The word of the rule.
    reason: str | None = None


class ApprovalAnswered(Struct, frozen=True, array_like=True, tag="answered"):
    """A person has decided, or the kernel in the person's place (no `uid`)."""

    how: Literal["approved", "denied", "answered"]
    uid: int | None
    #: When (milliseconds since 1970).
    at_ms: int
    reason: str | None = None
    answer: OptionalRaw = None


class ApprovalRemembered(Struct, frozen=True, array_like=True, tag="remembered"):
    """Who has decided what: it is kept when the item has gone with its event."""

    number: int
    decided: ApprovalDecided


class ApprovalStarted(Struct, frozen=True, array_like=True, tag="used"):
    """The call may start: the approval is used."""

    at: Deadline


class EpochsReserved(Struct, frozen=True, array_like=True, tag="epochs"):
    """Epochs up to this one may have been used."""

    top: int


class BudgetTree(Struct, frozen=True, array_like=True, tag="budget", kw_only=True):
    """What everything that began with one event has used."""

    #: The event.
    root: str
    #: When it was accepted (milliseconds since 1970).
    began_ms: int
    #: Of each agent with a budget: what was spent of it, by the agent that did; "" where nobody knows who.
    accounts: dict[str, dict[str, Spend]]
    #: Of each agent: whose budgets led to its last event.
    paths: dict[str, list[str]]
    #: Digests of tool calls that were counted and may be sent again, in a row, by their events.
    charged: dict[str, bytes]
    #: Until a newer record is there, so many tool calls more may have been counted.
    slack: int
    #: When the last of it ended (milliseconds since 1970).
    ended_ms: int | None = None
    #: For how long (milliseconds) its time stood still while people were asked, and up to when that is counted.
    stood_ms: int = 0
    stood_until_ms: int = 0


class BudgetHold(Struct, frozen=True, array_like=True, tag="budget_hold", kw_only=True):
    """A model call is about to be made, and nobody has said yet what it came to."""

    #: The event that its tree began with, and the one whose turn makes it.
    root: str
    event_id: str
    #: Its own id, which no other has.
    id: str
    #: The agent that makes it, and those whose budgets it is charged to.
    agent: str
    accounts: list[str]
    #: What it uses at most.
    amount: Spend


Record = (
    Accepted
    | Attempt
    | CancelWish
    | Finished
    | InstanceSpawned
    | InstanceDeleted
    | AnswerUnwanted
    | EpochsReserved
    | RestartWished
    | FreshStart
    | BudgetTree
    | BudgetHold
    | ConfigPatched
    | DeadlineMoved
    | ApprovalAsked
    | ApprovalAnswered
    | ApprovalStarted
    | ApprovalRemembered
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)

EPOCHS: Final = "epochs"
_EVENT: Final = "event:"
_INSTANCE: Final = "instance:"
_DELETED: Final = "deleted:"
_RESTART: Final = "restart:"
_FRESH: Final = "fresh:"
_BUDGET: Final = "budget:"
_HOLD: Final = "budget-hold:"
_CONFIG: Final = "config:"
_APPROVAL: Final = "approval:"
_REMEMBERED: Final = "approval-decided:"


def encode(record: Record) -> bytes:
    """The bytes of a record."""
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    """The record of these bytes. Raises msgspec.DecodeError and its kin."""
    return _decoder.decode(data)


def event_subject(event_id: str) -> str:
    """The subject of an event's records."""
    return _EVENT + event_id


def event_of(subject: str) -> str | None:
    """The event that a subject is about, if it is about one."""
    return subject[len(_EVENT) :] if subject.startswith(_EVENT) else None


def instance_subject(agent: str, key: str) -> str:
    """The subject of an instance's records. Agent names hold no slash; instance keys may."""
    return f"{_INSTANCE}{agent}/{key}"


def deleted_subject(agent: str, key: str) -> str:
    """The subject of an instance's tombstone."""
    return f"{_DELETED}{agent}/{key}"


def fresh_subject(agent: str) -> str:
    """The subject of the generation of an agent's conversations."""
    return _FRESH + agent


def config_subject(number: int) -> str:
    """The subject of a patch of configuration."""
    return f"{_CONFIG}{number}"


def approval_subject(agent: str, key: str, call_id: str) -> str:
    """The subject of an item that waits for a person. Instance keys may hold slashes, and no zero byte."""
    return f"{_APPROVAL}{agent}/{key}\0{call_id}"


def remembered_subject(number: int) -> str:
    """The subject of a decision that is kept."""
    return f"{_REMEMBERED}{number}"


def restart_subject(agent: str, key: str, call_id: str) -> str:
    """The subject of an instance's wish for a restart."""
    return f"{_RESTART}{agent}/{key}/{call_id}"


def budget_subject(root: str) -> str:
    """The subject of what a tree of work has used."""
    return _BUDGET + root


def hold_subject(hold_id: str) -> str:
    """The subject of a model call that is about to be made."""
    return _HOLD + hold_id


def event_digest(agent: str, key: str, sender: str, content: str | None) -> bytes:
    """What a repeat of an event must have in common with the first: its instance, its sender, and what that says of it.

    The sender as well: nobody else is given the answer of an event that has ended.
    """
    return instance_digest(agent, key) + _digest(f"{sender}\0{content or ''}", CONTENT_DIGEST_BYTES)


def instance_digest(agent: str, key: str) -> bytes:
    """The first part of an event's digest: which instance it is for."""
    return _digest(f"{agent}\0{key}", INSTANCE_DIGEST_BYTES)


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
