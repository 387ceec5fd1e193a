"""User numbers for the jails of a tool host that root runs: nobody else has them, and each is for one jail. Pure.

Nobody assigns numbers in their range (schemas/system/users.py). So no file, service or container has one of them by
accident, and a process that escaped would own nothing. A block in which somebody has a number nevertheless is skipped.

Source: docs/design/sandbox.md section 3.2; https://systemd.io/UIDS-GIDS/.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from goondan.schemas.system.users import UserNumbers

#: Numbers for each tool host. More jails than that are never alive at once.
BLOCK: Final = 4096
#: Blocks that are tried: it is rare that somebody has a number in one, and each try asks a service.
TRIES: Final = 16


def instance_uid(workdir: str, numbers: UserNumbers) -> int:
    """The user that owns an instance's workdir (its path) where owners cannot be mapped; always the same for a path."""
    digest = hashlib.sha256(workdir.encode("utf-8", "surrogateescape")).digest()
    first, last = numbers.instances
    return first + int.from_bytes(digest[:8], "big") % (last - first + 1)


class Uids:
    """The numbers of one tool host. The lowest free one is given first: what Linux keeps for a user is used again."""

    def __init__(self, host_pid: int, numbers: UserNumbers) -> None:
        """Tool hosts that run side by side have different process ids, and so in most cases different numbers."""
        self._first, last = numbers.jails
        self._last = last
        self._blocks = -(-(last - self._first + 1) // BLOCK)
        self._block = host_pid % self._blocks
        self._taken: set[int] = set()

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last number that a jail of this tool host can have."""
        first = self._first + self._block * BLOCK
        return first, min(first + BLOCK - 1, self._last)

    def pass_over(self, taken: Callable[[int, int], bool]) -> bool:
        """Go on to a block in which nobody has a number. `taken` says whether somebody has one from first to last.

        False when none was found in TRIES; the numbers then stay as they were. Call it before any number is given.
        """
        was = self._block
        for step in range(min(TRIES, self._blocks)):
            self._block = (was + step) % self._blocks
            if not taken(*self.bounds):
                return True
        self._block = was
        return False

    def next(self) -> int | None:
        """The number that `take` would give; None when all are taken."""
        first, last = self.bounds
        return next((n for n in range(first, last + 1) if n not in self._taken), None)

    def take(self) -> int | None:
        """A number for a new jail; None when all are taken."""
        found = self.next()
        if found is not None:
            self._taken.add(found)
        return found

    def give_back(self, uid: int) -> None:
        """The jail's last process is gone: its number is free again."""
        self._taken.discard(uid)
