"""The body of a request to a model, in which files stand as base64. Pure; connection.py reads and sends the files.

A vendor's module writes a mark where the base64 of a file is to stand. The body is then cut at its marks: what is
between them is sent as it is, and a file is read, encoded and sent piece by piece. So a request with a picture of some
megabytes needs no buffer of that size, and nothing copies, searches or encodes it again.

Source: docs/design/files.md section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from goondan.schemas.wire.blobs import MAX_FILE_BYTES, is_reference
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import FilePart


class FilesPlace(Struct, frozen=True):
    """Where the files of a conversation are, and how a body marks their places."""

    #: The folder.
    folder: str
    #: Random digits that never leave the process: no text of a conversation can contain them.
    mark: str


class SentFile(Struct, frozen=True):
    """A file that goes to a model."""

    #: What it is.
    media_type: str
    #: Its name, if it has one.
    name: str | None
    #: What stands for its base64 until the body is cut.
    base64: str

    @property
    def data_url(self) -> str:
        """The file as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


class FileText(Struct, frozen=True):
    """The base64 of a file."""

    #: Where the file lies.
    path: str
    #: Its size (bytes).
    size: int

    @property
    def length(self) -> int:
        """The length of the base64 (bytes)."""
        return 4 * ((self.size + 2) // 3)


class Body(Struct, frozen=True):
    """A body with files: its pieces, in order."""

    #: The pieces.
    pieces: Sequence[bytes | FileText]

    def behind(self, head: bytes) -> Body:
        """The same, with `head` before it."""
        first, *rest = self.pieces
        return Body([head + first, *rest] if isinstance(first, bytes) else [head, first, *rest])

    def __len__(self) -> int:
        """The length of the body (bytes)."""
        return sum([piece.length if isinstance(piece, FileText) else len(piece) for piece in self.pieces])


def sent_file(file: FilePart, mark: str) -> SentFile:
    """The file as a vendor's module writes it. Raises GoondanError E_FILE_INVALID."""
    blob = file.blob
    if not is_reference(blob) or blob.size > MAX_FILE_BYTES:
        raise fail("E_FILE_INVALID", "a message refers to a file in a way that is none")
    return SentFile(file.media_type, file.name, f"{mark}{blob.file}{blob.size}{mark}")


def with_files(body: bytes, files: FilesPlace | None) -> bytes | Body:
    """The body with the files in the places of the marks."""
    if files is None or (mark := files.mark.encode()) not in body:
        return body
    pieces: list[bytes | FileText] = []
    for index, piece in enumerate(body.split(mark)):
        if index % 2 == 0:
            pieces.append(piece)
        else:
            name = piece.decode()
            pieces.append(FileText(f"{files.folder}/{name[:32]}", int(name[32:])))
    return Body(pieces)
