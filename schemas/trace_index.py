"""Which turns a trace has, and where: the folder `traces` of a workspace. Agents add to it, `gdn trace` reads it.

Rules.
- A turn that begins adds one line: when, trace, turn, event, agent, instance key, as a JSON array. No line is changed.
- There is a file for each first digit of a trace id, so a trace is in one of sixteen. A file that has grown takes the
  place of its predecessor (`.1`). So the folder is bounded, and the oldest turns are forgotten first.
- It is a hint. The conversation files hold the truth. Everything here can be deleted. So nothing is synced, a turn goes
  on when its line cannot be written, and a reader skips what it cannot read.
- Lines of several processes never mix: each is one write at the end of the file. It begins with a line break of its
  own, because a loss of power may have cut the line before.

Source: docs/design/traces.md section 3.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.schemas.spans import is_trace_id

FOLDER: Final = "traces"
#: A file of this size takes the place of its predecessor (bytes). All of them hold some 400,000 turns, and are read in
#: less than 100 ms.
FILE_BYTES: Final = 2 << 20
#: The last turns of a file are looked for in this much of its end (bytes): a hundred lines.
_TAIL_BYTES: Final = 16 << 10
_DIGITS: Final = "0123456789abcdef"
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_encoder: Final = msgspec.json.Encoder()


class IndexLine(Struct, frozen=True, array_like=True):
    """One turn."""

    #: When it began: RFC 3339 in UTC with milliseconds.
    at: str
    #: Its trace.
    trace_id: str
    #: Its id.
    turn_id: str
    #: The event that it was for.
    event_id: str
    #: The agent.
    agent: str
    #: Its instance.
    instance_key: str


_decoder: Final = msgspec.json.Decoder(IndexLine)


def add(state_dir: str, entry: IndexLine) -> None:
    """Add a turn; its trace id must be one. Raises OSError."""
    folder = f"{state_dir}/{FOLDER}"
    path = f"{folder}/{entry.trace_id[0]}"
    try:
        fd = os.open(path, _APPEND, 0o600)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        fd = os.open(path, _APPEND, 0o600)
    try:
        os.write(fd, b"\n" + _encoder.encode(entry) + b"\n")
        if os.lseek(fd, 0, os.SEEK_CUR) >= FILE_BYTES:
            _replace(fd, path)
    finally:
        os.close(fd)


def _replace(fd: int, path: str) -> None:
    """A file has grown: it takes the place of its predecessor, unless somebody else has just done that."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            os.replace(path, f"{path}.1")
    except (BlockingIOError, FileNotFoundError):
        return


def of_trace(state_dir: str, trace_id: str) -> list[IndexLine]:
    """The turns of a trace, in the order in which they began."""
    if not is_trace_id(trace_id):
        return []
    found = _search(state_dir, trace_id[0], trace_id)
    return _sorted([entry for entry in found if entry.trace_id == trace_id])


def named(state_dir: str, name: str) -> list[IndexLine]:
    """The turns with this id, or of an event with this id."""
    found = [entry for digit in _DIGITS for entry in _search(state_dir, digit, name)]
    return _sorted([entry for entry in found if name in (entry.turn_id, entry.event_id)])


def last(state_dir: str, number: int, agent: str | None = None, instance_key: str | None = None) -> list[IndexLine]:
    """The turns that began last, the last one first; of one agent, or one instance key, if given. Only the last lines
    of a file are searched.
    """
    found: list[IndexLine] = []
    for digit in _DIGITS:
        for path in _files(state_dir, digit):
            with _opened(path) as data:
                if data is None:
                    continue
                tail = data[max(0, len(data) - _TAIL_BYTES) :]
            lines = [_read(line) for line in tail.split(b"\n")]
            found += [entry for entry in lines if entry is not None]
    wanted = [
        entry
        for entry in found
        if agent in (None, entry.agent) and instance_key in (None, entry.instance_key)
    ]  # fmt: skip
    return _sorted(wanted)[::-1][:number]


def _sorted(entries: list[IndexLine]) -> list[IndexLine]:
    """Each turn once, by its beginning: a turn that was cut off in it has a line for each time it began."""
    once = {(entry.agent, entry.instance_key, entry.turn_id): entry for entry in reversed(entries)}
    return sorted(once.values(), key=lambda entry: entry.at)


def _files(state_dir: str, digit: str) -> tuple[str, str]:
    # In this order: a file that grows too large meanwhile is then read twice, not missed.
    return (f"{state_dir}/{FOLDER}/{digit}", f"{state_dir}/{FOLDER}/{digit}.1")


def _search(state_dir: str, digit: str, name: str) -> list[IndexLine]:
    """Lines with this text, of the files of one digit."""
    try:
        wanted = _encoder.encode(name)
    except UnicodeEncodeError:
        return []
    found: list[IndexLine] = []
    for path in _files(state_dir, digit):
        with _opened(path) as data:
            if data is None:
                continue
            at = data.find(wanted)
            while at >= 0:
                start = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                end = len(data) if end < 0 else end
                entry = _read(data[start:end])
                if entry is not None:
                    found.append(entry)
                at = data.find(wanted, end)
    return found


@contextmanager
def _opened(path: str) -> Iterator[mmap.mmap | None]:
    """A file's bytes; None for one that is not there, is empty, or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        data = None
    finally:
        os.close(fd)
    if data is None:
        yield None
        return
    with data:
        yield data


def _read(line: bytes) -> IndexLine | None:
    try:
        entry = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return entry if is_trace_id(entry.trace_id) else None
