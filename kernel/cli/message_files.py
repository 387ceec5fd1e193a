"""The pictures and PDFs that a person sends with a message.

Source: docs/files.md; docs/design/files.md section 1.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.schemas.system.blob_files import BlobFolder
from goondan.schemas.wire.blobs import (
    HEAD_BYTES,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARS,
    media_type_of,
)
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import FilePart

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OpenFile(NamedTuple):
    """A file that may be sent."""

    #: The file's descriptor.
    descriptor: int
    #: Its size (bytes).
    size: int
    #: What it is by its content.
    media_type: str
    #: The last part of its path.
    name: str


def open_files(paths: Sequence[str]) -> list[OpenFile]:
    """Open the files of one message. Raises GoondanError E_USAGE, E_FILE_INVALID."""
    if len(paths) > MAX_FILES:
        raise fail("E_FILE_INVALID", f"{len(paths)} files with one message, limit {MAX_FILES}")
    opened: list[OpenFile] = []
    try:
        for path in paths:
            opened += [_open(path)]
        size = sum(file.size for file in opened)
        if size > MAX_MESSAGE_BYTES:
            raise fail("E_FILE_INVALID", f"files of {size} bytes with one message, limit {MAX_MESSAGE_BYTES}")
    except GoondanError:
        close_files(opened)
        raise
    return opened


def lay_down(files: Sequence[OpenFile], folder: str | None, *, sync: bool) -> list[FilePart]:
    """Copy the files into the folder of large payloads, from which the broker's events name them; with `sync` they
    survive a loss of power. Raises GoondanError E_BLOB_UNAVAILABLE, E_DISK_FULL, E_STATE, E_FILE_INVALID.
    """
    if not files:
        return []
    if folder is None:
        raise fail("E_BLOB_UNAVAILABLE", "this process has no access to the folder of large payloads")
    place = BlobFolder(folder)
    return [
        FilePart(place.copy(file.descriptor, file.size, sync=sync), file.media_type, file.name or None)
        for file in files
    ]


def close_files(files: Sequence[OpenFile]) -> None:
    """Close the files."""
    for file in files:
        with suppress(OSError):
            os.close(file.descriptor)


def _open(path: str) -> OpenFile:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        raise fail("E_USAGE", f"{path}: cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise fail("E_USAGE", f"{path}: is no regular file")
        media_type = media_type_of(os.pread(descriptor, HEAD_BYTES, 0))
        if media_type is None:
            raise fail("E_FILE_INVALID", f"{path}: is no png, jpeg, gif, webp or PDF by its content")
        if status.st_size > MAX_FILE_BYTES:
            raise fail("E_FILE_INVALID", f"{path}: has {status.st_size} bytes, limit {MAX_FILE_BYTES}")
    except OSError as error:
        os.close(descriptor)
        raise fail("E_USAGE", f"{path}: cannot be read: {error.strerror}") from None
    except GoondanError:
        os.close(descriptor)
        raise
    name = os.path.basename(path).encode("utf-8", "replace").decode()
    return OpenFile(descriptor, status.st_size, media_type, name[-MAX_NAME_CHARS:])
