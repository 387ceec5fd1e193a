"""Large payloads by reference: which, how large, and what a good reference is. Pure.

system/blob_files.py reads and writes the files.

A payload that is too large for a frame lies as a file in the workspace's `blobs` folder; the frame carries `blob`
{file, digest, size} and no payload. The broker accounts the size and passes the reference on, the receiver reads the
file and checks it against digest and size. A file has a name of its own, at random, and so one owner: equal payloads
may have different ends.

Source: docs/design/wire.md section 7; PROTOCOL.md.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, Frame

#: Frames up to this size travel whole. Half of what a frame may have: what the broker adds always fits, and a file is
#: only cheaper than a copy through three sockets beyond some hundred KiB (bytes).
INLINE_FRAME_BYTES: Final = 512 << 10
#: The output of one call: what `outputMb` can grant (bytes).
MAX_OUTPUT_BYTES: Final = 64 << 20
#: One payload: the largest output, and the result, answer and event around it (bytes).
MAX_BLOB_BYTES: Final = MAX_OUTPUT_BYTES + (256 << 10)
#: The limit of a request (bytes): an event's payload, or a call's arguments with their message.
MAX_REQUEST_BYTES: Final = 16 << 20
#: The arguments of one call: they, and the message that made it, must fit a frame to a worker, of 8 MiB (bytes).
MAX_ARGS_BYTES: Final = (8 << 20) - (64 << 10)
#: Values in a payload that goes by reference, keys included: as many as the largest frame could hold, so that a large
#: payload is no cheaper way to fill a receiver's memory.
MAX_VALUES: Final = 1 << 20
#: All files of the folder together (bytes): some of the largest, hundreds of usual ones.
MAX_FOLDER_BYTES: Final = 1 << 30
#: How long a file that no known event refers to is left alone after it was written (seconds). Blobs outside of events
#: are those of calls and results. They are kept for ten minutes at most.
KEEP_S: Final = 900.0

#: The frames that may carry a reference, with whether their payload is deleted by who reads it: calls, results, answers
#: to calls and news have one reader. Those of events belong to the broker, which may have to hand them over again.
REFERENCES: Final[dict[str, bool]] = {
    "tool.call": True,
    "tool.result": True,
    "tool.answer": True,
    "event": False,
    "ack": False,
    "tool.completed": True,
}

_FILE: Final = re.compile("[0-9a-f]{32}")
_DIGEST: Final = re.compile("[0-9a-f]{64}")


def describe(payload: bytes | memoryview, file: str) -> Blob:
    """The reference to these bytes in `file`."""
    return Blob(file, hashlib.sha256(payload).hexdigest(), len(payload))


def is_reference(blob: Blob) -> bool:
    """Whether a file can have this name, which is no path then, and this content."""
    return _FILE.fullmatch(blob.file) is not None and _DIGEST.fullmatch(blob.digest) is not None and blob.size > 0


def check_reference(frame: Frame, limit: int = MAX_BLOB_BYTES) -> None:
    """Raise GoondanError unless the reference of `frame` is a good one: E_BLOB_INVALID, or E_FRAME_TOO_LARGE for a
    payload of more than `limit` bytes. A frame without a reference passes.
    """
    blob = frame.blob
    if blob is None:
        return
    if frame.type not in REFERENCES:
        raise fail("E_BLOB_INVALID", f"a frame of type {frame.type[:40]!r} has its payload in itself")
    if frame.payload != NO_PAYLOAD:
        raise fail("E_BLOB_INVALID", "a frame has a payload or a reference to one, not both")
    if not is_reference(blob):
        message = "blob is {file, digest: 32 and 64 lower-case hexadecimal digits, size: bytes, at least 1}"
        raise fail("E_BLOB_INVALID", message)
    if blob.size > limit:
        raise too_large(blob.size, limit)


def too_large(size: int, limit: int) -> GoondanError:
    """The error for a payload that is too large even by reference."""
    return fail("E_FRAME_TOO_LARGE", f"a payload of {size} bytes, limit {limit}")
