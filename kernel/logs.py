"""Reading the logs of a kernel while programs write them: lines, their order, the ends of files and what is added.

Three kinds of lines stand in them: `2026-01-31 09:30:00,123 LEVEL text` in local time (supervisor, agents), one JSON
object with `time` in seconds (tool host, for itself and for its tools), and anything else, which belongs to the line
before it: tracebacks, and what a library prints. All of it is untrusted: tools write through the tool host.

A log that becomes too large is copied and emptied (kernel/log_bounds.py), so its old content is `<role>.log.1`, and
`<role>.log.2` what that was before. A reader that follows goes on there, so that it loses nothing.

Source: docs/design/commands.md section 8.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from goondan.kernel.log_bounds import OLD_SUFFIX, OLDER_SUFFIX, SUFFIX, role_of
from goondan.kernel.supervisor.programs import programs

#: Longer lines are cut (characters): they are no longer read, and a terminal would choke.
MAX_LINE: Final = 8192
#: What the log of each agent is called: `agent-<name>`.
AGENT: Final = "agent"

#: Bytes read at once, and in one look at one log.
BLOCK: Final = 1 << 16
MAX_LOOK: Final = 4 << 20
#: A line that has no end yet is kept up to this size (bytes), then shown as it is.
MAX_PARTIAL: Final = 1 << 16

_TIMED: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")
_LEVEL: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b ?")


class LogLine(Struct, frozen=True):
    """One line."""

    #: When it was written (seconds since 1970).
    time: float
    #: The process that wrote it.
    role: str
    #: Its level. INFO for a line that names none.
    level: str
    #: Its text.
    text: str


class _Said(Struct, rename="camel"):
    """A line of the tool host's."""

    #: Its text.
    message: str
    #: Its level.
    level: str = "info"
    #: When it was written (seconds since 1970).
    time: float | None = None
    #: The tool that wrote it. None: the tool host itself.
    tool: str | None = None
    #: The agent that it was written for.
    agent: str | None = None
    #: The key of the agent's instance.
    instance_key: str | None = None
    #: The code of the error that it reports.
    code: str | None = None


def roles() -> tuple[str, ...]:
    """The processes that have one log."""
    return ("supervisor", "broker", "toolhost", "forkserver", *programs())


def is_wanted(role: str, wanted: str | None) -> bool:
    """Whether a role's log is shown: all without a wish; `agent` stands for every agent."""
    return wanted is None or role == wanted or (wanted == AGENT and role.startswith(AGENT + "-"))


class Reader:
    """Makes entries of one role's lines, in their order. `fallback` is the time for a file without any."""

    def __init__(self, role: str, fallback: float) -> None:
        self._role = role
        self._last = (fallback, "INFO")
        self._begun = False

    def read(self, lines: Sequence[bytes]) -> list[LogLine]:
        """The entries of complete lines, without their line ends."""
        parsed = [parse(line) for line in lines]
        if not self._begun:
            # The first lines that we read can belong to a line further up. They are not older than the next known time.
            known = next((time for time, _, _ in parsed if time is not None), None)
            if known is not None:
                self._last, self._begun = (known, "INFO"), True
        entries = []
        for time, level, text in parsed:
            before, above = self._last
            self._last = (before if time is None else time, level or ("INFO" if time is not None else above))
            entries.append(LogLine(self._last[0], self._role, self._last[1], text))
        return entries


def parse(line: bytes) -> tuple[float | None, str | None, str]:
    """Time, level and text of one line; None for what it does not say."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    if text.startswith("{"):
        said = _said(line)
        if said is not None:
            return said.time, said.level.upper(), _cut(_words(said))
    match = _TIMED.match(text)
    time = None if match is None else _seconds(match[1], match[2])
    if match is None or time is None:
        return None, None, _cut(text)
    rest = text[match.end() :]
    level = _LEVEL.match(rest)
    return time, None if level is None else level[1], _cut(rest if level is None else rest[level.end() :])


def _said(line: bytes) -> _Said | None:
    try:
        return msgspec.json.decode(line, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _words(said: _Said) -> str:
    where = "" if said.agent is None else f" ({said.agent}/{said.instance_key or ''})"
    whose = "" if said.tool is None else f"{said.tool}{where}: "
    return whose + said.message + ("" if said.code is None else f" [{said.code}]")


def _seconds(day_and_time: str, ms: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(f"{day_and_time}.{ms}").timestamp()
    except (ValueError, OverflowError):
        return None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "…"


def merge(logs: Iterable[Sequence[LogLine]], count: int | None = None) -> list[LogLine]:
    """All entries by time, those of one log in their order; only the last `count` of them."""
    merged = sorted((entry for log in logs for entry in log), key=lambda entry: entry.time)
    return merged if count is None else merged[len(merged) - min(count, len(merged)) :]


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
