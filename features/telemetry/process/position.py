"""How far the exporter has come, on disk: all that it keeps. The spans are where the agents have stored them.

It is written after each batch that the collector has taken. So what was sent and not yet written down is sent again
after a crash, with the same ids of traces and spans: it is the same span once more. Nothing is left out.

Source: docs/design/traces.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.features.telemetry.process.reading import Turn
from goondan.features.telemetry.wire import TELEMETRY
from goondan.schemas.system.directories import replace_file

FILE: Final = "position.json"
#: Turns that are exported at once, those that run among them. When there are more, the oldest are given up.
MAX_TURNS: Final = 4096
#: The largest file that is read (bytes).
_MAX_BYTES: Final = 16 << 20


class Position(Struct, kw_only=True):
    """The position."""

    #: The number of the last row of the index that was taken up; 0: none.
    seq: int = 0
    #: The turn of that row.
    turn_id: str = ""
    #: When that turn began. Without a row: since when turns count.
    at: str = ""
    #: Turns up to that row that are not done.
    turns: list[Turn] = []
    #: Spans that were given up.
    dropped: int = 0
    #: Turns that were given up with all their spans.
    dropped_turns: int = 0


def read(state_dir: str) -> Position | None:
    """The position of a workspace; None: it has none that can be read."""
    with suppress(OSError, msgspec.DecodeError, UnicodeError):
        fd = os.open(f"{state_dir}/{TELEMETRY}/{FILE}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as source:
            return msgspec.json.decode(source.read(_MAX_BYTES), type=Position)
    return None


def write(state_dir: str, position: Position) -> None:
    """Write it. Raises OSError: the position before it stays."""
    folder = f"{state_dir}/{TELEMETRY}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    replace_file(f"{folder}/{FILE}", msgspec.json.encode(position))
