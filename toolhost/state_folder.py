"""A tool host's folder on disk, and its promises in there: `<state_dir>/toolhosts/<name>/`, locked while the tool host
lives.

Several tool hosts can work for one kernel. The broker knows each by a name, and each has a folder of its own. So no
tool host takes the notes of a living one for those of a tool host that is gone. The lock ends with the process.

`pending.json` has the pending work that the tool host has promised. It is read once, when a tool host starts: all work
in it was lost with the tool host before. It is written again whenever work begins or ends. It survives the end of the
process, but not a loss of power. A file that cannot be read or written costs the promise, never a call.

Source: docs/design/tools.md section 6; requirement RESULT-04.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import suppress
from typing import Final, Self

import msgspec

from goondan.schemas.bundle.address import path_segment
from goondan.schemas.system.private_files import read_list, replace_file
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.workdirs import LOCK, TOOLHOSTS
from goondan.toolhost.calls.results import Promise
from goondan.toolhost.privileges.powers import Powers

#: How long the tool host before may take to end after its link did (seconds): its jails are killed first.
PATIENCE_S: Final = 2.0
_POLL_S: Final = 0.05
PROMISES: Final = "pending.json"
#: A larger file was not written by us (bytes).
_MAX_BYTES: Final = 4 << 20


class StateFolder:
    """A folder that this process has locked. `path` is None where nothing can be kept; nothing is locked then."""

    def __init__(self, path: str | None, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    async def claim(cls, state_dir: str, principal: str, powers: Powers, *, patience_s: float = PATIENCE_S) -> Self:
        """The folder of the tool host `principal`. Raises GoondanError E_PRINCIPAL_BUSY when another one has it."""
        path = os.path.join(state_dir, TOOLHOSTS, path_segment(principal.removeprefix("toolhost/")))
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        try:
            powers.claim_state(state_dir, TOOLHOSTS, os.path.basename(path))
            while (lock := _lock(path)) is None:
                if loop.time() >= until:
                    name = principal[:100]
                    raise fail("E_PRINCIPAL_BUSY", f"another process is {name} of the state in {state_dir}")
                await asyncio.sleep(_POLL_S)
        except OSError:
            return cls(None, -1)
        return cls(path, lock)

    def orphans(self) -> list[Self]:
        """The folders of tool hosts that are gone, locked. `release` each."""
        found: list[Self] = []
        above = None if self.path is None else os.path.dirname(self.path)
        for name in [] if above is None else sorted(os.listdir(above)):
            path = os.path.join(above or "", name)
            with suppress(OSError):
                lock = None if path == self.path else _lock(path)
                if lock is not None:
                    found.append(type(self)(path, lock))
        return found

    def file(self, name: str) -> str | None:
        """The path of one file in it."""
        return None if self.path is None else os.path.join(self.path, name)

    def release(self) -> None:
        """Unlock it, so that another process can have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock(folder: str) -> int | None:
    """The locked descriptor of a folder's lock; None when another process has it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(folder, LOCK), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


class PromiseFile:
    """One such file. With `path` None nothing can be kept."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def read(self) -> list[Promise]:
        """The promises in it; none when there is no file."""
        return [] if self._path is None else read_list(self._path, Promise, _MAX_BYTES)

    def write(self, promises: list[Promise]) -> None:
        """Replace the promises in it by these."""
        if self._path is None:
            return
        if not promises:
            with suppress(OSError):
                os.unlink(self._path)
            return
        with suppress(OSError):
            replace_file(self._path, msgspec.json.encode(promises))
