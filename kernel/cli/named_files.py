"""Digests of the small files that the arguments of a call name: what a person looks at before a yes can be compared
with what is there later. The call itself reads them when it runs, so they may be others by then.

A model has written the names, and its tools the files. Only regular files below the call's working directory are read,
and nothing of them is shown.

Source: docs/approvals.md, "What happens to a call".
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from typing import Any, Final

import msgspec

#: The largest file (bytes), how many are shown, and how many words of the arguments are looked at.
MAX_FILE_BYTES: Final = 64 << 10
MAX_FILES: Final = 8
MAX_WORDS: Final = 1000
#: What a shell takes for a word, roughly, in JSON.
_WORD: Final = re.compile(r"[^\s\"'`;|&<>()=\\]+")


def with_files(item: dict[str, Any]) -> dict[str, Any]:
    """A call (`args`, `workdir`) with `files`: a digest for each name in its arguments that is such a file."""
    found: dict[str, str] = {}
    text = msgspec.json.encode(item.get("args")).decode().replace("\\n", " ")
    for word in _WORD.findall(text)[:MAX_WORDS] if item.get("workdir") else ():
        with suppress(OSError, ValueError):
            if len(found) < MAX_FILES and (digest := _digest(item["workdir"], word)) is not None:
                found[word] = digest
    return {**item, "files": found}


def _digest(workdir: str, name: str) -> str | None:
    """SHA-256 of the file. None: it is none of those that are read. Raises OSError, ValueError."""
    path, below = os.path.realpath(os.path.join(workdir, name)), os.path.realpath(workdir) + os.sep
    if not path.startswith(below):
        return None
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_FILE_BYTES:
            return None
        if not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(below):  # a tool has put a link in its way
            return None
        return hashlib.sha256(file.read(MAX_FILE_BYTES)).hexdigest()
