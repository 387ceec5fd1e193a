"""The witness: a file in another folder that says that there was a journal, so that a lost journal is noticed.

The side file (mark.py) lies beside the journal. If both are removed, the promised writes and the promise are gone, and
the next start would look like the first one. So a file in the kernel's own folder remembers that there was a journal.

The witness claims only what the disk is known to have. A new journal may be lost with the power, so a new witness
counts only within its boot; with `power` it always counts. As soon as the journal was found on the disk, or was copied
to it, the witness counts for ever.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from goondan.schemas.system.directories import replace_file

#: Its content when the journal was found on the disk. Otherwise it has the boot (UUID) in which the journal was made.
_KEPT: Final = "kept"
#: Bytes that are read of it: a UUID and a line's end are 37.
_MAX_BYTES: Final = 64


class Witness:
    """The file at `path`, whose folder is made if it is missing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def must_be_there(self, boot_id: str, *, power: bool) -> bool:
        """Whether a journal was kept here that no loss of power can have taken. `power`: what the journal survives.
        Raises OSError.
        """
        said = self._read()
        return said is not None and (power or said in (_KEPT, boot_id))

    def made(self, boot_id: str) -> None:
        """A journal was made. If the disk has no room for the witness, the next start writes it."""
        self._write(boot_id)

    def kept(self) -> None:
        """The journal is on the disk."""
        if self._read() != _KEPT:
            self._write(_KEPT)

    def _read(self) -> str | None:
        """Its content; None without a witness. Anything that is not a file does not count, and is replaced."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), open(os.open(self._path, flags), "rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", "replace").strip()
        return None

    def _write(self, word: str) -> None:
        with suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            replace_file(self._path, f"{word}\n".encode())
