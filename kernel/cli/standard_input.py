"""Reads an argument from standard input when it is too large for a command line.

Source: docs/design/commands.md section 5.
"""

from __future__ import annotations

import os
from typing import Final

from goondan.schemas.blobs import too_large
from goondan.schemas.errors import fail

#: The argument that means: read it from standard input.
FROM_STDIN: Final = "-"
_CHUNK: Final = 1 << 16


def read_all(limit: int, fd: int = 0) -> bytes:
    """Read all of standard input. Raises GoondanError E_FRAME_TOO_LARGE for more than `limit` bytes, and E_USAGE when
    it is closed.
    """
    parts, size = [], 0
    try:
        while chunk := os.read(fd, _CHUNK):
            size += len(chunk)
            if size > limit:
                raise too_large(size, limit)
            parts.append(chunk)
    except OSError as error:
        raise fail("E_USAGE", f"standard input cannot be read: {error.strerror}") from None
    return b"".join(parts)
