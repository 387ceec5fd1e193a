"""The few things on the file system that need root, done for a tool host that is not root any more.

Each is one narrow verb; what it may be done to was said at the start (terms.py) or follows from it. Nothing is ever
opened, made or removed through a link that somebody else could have put there.

Source: docs/decisions/039.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Final

from toolhost.launcher.places import hand_over, make_folders, open_folder
from toolhost.launcher.sockets import held_by
from toolhost.launcher.terms import (
    TRIAL,
    Refused,
    Terms,
    check_workspace,
    check_writable,
    is_jails,
    state_root_of,
    within,
)

#: What freezes a control group of version 1.
FREEZER_STATE: Final = "freezer.state"
#: A group's share of the processors, in version 1.
SHARES: Final = "cpu.shares"
#: Sockets of one process that are asked for what they hold.
MAX_SOCKETS: Final = 65536


class Deeds:
    """What can be asked for. Every method raises OSError; `terms` are what was said at the start."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._state_dir: str | None = None
        self.enclosed = True

    @property
    def state_root(self) -> str | None:
        """The state root, None as long as nobody has said which it is."""
        return None if self._state_dir is None else state_root_of(self._state_dir)

    def state(self, state_dir: str, above: str, name: str) -> None:
        """Set where the state is (once), and make the folder `above`/`name` in it. All folders in `above` get the tool
        host's user as their owner: this one, and those of tool hosts that have ended.
        """
        state_dir = os.path.realpath(state_dir)
        if self._state_dir not in (None, state_dir):
            raise Refused(f"the state is in {self._state_dir}")
        if self._state_dir is None:
            if state_dir in self._terms["top"] or any(within(state_dir, path) for path in self._terms["closed"]):
                raise Refused(f"{state_dir} is no place for state")
            os.makedirs(state_dir, 0o700, exist_ok=True)
            self._state_dir = state_dir
        if "/" in name or "/" in above:
            raise Refused("that is no name of a folder")
        make_folders(state_dir, [above, name])
        for each in os.listdir(f"{state_dir}/{above}"):
            with suppress(NotADirectoryError):
                folder = open_folder(f"{state_dir}/{above}/{each}")
                try:
                    hand_over(folder, self._terms["user"])
                finally:
                    os.close(folder)

    def settle(self, enclosed: bool) -> None:
        """Set whether bubblewrap has to run as root. Set before the first jail of a tool; False is final."""
        self.enclosed = self.enclosed and bool(enclosed)

    def trial(self, number: int) -> str:
        """Make the folder in which it is tried whether workdirs can have file systems of their own; its path."""
        if self._state_dir is None:
            raise Refused("there is no state yet")
        make_folders(self._state_dir, [f"{TRIAL}{int(number)}"])
        return f"{self._state_dir}/{TRIAL}{int(number)}"

    def remove_trial(self, number: int) -> None:
        """Remove that folder, which must be empty."""
        os.rmdir(f"{self._state_dir}/{TRIAL}{int(number)}")

    def workdir(self, place: str) -> None:
        """Make an instance's folder, with root as its owner. `place` is its path in the state."""
        root = self._state_dir
        check_workspace(f"{root}/{place}", root)
        if root is not None:
            make_folders(root, place.split("/"))

    def placeholders(self, folder: str) -> list[str]:
        """Make the guarded names that a folder lacks, with the folder's owner. Returns the paths that were made."""
        check_writable(folder, self._terms, self.state_root)
        made = []
        here = open_folder(folder)
        before = os.umask(0o022)  # they lie among a person's files
        try:
            owner = os.fstat(here)
            for name in self._terms["guarded"]:
                with suppress(OSError):
                    os.mkdir(name, 0o755, dir_fd=here)
                    made.append(f"{folder}/{name}")
                    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=here, follow_symlinks=False)
        finally:
            os.umask(before)
            os.close(here)
        return made

    def remove_placeholder(self, path: str) -> None:
        """Remove one that is empty, unless another tool host guards it."""
        folder, _, name = path.rpartition("/")
        if name not in self._terms["guarded"]:
            raise Refused(f"{path} is no placeholder")
        check_writable(folder, self._terms, self.state_root)
        here = open_folder(folder)
        try:
            remove_unguarded(name, here)
        finally:
            os.close(here)

    def group(self, number: int) -> None:
        """Make the control group of a jail that stands beside the tool host's."""
        path = self._beside(number)
        os.mkdir(path)
        try:
            for place in (f"{path}/{SHARES}", path):  # all that it writes there: each takes its time
                os.chown(place, self._terms["user"], self._terms["user"])
        except OSError:
            os.rmdir(path)
            raise

    def remove_group(self, number: int) -> None:
        """Remove it; no process is in it any more."""
        os.rmdir(self._beside(number))

    def remove_groups(self) -> None:
        """Remove all that are empty: the tool host ends."""
        for path in self._terms["groups"]:
            remove_group(path)
        beside = self._terms["beside"]
        if beside is not None:
            folder, _, start = beside.rpartition("/")
            for name in os.listdir(folder):
                if name.startswith(start):
                    remove_group(f"{folder}/{name}")

    def niceness(self, pid: int, value: int) -> None:
        """What the session of a jail's process has against others where the scheduler groups by session."""
        self._check_jails(pid)
        if not 0 <= value < 20:
            raise Refused(f"the niceness of a jail cannot be {value}")
        with open(f"/proc/{int(pid)}/autogroup", "w", encoding="ascii") as file:
            file.write(str(value))

    def sockets(self, pid: int, numbers: list[int]) -> int:
        """What these sockets of a jail's process hold (bytes)."""
        self._check_jails(pid)
        return held_by(pid, numbers[:MAX_SOCKETS])

    def _beside(self, number: int) -> str:
        beside = self._terms["beside"]
        if beside is None:
            raise Refused("there are no such groups here")
        return f"{beside}{int(number)}"

    def _check_jails(self, pid: int) -> None:
        if not is_jails(uid_of(pid), self._terms):
            raise Refused(f"the process {pid} is none of a jail's")


def uid_of(pid: int) -> int:
    """The user of a process: what its files in /proc say of it is root's for some. Raises OSError."""
    with open(f"/proc/{int(pid)}/status", "rb") as source:
        for line in source:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(f"the process {pid} is gone")


def remove_unguarded(name: str, folder: int | None = None) -> None:
    """Remove an empty folder, `name` being its path or its name in `folder`, unless a tool host guards it: each that
    does has locked it. Raises OSError.
    """
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rmdir(name, dir_fd=folder)
    finally:
        os.close(fd)


def remove_group(folder: str) -> None:
    """A control group and those in it, as far as no process is left in them. One that was left frozen goes on, so that
    what was killed in it can end: in version 1 that waits.
    """
    with suppress(OSError):
        if os.path.exists(f"{folder}/{FREEZER_STATE}"):
            with open(f"{folder}/{FREEZER_STATE}", "w", encoding="ascii") as state:
                state.write("THAWED")
    with suppress(OSError):
        for name in os.listdir(folder):
            if os.path.isdir(f"{folder}/{name}"):
                remove_group(f"{folder}/{name}")
        os.rmdir(folder)
