"""The interface between the broker and its journal: plain values, no objects of either. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol


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


class Item(NamedTuple):
    """Writes that belong together: all of them are written, or none."""

    writes: tuple[Write, ...]
    #: New work: it may be refused when the disk is full. Ends of old work are never refused.
    refusable: bool = False


class Settled(NamedTuple):
    """A batch that is as durable as promised."""

    #: What `append` returned for it.
    number: int
    #: Items, by position, for which the disk had no room.
    refused: frozenset[int] = frozenset()


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

    def append(self, batch: Sequence[Item]) -> int:
        """Take a batch; returns its number (1, 2, …). Does not wait for the disk."""

    def settled(self) -> list[Settled]:
        """Batches that have become durable since the last question, in order. Raises JournalFailed after a failure."""

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


class Store(Archive, Protocol):
    """The storage of a journal: a start reads it, and the journal's writer writes it. For one thread at a time.

    A journal of another kind is a module with one of these, and a line in factory.py.
    """

    #: The name of the store in messages: a path.
    path: str
    #: What `commit` survives: a loss of power, or the end of every process. With `process`, `promise` survives as much
    #: and is quicker.
    durability: Literal["power", "process"]
    #: What could not be read, in words, if the operator has accepted the loss.
    losses: list[str]

    def rows(self) -> Iterator[Row]:
        """All records, in the order in which they were written."""

    def files(self) -> frozenset[str]:
        """Files of large payloads that kept answers refer to."""

    def suspect(self, row: Row, reason: str, now_ms: int) -> bool:
        """A record could not be applied. True when it is put aside, which happens from the second time on."""

    def commit(self, batch: Sequence[Write], now_ms: int) -> int:
        """Write a batch, whole or not at all; returns the number of its last write. Raises DiskFull, JournalFailed."""

    def promise(self, batch: Sequence[Write], now_ms: int) -> int:
        """As `commit`, so that it survives the end of every process; the rest of the work is left to `fold`."""

    def fold(self) -> None:
        """Do what `promise` has left. Raises DiskFull, JournalFailed."""

    def checkpoint(self) -> None:
        """Slow work on the disk that may be done at any moment, by another thread. Never raises."""

    def tidy(self, now_ms: int) -> bool:
        """Remove what was kept long enough; True when there is more to do. Raises DiskFull, JournalFailed."""

    def close(self) -> None:
        """Finish what is left, and close."""
