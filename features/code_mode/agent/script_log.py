"""What the calls of a running script have come to, in a file: for the process that finds the script without its agent.

The file is mapped into memory. So a note costs no system call, and it outlives the end of the process. It does not
outlive a loss of power: a script that makes a thousand calls cannot wait for the disk before each. After a loss of
power the trace has what was stored before (agentproc/turn/notes.py).

Source: docs/design/tools.md section 12.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import Final

import msgspec

from goondan.features.code_mode.agent.scripts import Record

#: The file, beside the conversation. Behind its last line are zeros.
FILE: Final = "script-calls.jsonl"
#: How much is reserved on the disk at a time (bytes): what is mapped and cannot be written would end the process.
STEP: Final = 256 << 10
#: More is not written or read (bytes): scripts of MAX_INNER_CALLS calls with long names and arguments.
MAX_SIZE: Final = 16 << 20

log = logging.getLogger("agentproc")

_Line = tuple[str, Record]
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


class ScriptLog:
    """The file of one agent instance. It is made at the first call of a script, and empty when no script runs."""

    def __init__(self, folder: str | Path) -> None:
        self._path = os.path.join(folder, FILE)
        self._map: mmap.mmap | None = None
        self._at = 0
        self._broken = False

    def add(self, call_id: str, record: Record) -> None:
        """Write down what has become of a call of the script with this callId. Nothing is raised: a call does not fail
        for want of a note.
        """
        line = _encode((call_id, record)) + b"\n"
        try:
            room = self._room(len(line))
        except (OSError, ValueError) as error:
            if not self._broken:
                log.warning("the calls of a script cannot be written down: %s", error)
            self._broken = True
            return
        room[self._at : self._at + len(line)] = line
        self._at += len(line)

    def _room(self, size: int) -> mmap.mmap:
        """The mapping, with room for so many bytes more. Raises OSError, and ValueError for a file that is full."""
        mapped = self._map
        if mapped is not None and self._at + size <= len(mapped):
            return mapped
        reserved = (self._at + size + STEP - 1) // STEP * STEP
        if reserved > MAX_SIZE:
            raise ValueError(f"they would take more than {MAX_SIZE} bytes")
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if mapped is None:
                self._at = len(_written(self._path))
                reserved = max(reserved, (self._at + size + STEP - 1) // STEP * STEP)
            os.posix_fallocate(fd, 0, reserved)
            made = mmap.mmap(fd, reserved)
        finally:
            os.close(fd)
        if mapped is not None:
            mapped.close()
        self._map = made
        return made

    def read(self, call_id: str) -> list[Record]:
        """What was written down about the calls of this script, in order. A line that was cut off is left out."""
        found = []
        for line in _written(self._path).splitlines():
            try:
                name, record = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if name == call_id:
                found.append(record)
        return found

    def clear(self) -> None:
        """No script runs any more."""
        try:
            if self._map is not None:
                self._map[: self._at] = bytes(self._at)
            elif os.path.exists(self._path):
                os.truncate(self._path, 0)
        except OSError as error:
            log.warning("the calls of a script cannot be forgotten: %s", error)
        self._at = 0

    def close(self) -> None:
        """Close the file."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _written(path: str) -> bytes:
    """The lines of a file; b"" when there is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SIZE)
    except OSError:
        return b""
    return data.partition(b"\0")[0]
