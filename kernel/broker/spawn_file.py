"""The file in which earlier kernels remembered who spawned which instance: `<state_dir>/spawned.jsonl`.

One line for each instance that was spawned or forgotten; the last one about an instance counts. A broker that finds it
takes what stands there into the journal, and removes it. What cannot be read costs who is listed and which working
directory was shared, never an event.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec

from kernel.broker.spawns import SpawnRecord

_FILE: Final = "spawned.jsonl"
#: A file larger than this is not ours (bytes): some ten thousand lines of the longest.
_MAX_BYTES: Final = 64 << 20


class SpawnFile:
    """The file in `state_dir`."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _FILE)

    def read(self) -> list[SpawnRecord]:
        """Its records, the oldest first. Bad lines are skipped."""
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
        return list(known.values())

    def remove(self) -> None:
        """The journal knows what stood in it."""
        with suppress(OSError):
            os.unlink(self._path)
