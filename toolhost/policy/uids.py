"""Which user each jail of a root-run tool host is: numbers that nobody else has, each for one jail at a time. Pure.

They lie where systemd's table of user ids has nothing assigned (0x70000000 to 0x7FFFFFFE), so no file, service or
container has one of them by accident, and a process that escaped would own nothing.

Source: sandbox.md section 3, item 2; https://systemd.io/UIDS-GIDS/.
"""

from __future__ import annotations

import hashlib
from typing import Final

from schemas.users import TOOLHOST_UID

_FIRST: Final = 0x70000000  # the last below _INSTANCES is the tool host's own (schemas/users.py)
#: Numbers for each tool host; more jails than that are not alive at once.
BLOCK: Final = 4096
_BLOCKS: Final = 32768
#: The upper half: for instances whose workdir had to be given to a user of theirs.
_INSTANCES: Final = _FIRST + _BLOCKS * BLOCK
_LAST: Final = 0x7FFFFFFE
#: First and last of the numbers that instances can have.
INSTANCES: Final = (_INSTANCES, _LAST)


def instance_uid(workdir: str) -> int:
    """The user that an instance's workdir (its path) belongs to where owners cannot be mapped: always the same."""
    digest = hashlib.sha256(workdir.encode("utf-8", "surrogateescape")).digest()
    return _INSTANCES + int.from_bytes(digest[:8], "big") % (_LAST - _INSTANCES + 1)


class Uids:
    """The numbers of one tool host. The lowest free one comes first, because what the kernel keeps for it is kept."""

    def __init__(self, host_pid: int) -> None:
        """Tool hosts that run side by side have different process ids, and so different numbers, mostly."""
        self._base = _FIRST + host_pid % _BLOCKS * BLOCK
        self._taken: set[int] = set()

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last number that a jail of this tool host can have."""
        last = self._base + BLOCK - 1
        return self._base, last - 1 if last == TOOLHOST_UID else last

    def next(self) -> int | None:
        """The number that `take` would give; None when all are taken."""
        first, last = self.bounds
        return next((n for n in range(first, last + 1) if n not in self._taken), None)

    def take(self) -> int | None:
        """A number for a new jail, or None."""
        found = self.next()
        if found is not None:
            self._taken.add(found)
        return found

    def give_back(self, uid: int) -> None:
        """The jail's last process is gone."""
        self._taken.discard(uid)
