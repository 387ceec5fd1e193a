"""What a client does with files: it finds the running kernel, reads its token, and writes and reads large payloads.

Everything blocks for as long as the disk takes. Files of the folder of large payloads may be hostile: they are opened
beneath it, without following links and without waiting.

Source: PROTOCOL.md "Find a running kernel", "Transport", "Large payloads".
"""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from goondan_client.errors import GoondanError
from goondan_client.frames import Blob, check_values

#: Characters of a digest in the name of a workspace.
_DIGEST_CHARS: Final = 16
#: A record or a token has no more bytes.
_MAX_SMALL: Final = 65536
#: Files of one message: how many, how large each, and all together (bytes).
MAX_FILES: Final = 16
MAX_FILE: Final = 16 << 20
MAX_ALL: Final = 20 << 20
#: How contents begin that a model may see.
_KINDS: Final = {
    rb"\x89PNG\r\n\x1a\n": "image/png",
    rb"\xff\xd8\xff": "image/jpeg",
    rb"GIF8[79]a": "image/gif",
    rb"RIFF....WEBP": "image/webp",
    rb"%PDF-": "application/pdf",
}


FileParts = list[dict[str, Any]]


class Place:
    """Where a kernel is: a runtime directory that was named, or that of a bundle's kernel."""

    def __init__(self, bundle: str | os.PathLike[str] | None = None, run_dir: str | os.PathLike[str] | None = None):
        named = run_dir or (os.environ.get("GOONDAN_RUN_DIR") if bundle is None else None)
        self._named = None if named is None else os.path.abspath(named)
        self._bundle = os.path.realpath(os.path.expanduser(bundle or "."))

    def run_dir(self) -> str:
        """The runtime directory. Raises GoondanError E_KERNEL_NOT_RUNNING."""
        if self._named is not None:
            return self._named
        bundle = self._bundle
        if os.path.basename(bundle) == "goondan.yaml" and not os.path.isdir(bundle):
            bundle = os.path.dirname(bundle)
        root = os.path.abspath(os.path.expanduser(os.environ.get("GOONDAN_STATE_ROOT") or "~/.goondan"))
        digest = hashlib.sha256(os.fsencode(bundle)).hexdigest()[:_DIGEST_CHARS]
        try:
            record = msgspec.json.decode(_small(f"{root}/workspaces/{digest}/kernel/kernel.json"), type=dict[str, Any])
            return str(record["runDir"])
        except (OSError, msgspec.MsgspecError, KeyError):
            hint = "Start it with `gdn run --detach`, or name its runtime directory (run_dir, GOONDAN_RUN_DIR)."
            raise GoondanError("E_KERNEL_NOT_RUNNING", f"no kernel runs for {bundle}", hint) from None

    def token(self, run_dir: str) -> str:
        """The operator's token, after a look at whose place it is. Empty while there is none.

        Raises GoondanError E_BROKER_UNTRUSTED.
        """
        check_place(run_dir)
        try:
            return _small(f"{run_dir}/client.token").decode("ascii", "replace").strip()
        except OSError:
            return ""


def check_place(run_dir: str) -> None:
    """See that nobody but the user of the kernel, and root, could have put the socket there.

    Raises GoondanError E_BROKER_UNTRUSTED.
    """
    path = os.path.realpath(run_dir)
    try:
        owner = os.stat(path).st_uid
        # Root may talk to anybody's kernel: its token is worth nothing to others.
        ours = {0, os.geteuid(), owner} if os.geteuid() == 0 else {0, os.geteuid()}
        for folder in (path, *map(str, Path(path).parents)):
            found = os.stat(folder)
            if found.st_uid not in ours:
                raise _untrusted(f"{folder} belongs to uid {found.st_uid}")
            if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX and not _are_alone(folder, found, ours):
                raise _untrusted(f"others can change {folder}")
        if os.stat(path).st_mode & 0o077:
            raise _untrusted(f"{path} is open to others")
        found = os.stat(f"{path}/clients.sock", follow_symlinks=False)
    except OSError:
        return  # it is not there, and so nobody is
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in ours:
        raise _untrusted(f"{path}/clients.sock is no socket of the kernel")


def _are_alone(folder: str, found: os.stat_result, ours: set[int]) -> bool:
    """Whether only these users can change a directory that its group, or everybody, may write to."""
    try:
        if found.st_mode & 0o002 or "system.posix_acl_access" in os.listxattr(folder):  # a list can name anybody
            return False
        users, listed = pwd.getpwall(), grp.getgrgid(found.st_gid).gr_mem
    except (OSError, KeyError):
        return False
    members = {user.pw_uid for user in users if user.pw_gid == found.st_gid}
    ids = {user.pw_name: user.pw_uid for user in users}
    return bool(members or listed) and members | {ids.get(name, -1) for name in listed} <= ours


def _untrusted(why: str) -> GoondanError:
    return GoondanError("E_BROKER_UNTRUSTED", why, "See whose the socket and the directories above it are.")


def _small(path: str) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(_MAX_SMALL)


def write_blob(folder: str | None, payload: bytes | memoryview, durable: bool) -> Blob:
    """Lay a payload down. `durable`: it survives a loss of power.

    Raises GoondanError E_DISK_FULL, E_BLOB_UNAVAILABLE; nothing is left behind then.
    """
    if folder is None:
        raise GoondanError("E_BLOB_UNAVAILABLE", "this program has no access to the folder of large payloads")
    name = os.urandom(16).hex()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(f"{folder}/{name}", flags, 0o600), "wb", buffering=0) as file:
            view = memoryview(payload)
            while view:
                view = view[file.write(view) or 0 :]
            if durable:
                os.fsync(file.fileno())
        if durable:
            above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)
    except OSError as error:
        remove_blob(folder, name)
        code = "E_DISK_FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "E_BLOB_UNAVAILABLE"
        raise GoondanError(code, f"a payload cannot be written into {folder}: {error.strerror}") from None
    return Blob(name, hashlib.sha256(payload).hexdigest(), len(payload))


def read_blob(folder: str | None, blob: Blob) -> bytes:
    """The payload behind a reference whose fields were looked at.

    Raises GoondanError E_BLOB_UNAVAILABLE, E_BLOB_MISSING, E_BLOB_MISMATCH, E_FRAME_INVALID.
    """
    if folder is None:
        raise GoondanError("E_BLOB_UNAVAILABLE", "this program has no access to the folder of large payloads")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        with open(os.open(f"{folder}/{blob.file}", flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise GoondanError("E_BLOB_MISSING", f"the payload {blob.file} is no regular file")
            if found.st_size != blob.size:
                raise GoondanError("E_BLOB_MISMATCH", f"the payload {blob.file} has {found.st_size} bytes")
            data = file.read(blob.size + 1)
    except OSError as error:
        raise GoondanError("E_BLOB_MISSING", f"the payload {blob.file} cannot be read: {error.strerror}") from None
    if len(data) != blob.size or hashlib.sha256(data).hexdigest() != blob.digest:
        raise GoondanError("E_BLOB_MISMATCH", f"the payload {blob.file} has another content")
    check_values(data)
    return data


def touch_blob(folder: str | None, file: str) -> None:
    """Somebody still refers to it: no sweep takes it for a while."""
    with suppress(OSError):
        os.utime(f"{folder}/{file}", follow_symlinks=False)


def remove_blob(folder: str | None, file: str) -> None:
    """Delete it, if it is there."""
    with suppress(OSError):
        os.unlink(f"{folder}/{file}")


def lay_down(folder: str | None, files: Sequence[str | os.PathLike[str] | bytes], durable: bool) -> FileParts:
    """Put the pictures and PDFs of a message where its event can name them: paths, or contents. Returns FileParts.

    Raises GoondanError E_FILE_INVALID, E_BLOB_UNAVAILABLE, E_DISK_FULL; nothing is left behind then.
    """
    parts: list[dict[str, Any]] = []
    left = MAX_ALL
    try:
        for file in files:
            name = None if isinstance(file, bytes) else os.path.basename(os.fspath(file))
            content = file if isinstance(file, bytes) else _content(file)
            left -= len(content)
            if len(parts) == MAX_FILES or len(content) > MAX_FILE or left < 0:
                why = "a message has 16 files at most, each of 16 MiB, 20 MiB together"
                raise GoondanError("E_FILE_INVALID", why, "Send fewer or smaller files, or several messages.")
            kind = next((kind for head, kind in _KINDS.items() if re.match(head, content, re.DOTALL)), None)
            if kind is None:
                hint = "Send a picture or a PDF; put another file in the workdir and send its path as text."
                raise GoondanError("E_FILE_INVALID", f"{name or 'a file'} is no PNG, JPEG, GIF, WebP or PDF", hint)
            blob = write_blob(folder, content, durable)
            parts.append({"type": "file", "blob": blob, "mediaType": kind, "name": name})
    except GoondanError:
        for part in parts:
            remove_blob(folder, part["blob"].file)
        raise
    return parts


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE + 1)
    except OSError as error:
        hint = "Correct the path, or let this program read the file."
        raise GoondanError("E_FILE_INVALID", f"{os.fspath(path)}: {error.strerror}", hint) from None
