"""Reads the pieces of a request's body for sending: files as base64, a small part at a time.

No part of a file is larger than PART_BYTES: memory of this size is used again and again. Buffers of megabytes would be
fresh pages of the system each time, and to touch those takes longer than the encoding.

Source: docs/design/files.md section 4.
"""

from __future__ import annotations

import os
import stat
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from typing import Final

from goondan.agentproc.providers.body import FileText
from goondan.agentproc.providers.vendor import Fault

#: The largest part of a file's base64 (bytes).
PART_BYTES: Final = 64 << 10
_READ_BYTES: Final = PART_BYTES // 4 * 3
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def parts_of(pieces: Sequence[bytes | FileText]) -> Iterator[bytes]:
    """The body in parts, in order. Raises Fault `final` when a file is not as it was."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
        else:
            yield from _file_parts(piece)


def _file_parts(file: FileText) -> Iterator[bytes]:
    try:
        descriptor = os.open(file.path, _FLAGS)
    except OSError as error:
        raise Fault("final", f"a file of the conversation cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            raise Fault("final", "a file of the conversation has changed")
        buffer = memoryview(bytearray(min(_READ_BYTES, file.size)))
        left = file.size
        while left:
            wanted = min(_READ_BYTES, left)
            _fill(descriptor, buffer[:wanted])
            left -= wanted
            yield b2a_base64(buffer[:wanted], newline=False)
    except OSError as error:
        raise Fault("final", f"a file of the conversation cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _fill(descriptor: int, buffer: memoryview) -> None:
    while buffer:
        count = os.readv(descriptor, [buffer])
        if not count:
            raise Fault("final", "a file of the conversation has become shorter")
        buffer = buffer[count:]
