"""Reads the file of a recorded run: a regular file, of a bounded size.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from goondan.schemas.recordings import MAX_FILE_BYTES, Part, Recording, read_lines
from goondan.schemas.wire.errors import fail


def read_recording(path: str, wanted: Callable[[Part], bool] = lambda part: True) -> tuple[Recording, list[Part]]:
    """The first line, and the wanted parts, of the recording at `path`. Raises GoondanError E_CONFIG_NOT_FOUND,
    E_CONFIG_INVALID_VALUE.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise fail("E_CONFIG_INVALID_VALUE", f"the recording {path} is not a regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise fail("E_CONFIG_NOT_FOUND", f"the recording {path} cannot be read: {error.strerror}") from None
    return read_lines(data, path, wanted)
