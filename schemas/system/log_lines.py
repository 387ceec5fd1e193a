"""Logs as JSON: with `GOONDAN_LOG_FORMAT=json` each record that a program of the kernel writes to its standard error is
one JSON object in one line, `{time, level, role, name, message, fields}`. Without it nothing here does anything.

It is the stream that makes them, so whatever writes keeps its form: loggers, `print`, tracebacks. Their own time and
level are taken out of the text. `time` is RFC 3339 in UTC; `level` is debug, info, warning, error or critical; `role`
is the program; `name` is the agent and its instance, or ""; `fields` has what else the tool host says of a line.

Source: docs/decisions/175.
"""

from __future__ import annotations

import datetime
import io
import os
import re
import sys
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.schemas.text.times import rfc3339

#: The environment variable. `json` is the only value that counts.
VARIABLE: Final = "GOONDAN_LOG_FORMAT"
#: Text without an end that is kept (characters), then written as it is.
MAX_PARTIAL: Final = 1 << 16
#: How loggers of the kernel begin a record: in local time. A text: without the variable no program reads it.
_RECORD: Final = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) ?"
#: What the tool host writes for `warning`.
_WARN: Final = "warn"


class JsonLines(io.TextIOBase):
    """Standard error as JSON lines, of the program `role`, for `name`."""

    def __init__(self, fd: int, role: str, name: str) -> None:
        super().__init__()
        self._fd = fd
        self.role = role
        self.name = name
        self._partial = ""

    def write(self, text: str) -> int:
        """Write a record, or a part of a line. What ends with a line's end is a record, of however many lines."""
        self._partial += text
        if self._partial.endswith("\n") or len(self._partial) > MAX_PARTIAL:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what there is."""
        text, self._partial = self._partial.rstrip("\n"), ""
        if text:
            self._put(*_parsed(text, self.name or self.role), {})

    def put_object(self, line: bytes) -> None:
        """Write a line of the tool host, which is an object already."""
        fields = msgspec.json.decode(line, type=dict[str, Any])
        at, level, message = fields.pop("time", None), str(fields.pop("level", "info")), fields.pop("message", "")
        level = "warning" if level == _WARN else level
        self._put(time.time() if at is None else at, level, message, fields)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def writable(self) -> bool:
        """True."""
        return True

    def _put(self, at: float, level: str, message: str, fields: dict[str, Any]) -> None:
        said = {"time": rfc3339(at), "level": level, "role": self.role, "name": self.name, "message": message}
        more = {key: value for key, value in fields.items() if value is not None}
        line = msgspec.json.encode({**said, "fields": more}) + b"\n"
        with suppress(OSError):
            while line:  # a signal may cut a write to a pipe short
                line = line[os.write(self._fd, line) :]


def begin_log(role: str, name: str = "") -> None:
    """Say whose lines this process writes from now on: those of the program `role`, for `name`."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.role, sys.stderr.name = role, name
    elif os.environ.get(VARIABLE) == "json":
        sys.stderr = JsonLines(2, role, name)


def _parsed(text: str, name: str) -> tuple[float, str, str]:
    """Time (seconds since 1970), level and text of a record."""
    text = text.encode("utf-8", "replace").decode()
    found = re.match(_RECORD, text)
    if found is None:
        return time.time(), "info", text
    try:
        at = datetime.datetime.fromisoformat(f"{found[1]}.{found[2]}").timestamp()
    except (ValueError, OverflowError):
        at = time.time()
    return at, found[3].lower(), text[found.end() :].removeprefix(f"{name} ")
