"""What a tool host can have done on this machine, whoever started it, with the user numbers and the control groups that
its jails get.

Jails of a tool host that root runs have user numbers that nobody else has, each for one jail. Nobody assigns numbers in
their range (schemas/system/users.py). So no file, service or container has one of them by
accident, and a process that escaped would own nothing. A block in which somebody has a number nevertheless is skipped.

A part of the tree of control groups is ours. Version 1, as root: the tool host has a group `goondan.PID` in each
hierarchy, and in it a group `N` for each jail. Beside it is a group `goondan-jail.PID.N` for each jail, where
processors are shared out. Version 2: the same inside the group that was delegated to us. The processes of that group
first move into a group of their own, because a group that hands controllers on may hold no process. A tool host removes
what a killed tool host has left behind.

There are two kinds: `Ordinary` does everything itself, `Rooted` asks a privileged helper and a launcher that stay root.
One is made at the start (toolhost/drop_privileges.py) and passed on. Nobody else asks whether root is there.

Requests to the privileged helper (launcher/program.py) are sent here, and the answer is waited for. Any
thread may ask; the loop's thread must not ask for what takes long. A lost helper cannot be started again, because
nobody is root any more: the tool host ends (`Powers.lifeline`), and its supervisor starts the next.

Source: docs/design/sandbox.md sections 3.1, 3.2 and 4; https://systemd.io/UIDS-GIDS/; Linux's cgroup-v1 and cgroup-v2
documents; systemd's CGROUP_DELEGATION; docs/decisions/039.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from goondan.schemas.system.users import NUMBERS, UserNumbers
from goondan.toolhost.launcher import operations
from goondan.toolhost.launcher.places import let_owner_in, opened, write_text
from goondan.toolhost.policy.limits import Tree
from goondan.toolhost.privileges.launcher_link import LauncherLink, Offload, StartLauncher, spawn

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import AllowList

# --- user numbers -----------------------------------------------------------------------------------------------------

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


# --- control groups ---------------------------------------------------------------------------------------------------

#: How the names of our groups begin; the process id of the tool host follows.
PREFIX: Final = "goondan."
#: How the names of the groups beside it begin; the process id and the jail's number follow.
_BESIDE: Final = "goondan-jail."
#: The group into which the processes of a delegated group are moved.
_LEAF: Final = "goondan-host"
#: A process may have had children since the list was read, and a supervisor that starts everything at once has some:
#: they are moved in the next round, and their children in the round after it. A process that is ending cannot be moved;
#: a pause (seconds) waits for its end.
_ROUNDS: Final = 100
_PAUSE_S: Final = 0.002


def find_tree(*, controllers: tuple[str, ...] = ("memory", "pids")) -> Tree | None:
    """Find the groups that this process may make, and make the tool host's own group; None when it may make none.

    Version 2 is used only where it has all of `controllers`.
    """
    mounts = _mounts()
    if "cgroup2" in mounts and (found := _version_2(mounts["cgroup2"], controllers)) is not None:
        return found
    return _version_1(mounts) if os.geteuid() == 0 else None


def _mounts() -> dict[str, str]:
    """Where each controller of version 1 is mounted. Version 2 has the key `cgroup2`."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as source:
        for line in source:
            _, at, kind, options, *_ = line.split()
            if kind == "cgroup2":
                found.setdefault("cgroup2", at)
            elif kind == "cgroup":
                for option in options.split(","):
                    found.setdefault(option, at)
    return found


def _own() -> dict[str, str]:
    """The group of this process in each hierarchy. The key is a controller, and "" for version 2."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="replace") as source:
        for line in source:
            _, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                found[name] = path
    return found


def _version_1(mounts: dict[str, str]) -> Tree | None:
    own = _own()
    folders: dict[str, str] = {}
    for name in ("memory", "pids", "cpu", "cpuacct", "freezer"):
        if name in mounts:
            # Below our own group, so that what limits us limits jails; at the top where our group cannot be seen.
            for base in (mounts[name] + own.get(name, "/").rstrip("/"), mounts[name]):
                if (made := _host_group(base)) is not None:
                    folders[name] = made
                    break
    return Tree(version=1, **folders) if folders else None


def _version_2(mount: str, controllers: tuple[str, ...]) -> Tree | None:
    own = mount + _own().get("", "/").rstrip("/")
    if own.endswith("/" + _LEAF):
        own = own.rpartition("/")[0]
    there = read_text(f"{own}/cgroup.controllers").split()
    if not set(controllers) <= set(there) or not _delegated(own):
        return None
    try:
        with suppress(FileExistsError):
            os.mkdir(f"{own}/{_LEAF}")
        for _ in range(_ROUNDS):
            pids = read_text(f"{own}/cgroup.procs").split()
            if not pids:
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    write_text(f"{own}/{_LEAF}/cgroup.procs", pid)
            time.sleep(_PAUSE_S)
        made = _host_group(own)
        if made is None:
            return None
        wanted = [name for name in ("memory", "pids", "cpu") if name in there]
        for folder in (own, made):
            for name in wanted:
                write_text(f"{folder}/cgroup.subtree_control", f"+{name}")
    except OSError:
        return None
    found = {name: made if name in there else None for name in ("memory", "pids", "cpu")}
    return Tree(version=2, cpuacct=made, freezer=made, **found)


def _delegated(folder: str) -> bool:
    """Whether systemd marks the part of the tree below `folder` as ours to arrange."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _host_group(base: str) -> str | None:
    """Make the tool host's group below `base`, and remove the groups of tool hosts that are gone; None on failure."""
    try:
        for name in os.listdir(base):
            if name.startswith((PREFIX, _BESIDE)) and not os.path.exists(f"/proc/{name.split('.')[1]}"):
                operations.remove_group(f"{base}/{name}")
        made = f"{base}/{PREFIX}{os.getpid()}"
        with suppress(FileExistsError):
            os.mkdir(made)
    except OSError:
        return None
    return made


def beside(tree: Tree) -> str | None:
    """How the names of the groups beside this process's own begin; None where there are no such groups."""
    if tree.version == 1 and tree.cpu is not None:
        return f"{os.path.dirname(tree.cpu)}/{_BESIDE}{os.getpid()}."
    return None


def hand_over(tree: Tree, uid: int) -> None:
    """Let that user make groups inside the groups of this process. Raises OSError."""
    for folder in tree.folders:
        os.chown(folder, uid, uid)


def read_text(path: str) -> str:
    """The text of a group's file; "" when it is empty or cannot be read."""
    with suppress(OSError), opened(path, os.O_RDONLY) as fd:
        return os.read(fd, 1 << 16).decode("ascii", "replace").strip()
    return ""


# --- what can be done -------------------------------------------------------------------------------------------------

#: Longest wait for one operation (seconds): a mkdir takes microseconds, and longer on a file system that is gone.
ANSWER_S: Final = 30.0
_MAX_ANSWER: Final = 65536
#: Sockets of one process that are asked about: more than a jail may open, and few enough for one request.
_MANY_SOCKETS: Final = 4096


class Powers:
    """What a tool host does with the rights of its own user.

    Methods raise OSError when something is refused or fails. Any thread may call them; attributes are only read.
    """

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

    def let_go(self) -> None:
        """Nothing is asked for any more: launcher and helper end, while this process does other things. Its own end
        waits for theirs.
        """
        self.launcher.let_go()

    def settle(self, enclosed: bool) -> None:
        """Say, before the first jail of a tool, whether bubblewrap has to run as root here."""

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        """Make the folder `above`/`name` in the state, and take over the folders beside it of tool hosts that are
        gone.
        """
        os.makedirs(f"{state_dir}/{above}/{name}", 0o700, exist_ok=True)

    def make_workdir(self, path: str, state_dir: str) -> None:
        """Make sure that an instance's folder exists and that its owner can use it; `path` lies in the state."""
        os.makedirs(path, 0o700, exist_ok=True)
        with opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
            let_owner_in(folder)

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        """Make the missing guarded names in somebody's folder, as far as possible. Returns those that were made."""
        with opened(folder, os.O_PATH | os.O_DIRECTORY) as here:
            return [f"{folder}/{name}" for name in operations.make_placeholders(here, names)]

    def remove_placeholder(self, path: str) -> None:
        """Remove an empty placeholder that no tool host guards."""
        operations.remove_unguarded(path)

    def make_group(self, number: int, path: str) -> None:
        """Make the control group of the jail with that number beside ours."""
        os.mkdir(path)

    def remove_group(self, number: int, path: str) -> None:
        """Remove that control group."""
        os.rmdir(path)

    def set_niceness(self, pid: int, niceness: int) -> None:
        """Set the niceness of the session of a jail's process."""
        operations.set_niceness(pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        """What these sockets (descriptors) of a jail's process hold (bytes)."""
        return operations.held_by(pid, numbers)


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
            atexit.register(operations.remove_groups, found.folders, beside(found))
        return found


class Rooted(Powers):
    """See powers.Powers. If the privileged helper did not start, everything is refused."""

    def __init__(self, uids: Uids, tree: Tree | None) -> None:
        """Call `start` after this, while this process is still root."""
        super().__init__(0, self._make_launcher, uids)
        self.tree = tree
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, channel: socket.socket, pid: int, allowed: AllowList) -> None:
        """Take this process as the helper. It waits for its allow-list at the other end of the socket."""
        channel.settimeout(ANSWER_S)
        channel.send(json.dumps(allowed).encode())
        self._channel, self.lifeline = channel, pid
        atexit.register(self.close)

    def let_go(self) -> None:
        """See Powers."""
        super().let_go()
        if self._channel is not None:
            with suppress(OSError):  # it has ended
                self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the helper, which then removes the groups of this process."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None and self.lifeline is not None:
            channel.close()
            with suppress(ChildProcessError):
                os.waitpid(self.lifeline, 0)

    def do(self, operation: str, *arguments: Any) -> Any:
        """Ask for a privileged operation with arguments that are JSON. Returns what it returns."""
        return self._ask(operation, *arguments)[0]

    def _ask(self, operation: str, *arguments: Any) -> tuple[Any, list[int]]:
        with self._lock:
            channel, pid = self._channel, self.lifeline
            if channel is None or pid is None:
                raise OSError(0, "the privileged helper of this tool host is gone")
            try:
                channel.send(json.dumps({"operation": operation, "with": arguments}).encode())
                data, fds, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    raise ConnectionResetError(0, "the privileged helper of this tool host is gone")
            except OSError:
                # A later answer could be for another question; and without the helper nothing goes on.
                self._channel = None
                channel.close()
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
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
