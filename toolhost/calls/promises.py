"""The file in which a tool host keeps the pending work that it has promised: `pending.json` in its state folder.

It is read once, when a tool host starts: all work in it was lost with the tool host before. It is written again
whenever work begins or ends. It survives the end of the process, but not a loss of power. A file that cannot be read or
written costs the promise, never a call.

Source: docs/design/tools.md section 6; requirement RESULT-04.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec

from goondan.schemas.system.private_files import read_list, replace_file
from goondan.toolhost.calls.pending import Promise

PROMISES: Final = "pending.json"
#: A larger file was not written by us (bytes).
_MAX_BYTES: Final = 4 << 20


class PromiseFile:
    """One such file. With `path` None nothing can be kept."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def read(self) -> list[Promise]:
        """The promises in it; none when there is no file."""
        return [] if self._path is None else read_list(self._path, Promise, _MAX_BYTES)

    def write(self, promises: list[Promise]) -> None:
        """Replace the promises in it by these."""
        if self._path is None:
            return
        if not promises:
            with suppress(OSError):
                os.unlink(self._path)
            return
        with suppress(OSError):
            replace_file(self._path, msgspec.json.encode(promises))
