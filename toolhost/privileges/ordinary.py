"""The powers of a process that does everything itself: an ordinary user's tool host, and root that has stayed root."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from schemas.system.own_users import NUMBERS
from toolhost.launcher.deeds import remove_unguarded
from toolhost.launcher.sockets import held_by
from toolhost.privileges.launcher_link import LauncherLink, spawn
from toolhost.privileges.own_groups import find_tree, remove_tree
from toolhost.privileges.powers import Powers
from toolhost.privileges.tree import Tree
from toolhost.privileges.uids import Uids


class Ordinary(Powers):
    """See powers.Powers."""

    def __init__(self, umask: int | None = None) -> None:
        """`umask` is what jails write under, None for that of this process."""
        super().__init__(os.geteuid(), LauncherLink(lambda: spawn(umask)), Uids(os.getpid(), NUMBERS))

    @cached_property
    def tree(self) -> Tree | None:  # type: ignore[override] # it is found when it is asked for, and read only
        """Found once; what is empty of it goes when the process ends."""
        found = find_tree()
        if found is not None:
            atexit.register(remove_tree, found)
        return found

    @property
    def lifeline(self) -> int | None:
        return None

    def settle(self, enclosed: bool) -> None:
        pass

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        os.makedirs(f"{state_dir}/{above}/{name}", 0o700, exist_ok=True)

    def make_workdir(self, path: str, state_dir: str) -> None:
        os.makedirs(path, 0o700, exist_ok=True)

    def make_trial(self, folder: str) -> str:
        os.makedirs(folder, 0o700, exist_ok=True)
        return folder

    def remove_trial(self, folder: str) -> None:
        os.rmdir(folder)

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        made: list[str] = []
        for name in names:
            path = f"{folder}/{name}"
            with suppress(OSError):
                os.mkdir(path, 0o755)
                made.append(path)
                _open_to_readers(path)
                if self.operator == 0:
                    owner = os.stat(folder)
                    os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        return made

    def remove_placeholder(self, path: str) -> None:
        remove_unguarded(path)

    def make_group(self, number: int, path: str) -> None:
        os.mkdir(path)

    def remove_group(self, number: int, path: str) -> None:
        os.rmdir(path)

    def set_niceness(self, pid: int, niceness: int) -> None:
        with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
            file.write(str(niceness))

    def held_by(self, pid: int, numbers: list[int]) -> int:
        return held_by(pid, numbers)


def _open_to_readers(path: str) -> None:
    """It lies among a person's files, and is not as closed as what we make for ourselves."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o755)
    finally:
        os.close(fd)
