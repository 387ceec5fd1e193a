"""The powers of a process that does everything itself: an ordinary user's tool host, and root that has stayed root."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from functools import cached_property

from goondan.schemas.system.own_users import NUMBERS
from goondan.toolhost.launcher.descriptors import opened
from goondan.toolhost.launcher.operations import make_placeholders, remove_groups, remove_unguarded, set_niceness
from goondan.toolhost.launcher.places import let_owner_in
from goondan.toolhost.launcher.sockets import held_by
from goondan.toolhost.privileges.launcher_link import spawn
from goondan.toolhost.privileges.own_groups import beside, find_tree
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.privileges.tree import Tree
from goondan.toolhost.privileges.uids import Uids


class Ordinary(Powers):
    """See powers.Powers."""

    def __init__(self, umask: int | None = None) -> None:
        """`umask` is the one that jails write under; None: that of this process."""
        super().__init__(os.geteuid(), lambda: spawn(umask), Uids(os.getpid(), NUMBERS))

    @cached_property
    def tree(self) -> Tree | None:  # type: ignore[override] # it is found when it is asked for, and read only
        """Found once. Its empty groups are removed when the process ends."""
        found = find_tree()
        if found is not None:
            atexit.register(remove_groups, found.folders, beside(found))
        return found

    def settle(self, enclosed: bool) -> None:
        pass

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        os.makedirs(f"{state_dir}/{above}/{name}", 0o700, exist_ok=True)

    def make_workdir(self, path: str, state_dir: str) -> None:
        os.makedirs(path, 0o700, exist_ok=True)
        with opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
            let_owner_in(folder)

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        with opened(folder, os.O_PATH | os.O_DIRECTORY) as here:
            return [f"{folder}/{name}" for name in make_placeholders(here, names)]

    def remove_placeholder(self, path: str) -> None:
        remove_unguarded(path)

    def make_group(self, number: int, path: str) -> None:
        os.mkdir(path)

    def remove_group(self, number: int, path: str) -> None:
        os.rmdir(path)

    def set_niceness(self, pid: int, niceness: int) -> None:
        set_niceness(pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        return held_by(pid, numbers)
