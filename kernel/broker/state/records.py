"""What the broker writes into its journal: the interface of a journal, and the records themselves. Pure.

A record is a msgpack array whose first element names its kind. A kind of a feature is `FEATURE/kind`, so that every
record has its owner in it; the core's kinds have no slash. The second element of a feature's record is the id of the
event that it concerns, or "": a kernel without the feature reads only these two.

New fields come last and have a default. A record stands alone: it refers to other things by their ids only.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import Raw, Struct

from goondan.kernel.broker.state import entities, workdirs
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, FilePart, OptionalRaw, ReplyTo, Source


class Put(NamedTuple):
    """Add a record to a subject. Replay reads it until the subject is retired."""

    #: An event, an instance or another thing that has a life of its own (records.py).
    subject: str
    #: The record as records.py encodes it.
    data: bytes


class Retire(NamedTuple):
    """Remove every record of a subject: its work is over."""

    #: The subject.
    subject: str
    #: What was accepted under this id (records.py), so that a repeat is recognised for days; None: forget the id, too.
    digest: bytes | None = None
    #: How it ended; a word of the broker.
    state: str = ""
    #: An answer that somebody may still ask for.
    answer: bytes | None = None
    #: The file of a large payload that the answer refers to, and its size (bytes).
    large: tuple[str, int] | None = None


class DropAnswer(NamedTuple):
    """The answer of a retired subject has arrived, and need not be kept any longer."""

    subject: str


Write = Put | Retire | DropAnswer


class Item(Struct, frozen=True):
    """Writes that belong together: all of them are written, or none."""

    #: The writes, in order.
    writes: tuple[Write, ...]
    #: New work: it may be refused when the disk is full. Ends of old work are never refused.
    refusable: bool = False


class Row(NamedTuple):
    """One record as replay reads it."""

    #: The number of its write.
    seq: int
    #: The subject of the record.
    subject: str
    #: The encoded record (records.py).
    data: bytes


class Ended(NamedTuple):
    """What is known of a retired subject."""

    #: What was accepted under its id.
    digest: bytes
    #: How it ended.
    state: str
    #: When (milliseconds since 1970).
    at_ms: int


class DiskFull(Exception):
    """There is no room for the batch; nothing of it was written."""


class JournalFailed(Exception):
    """The disk failed; what it holds is unknown. The process must end, and the next one reads the file again."""


class Archive(Protocol):
    """Finds what the journal has about one subject. A look is quick: one row by its name."""

    def find_ended(self, subject: str) -> Ended | None:
        """What is known of a retired subject. Raises GoondanError E_JOURNAL_CORRUPT when its row is damaged."""

    def find_answer(self, subject: str) -> bytes | None:
        """The kept answer of a retired subject. Raises GoondanError E_JOURNAL_CORRUPT when it is damaged."""

    def find_records(self, subject: str) -> list[bytes]:
        """The records of a subject that is not retired, in order; none for any other."""


class Journal(Archive, Protocol):
    """An append-only record of decisions, written in batches."""

    def append(self, batch: Sequence[Item]) -> None:
        """Take a batch. Does not wait for the disk."""

    def settled(self) -> list[frozenset[int]]:
        """For each batch that has become durable since the last question, in order: the items, by position, for which
        the disk had no room. Raises JournalFailed after a failure.
        """

    def wake_fd(self) -> int | None:
        """A descriptor that becomes readable when `settled` has news; None when that is so only after `append`."""

    def is_behind(self) -> bool:
        """Whether work was put off that should be done in a quiet moment."""

    def catch_up(self) -> None:
        """Do the work that was put off, because nobody waits now. Raises JournalFailed."""

    def files(self) -> frozenset[str]:
        """Files of large payloads that kept answers refer to."""

    def close(self) -> None:
        """Write what is left and end."""


# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.


#: Bytes of the digest of an event's instance, and of its sender with what that says of its content.
INSTANCE_DIGEST_BYTES: Final = 8
CONTENT_DIGEST_BYTES: Final = 8
#: Digests of instances that are remembered: each turn needs that of its own.
_REMEMBERED: Final = 1024


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
    #: The span that it comes from (acting.py).
    parent_span_id: str | None = None
    #: How the instance's working directory is reached if it is shared (workdirs.Workdir).
    instance_beneath: workdirs.Beneath | None = None
    #: What features keep with it, by their names.
    parts: dict[str, Raw] | None = None
    #: The pictures and PDFs of an operator's message; None when it has none.
    files: list[FilePart] | None = None


class Attempt(Struct, frozen=True, array_like=True, tag="attempt"):
    """A holder was lost without progress."""

    #: How many holders were lost so far.
    count: int
    #: How many messages the turn had stored.
    position: int = 0


class CancelRequested(Struct, frozen=True, array_like=True, tag="cancel"):
    """The event was cancelled by somebody who may do so."""


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The event ended. The record stays until the asker has stored the answer, or a person has ended a dead letter."""

    #: How the event ended.
    state: entities.End
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
    beneath: workdirs.Beneath | None = None


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


class DeadlineMoved(Struct, frozen=True, array_like=True, tag="moved"):
    """The event has a new deadline, because its clock stood still for a while."""

    #: The new deadline.
    deadline: Deadline


class EpochsReserved(Struct, frozen=True, array_like=True, tag="epochs"):
    """Epochs up to this one may have been used."""

    #: The highest of them.
    top: int


#: The records of the core.
Record = (
    Accepted
    | Attempt
    | CancelRequested
    | Finished
    | InstanceSpawned
    | InstanceDeleted
    | AnswerUnwanted
    | AnswerAwaitedNoMore
    | EpochsReserved
    | DeadlineMoved
)

encode: Final = msgspec.msgpack.Encoder().encode
"""The bytes of a record, of the core or of a feature."""
#: For the head of any record.
_head_decoder: Final = msgspec.msgpack.Decoder(list[Any])
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)

EPOCHS: Final = "epochs"
_EVENT: Final = "event:"
_INSTANCE: Final = "instance:"
_DELETED: Final = "deleted:"


def decode(data: bytes) -> Record:
    """The record of the core that these bytes are. Raises msgspec.DecodeError and its kin."""
    return _decoder.decode(data)


def feature_of(data: bytes) -> tuple[str, str] | None:
    """The feature that a record is of, and the event that it concerns ("": none); None for a record of the core.
    Raises msgspec.DecodeError and its kin.
    """
    head = _head_decoder.decode(data)
    kind, concerned = (head[0], head[1] if len(head) > 1 else "") if head else ("", "")
    if not isinstance(kind, str) or "/" not in kind:
        return None
    return kind.partition("/")[0], concerned if isinstance(concerned, str) else ""


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


def event_digest(agent: str, key: str, sender: str, content: str | None) -> bytes:
    """The digest that a repeat of an event must share with the first: of its instance, its sender and its content.

    The sender belongs to it because nobody else may get the answer of an ended event.
    """
    return instance_digest(agent, key) + _digest(f"{sender}\0{content or ''}", CONTENT_DIGEST_BYTES)


@lru_cache(maxsize=_REMEMBERED)
def instance_digest(agent: str, key: str) -> bytes:
    """The first part of an event's digest: it stands for the instance."""
    return _digest(f"{agent}\0{key}", INSTANCE_DIGEST_BYTES)


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
