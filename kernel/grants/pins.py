"""The digest that a grant is pinned to: every file of a package, manifest and code.

Unlike the digest of a revision it leaves nothing out: neither hidden nor compiled nor large files, because a module
could import any of them.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Final

from kernel.bundle.lookup import Unreadable

#: Nobody could have looked at a package with more.
MAX_FILES: Final = 20_000
MAX_BYTES: Final = 1 << 30
_CHUNK: Final = 1 << 20


def pin(root: str) -> str:
    """`sha256:` and the digest of everything below `root`. Raises Unreadable for what cannot be pinned."""
    total = hashlib.sha256()
    files, left = 0, MAX_BYTES
    todo = [root]
    while todo:
        here = todo.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            raise Unreadable(f"{here} cannot be read: {error.strerror}") from None
        for entry in entries:
            files += 1
            if files > MAX_FILES:
                raise Unreadable(f"it holds more than {MAX_FILES} files")
            name = os.fsencode(os.path.relpath(entry.path, root))
            if entry.is_symlink():
                target = os.fsencode(os.readlink(entry.path))
                total.update(b"link %d %s %d %s" % (len(name), name, len(target), target))
            elif entry.is_dir():
                total.update(b"folder %d %s" % (len(name), name))
                todo.append(entry.path)
            else:
                size, digest = _file(entry.path, left)
                left -= size
                total.update(b"file %d %s %s" % (len(name), name, digest))
    return "sha256:" + total.hexdigest()


def _file(path: str, limit: int) -> tuple[int, bytes]:
    total, size = hashlib.sha256(), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as source:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Unreadable(f"{path} is no regular file")
            while chunk := source.read(_CHUNK):
                total.update(chunk)
                size += len(chunk)
                if size > limit:
                    raise Unreadable(f"it holds more than {MAX_BYTES >> 20} MiB")
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    return size, total.digest()
