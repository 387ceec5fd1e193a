"""Reading log files while programs write them: their ends, and what is added later.

A log that becomes too large is either renamed at a start or copied and emptied in use (kernel/log_bounds.py); in both
cases its old content is `<role>.log.1`. A reader that follows goes on there, so that it loses nothing. Earlier lines
are in `<role>.log.2`, as far as they were kept.

Source: docs/design/commands.md section 8.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO, Final

from goondan.kernel.log_names import OLD_SUFFIX, OLDER_SUFFIX, SUFFIX, role_of
from goondan.kernel.logs import LogLine, Reader, is_wanted

#: Bytes read at once, and in one look at one log.
BLOCK: Final = 1 << 16
MAX_LOOK: Final = 4 << 20
#: A line that has no end yet is kept up to this size (bytes), then shown as it is.
MAX_PARTIAL: Final = 1 << 16


def log_files(folder: str, wanted: str | None) -> dict[str, str]:
    """Role -> path, of the logs that are shown."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            role = role_of(name)
            if role is not None and is_wanted(role, wanted):
                found[role] = os.path.join(folder, role + SUFFIX)
    return found


def last_lines(data: BinaryIO, count: int) -> list[bytes]:
    """The last `count` lines of a file, read from its end, where the file then stands. A line without an end counts."""
    size = end = data.seek(0, os.SEEK_END)
    blocks: list[bytes] = []
    ends = 0
    while end > 0 and ends <= count:
        start = max(0, end - BLOCK)
        data.seek(start)
        block = data.read(end - start)
        blocks.append(block)
        ends += block.count(b"\n")
        end = start
    data.seek(size)  # not to its end now: what is written meanwhile is still to be read
    lines = b"".join(reversed(blocks)).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines[len(lines) - min(count, len(lines)) :]


class Log:
    """One role's log. `tail` comes first; then every `look` gives what was added."""

    def __init__(self, role: str, path: str) -> None:
        self.path = path
        self._role = role
        self._reader: Reader | None = None
        self._file: BinaryIO | None = None
        self._partial = b""

    def tail(self, count: int) -> list[LogLine]:
        """The last `count` entries, of the old content too if the present is shorter. Reading goes on at the end."""
        lines: list[bytes] = []
        if self._open() and self._file is not None:
            lines = last_lines(self._file, count)
        for suffix in (OLD_SUFFIX, OLDER_SUFFIX):
            if len(lines) < count:
                with suppress(OSError), open(self.path + suffix, "rb") as old:
                    lines = last_lines(old, count - len(lines)) + lines
        return self._entries(lines)

    def look(self) -> list[LogLine]:
        """What was added since the last time. A last line without an end waits for it."""
        data = b""
        if self._file is not None:
            data = self._moved()
        if self._file is None and self._open():
            data += self._rest()
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_PARTIAL:
            lines.append(self._partial)
            self._partial = b""
        return self._entries(lines)

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - kept between looks
        except OSError:
            return False
        return True

    def _moved(self) -> bytes:
        """The rest of the open file; closed when the path leads to another by now."""
        file = self._file
        if file is None:
            return b""
        state = os.fstat(file.fileno())
        data = b""
        if state.st_size < file.tell():
            with suppress(OSError), open(self.path + OLD_SUFFIX, "rb") as old:
                old.seek(file.tell())
                data = old.read(MAX_LOOK)
            file.seek(0)
        data += self._rest()
        try:
            same = os.path.samestat(os.stat(self.path), state)
        except OSError:
            same = False
        if not same:
            data += self._rest()
            self.close()
        return data

    def _rest(self) -> bytes:
        data = b""
        while self._file is not None and len(data) < MAX_LOOK and (block := self._file.read(BLOCK)):
            data += block
        return data

    def _entries(self, lines: list[bytes]) -> list[LogLine]:
        if self._reader is None:
            written = 0.0
            with suppress(OSError):
                written = os.stat(self.path).st_mtime
            self._reader = Reader(self._role, written)
        return self._reader.read(lines)
