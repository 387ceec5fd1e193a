"""Writes down what an agent instance does while a run is recorded: its turns, its model's answers, its tools' results.

Each incarnation appends to one file beside the conversation, which `gdn record` collects and deletes. Texts have no
secret that the agent knows, and names in place of this machine's folders. The rest is the collector's work
(kernel/recordings.py).

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from goondan.agentproc.conversation_format import create_file
from goondan.schemas.recorded_texts import without_places
from goondan.schemas.recordings import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    Noted,
    Part,
    RecordedTurn,
    Stopped,
    encode_noted,
    noted_file,
)
from goondan.schemas.text.secret_values import in_texts

#: Room for the line that says that nothing more is written (bytes).
_ROOM_FOR_END: Final = 1024

log = logging.getLogger("agentproc")


class Recorder:
    """The file of the run `run` in the instance's `folder`. `redact` takes secrets out of a text. Nothing is raised: a
    turn does not fail because its record cannot be written.
    """

    def __init__(self, folder: str, run: str, redact: Callable[[str], str]) -> None:
        self._path = os.path.join(folder, noted_file(run))
        self._redact = redact
        self._fd: int | None = None
        self._room = MAX_FILE_BYTES
        self._stopped = False
        #: Folders of this machine, each with the name that is written in its place.
        self.places: tuple[tuple[str, str], ...] = ()

    def write(self, part: Part) -> None:
        """Append a part of the recording."""
        if self._stopped:
            return
        places = self.places
        files = part.files if isinstance(part, RecordedTurn) else []
        told = msgspec.structs.replace(part, files=[]) if files else part
        plain = in_texts(msgspec.to_builtins(told), lambda text: without_places(self._redact(text), places))
        clean = msgspec.convert(plain, type(part))
        line = encode_noted(Noted(time.time_ns(), msgspec.structs.replace(clean, files=files) if files else clean))
        if len(line) > MAX_LINE_BYTES or len(line) > self._room - _ROOM_FOR_END:
            why = (
                f"it would be larger than {MAX_FILE_BYTES >> 20} MiB, or a line longer than {MAX_LINE_BYTES >> 20} MiB"
            )
            line = self._last(why)
        try:
            self._append(line)
        except OSError as error:
            self._last(str(error))

    def _last(self, why: str) -> bytes:
        """The line after which nothing is written any more."""
        log.error("the run is recorded no further: %s", why)
        self._stopped = True
        return encode_noted(Noted(time.time_ns(), Stopped(why)))

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            create_file(Path(self._path))
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._room -= os.fstat(self._fd).st_size
        os.write(self._fd, line)
        self._room -= len(line)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
