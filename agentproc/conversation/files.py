"""The pictures and PDFs of one instance's conversation: files in the folder `files` beside it.

Rules.
- The file of an event is linked here before its turn begins, so it is here as long as the conversation refers to it.
  The broker deletes its own name of it with the event. The folder goes with the instance.
- What a tool returns as base64 is written here before its result is stored. The result then has the file's number. The
  forms that are known:
  - `{"type": "file", "data": BASE64, "mediaType"?, "name"?}`, as the bundled tools return a file;
  - `{"type": "image", "data": BASE64, "mimeType"}`, a block of MCP;
  - `{"blob": BASE64, "mimeType"?, "uri"}`, the contents of an MCP resource.
  In the place of `data` and `blob` stands `file`: the number of the file in the result, from 1. The rest stays.
- A file to which no message refers goes when a process takes up the conversation.

Source: docs/design/files.md sections 1 to 3; requirement MCP-16.
"""

from __future__ import annotations

import errno
import os
import stat
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.agentproc.conversation.file import sync_directory
from goondan.agentproc.providers.base import FilesPlace
from goondan.schemas.wire import blobs as wire_blobs
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import FilePart, ToolResult

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CHUNK: Final = 1 << 18


class InstanceFiles:
    """The folder `files` in the instance's folder `directory`, with at most `max_bytes` in it. With `durable` a file
    survives a loss of power before anything refers to it.
    """

    def __init__(self, directory: str, *, durable: bool, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._path = f"{directory}/files"
        self._durable = durable
        self._mark = f"@{os.urandom(16).hex()}@"
        self._is_there = os.path.isdir(self._path)

    @property
    def place(self) -> FilesPlace | None:
        """Where the files are; None when the conversation has none."""
        return FilesPlace(self._path, self._mark) if self._is_there else None

    def take(self, blobs: str, files: Sequence[FilePart]) -> list[FilePart]:
        """Take the files of an event from the folder of large payloads. Files that are here already stay as they are.

        Raises GoondanError: E_FILE_INVALID when one is not what it is said to be, E_BLOB_MISSING, E_BLOB_MISMATCH,
        E_STORE_FULL, E_DISK_FULL, E_STATE.
        """
        wire_blobs.check_files(files)
        with _errors(self._path):
            self._make()
            new = [file for file in files if not os.path.lexists(f"{self._path}/{file.blob.file}")]
            self._check_room(wire_blobs.size_of_files(new))
            for file in files:
                self._link(f"{blobs}/{file.blob.file}", f"{self._path}/{file.blob.file}", file)
            self._sync()
        return list(files)

    def lift(self, result: ToolResult) -> tuple[ToolResult, list[FilePart]]:
        """Keep the files in the output of a call. Returns the result with their numbers in place of their base64, and
        the files. What cannot be kept stays as it is.
        """
        output = b"" if result.status != "ok" or result.output is None else bytes(result.output)
        if b"\xa4data" not in output and b"\xa4blob" not in output:  # no key under which a file may lie (files_in)
            return result, []
        value = msgspec.msgpack.decode(output)
        try:
            return settled(result, value, files_in(value), self._keep)
        except GoondanError:
            return result, []

    def sweep(self, referenced: Container[str]) -> None:
        """Delete the files that are not in `referenced`."""
        with suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name not in referenced:
                    with suppress(OSError):
                        os.unlink(entry.path)

    # --- inside

    def _make(self) -> None:
        if not self._is_there:
            os.makedirs(self._path, 0o700, exist_ok=True)
            self._is_there = True

    def _check_room(self, size: int) -> None:
        """Raise GoondanError E_STORE_FULL when there is no room for so many bytes more."""
        with os.scandir(self._path) as entries:
            used = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        if used + size > self._max_bytes:
            message = (
                f"the files of the conversation have {used} bytes, limit {self._max_bytes}; {size} more do not fit"
            )
            raise fail("E_STORE_FULL", message)

    def _link(self, source: str, target: str, file: FilePart) -> None:
        if not os.path.lexists(target):
            try:
                os.link(source, target, follow_symlinks=False)
            except FileNotFoundError:
                raise fail("E_BLOB_MISSING", f"the file {file.name or file.blob.file} is not there any more") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _copy(source, target, file.blob.size, self._durable)
        try:
            _check(target, file)
        except (OSError, GoondanError):
            with suppress(OSError):
                os.unlink(target)
            raise

    def _keep(self, one: Lifted) -> FilePart | None:
        """Write a file of a result; None when it is none that a model can be shown."""
        if not 0 < len(one.base64) <= wire_blobs.MAX_FILE_BYTES * 4 // 3 + 4:
            return None
        try:
            data = a2b_base64(one.base64)
        except (Base64Error, ValueError):
            return None
        media_type = wire_blobs.media_type_of(data)
        if media_type is None or len(data) > wire_blobs.MAX_FILE_BYTES:
            return None
        blob = wire_blobs.describe(data, os.urandom(16).hex())
        with _errors(self._path):
            self._make()
            self._check_room(len(data))
            _write(f"{self._path}/{blob.file}", data, self._durable)
            self._sync()
        return FilePart(blob, media_type, one.name)

    def _sync(self) -> None:
        if self._durable:
            sync_directory(self._path)


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turns errors of the system into ours."""
    try:
        yield
    except OSError as error:
        code = "E_DISK_FULL" if error.errno in _FULL else "E_STATE"
        raise fail(code, f"{path}: a file of the conversation cannot be kept: {error.strerror}") from None


def _check(path: str, file: FilePart) -> None:
    """Raises GoondanError unless the file is what it is said to be."""
    descriptor = os.open(path, _FLAGS)
    try:
        status, head = os.fstat(descriptor), os.read(descriptor, wire_blobs.HEAD_BYTES)
    finally:
        os.close(descriptor)
    shown = file.name or file.blob.file
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.blob.size:
        raise fail(
            "E_BLOB_MISMATCH", f"the file {shown} does not have the {file.blob.size} bytes that it is said to have"
        )
    if wire_blobs.media_type_of(head) != file.media_type:
        raise fail("E_FILE_INVALID", f"the file {shown} is said to be {file.media_type}, and by its content it is not")


def _write(path: str, data: bytes, durable: bool) -> None:
    descriptor = os.open(path, _NEW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view[: 1 << 20]) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(source: str, target: str, size: int, durable: bool) -> None:
    """Copy a file, where the file system has no links."""
    reading = os.open(source, _FLAGS)
    try:
        data = b""
        while len(data) < size and (chunk := os.read(reading, min(_CHUNK, size - len(data)))):
            data += chunk
    finally:
        os.close(reading)
    _write(target, data, durable)


#: How deep a file may lie in an output: `{"messages": [{"content": [{"resource": {…}}]}]}` is the deepest of MCP's.
MAX_DEPTH: Final = 6
#: How many values of an output are looked at.
MAX_LOOKED_AT: Final = 10_000
#: A shorter base64 is none of a picture.
_LEAST: Final = 16


class Lifted(Struct, frozen=True):
    """A file that was found."""

    #: The object that it stands in, and the key of its base64 there.
    holder: dict[str, Any]
    #: The key of its blob.
    key: str
    #: Its base64.
    base64: str
    #: Its name, if it has one.
    name: str | None


def settled(
    result: ToolResult, output: Any, found: list[Lifted], keep: Callable[[Lifted], FilePart | None]
) -> tuple[ToolResult, list[FilePart]]:
    """The result with numbers in the places of the files that `keep` keeps, and these files. `output` is its output,
    and is changed; `found` are the files in it.
    """
    files: list[FilePart] = []
    size = 0
    for one in found:
        if len(files) == wire_blobs.MAX_FILES or size + len(one.base64) * 3 // 4 > wire_blobs.MAX_MESSAGE_BYTES:
            break
        file = keep(one)
        if file is None:
            continue
        files.append(file)
        size += file.blob.size
        del one.holder[one.key]
        one.holder["file"] = len(files)
    return (replace(result, output=Raw(encode_value(output))), files) if files else (result, [])


def files_in(value: Any) -> list[Lifted]:
    """The files in an output."""
    found: list[Lifted] = []
    left = MAX_LOOKED_AT
    todo: deque[tuple[Any, int]] = deque([(value, 0)])
    while todo and left:
        item, depth = todo.popleft()
        left -= 1
        if isinstance(item, dict):
            one = _file_in(item)
            if one is not None:
                found.append(one)
            elif depth < MAX_DEPTH:
                todo += [(inner, depth + 1) for inner in item.values() if isinstance(inner, dict | list)]
        elif isinstance(item, list) and depth < MAX_DEPTH:
            todo += [(inner, depth + 1) for inner in item[:left] if isinstance(inner, dict | list)]
    return found


def _file_in(item: dict[str, Any]) -> Lifted | None:
    """The file that an object is."""
    key = "data" if item.get("type") in ("file", "image") else "blob" if isinstance(item.get("uri"), str) else None
    base64 = None if key is None else item.get(key)
    if key is None or not isinstance(base64, str) or len(base64) < _LEAST or "file" in item:
        return None
    name = item.get("name") or item.get("uri")
    return Lifted(item, key, base64, name[-wire_blobs.MAX_NAME_CHARS :] if isinstance(name, str) and name else None)
