"""What a tool host can have done on this machine, whoever started it.

There are two kinds: `Ordinary` does everything itself, `Rooted` asks a privileged helper and a launcher that stay root.
One is made at the start (toolhost/drop_privileges.py) and passed on. Nobody else asks whether root is there.

Requests to the privileged helper (launcher/privileged_helper.py) are sent here, and the answer is waited for. Any
thread may ask; the loop's thread must not ask for what takes long. A lost helper cannot be started again, because
nobody is root any more: the tool host ends (`Powers.lifeline`), and its supervisor starts the next.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import socket
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, NamedTuple

from goondan.schemas.system.own_users import NUMBERS
from goondan.toolhost.launcher.allow_list import AllowList
from goondan.toolhost.launcher.descriptors import opened
from goondan.toolhost.launcher.operations import (
    held_by,
    make_placeholders,
    remove_groups,
    remove_unguarded,
    set_niceness,
)
from goondan.toolhost.launcher.places import let_owner_in
from goondan.toolhost.limits.table import Tree
from goondan.toolhost.offload import Offload
from goondan.toolhost.privileges.launcher_link import LauncherLink, StartLauncher, spawn
from goondan.toolhost.privileges.own_groups import beside, find_tree
from goondan.toolhost.privileges.uids import Uids

#: Longest wait for one operation (seconds): a mkdir takes microseconds, and longer on a file system that is gone.
ANSWER_S: Final = 30.0
_MAX_ANSWER: Final = 65536
#: Sockets of one process that are asked about: more than a jail may open, and few enough for one request.
_MANY_SOCKETS: Final = 4096


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


class _Helper(NamedTuple):
    """The privileged helper that runs."""

    #: Our end of its socket.
    channel: socket.socket
    #: Its process number.
    pid: int


class Rooted(Powers):
    """See powers.Powers. If the privileged helper did not start, everything is refused."""

    def __init__(self, uids: Uids, tree: Tree | None) -> None:
        """Call `start` after this, while this process is still root."""
        super().__init__(0, self._make_launcher, uids)
        self.tree = tree
        self._helper: _Helper | None = None
        self._lock = threading.Lock()

    def start(self, channel: socket.socket, pid: int, allowed: AllowList) -> None:
        """Take this process as the helper. It waits for its allow-list at the other end of the socket."""
        channel.settimeout(ANSWER_S)
        channel.send(json.dumps(allowed).encode())
        self._helper, self.lifeline = _Helper(channel, pid), pid
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the groups of this process, and end the helper."""
        with suppress(OSError):
            self.do("remove_groups")
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.channel.close()
            with suppress(ChildProcessError):
                os.waitpid(helper.pid, 0)

    def do(self, operation: str, *arguments: Any) -> Any:
        """Ask for a privileged operation with arguments that are JSON. Returns what it returns."""
        return self._ask(operation, *arguments)[0]

    def _ask(self, operation: str, *arguments: Any) -> tuple[Any, list[int]]:
        with self._lock:
            helper = self._helper
            if helper is None:
                raise OSError(0, "the privileged helper of this tool host is gone")
            try:
                helper.channel.send(json.dumps({"operation": operation, "with": arguments}).encode())
                data, fds, _, _ = socket.recv_fds(helper.channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    raise ConnectionResetError(0, "the privileged helper of this tool host is gone")
            except OSError:
                # A later answer could be for another question; and without the helper nothing goes on.
                self._helper = None
                helper.channel.close()
                with suppress(OSError):
                    os.kill(helper.pid, signal.SIGKILL)
                raise
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer["done"], fds

    def _make_launcher(self) -> tuple[socket.socket, int]:
        pid, fds = self._ask("make_launcher")
        return socket.socket(fileno=fds[0]), int(pid)

    def settle(self, enclosed: bool) -> None:
        if self.lifeline is not None:  # else there is no jail to be made
            self.do("settle", enclosed)

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        self.do("claim_state", state_dir, above, name)

    def make_workdir(self, path: str, state_dir: str) -> None:
        try:
            missing = os.stat(path).st_mode & stat.S_IRWXU != stat.S_IRWXU
        except OSError:
            missing = True
        if missing:
            self.do("make_workdir", path[len(state_dir) + 1 :])

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        return list(self.do("make_placeholders", folder))  # the allow-list has the names

    def remove_placeholder(self, path: str) -> None:
        self.do("remove_placeholder", path)

    def make_group(self, number: int, path: str) -> None:
        self.do("make_group", number)

    def remove_group(self, number: int, path: str) -> None:
        self.do("remove_group", number)

    def set_niceness(self, pid: int, niceness: int) -> None:
        self.do("set_niceness", pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        return int(self.do("held_by", pid, numbers[:_MANY_SOCKETS]))
