"""The file in which a tool host keeps what pending work it has promised: `pending.json` in its state folder.

Read once, when a tool host starts: whatever stands in it was lost with the one before. Written anew whenever work
begins or ends; it survives the end of the process, not of the machine's power. A file that cannot be read or written
costs the promise, never a call.

Source: docs/design/tools.md section 6; requirement RESULT-04.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec

from schemas.system.private_files import read_list, replace_file
from toolhost.calls.pending import Promise

PROMISES: Final = "pending.json"
#: A file larger than this is none of ours (bytes).
_MAX_BYTES: Final = 4 << 20


class PromiseFile:
    """One such file; `path` None: nothing can be kept."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def read(self) -> list[Promise]:
        """What stands in it; nothing when there is none."""
        return [] if self._path is None else read_list(self._path, Promise, _MAX_BYTES)

    def write(self, promises: list[Promise]) -> None:
        """Put these in its place."""
        if self._path is None:
            return
        if not promises:
            with suppress(OSError):
                os.unlink(self._path)
            return
        with suppress(OSError):
            replace_file(self._path, msgspec.json.encode(promises))
