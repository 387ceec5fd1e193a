"""Pictures and PDFs beside a text: which kinds there are, how large they may be, and how they are recognised. Pure.

A kind is recognised by the first bytes of the content, never by a name or by what a sender says.

Source: docs/design/files.md section 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from goondan.schemas.wire.blobs import MAX_REQUEST_BYTES, is_reference
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import FilePart

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
