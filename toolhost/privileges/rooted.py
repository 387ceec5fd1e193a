"""The powers of a tool host that root has started: what only root can do is asked of its steward and its launcher.

Source: docs/decisions/039.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from toolhost.privileges.launcher_link import LauncherLink
from toolhost.privileges.powers import Powers
from toolhost.privileges.steward_link import Steward
from toolhost.privileges.tree import Tree
from toolhost.privileges.uids import Uids

#: Sockets of one process that are asked about: more than a jail may have open.
_MANY_SOCKETS: Final = 4096


class Rooted(Powers):
    """See powers.Powers. Without a steward, should it not have started, everything is refused."""

    def __init__(self, uids: Uids, tree: Tree | None) -> None:
        """The steward is started later (Steward.start), while this process is still root."""
        self.steward = Steward()
        super().__init__(0, LauncherLink(self.steward.launcher), uids)
        self.tree = tree

    @property
    def lifeline(self) -> int | None:
        return self.steward.pid or None

    def settle(self, enclosed: bool) -> None:
        if self.steward.pid:  # else there is no jail to be made
            self.steward.settle(enclosed)

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        self.steward.claim_state(state_dir, above, name)

    def make_workdir(self, path: str, state_dir: str) -> None:
        if not os.path.isdir(path):
            self.steward.make_workdir(path[len(state_dir) + 1 :])

    def make_trial(self, folder: str) -> str:
        return self.steward.make_trial()  # nobody else may write to it: a mount would follow his links

    def remove_trial(self, folder: str) -> None:
        self.steward.remove_trial()

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        return self.steward.make_placeholders(folder)  # it was told the names when it started

    def remove_placeholder(self, path: str) -> None:
        self.steward.remove_placeholder(path)

    def make_group(self, number: int, path: str) -> None:
        self.steward.make_group(number)

    def remove_group(self, number: int, path: str) -> None:
        self.steward.remove_group(number)

    def set_niceness(self, pid: int, niceness: int) -> None:
        self.steward.set_niceness(pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        return self.steward.held_by(pid, numbers[:_MANY_SOCKETS])
