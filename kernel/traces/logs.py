"""The logs of a workspace: how files are named, opened and kept within their bounds, and how they are read
while programs write them.

A role has up to three files. `<role>.log` is what its processes append to. When it has grown too large, its content
becomes `<role>.log.1`, and what was there before becomes `<role>.log.2`; a reader that follows goes on there, and
loses nothing. What one source may write at once and later is bounded where lines are written
(schemas/traces/log_admission.py): so a flood takes long to push out others' lines.

Everything is opened below the folder's descriptor and never through a link. A file that takes another file's place was
made at that moment, under a name that nobody can guess.

Four kinds of lines stand in them: `2026-01-31 09:30:00,123 LEVEL text` in local time (supervisor, agents), one JSON
object with `time` in seconds (tool host, for itself and for its tools), one JSON object with `time` as RFC 3339 (every
program, if that is wished: schemas/system/log_lines.py), and anything else, which belongs to the line before it:
tracebacks, and what a library prints. All of it is untrusted: tools write through the tool host.

Source: docs/decisions/158; docs/design/commands.md section 8.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from goondan.features import FEATURES
from goondan.kernel.supervisor.programs import programs

SUFFIX: Final = ".log"
OLD_SUFFIX: Final = ".1"
OLDER_SUFFIX: Final = ".2"
#: A log that is larger moves to `<role>.log.1` (bytes).
MAX_LOG_BYTES: Final = 8 << 20
#: Of each older file (bytes): what was written until the next look at a log that had become too large fits as well.
#: What is more is cut from its middle.
MAX_OLD_BYTES: Final = 12 << 20
#: Room for the line that says how much was cut (bytes).
_LINE: Final = 256
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def role_of(name: str) -> str | None:
    """The role that a file of the log folder belongs to; None for what is no log."""
    role = name.removesuffix(OLD_SUFFIX).removesuffix(OLDER_SUFFIX).removesuffix(SUFFIX)
    return role if role and name in (role + SUFFIX + end for end in ("", OLD_SUFFIX, OLDER_SUFFIX)) else None


def open_log(path: str) -> int:
    """A log file to append to, closed to others. The content of a file that is too large already moves first.

    Raises OSError, also when it is a link, or somebody else's.
    """
    folder = os.open(os.path.dirname(path), _FOLDER)
    try:
        fd = os.open(os.path.basename(path), _APPEND, 0o600, dir_fd=folder)
        try:
            _check(fd, path)
        except OSError:
            os.close(fd)
            raise
        os.set_blocking(fd, True)
    finally:
        os.close(folder)
    bound_log(path)
    return fd


def bound_logs(folder: str) -> None:
    """Bound every log in a folder that is being written to. Never raises: a log that cannot be bounded stays."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(SUFFIX):
                bound_log(os.path.join(folder, name))


def bound_log(path: str) -> None:
    """Bound a log that is being written: its content so far becomes `<path>.1`, and it starts again from nothing.

    The writers append, so they go on at the new end. Lines written between the copy and the cut are lost. Never raises.
    """
    with suppress(OSError):
        folder = os.open(os.path.dirname(path), _FOLDER)
        try:
            name = os.path.basename(path)
            log = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                _check(log, path)
                if os.fstat(log).st_size > MAX_LOG_BYTES:
                    _rotate(folder, name, log)
                    os.ftruncate(log, 0)
            finally:
                os.close(log)
        finally:
            os.close(folder)


def _rotate(folder: int, name: str, log: int) -> None:
    """Copy what a log holds into `<name>.1`, whose content becomes `<name>.2`."""
    from goondan.schemas.system.directories import replace_in  # every command and every start opens logs

    old = name + OLD_SUFFIX
    with suppress(FileNotFoundError):
        # What is no plain file of ours is replaced where it is: a link to elsewhere is no older log.
        if _is_ours(os.stat(old, dir_fd=folder, follow_symlinks=False)):
            os.rename(old, name + OLDER_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    replace_in(folder, old, _content(log, MAX_OLD_BYTES))


def _content(fd: int, limit: int) -> bytes:
    """The content of a file. When it is too large: its beginning, a line that says how much is left out, and its end.
    It ends with a line's end.
    """
    size = os.fstat(fd).st_size
    if size <= limit:
        data = _part(fd, 0, size)
    else:
        from goondan.schemas.traces.log_admission import suppressed_bytes

        half = (limit - _LINE) // 2
        first, last = _part(fd, 0, half), _part(fd, size - half, half)
        first, last = first[: first.rfind(b"\n") + 1], last[last.find(b"\n") + 1 :]
        missing = size - len(first) - len(last)
        data = first + suppressed_bytes(missing) + b"\n" + last
    return data if not data or data.endswith(b"\n") else data + b"\n"


def _part(fd: int, start: int, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
        data += more
    return data


def _check(fd: int, path: str) -> None:
    """Raise OSError unless it is a plain file of ours with this one name."""
    if not _is_ours(os.fstat(fd)):
        raise OSError(errno.EPERM, "is no plain file of ours", path)


def _is_ours(state: os.stat_result) -> bool:
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink <= 1


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


class _Whose(Struct, rename="camel"):
    """What the tool host says of a line besides."""

    #: The tool that wrote it. None: the tool host itself.
    tool: str | None = None
    #: The agent that it was written for.
    agent: str | None = None
    #: The key of the agent's instance.
    instance_key: str | None = None
    #: The code of the error that it reports.
    code: str | None = None


class _Said(_Whose, rename="camel", kw_only=True):
    """A line that is an object."""

    #: Its text.
    message: str
    #: Its level.
    level: str = "info"
    #: When it was written: seconds since 1970, or RFC 3339.
    time: float | str | None = None
    #: What else is said of it, where every program writes objects.
    fields: _Whose | None = None


def roles() -> tuple[str, ...]:
    """The processes that have one log."""
    return (
        "supervisor",
        "broker",
        "toolhost",
        "forkserver",
        *programs(),
        *(name for row in FEATURES for name in row.beside),
    )


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
            at = _moment(said.time) if isinstance(said.time, str) else said.time
            return at, said.level.upper(), _cut(_words(said.fields or said, said.message))
    match = _TIMED.match(text)
    time = None if match is None else _moment(f"{match[1]}.{match[2]}")
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


def _words(said: _Whose, message: str) -> str:
    where = "" if said.agent is None else f" ({said.agent}/{said.instance_key or ''})"
    whose = "" if said.tool is None else f"{said.tool}{where}: "
    return whose + message + ("" if said.code is None else f" [{said.code}]")


def _moment(at: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(at).timestamp()
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


def of_instance(folder: str, agent: str, instance: str, count: int) -> list[LogLine]:
    """What the processes of an agent have written, and the tools of one of its instances, by time; of the last `count`
    lines of each log.
    """
    found, own = list[list[LogLine]](), f"{AGENT}-{agent}"
    for role in (own, "toolhost"):
        with closing(Log(role, f"{folder}/{role}{SUFFIX}")) as log:
            found.append(log.tail(count))
    # A line of a tool begins with the tool's name and whose it is (`_words`); what comes behind is the tool's own.
    whose = f"{agent}/{instance}): "
    return [line for line in merge(found) if line.role == own or line.text.partition(" (")[2].startswith(whose)]


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
