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

from goondan.kernel.broker.budgets.amounts import Spend
from goondan.kernel.broker.workdirs import Beneath
from goondan.schemas.approvals import ApprovalDecided
from goondan.schemas.effective_config import Change, Touched
from goondan.schemas.frames import NO_PAYLOAD, Blob, ErrorPayload, FilePart, OptionalRaw, ReplyTo, Source

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

    #: The agent that it is for.
    agent: str
    #: The instance key of this agent.
    key: str
    #: The instance's working directory.
    instance_workdir: str
    #: The principal that may repeat it (entities.Connection.sender).
    sender: str
    #: The header's `from`.
    from_: str | None
    #: The payload, unopened.
    payload: Raw = NO_PAYLOAD
    #: The reference to the payload's file if the payload is large.
    blob: Blob | None = None
    #: Who caused the event.
    source: Source | None = None
    #: Where the answer goes; None when no answer is wanted.
    reply_to: ReplyTo | None = None
    #: The instances that wait for each other, the sender last; None when nobody waits.
    chain: list[str] | None = None
    #: The person on whose behalf the event was sent, as an operator said.
    auth: OptionalRaw = None
    #: The working directory that an operator named for this event.
    workdir: str | None = None
    #: The trace that the event belongs to.
    trace_id: str | None = None
    #: When its time is over. None: no deadline.
    deadline: Deadline | None = None
    #: The tool call whose handler sent it.
    call_id: str | None = None
    #: The event whose turn sent it and waits.
    asking: str | None = None
    #: Distinguishes two events with the same id (event_digest).
    digest: bytes = b""
    #: When it was accepted (milliseconds since 1970).
    at_ms: int = 0
    #: The event that all this work began with (entities.Event).
    root: str | None = None
    #: The session of the root (entities.Event).
    session: str | None = None
    #: True when an agent sent this request and does not wait for the answer.
    asynchronous: bool = False
    #: Answers to such requests only: the correlation id of the request.
    in_reply_to: str | None = None
    #: The span that it comes from (tracing.py).
    parent_span_id: str | None = None
    #: How the instance's working directory is reached if it is shared (workdirs.Workdir).
    instance_beneath: Beneath | None = None
    #: The agents whose budgets it is charged to, the outermost first.
    budgets: list[str] | None = None
    #: The pictures and PDFs of an operator's message; None when it has none.
    files: list[FilePart] | None = None


class Attempt(Struct, frozen=True, array_like=True, tag="attempt"):
    """A holder was lost without progress."""

    #: How many holders were lost so far.
    count: int
    #: How many messages the turn had stored.
    position: int = 0


class CancelWish(Struct, frozen=True, array_like=True, tag="cancel"):
    """The event was cancelled by somebody who may do so."""


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The event ended. The record stays until the asker has stored the answer, or a person has ended a dead letter."""

    #: How the event ended.
    state: End
    #: The answer.
    answer: Raw = NO_PAYLOAD
    #: The reference to the answer's file if the answer is large.
    blob: Blob | None = None
    #: When it ended (milliseconds since 1970).
    at_ms: int = 0
    #: Dead letters only: why it ended.
    cause: str = ""


class InstanceSpawned(Struct, frozen=True, array_like=True, tag="spawned"):
    """An agent spawned this instance."""

    #: The agent of the instance.
    agent: str
    #: The instance key.
    key: str
    #: The agent that asked first.
    owner_agent: str
    #: The instance key of this agent.
    owner_key: str
    #: When (seconds since 1970).
    created: float
    #: The working directory that the spawn gave; None when the instance has its own.
    cwd: str | None = None
    #: How this directory is reached (workdirs.Workdir).
    beneath: Beneath | None = None


class InstanceDeleted(Struct, frozen=True, array_like=True, tag="deleted"):
    """An instance is being deleted and no part of it runs any more: its folder may be moved away."""

    #: The agent of the instance.
    agent: str
    #: The instance key.
    key: str
    #: True when others work in its workdir, so that it stays.
    keep_workdir: bool = False


class AnswerUnwanted(Struct, frozen=True, array_like=True, tag="unwanted"):
    """The instance that sent a request is gone: the answer does not become an event."""


class AnswerAwaitedNoMore(Struct, frozen=True, array_like=True, tag="unawaited"):
    """The turn that sent a request does not wait any more: the answer becomes an event."""


class RestartWished(Struct, frozen=True, array_like=True, tag="restart"):
    """An agent wishes a restart of the kernel as soon as no process holds this event."""

    #: Why, in the agent's words.
    reason: str
    #: The event whose turn wishes it.
    event_id: str
    #: When (milliseconds since 1970).
    at_ms: int


class FreshStart(Struct, frozen=True, array_like=True, tag="fresh"):
    """The conversations of this agent, or of all agents (with the name ""), have this generation."""

    #: The agent; "": all of them.
    agent: str
    #: The generation.
    generation: int


class ConfigPatched(Struct, array_like=True, tag="config", kw_only=True):
    """A patch of an agent's configuration was accepted, and perhaps reverted since; or a proposal was rejected.

    Not frozen: the broker's Patch is one with more fields.
    """

    #: Its number in the order of decisions.
    number: int
    #: The id of the proposal.
    id: str
    #: The agent that it is for.
    agent: str
    #: The instance that it is for; None: all instances of the agent.
    key: str | None
    #: What it changes.
    change: Change
    #: The parts of the configuration that it touches: names from the outside in.
    touched: frozenset[Touched]
    #: From this revision on it does not count; 0: it counts.
    reverted: int = 0
    #: Its operations without their values.
    asked: list[str] = []
    #: Who proposed it: `agent` or `operator`.
    by: str = ""
    #: The instance key of the agent that proposed it.
    by_key: str | None = None
    #: The extension that proposed it, as its agent says.
    extension: str | None = None
    #: The event whose turn proposed it.
    event_id: str | None = None
    #: Why, in the proposer's words.
    reason: str = ""
    #: The revision that it was made from.
    made_from: int = 0
    #: When (milliseconds since 1970).
    at_ms: int = 0
    #: The tools in it that extensions had registered and that are not in the bundle.
    dynamic: list[str] = []
    #: Why it was rejected.
    error: ErrorPayload | None = None


class DeadlineMoved(Struct, frozen=True, array_like=True, tag="moved"):
    """The event has a new deadline, because its clock stood still for a while."""

    #: The new deadline.
    deadline: Deadline


class ApprovalAsked(Struct, frozen=True, array_like=True, tag="asked", kw_only=True):
    """A person is asked about a call, or asked a question in the name of one."""

    #: The agent that makes the call.
    agent: str
    #: Its instance key.
    key: str
    #: The event whose turn makes the call.
    event_id: str
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


class ApprovalAnswered(Struct, frozen=True, array_like=True, tag="answered"):
    """A person has decided, or the kernel in the person's place."""

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


class ApprovalRemembered(Struct, frozen=True, array_like=True, tag="remembered"):
    """Who has decided what. The record stays when the item has ended with its event."""

    #: The number of the item.
    number: int
    #: The decision.
    decided: ApprovalDecided


class ApprovalStarted(Struct, frozen=True, array_like=True, tag="used"):
    """The call may start: the approval is used."""

    #: When it was used.
    at: Deadline


class EpochsReserved(Struct, frozen=True, array_like=True, tag="epochs"):
    """Epochs up to this one may have been used."""

    #: The highest of them.
    top: int


class BudgetTree(Struct, frozen=True, array_like=True, tag="budget", kw_only=True):
    """What a tree has used: all work that began with one event."""

    #: The event that the tree began with.
    root: str
    #: When it was accepted (milliseconds since 1970).
    began_ms: int
    #: Agent with a budget -> spending agent -> amount; "" when nobody knows who has spent it.
    accounts: dict[str, dict[str, Spend]]
    #: Agent -> the agents whose budgets its last event is charged to.
    paths: dict[str, list[str]]
    #: Event -> joined digests of tool calls that were counted and may be sent again.
    charged: dict[str, bytes]
    #: So many more tool calls may have been counted before there is a newer record.
    slack: int
    #: When its last event ended (milliseconds since 1970); None while it has unfinished events.
    ended_ms: int | None = None
    #: How long its time stood still while people were asked (milliseconds).
    stood_ms: int = 0
    #: Up to which moment that is counted (milliseconds since 1970).
    stood_until_ms: int = 0


class BudgetHold(Struct, frozen=True, array_like=True, tag="budget_hold", kw_only=True):
    """A model call that may be under way and is not settled."""

    #: The event that its tree began with.
    root: str
    #: The event whose turn makes it.
    event_id: str
    #: Its id; no other model call has it.
    id: str
    #: The agent that makes it.
    agent: str
    #: The agents whose budgets it is charged to.
    accounts: list[str]
    #: The most that it may use.
    amount: Spend


Record = (
    Accepted
    | Attempt
    | CancelWish
    | Finished
    | InstanceSpawned
    | InstanceDeleted
    | AnswerUnwanted
    | AnswerAwaitedNoMore
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
    """The digest that a repeat of an event must share with the first: of its instance, its sender and its content.

    The sender belongs to it because nobody else may get the answer of an ended event.
    """
    return instance_digest(agent, key) + _digest(f"{sender}\0{content or ''}", CONTENT_DIGEST_BYTES)


def instance_digest(agent: str, key: str) -> bytes:
    """The first part of an event's digest: it stands for the instance."""
    return _digest(f"{agent}\0{key}", INSTANCE_DIGEST_BYTES)


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
