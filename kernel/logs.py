"""Lines of a kernel's logs: whose they are, when they were written, and in which order to show them (pure).

Three kinds of lines stand in them: `2026-01-31 09:30:00,123 LEVEL text` in local time (supervisor, agents), one JSON
object with `time` in seconds (tool host, for itself and for its tools), and anything else, which belongs to the line
before it: tracebacks, and what a library prints. All of it is untrusted: tools write through the tool host.

Source: docs/design/commands.md section 8.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

#: Longer lines are cut (characters): they are no longer read, and a terminal would choke.
MAX_LINE: Final = 8192
#: Processes that have one log; each agent's is `agent-<name>`.
ROLES: Final = ("supervisor", "broker", "toolhost", "forkserver", "oauth")
AGENT: Final = "agent"

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
