"""The file in which the broker remembers who spawned which instance: `<state_dir>/spawned.jsonl`.

One line for each instance that was spawned or forgotten; the last one about an instance counts. It is written before
the asker is told, so it survives the end of the broker and of the kernel, not of the machine's power. A broker reads it
when it starts, and makes it short. What cannot be read or written costs who is listed and which working directory was
shared, never an event.

Source: requirements AGENTS-26, AGENTS-27; design section 10.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from kernel.broker.mailbox import SpawnRecord
from schemas.private_files import replace_file

_FILE: Final = "spawned.jsonl"
#: A file larger than this is none of ours (bytes): some ten thousand lines of the longest.
_MAX_BYTES: Final = 64 << 20


class SpawnFile:
    """The file in `state_dir`. Only one process writes to it: the broker, which holds the kernel's lock."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _FILE)

    def read(self) -> list[SpawnRecord]:
        """What stands in it, oldest first; lines that are none are skipped."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                lines = file.read(_MAX_BYTES).splitlines()
        except OSError:
            return []
        known: dict[tuple[str, str], SpawnRecord] = {}
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                record = msgspec.json.decode(line, type=SpawnRecord)
                known.pop((record.agent, record.key), None)
                if not record.gone:
                    known[record.agent, record.key] = record
        if len(lines) > 2 * len(known):
            self._replace(known.values())
        return list(known.values())

    def append(self, records: Iterable[SpawnRecord]) -> None:
        """Write these down."""
        with suppress(OSError):
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o600), "wb") as out:
                # A line that was cut off by a full disk must not take this one with it.
                out.write(b"".join(b"\n" + msgspec.json.encode(record) for record in records) + b"\n")

    def _replace(self, records: Iterable[SpawnRecord]) -> None:
        with suppress(OSError):
            replace_file(self._path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))
