"""The bundled tool `file-system`: files and folders in the instance's workdir, and elsewhere in its jail.

The jail is the wall. This module only reports clearly what it refuses. Nothing here waits for a file: anything but a
regular file (a FIFO, a device) is opened without blocking and refused.

Source: docs/design/tools.md section 9; requirements FS-01 to FS-15; recorded parity `file-system__*`.
"""

from __future__ import annotations

import errno
import posix

from goondan_base.arguments import InvalidInput, flag, non_empty, normalised, number
from goondan_base.arguments import path as path_argument
from goondan_base.reasons import name_of, reason_of
from goondan_tool import ToolContext, ToolError
from goondan_tool.sandbox import denied, within

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Self

DEFAULT_MAX_BYTES = 100_000
#: The size of one read (bytes).
READ_BYTES = 1 << 18
#: The size of a list's entry besides its name and path, at most (bytes).
ENTRY_BYTES = 48
#: How many of the first bytes tell whether a file is a picture or a PDF.
HEAD_BYTES = 16
#: What an output has besides the base64 of a file, at most (bytes).
FILE_ROOM = 16_384
#: The most entries that a recursive list reads, also when it returns few of them. It takes some seconds.
MAX_VISITED = 500_000
#: After how many entries a list checks whether it was cancelled.
LOOK_EVERY = 1000
#: The flags of every open: never wait for the other end of a FIFO, never get a controlling terminal.
CAREFULLY = posix.O_NONBLOCK | posix.O_NOCTTY | posix.O_CLOEXEC
#: The bits of a mode that are the kind of the file.
KIND, FOLDER, REGULAR = 0o170000, 0o040000, 0o100000
KINDS = {0o010000: "a FIFO", 0o020000: "a device", 0o060000: "a device", 0o140000: "a socket"}
#: The errors that may mean that the sandbox hides or protects a place.
PERHAPS_DENIED = (errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.EACCES, errno.EPERM)
SUGGESTIONS = {
    errno.ENOENT: "Look at what is there with file-system__list.",
    errno.EISDIR: "Name a file; file-system__list shows what is in a folder.",
    errno.EROFS: "This tool may only read there; write to another place in the workdir.",
}


class FileSystemError(Exception):
    """An error of the operating system. `code` is its name of the reason."""

    def __init__(self, number: int, operation: str, path: str, reason: str | None = None) -> None:
        self.code = name_of(number)
        super().__init__(f"{self.code}: {reason or reason_of(number)}, {operation} '{path}'")
        self.suggestion = SUGGESTIONS.get(number)


# --- exports --------------------------------------------------------------------------------------------------------


def read(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`file-system__read`: the first bytes of a file as text. Bytes that are no UTF-8, or were cut, become U+FFFD.

    A picture or a PDF is returned as a file, which the model sees. With a `maxBytes` below its size it is read as text.
    """
    path = path_argument(input, "path", ctx.workdir)
    most = number(input, "maxBytes", DEFAULT_MAX_BYTES)
    if most < 1:
        raise InvalidInput("'maxBytes' must be greater than 0")
    with OpenFile(ctx, path, posix.O_RDONLY, "read") as file:
        media_type = media_type_of(file.head())
        if media_type is not None and ("maxBytes" not in input or file.size() <= most):
            return whole(ctx, path, file, media_type)
        expected = min(file.size(), most)
        if expected > ctx.output_limit:
            raise ToolError(
                f"{int(expected)} bytes of {path} are more than an output may have, which is {ctx.output_limit}",
                code="E_TOOL_LIMIT",
                suggestion="Read less of it with maxBytes, or a part of it with the tool bash.",
            )
        # One byte more than wanted shows whether there are more. The size of a file in /proc is always 0.
        data = file.read(min(int(most), ctx.output_limit) + 1)
        size = max(file.size(), len(data))
    return {
        "path": path,
        "size": size,
        "truncated": size > most,
        "content": data[: int(most)].decode("utf-8", "replace"),
    }


def whole(ctx: ToolContext, path: str, file: OpenFile, media_type: str) -> dict[str, Any]:
    """A picture or a PDF as the output of `read`."""
    size = file.size()
    if size * 4 // 3 + FILE_ROOM > ctx.output_limit:
        raise ToolError(
            f"{path} has {size} bytes; as base64 that is more than an output may have, which is {ctx.output_limit}",
            code="E_TOOL_LIMIT",
            suggestion="Make it smaller, or read the first bytes of it with maxBytes.",
        )
    from binascii import b2a_base64

    data = b2a_base64(file.read(size), newline=False).decode("ascii")
    content = {"type": "file", "mediaType": media_type, "data": data, "name": path.rpartition("/")[2]}
    return {"path": path, "size": size, "truncated": False, "content": content}


def write(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`file-system__write`: write a text to a file, in place of its content or after it."""
    path = path_argument(input, "path", ctx.workdir)
    content = non_empty(input, "content").encode("utf-8", "replace")
    append = flag(input, "append", False)
    check_place(ctx, path)
    make_folders(ctx, parent(path))
    flags = posix.O_WRONLY | posix.O_CREAT | (posix.O_APPEND if append else 0)
    with OpenFile(ctx, path, flags, "write") as file:
        file.write(content, append)
        return {"path": path, "size": file.size(), "written": True, "append": append}


def list_(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`file-system__list`: the files and folders in a folder, or in all folders below it, ordered by their paths."""
    path = path_argument(input, "path", ctx.workdir, ".")
    recursive = flag(input, "recursive", False)
    wanted = {"dir": flag(input, "includeDirs", True), "file": flag(input, "includeFiles", True)}
    entries: list[dict[str, Any]] = []
    room = ctx.output_limit
    for entry in walk(ctx, path, recursive):
        if wanted[entry["type"]]:
            room -= len(entry["name"]) + len(entry["path"]) + ENTRY_BYTES
            if room < 0:
                raise too_much(f"{path} has more entries than an output may hold")
            entries.append(entry)
    entries.sort(key=lambda entry: collation_key(entry["path"]))
    return {"path": path, "recursive": recursive, "count": len(entries), "entries": entries}


def mkdir(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`file-system__mkdir`: make a folder. With `recursive`, folders above it are made too, and it may exist
    already.
    """
    path = path_argument(input, "path", ctx.workdir)
    recursive = flag(input, "recursive", True)
    check_place(ctx, path)
    if recursive:
        make_folders(ctx, path)
    else:
        try:
            posix.mkdir(path)
        except OSError as error:
            raise explained(ctx, error, "mkdir", path) from None
    return {"path": path, "created": True, "recursive": recursive}


handlers = {"read": read, "write": write, "list": list_, "mkdir": mkdir}


# --- files ----------------------------------------------------------------------------------------------------------


class OpenFile:
    """An open file that is known to be a regular one. Its errors have words."""

    def __init__(self, ctx: ToolContext, path: str, flags: int, operation: str) -> None:
        self._ctx = ctx
        self._path = path
        self._operation = operation
        try:
            self._fd = posix.open(path, flags | CAREFULLY, 0o666)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
                raise self._no_file("a FIFO or a socket") from None
            raise explained(ctx, error, "open", path) from None
        kind = posix.fstat(self._fd).st_mode & KIND
        if kind != REGULAR:
            posix.close(self._fd)
            if kind == FOLDER:
                raise FileSystemError(errno.EISDIR, operation, path)
            raise self._no_file(KINDS.get(kind, "something else"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        posix.close(self._fd)

    def size(self) -> int:
        """The size of the file now (bytes)."""
        return posix.fstat(self._fd).st_size

    def head(self) -> bytes:
        """The first HEAD_BYTES bytes. `read` begins at the first byte all the same."""
        try:
            return posix.pread(self._fd, HEAD_BYTES, 0)
        except OSError:  # `read` says why
            return b""

    def read(self, most: int) -> bytes:
        """The first `most` bytes."""
        chunks: list[bytes] = []
        try:
            while most > 0 and (chunk := posix.read(self._fd, min(most, READ_BYTES))):
                chunks.append(chunk)
                most -= len(chunk)
        except OSError as error:
            raise explained(self._ctx, error, "read", self._path) from None
        return b"".join(chunks)

    def write(self, content: bytes, append: bool) -> None:
        """Replace the content of the file, or append to it, as the flags of the open say."""
        rest = memoryview(content)
        try:
            if not append:
                posix.ftruncate(self._fd, 0)
            while rest:
                rest = rest[posix.write(self._fd, rest) :]
        except OSError as error:
            raise explained(self._ctx, error, "write", self._path) from None

    def _no_file(self, kind: str) -> FileSystemError:
        return FileSystemError(errno.EINVAL, self._operation, self._path, f"{kind} is no file")


def media_type_of(head: bytes) -> str | None:
    """The media type of a picture that models see, or of a PDF, by its first bytes."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return "application/pdf" if head.startswith(b"%PDF-") else None


def make_folders(ctx: ToolContext, path: str) -> None:
    """Make a folder and the missing folders above it."""
    missing = [path]
    try:
        while missing:
            try:
                posix.mkdir(missing[-1])
            except FileNotFoundError:
                above = parent(missing[-1])
                if above == missing[-1]:
                    raise
                missing.append(above)
                continue
            except OSError as error:
                # EEXIST if the folder may be written to. Other errors about an existing folder do not matter.
                if not is_folder(missing[-1]):
                    raise explained(ctx, error, "mkdir", missing[-1]) from None
            missing.pop()
    except FileNotFoundError as error:
        raise explained(ctx, error, "mkdir", path) from None


def parent(path: str) -> str:
    """The folder above an absolute path."""
    return path.rstrip("/").rpartition("/")[0] or "/"


def is_folder(path: str) -> bool:
    """Whether a folder of this path exists. Links are followed."""
    try:
        return posix.stat(path).st_mode & KIND == FOLDER
    except OSError:
        return False


# --- what the sandbox does not give ---------------------------------------------------------------------------------


def check_place(ctx: ToolContext, path: str) -> None:
    """Raise E_SANDBOX_DENIED for a path to write to that is only in the private memory of this jail.

    Writing there would work, but the file would be lost with the jail, and no other tool would see it.
    """
    real = resolved(path)
    if within(real, resolved(ctx.workdir)):
        return
    error = denied(real)
    if error is not None:
        raise error


def explained(ctx: ToolContext, error: OSError, operation: str, path: str) -> Exception:
    """The error to raise for an error of the operating system about `path`."""
    number = error.errno or errno.EIO
    if number in PERHAPS_DENIED:
        better = denied(resolved(path))
        if better is not None:
            return better
    return FileSystemError(number, operation, path)


def resolved(path: str) -> str:
    """The path with all symbolic links resolved, as far as it exists."""
    from posixpath import realpath  # takes 2 ms, and a call that only reads does not need it

    return realpath(path)


# --- lists ----------------------------------------------------------------------------------------------------------


def walk(ctx: ToolContext, path: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """The files and folders in a folder, in no order. Other entries, and entries that vanish meanwhile, are left
    out.
    """
    visited = 0
    folders = [path]
    while folders:
        folder = folders.pop()
        prefix = normalised(folder).rstrip("/") + "/"
        try:
            with posix.scandir(folder) as found:
                for item in found:
                    visited += 1
                    if visited > MAX_VISITED:
                        raise too_much(f"{path} has more than {MAX_VISITED} entries")
                    if visited % LOOK_EVERY == 0 and ctx.cancelled:
                        raise ToolError("the list was cancelled", code="E_CANCELLED")
                    entry = described(item, prefix + item.name)
                    if entry is None:
                        continue
                    yield entry
                    if recursive and entry["type"] == "dir":
                        folders.append(entry["path"])
        except FileNotFoundError:
            if folder == path:
                raise explained(ctx, FileNotFoundError(errno.ENOENT, ""), "scandir", path) from None
        except OSError as error:
            raise explained(ctx, error, "scandir", folder) from None


def described(item: posix.DirEntry[str], path: str) -> dict[str, Any] | None:
    """An entry of a list. None for an entry that is neither a folder nor a file, or is gone."""
    if item.is_dir(follow_symlinks=False):
        return {"name": item.name, "path": path, "type": "dir"}
    if not item.is_file(follow_symlinks=False):
        return None
    try:
        size = item.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
    return {"name": item.name, "path": path, "type": "file", "size": size}


def too_much(message: str) -> ToolError:
    """The error for a list that would be too long."""
    return ToolError(message, code="E_TOOL_LIMIT", suggestion="List a folder in it, or without recursive.")


# --- the order of lists ---------------------------------------------------------------------------------------------

#: ASCII in the order of the root collation: white space, punctuation, symbols. Digits and letters follow.
PUNCTUATION = "\t\n\v\f\r _-,;:!?.'\"()[]{}@*/\\&#%`^+<=>|~$"
#: The accents in their order. All others come after these.
ACCENTS = "\u0301\u0300\u0306\u0302\u030c\u030a\u0308\u030b\u0303\u0307\u0338\u0327\u0328\u0304"
#: Letters that are sorted beside other letters although they do not decompose into them.
BESIDE = {"æ": "ae\u0338", "œ": "oe\u0338", "ø": "o\u0338", "đ": "d\u0338", "ł": "l\u0338"}
#: The offset of digits and letters, so that they come after all symbols.
LETTERS = 0xB0000
_ORDER: dict[int, int | None] = dict.fromkeys((*range(9), *range(14, 32), 127))  # not compared at all
_ORDER |= {ord(character): rank for rank, character in enumerate(PUNCTUATION, 1)}
_ORDER |= {code: LETTERS + code for code in (*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1))}
_ORDER |= {code: LETTERS + code + 32 for code in range(ord("A"), ord("Z") + 1)}


def collation_key(path: str) -> tuple[str, str, str, str]:
    """The key by which paths are sorted, as in ICU's root collation: by letters, then by accents, then by case (lower
    before upper).

    It differs in one point: letters of other scripts are sorted by their code points.
    """
    if path.isascii():
        return path.translate(_ORDER), "", path.swapcase(), path
    import unicodedata

    letters, accents = [], []
    for letter, others in BESIDE.items():
        path = path.replace(letter, others).replace(letter.upper(), others.upper())
    for character in unicodedata.normalize("NFD", path):
        category = unicodedata.category(character)
        if character.isascii():
            letters.append(character.translate(_ORDER))
            accents.append("\0")
        elif category[0] == "M":
            accents.append(chr(ACCENTS.find(character) + 1) if character in ACCENTS else character)
        elif category[0] in "LN":
            base = unicodedata.normalize("NFKD", character).casefold()
            digit = unicodedata.decimal(base, None) if len(base) == 1 else None
            base = base if digit is None else str(digit)
            letters += [chr(min(LETTERS + ord(part), 0x10FFFF)) for part in base]
            accents.append("\0")
        elif category != "Cf":
            letters.append(character)
            accents.append("\0")
    return "".join(letters), "".join(accents), path.swapcase(), path
