"""Files of tokens: read if nobody else can read or write them, and made for who has none.

Source: docs/commands.md; docs/mcp.md, "Our tools for MCP clients".
"""

from __future__ import annotations

import os
import stat
from typing import Final

from goondan.features.serve.api.rules.callers import MAX_TOKEN, MIN_TOKEN, is_token
from goondan.schemas.wire.errors import fail

#: The largest file (bytes): each of its tokens may be as long as tokens are.
MAX_FILE: Final = 1 << 20


def read_private(path: str) -> str:
    """The text of a file that is ours, no link, and closed to others. Raises GoondanError E_USAGE, without any of the
    text.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
            state, data = os.fstat(opened.fileno()), opened.read(MAX_FILE + 1) or b""
    except (OSError, ValueError) as error:
        raise fail("E_USAGE", f"{path[:200]}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise fail("E_USAGE", f"{path}: others can read or write it", suggestion="chmod 600 it, or name a new file.")
    if len(data) > MAX_FILE:
        raise fail("E_USAGE", f"{path}: a token file has at most {MAX_FILE} bytes")
    if not data.isascii():
        raise fail("E_USAGE", f"{path}: a token file has ASCII only")
    return data.decode()


def single_token(path: str) -> str:
    """The one token of a file, which is made with a fresh one if it is not there. Raises GoondanError E_USAGE."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    except (OSError, ValueError) as error:
        raise fail("E_USAGE", f"{path[:200]}: {getattr(error, 'strerror', None) or error}") from None
    else:
        token = os.urandom(32).hex()
        with open(fd, "w") as file:
            file.write(token + "\n")
        return token
    text = read_private(path).strip()
    if not is_token(text):
        raise fail("E_USAGE", f"{path}: a token is one word of {MIN_TOKEN} to {MAX_TOKEN} characters of ASCII")
    return text


def state_of(path: str) -> tuple[int, ...]:
    """What changes when a file changes."""
    try:
        state = os.lstat(path)
    except OSError:
        return ()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_mode, state.st_uid
