"""The log lines of tools, as the tool host writes them: each instance of an agent has its share of room at once.

What tools say is written by whoever runs in a jail, as fast as it likes. Without a share one tool would push the lines
of all others out of the log.

Source: docs/decisions/043.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from schemas.system.log_admission import Admission, suppressed_lines
from schemas.tool_host_reports import LogLine

#: How long after a line was suppressed the log says so at the latest (seconds).
REPORT_S: Final = 5.0


class Source(NamedTuple):
    """Whose lines share a bucket."""

    agent: str | None
    instance_key: str | None
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
        """Say what was suppressed until now."""
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
    """One line on standard error, where the supervisor collects the log."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), line + b"\n")
