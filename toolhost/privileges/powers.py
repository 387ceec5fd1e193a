"""What a tool host can have done on this machine, whoever started it.

There are two kinds: `Ordinary` (ordinary.py) does everything itself, `Rooted` (rooted.py) asks a privileged helper and
a launcher that stay root. One is made at the start (toolhost/drop_privileges.py) and passed on. Nobody else asks
whether root is there.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from goondan.toolhost.offload import Offload
from goondan.toolhost.privileges.launcher_link import LauncherLink, StartLauncher
from goondan.toolhost.privileges.tree import Tree
from goondan.toolhost.privileges.uids import Uids


class Powers(ABC):
    """Methods raise OSError when something is refused or fails. Any thread may call them; attributes are only read."""

    #: Where control groups can be made; None where none can.
    tree: Tree | None
    #: The process without which this one cannot go on; None where there is none.
    lifeline: int | None = None

    def __init__(self, operator: int, start_launcher: StartLauncher, uids: Uids) -> None:
        #: The user who started this tool host: 0 for root, and then the tool host has become another user by now.
        self.operator = operator
        #: Threads for work that would hold the loop up.
        self.offload = Offload()
        #: Starts jails.
        self.launcher = LauncherLink(start_launcher, self.offload)
        #: The user numbers of jails, where jails have their own.
        self.uids = uids
        #: The numbers of jails' control groups.
        self.group_numbers = itertools.count(1)

    @property
    def shares_user(self) -> bool:
        """Whether jails run as this process's own user. Jails of root's tool host have numbers of their own."""
        return self.operator != 0

    @abstractmethod
    def settle(self, enclosed: bool) -> None:
        """Say, before the first jail of a tool, whether bubblewrap has to run as root here."""

    @abstractmethod
    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        """Make the folder `above`/`name` in the state, and take over the folders beside it of tool hosts that are
        gone.
        """

    @abstractmethod
    def make_workdir(self, path: str, state_dir: str) -> None:
        """Make sure that an instance's folder exists and that its owner can use it; `path` lies in the state."""

    @abstractmethod
    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        """Make the missing guarded names in somebody's folder, as far as possible. Returns those that were made."""

    @abstractmethod
    def remove_placeholder(self, path: str) -> None:
        """Remove an empty placeholder that no tool host guards."""

    @abstractmethod
    def make_group(self, number: int, path: str) -> None:
        """Make the control group of the jail with that number beside ours."""

    @abstractmethod
    def remove_group(self, number: int, path: str) -> None:
        """Remove that control group."""

    @abstractmethod
    def set_niceness(self, pid: int, niceness: int) -> None:
        """Set the niceness of the session of a jail's process."""

    @abstractmethod
    def held_by(self, pid: int, numbers: list[int]) -> int:
        """What these sockets (descriptors) of a jail's process hold (bytes)."""
