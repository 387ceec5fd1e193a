"""The privileged operations: the few things on the file system that need root, done for a tool host that gave it up.

Each is narrow. The allow-list says what it may act on, directly or by what follows from it. Nothing is opened, made or
removed through a link that somebody else could have put there.

Source: docs/decisions/039.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from goondan.toolhost.launcher import allow_list, syscalls
from goondan.toolhost.launcher.places import hand_over, make_folders, open_folder, opened, status_numbers, write_text

TYPE_CHECKING = False  # see allow_list.py
if TYPE_CHECKING:
    from typing import Final

    from goondan.toolhost.launcher.requests import AllowList

#: The file that freezes a control group of version 1.
FREEZER_STATE: Final = "freezer.state"
#: A group's share of the processors, in version 1.
SHARES: Final = "cpu.shares"
#: Room for a path as JSON (bytes).
_PAGE: Final = 1 << 16
_SO_MEMINFO: Final = 55


class Settled:
    """What the tool host has told the privileged helper since its start. Launchers that were forked before read it,
    too.

    Two values: the state root, None until it is known; and whether bubblewrap may run as root.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _PAGE)  # shared with what is forked
        self.write(None, enclosed=True)

    def write(self, state_root: str | None, *, enclosed: bool) -> None:
        line = json.dumps([state_root, enclosed]).encode() + b"\n"
        self._page[: len(line)] = line

    def read(self) -> tuple[str | None, bool]:
        """Raises ValueError while it is being written."""
        state_root, enclosed = json.loads(self._page[: self._page.find(b"\n")])
        return state_root, enclosed


class Operations:
    """The operations: every public method can be asked for by its name; privileges/powers.py has them. Raises
    OSError.
    """

    def __init__(self, allowed: AllowList, settled: Settled) -> None:
        self._allowed = allowed
        self._settled = settled
        self._state_dir: str | None = None

    def settle(self, enclosed: bool) -> None:
        """Set whether bubblewrap has to run as root. Call it before the first jail of a tool; False is final."""
        state_root, before = self._settled.read()
        self._settled.write(state_root, enclosed=before and bool(enclosed))

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        """Set where the state is (once), and make the folder `above`/`name` in it.

        All folders in `above` get the tool host's user as owner: this one, and those of tool hosts that have ended.
        """
        state_dir = os.path.realpath(state_dir)
        if self._state_dir not in (None, state_dir):
            raise allow_list.NotAllowed(f"the state is in {self._state_dir}")
        if self._state_dir is None:
            if state_dir in self._allowed["top"] or any(
                allow_list.within(state_dir, path) for path in self._allowed["closed"]
            ):
                raise allow_list.NotAllowed(f"{state_dir} is no place for state")
            os.makedirs(state_dir, 0o700, exist_ok=True)
            self._state_dir = state_dir
            self._settled.write(allow_list.state_root_of(state_dir), enclosed=self._settled.read()[1])
        if "/" in name or "/" in above:
            raise allow_list.NotAllowed("that is no name of a folder")
        make_folders(state_dir, [above, name])
        for each in os.listdir(f"{state_dir}/{above}"):
            with suppress(NotADirectoryError), open_folder(f"{state_dir}/{above}/{each}") as folder:
                hand_over(folder, self._allowed["user"])

    def make_workdir(self, place: str) -> None:
        """Make an instance's folder, with root as its owner, or let its owner in. `place` is its path in the state."""
        root = self._state_dir
        allow_list.check_workspace(f"{root}/{place}", root)
        if root is not None:
            make_folders(root, place.split("/"))

    def make_placeholders(self, folder: str) -> list[str]:
        """Make the guarded names that a folder lacks, with the folder's owner. Returns the paths that were made."""
        allow_list.check_writable(folder, self._allowed, self._settled.read()[0])
        with open_folder(folder) as here:
            return [f"{folder}/{name}" for name in make_placeholders(here, self._allowed["guarded"])]

    def remove_placeholder(self, path: str) -> None:
        """Remove a placeholder that is empty, unless another tool host guards it."""
        folder, _, name = path.rpartition("/")
        if name not in self._allowed["guarded"]:
            raise allow_list.NotAllowed(f"{path} is no placeholder")
        allow_list.check_writable(folder, self._allowed, self._settled.read()[0])
        with open_folder(folder) as here:
            remove_unguarded(name, here)

    def make_group(self, number: int) -> None:
        """Make a jail's control group beside the tool host's."""
        path = self._beside(number)
        os.mkdir(path)
        try:
            for place in (f"{path}/{SHARES}", path):  # all that it writes there: each takes its time
                os.chown(place, self._allowed["user"], self._allowed["user"])
        except OSError:
            os.rmdir(path)
            raise

    def remove_group(self, number: int) -> None:
        """Remove such a group. No process is in it any more."""
        os.rmdir(self._beside(number))

    def remove_groups(self) -> None:
        """Remove all empty groups: the tool host ends."""
        remove_groups(self._allowed["groups"], self._allowed["beside"])

    def set_niceness(self, pid: int, value: int) -> None:
        """Set the niceness of the session of a jail's process, where the scheduler groups by session."""
        self._check_jails(pid)
        if not 0 <= value < 20:
            raise allow_list.NotAllowed(f"the niceness of a jail cannot be {value}")
        set_niceness(int(pid), value)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        """What these sockets of a jail's process hold (bytes)."""
        self._check_jails(pid)
        return held_by(pid, numbers)

    def _beside(self, number: int) -> str:
        beside = self._allowed["beside"]
        if beside is None:
            raise allow_list.NotAllowed("there are no such groups here")
        return f"{beside}{int(number)}"

    def _check_jails(self, pid: int) -> None:
        if not allow_list.is_jails(user_of(pid), self._allowed):
            raise allow_list.NotAllowed(f"the process {pid} is none of a jail's")


def user_of(pid: int) -> int:
    """The user of a process. Its files in /proc do not tell: for some processes they are root's. Raises OSError."""
    return status_numbers(f"/proc/{int(pid)}", "Uid")[0]


def set_niceness(pid: int, niceness: int) -> None:
    """Set the niceness of a process's session. Raises OSError."""
    write_text(f"/proc/{pid}/autogroup", str(niceness))


def make_placeholders(folder: int, names: Sequence[str]) -> list[str]:
    """Make the missing ones of these names in an open folder, with its owner, as far as possible. Returns those made.

    They lie among a person's files, so they are less closed than what we make for ourselves.
    """
    made = []
    owner = os.fstat(folder)
    for name in names:
        with suppress(OSError):
            os.mkdir(name, 0o700, dir_fd=folder)
            made.append(name)
            with opened(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder) as fd:
                if os.listdir(fd):
                    continue  # somebody has put another one in its place meanwhile
                os.fchmod(fd, 0o755)
                if owner.st_uid != os.geteuid():
                    os.fchown(fd, owner.st_uid, owner.st_gid)
    return made


def remove_unguarded(name: str, folder: int | None = None) -> None:
    """Remove an empty folder unless a tool host guards it: such a tool host has locked it. `name` is its path, or its
    name in `folder`. Raises OSError.
    """
    with opened(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rmdir(name, dir_fd=folder)


def remove_group(folder: str) -> None:
    """Remove a control group and those in it, as far as they have no process. A frozen group is set going: in version 1
    a process that was killed while frozen ends only then.
    """
    with suppress(OSError):
        write_text(f"{folder}/{FREEZER_STATE}", "THAWED")
    with suppress(OSError):
        for name in os.listdir(folder):
            if os.path.isdir(f"{folder}/{name}"):
                remove_group(f"{folder}/{name}")
        os.rmdir(folder)


def remove_groups(folders: list[str], beside: str | None) -> None:
    """Remove the empty groups of a tool host that ends: `folders`, and the groups whose paths begin with `beside`."""
    for folder in folders:
        remove_group(folder)
    above, _, start = (beside or "").rpartition("/")
    with suppress(OSError):
        for name in os.listdir(above) if above else ():
            if name.startswith(start):
                remove_group(f"{above}/{name}")


def held_by(pid: int, numbers: list[int]) -> int:
    """Bytes that lie unread in these sockets of one process. A socket that cannot be asked counts for nothing."""
    total = 0
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for number in numbers:
                total += _ask(pidfd, number)
        finally:
            os.close(pidfd)
    return total


def _ask(pidfd: int, number: int) -> int:
    with suppress(OSError, struct.error):
        fd = syscalls.copy_of(pidfd, number)
        try:
            copy = socket.socket(fileno=fd)
        except OSError:  # it has become something else
            os.close(fd)
            raise
        with copy:
            # struct of sk_meminfo: rmem_alloc, rcvbuf, wmem_alloc, sndbuf, fwd_alloc, wmem_queued, …
            words = struct.unpack_from("=6I", copy.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64))
            return int(words[0] + max(words[2], words[5]))
    return 0
