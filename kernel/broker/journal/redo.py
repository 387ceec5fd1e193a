"""The redo file, `<state_dir>/kernel.db-redo`: batches that were promised and are not in the tables yet.

It is for `durability: process`.

A transaction of SQLite writes ten pages for one event, and the reply would have to wait for them. So a batch is first
appended here, with one write into the page cache. Like a commit, this survives the end of every process. The batch is
folded into the tables after the replies were sent, many batches in one transaction. A start folds the batches that are
left.

An entry is a header (magic, length and checksum of the body) and a body in msgpack: the number of its first write, the
running digest before it, the time, the writes. After each fold, new entries are written from the beginning of the file,
over those that are already in the tables. So only a chain of entries counts: each begins with the number and the digest
with which the entry before it ended, and the first entry with those of the tables.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from goondan.kernel.broker.state.records import DiskFull, DropAnswer, Ended, JournalFailed, Put, Retire, Write

REDO_SUFFIX: Final = "-redo"
#: Magic, bytes of the body, its checksum.
_HEAD: Final = struct.Struct("<4sII")
_MAGIC: Final = b"GdnR"
#: A file that has grown beyond this (bytes) is cut when everything in it was folded: one large batch must not stay.
KEPT_BYTES: Final = 1 << 20
#: How a disk, or a user's part of it, says that it is full.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

_encoder: Final = msgspec.msgpack.Encoder()


class RedoEntry(NamedTuple):
    """One batch."""

    #: The number of its first write.
    first: int
    #: The running digest before it.
    digest: int
    #: Milliseconds since 1970.
    at_ms: int
    #: The writes of the batch.
    writes: Sequence[Write]

    @property
    def last(self) -> int:
        """The number of its last write."""
        return self.first + len(self.writes) - 1


class RedoFile:
    """The file at `path`. Made with the first entry."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._at = 0

    def append(self, entry: RedoEntry) -> None:
        """Write an entry, whole or not at all. Raises DiskFull, JournalFailed."""
        body = _encoder.encode((entry.first, entry.digest, entry.at_ms, [_plain(write) for write in entry.writes]))
        data = _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body
        try:
            if self._fd is None:
                self._fd = open_own(self._path)
            written = os.pwrite(self._fd, data, self._at)
            while written < len(data):  # the next try says why
                written += os.pwrite(self._fd, data[written:], self._at + written)
        except OSError as error:
            if error.errno in _FULL:
                # Half an entry has no right checksum, and the next one is written over it.
                raise DiskFull(f"{self._path}: {error.strerror}") from None
            raise JournalFailed(f"{self._path}: {error.strerror}") from None
        self._at += len(data)

    def read(self) -> list[RedoEntry]:
        """The chain from the beginning of the file. Raises OSError."""
        try:
            # Not to be kept waiting by a pipe that stands in the file's place.
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return []
        try:
            state = os.fstat(fd)
            if stat.S_ISDIR(state.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                return []  # not our file; the first entry replaces it
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
        finally:
            os.close(fd)
        found: list[RedoEntry] = []
        at = 0
        while (entry := _entry_at(data, at)) is not None:
            if found and entry[0].first != found[-1].last + 1:
                break  # of an earlier round
            found.append(entry[0])
            at = entry[1]
        return found

    def clear(self) -> None:
        """Everything is in the tables: begin again."""
        if self._fd is not None and self._at > KEPT_BYTES:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._at = 0

    def close(self) -> None:
        """Close the file. An empty one goes."""
        fd, self._fd = self._fd, None
        if fd is not None and not self._at:
            with suppress(OSError):
                os.unlink(self._path)
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def following(entries: Sequence[RedoEntry], last: int, digest: int) -> list[RedoEntry]:
    """The entries of a chain that continue tables with the last write `last` and this running digest (pure)."""
    left = [entry for entry in entries if entry.first > last]
    return left if left and (left[0].first, left[0].digest) == (last + 1, digest) else []


class Told(NamedTuple):
    """What the batches that are not in the tables change about a subject."""

    #: Records that come after those in the tables.
    records: list[bytes]
    #: True when these are all records: those in the tables do not count.
    alone: bool
    #: How the subject ended; None when they do not tell.
    ended: Ended | None
    #: The kept answer; None when they do not tell.
    answer: bytes | None
    #: True when the answer was dropped.
    dropped: bool


def told(entries: Sequence[RedoEntry], subject: str) -> Told:
    """What these entries change about a subject, in order (pure)."""
    records: list[bytes] = []
    alone = dropped = False
    ended: Ended | None = None
    answer: bytes | None = None
    for entry in entries:
        for write in entry.writes:
            if write.subject != subject:
                continue
            if isinstance(write, Put):
                records.append(write.data)
            elif isinstance(write, DropAnswer):
                answer, dropped = None, True
            else:
                records, alone = [], True
                if write.digest is not None:
                    ended = Ended(write.digest, write.state, entry.at_ms)
                if write.answer is not None:
                    answer, dropped = write.answer, False
    return Told(records, alone, ended, answer, dropped)


def advance(digest: int, writes: Sequence[Write]) -> int:
    """The running digest after these writes (pure)."""
    for write in writes:
        if isinstance(write, Put):
            digest = zlib.crc32(record_checksum(write.subject, write.data).to_bytes(4, "little"), digest)
        else:
            digest = zlib.crc32(write.subject.encode(), digest)
    return digest


def record_checksum(subject: str, data: bytes) -> int:
    """The checksum of a record, or of an answer."""
    return zlib.crc32(data, zlib.crc32(subject.encode()))


def _plain(write: Write) -> tuple[Any, ...]:
    if isinstance(write, Put):
        return (0, *write)
    return (1, *write) if isinstance(write, Retire) else (2, *write)


def _entry_at(data: bytes, at: int) -> tuple[RedoEntry, int] | None:
    """The entry that begins there, and where it ends; None when none does."""
    if at + _HEAD.size > len(data):
        return None
    magic, size, checksum = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : at + _HEAD.size + size]
    if magic != _MAGIC or len(body) < size or zlib.crc32(body) != checksum:
        return None
    try:
        first, digest, at_ms, writes = msgspec.msgpack.decode(body)
        return RedoEntry(first, digest, at_ms, [_write(*write) for write in writes]), at + _HEAD.size + size
    except (msgspec.DecodeError, TypeError, ValueError):
        return None


def _write(kind: int, *values: Any) -> Write:
    if kind == 0:
        return Put(*values)
    if kind == 2:
        return DropAnswer(*values)
    subject, digest, state, answer, large = values
    return Retire(subject, digest, state, answer, None if large is None else (large[0], large[1]))


def open_own(path: str) -> int:
    """A file for writing. A file that is not ours is replaced: it may be somebody's file under a second name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):
        fd = os.open(path, flags, 0o600)
        state = os.fstat(fd)
        if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink == 1:
            return fd
        os.close(fd)
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL, 0o600)
