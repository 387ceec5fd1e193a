"""What does not fit into a frame: large payloads by reference, and pictures and PDFs beside a text. Pure.

system/blob_files.py reads and writes the files.

A payload that is too large for a frame lies as a file in the workspace's `blobs` folder; the frame carries `blob`
{file, digest, size} and no payload. The broker accounts the size and passes the reference on, the receiver reads the
file and checks it against digest and size. A file has a name of its own, at random, and so one owner: equal payloads
may have different ends.

The kind of a picture is recognised by the first bytes of the content, never by a name or by what a sender says.

Source: docs/design/wire.md section 7; PROTOCOL.md; docs/design/files.md section 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, FilePart, Frame

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
    import hashlib  # it loads OpenSSL; a command has no use for it

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


# --- files beside a text ----------------------------------------------------------------------------------------------

#: The largest file (bytes). It is also the limit of any payload that an event brings.
MAX_FILE_BYTES: Final = MAX_REQUEST_BYTES
#: The most files of one message, or of one result of a tool.
MAX_FILES: Final = 16
#: All files of one message together (bytes).
MAX_MESSAGE_BYTES: Final = 20 << 20
#: All files of one request to a model together (bytes). As base64 they are a third larger, and vendors take 32 MiB.
MAX_SHOWN_BYTES: Final = 20 << 20
#: The most files of one request to a model. Vendors take a hundred.
MAX_SHOWN: Final = 64
#: The longest name of a file (characters).
MAX_NAME_CHARS: Final = 255
#: How many of the first bytes tell the kind.
HEAD_BYTES: Final = 16
#: The media type of a PDF.
PDF: Final = "application/pdf"

_KINDS: Final = {
    "image/png": "image",
    "image/jpeg": "image",
    "image/gif": "image",
    "image/webp": "image",
    PDF: "pdf",
}


def media_type_of(head: bytes | bytearray | memoryview) -> str | None:
    """The media type of a content by its first HEAD_BYTES bytes; None when it is none of ours."""
    head = bytes(head[:HEAD_BYTES])
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return PDF if head.startswith(b"%PDF-") else None


def kind_of(media_type: str) -> str | None:
    """What a model has to see for it: `image` or `pdf`; None for a media type that is none of ours."""
    return _KINDS.get(media_type)


def size_of_files(files: Sequence[FilePart]) -> int:
    """The bytes of all files together."""
    return sum(file.blob.size for file in files)


def check_files(files: Sequence[FilePart]) -> None:
    """Raise GoondanError E_FILE_INVALID unless these may be the files of one message."""
    if len(files) > MAX_FILES:
        raise fail("E_FILE_INVALID", f"{len(files)} files with one message, limit {MAX_FILES}")
    for file in files:
        if not is_reference(file.blob) or kind_of(file.media_type) is None:
            raise fail("E_FILE_INVALID", "a file is {blob: {file, digest, size}, mediaType, name?} of a known kind")
        if file.name is not None and not 0 < len(file.name) <= MAX_NAME_CHARS:
            raise fail("E_FILE_INVALID", f"the name of a file has 1 to {MAX_NAME_CHARS} characters")
        if file.blob.size > MAX_FILE_BYTES:
            raise fail("E_FILE_INVALID", f"a file of {file.blob.size} bytes, limit {MAX_FILE_BYTES}")
    if (size := size_of_files(files)) > MAX_MESSAGE_BYTES:
        raise fail("E_FILE_INVALID", f"files of {size} bytes with one message, limit {MAX_MESSAGE_BYTES}")


def words_for(file: FilePart, why: str) -> str:
    """The line of text in place of a file that a model is not shown; `why` ends the sentence."""
    what = "PDF" if file.media_type == PDF else "picture"
    name = f" {file.name}" if file.name else ""
    return f"[{what}{name}, {file.media_type}, {file.blob.size} bytes: {why}]"
