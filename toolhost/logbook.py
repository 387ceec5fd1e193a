"""The log lines of tools, written by the tool host. Each tool of an agent instance has a share of the room.

Code in a jail writes these lines as fast as it likes. Without shares one tool would push the lines of all others out of
the log.

Source: docs/decisions/158.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from goondan.schemas.system.log_admission import Admission, suppressed_lines
from goondan.schemas.tool_host_reports import LogLine

#: The longest time until the log reports a suppressed line (seconds).
REPORT_S: Final = 5.0


class Source(NamedTuple):
    """The writer of lines. Each writer has a share of its own."""

    #: The agent. None: the line belongs to no agent.
    agent: str | None
    #: The key of its instance.
    instance_key: str | None
    #: The tool.
    tool: str


class Logbook:
    """The log of one tool host. Use from the loop's thread."""

    def __init__(self) -> None:
        self._admission: Admission[Source] = Admission()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: LogLine) -> None:
        """Write a line of a tool, if its source has room."""
        data = msgspec.json.encode(line)
        source = Source(line.agent, line.instance_key, line.tool)
        if self._admission.admit(line.agent or line.tool, source, len(data) + 1, time.monotonic()):
            self._say(source, self._admission.take_suppressed(source))
            put(data)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def close(self) -> None:
        """Report the lines that were suppressed until now."""
        if self._timer is not None:
            self._timer.cancel()
        self._report()

    def _report(self) -> None:
        self._timer = None
        for source, count in self._admission.take_all_suppressed().items():
            self._say(source, count)

    def _say(self, source: Source, count: int) -> None:
        if count:
            put(msgspec.json.encode(suppressed_lines(count, time.time(), **source._asdict())))


def put(line: bytes) -> None:
    """Write one line to standard error, from which the supervisor collects the log."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), line + b"\n")
