"""The lines that a person has typed, kept between sessions: a file of JSON texts, one a line, mode 0600.

Rules.
- The file has the newest MAX_ENTRIES entries and at most MAX_BYTES. Longer entries are not kept. The file is cut when
  it is loaded.
- An entry that begins with a space is not kept, as in a shell. So a person can type a secret.
- A file that cannot be read or written costs the history, not the session. The same holds for a link, a pipe, and a
  file of another user: none of them is followed.

Source: docs/design/processes.md section 8.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from typing import Final

from goondan.schemas.system.private_files import replace_file

FILE: Final = "history"
MAX_ENTRIES: Final = 1000
#: The largest file (bytes), and the longest entry (characters).
MAX_BYTES: Final = 1 << 20
MAX_ENTRY: Final = 16 << 10
#: A line of the file is at most so many times as long as its entry (`\\uXXXX` for a character).
_ESCAPED: Final = 12


def load(path: str) -> list[str]:
    """The entries, oldest first. A file that has grown too long is written again."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        size = _size(fd)
        if size is None:
            return []
        os.fchmod(fd, 0o600)
        entries = parse(os.pread(fd, 2 * MAX_BYTES, max(0, size - 2 * MAX_BYTES)))
        kept = newest(entries)
        if len(kept) < len(entries) or size > MAX_BYTES:
            with suppress(OSError):
                _replace(path, kept)
        return kept
    except OSError:
        return []
    finally:
        os.close(fd)


def append(path: str, entry: str) -> None:
    """Append an entry to the file, if it is one that is kept."""
    if not is_kept(entry):
        return
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            if _size(fd) is not None:
                os.write(fd, line(entry))  # one write: lines of two sessions do not mix
        finally:
            os.close(fd)


def is_kept(entry: str) -> bool:
    """Whether an entry is kept."""
    return bool(entry.strip()) and not entry.startswith(" ") and len(entry) <= MAX_ENTRY


def line(entry: str) -> bytes:
    """An entry as a line of the file. Lone surrogates and all controls are escaped."""
    return json.dumps(entry).encode() + b"\n"


def parse(data: bytes) -> list[str]:
    """The entries in the bytes of a file. Lines that are no entry, such as a torn one, are left out."""
    entries = []
    for text in data.split(b"\n"):
        with suppress(ValueError, RecursionError):
            entry = json.loads(text) if len(text) <= MAX_ENTRY * _ESCAPED else None
            if isinstance(entry, str) and is_kept(entry):
                entries.append(entry)
    return entries


def newest(entries: list[str]) -> list[str]:
    """The newest entries, as many as are kept."""
    room = MAX_BYTES
    kept: list[str] = []
    for entry in reversed(entries[-MAX_ENTRIES:]):
        room -= len(line(entry))
        if room < 0:
            break
        kept.append(entry)
    return kept[::-1]


def _size(fd: int) -> int | None:
    """The size of a file that is ours (bytes). None for anything else."""
    state = os.fstat(fd)
    return state.st_size if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() else None


def _replace(path: str, entries: list[str]) -> None:
    replace_file(path, b"".join(map(line, entries)))
