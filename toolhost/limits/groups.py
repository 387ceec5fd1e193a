"""Control groups: which part of the tree is ours, and the groups of one jail.

Version 1 as root: a group `goondan.PID` of this tool host in each hierarchy, and in it one for each jail, `N`; beside
it, `goondan-jail.PID.N`, where processors are shared out. Version 2: the same inside the group that was delegated to
us, whose processes must first move into a group of their own, because a group that hands controllers on may hold none.
What a tool host that was killed has left behind is removed by the next.

Source: sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents; systemd's CGROUP_DELEGATION.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from contextlib import suppress
from functools import lru_cache
from typing import Final

from toolhost.launcher.deeds import FREEZER_STATE, remove_group
from toolhost.limits.plan import GroupPlan, Tree, weight
from toolhost.privileges.steward_link import STEWARD

#: The names of our groups begin with it; the number of the tool host's process follows.
PREFIX: Final = "goondan."
#: The names of those that stand beside it; that number and the jail's follow.
_BESIDE: Final = "goondan-jail."
#: Where the processes of a delegated group are put.
_LEAF: Final = "goondan-host"
#: Whoever is moved may have had children since the list was read, and a supervisor that starts everything at once has:
#: those come in the next round, theirs after that. One that is ending cannot be moved, and is waited for (seconds).
_ROUNDS: Final = 100
_PAUSE_S: Final = 0.002
#: A file of a group holds one line, or a few (bytes).
_MAX_FILE: Final = 4096


@lru_cache(maxsize=1)
def own_tree() -> Tree | None:
    """This process's part of the tree, found once; what is empty of it goes when the process ends."""
    found = find_tree()
    if found is not None:
        atexit.register(remove_tree, found)
    return found


def find_tree(*, controllers: tuple[str, ...] = ("memory", "pids")) -> Tree | None:
    """The groups that this process may make; None when there are none. Makes the tool host's own group.

    `controllers` are those without which version 2 is of no use.
    """
    mounts = _mounts()
    if "cgroup2" in mounts and (found := _version_2(mounts["cgroup2"], controllers)) is not None:
        return found
    return _version_1(mounts) if os.geteuid() == 0 else None


def _mounts() -> dict[str, str]:
    """Where each controller of version 1 is, and version 2 by the name `cgroup2`."""
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
    """The group of this process in each hierarchy: by controller, and by "" in version 2."""
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
            # Below our own group, so that whatever limits us limits jails; where that is not to be seen, at the top.
            for base in (mounts[name] + own.get(name, "/").rstrip("/"), mounts[name]):
                if (made := _host_group(base)) is not None:
                    folders[name] = made
                    break
    return Tree(version=1, **folders) if folders else None


def _version_2(mount: str, controllers: tuple[str, ...]) -> Tree | None:
    own = mount + _own().get("", "/").rstrip("/")
    if own.endswith("/" + _LEAF):
        own = own.rpartition("/")[0]
    there = _read(f"{own}/cgroup.controllers").split()
    if not set(controllers) <= set(there) or not _delegated(own):
        return None
    try:
        with suppress(FileExistsError):
            os.mkdir(f"{own}/{_LEAF}")
        for _ in range(_ROUNDS):
            pids = _read(f"{own}/cgroup.procs").split()
            if not pids:
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    _write(f"{own}/{_LEAF}/cgroup.procs", pid)
            time.sleep(_PAUSE_S)
        made = _host_group(own)
        if made is None:
            return None
        wanted = [name for name in ("memory", "pids", "cpu") if name in there]
        for folder in (own, made):
            for name in wanted:
                _write(f"{folder}/cgroup.subtree_control", f"+{name}")
    except OSError:
        return None
    found = {name: made if name in there else None for name in ("memory", "pids", "cpu")}
    return Tree(version=2, cpuacct=made, freezer=made, **found)


def _delegated(folder: str) -> bool:
    """Whether the part of the tree below `folder` is ours to arrange, as systemd marks it."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _host_group(base: str) -> str | None:
    """The tool host's group below `base`; leftovers of others that are gone are removed."""
    try:
        for name in os.listdir(base):
            if name.startswith((PREFIX, _BESIDE)) and not os.path.exists(f"/proc/{name.split('.')[1]}"):
                remove_group(f"{base}/{name}")
        made = f"{base}/{PREFIX}{os.getpid()}"
        with suppress(FileExistsError):
            os.mkdir(made)
    except OSError:
        return None
    return made


def beside(tree: Tree) -> str | None:
    """How the names of the groups begin that stand beside this process's own; None where none do."""
    if tree.version == 1 and tree.cpu is not None:
        return f"{os.path.dirname(tree.cpu)}/{_BESIDE}{os.getpid()}."
    return None


def hand_over(tree: Tree, uid: int) -> None:
    """Let that user make groups in those of this process. Raises OSError."""
    for folder in tree.folders:
        os.chown(folder, uid, uid)


def remove_tree(tree: Tree) -> None:
    """The tool host ends: its groups, as far as they are empty."""
    if STEWARD.runs:
        return  # it does that at its end
    for folder in tree.folders:
        base, _, own = folder.rpartition("/")
        with suppress(OSError):
            for name in os.listdir(base):
                if name == own or name.startswith(f"{_BESIDE}{os.getpid()}."):
                    remove_group(f"{base}/{name}")


class Group:
    """The groups of one jail, from before it starts until its last process is gone."""

    _numbers = itertools.count(1)

    def __init__(self, plan: GroupPlan, niceness: int = 0) -> None:
        """Make them. Raises OSError; then none are left. `niceness`: see `stand`."""
        self.tree = plan.tree
        self.name = str(next(self._numbers))
        self._events = -1
        self._usage = -1
        try:
            for folder in plan.tree.folders:
                if STEWARD.runs and self._alone(folder):
                    STEWARD.make_group(int(self.name))
                else:
                    os.mkdir(self._at(folder))
            for folder, name, value in plan.settings:
                try:
                    _write(f"{self._at(folder)}/{name}", value)
                except OSError:
                    if name not in plan.optional:
                        raise
            self.stand(niceness)
            if plan.tree.pids is not None:
                self._events = os.open(f"{self._at(plan.tree.pids)}/pids.events", os.O_RDONLY | os.O_CLOEXEC)
            if plan.tree.cpuacct is not None:
                usage = "cpuacct.usage" if plan.tree.version == 1 else "cpu.stat"
                self._usage = os.open(f"{self._at(plan.tree.cpuacct)}/{usage}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.remove()
            raise

    def _at(self, folder: str) -> str:
        """Where its group is in that hierarchy.

        Processors are shared out level by level: within one group for all jails a quick jail would wait with the others
        whenever these have used up what is due to them all. So there each is a group beside the tool host's.
        """
        if self._alone(folder):
            return f"{beside(self.tree)}{self.name}"
        return f"{folder}/{self.name}"

    def _alone(self, folder: str) -> bool:
        return self.tree.version == 1 and folder == self.tree.cpu

    @property
    def joins(self) -> list[str]:
        """Files that a process with one thread writes "0" to, to be in them all.

        In version 1 that is the file for threads: the one for processes waits for every thread of the machine (up to
        20 ms a time, measured), and for a process with one thread both mean the same.
        """
        name = "tasks" if self.tree.version == 1 else "cgroup.procs"
        return [f"{self._at(folder)}/{name}" for folder in self.tree.folders]

    @property
    def counts_cpu(self) -> bool:
        """Whether `cpu_s` knows."""
        return self._usage >= 0

    def cpu_s(self) -> float | None:
        """Processor time of everything that was ever in it (seconds); None when it is not counted."""
        if self._usage < 0:
            return None
        said = os.pread(self._usage, _MAX_FILE, 0)
        if self.tree.version == 1:
            return int(said) / 1e9
        return int(said.split()[1]) / 1e6  # usage_usec comes first

    def stand(self, niceness: int) -> None:
        """Have the weight of a process of that niceness while processors are short."""
        if self.tree.cpu is not None:
            name, value = weight(self.tree, niceness)
            _write(f"{self._at(self.tree.cpu)}/{name}", value)

    def freeze(self) -> bool:
        """Have all of its processes stop before they run another instruction of theirs: whether that can be done.

        One that is in a system call stops after that. They do not see it, and nothing of theirs can end it. In version
        1 those that are killed meanwhile end after `thaw`.
        """
        return self._set_frozen(("FROZEN", "1"))

    def thaw(self) -> None:
        """Let them go on."""
        self._set_frozen(("THAWED", "0"))

    def _set_frozen(self, values: tuple[str, str]) -> bool:
        if self.tree.freezer is None:
            return False
        name, value = (FREEZER_STATE, values[0]) if self.tree.version == 1 else ("cgroup.freeze", values[1])
        try:
            _write(f"{self._at(self.tree.freezer)}/{name}", value)
        except OSError:  # gone, or a kernel that cannot
            return False
        return True

    def processes(self) -> list[int]:
        """Those that are in it, bubblewrap's own outside of the jail among them."""
        return [int(pid) for pid in _read(f"{self._at(self.tree.folders[-1])}/cgroup.procs").split()]

    def refused(self) -> bool:
        """Whether a process was refused for their number."""
        return self._events >= 0 and os.pread(self._events, _MAX_FILE, 0).split()[:2] != [b"max", b"0"]

    def out_of_memory(self) -> bool:
        """Whether the limit of memory was met and nothing could be given back."""
        if self.tree.memory is None:
            return False
        name = "memory.oom_control" if self.tree.version == 1 else "memory.events"
        fields = _read(f"{self._at(self.tree.memory)}/{name}").split()
        said = dict(zip(fields[::2], fields[1::2], strict=False))
        return any(said.get(field, "0") != "0" for field in ("oom_kill", "under_oom", "oom"))

    def peak_memory(self) -> int | None:
        """The most memory that was ever in use at once, pages of files included (bytes)."""
        if self.tree.memory is None:
            return None
        name = "memory.max_usage_in_bytes" if self.tree.version == 1 else "memory.peak"
        said = _read(f"{self._at(self.tree.memory)}/{name}")
        return int(said) if said.isdigit() else None

    def close(self) -> None:
        """Nothing is asked of it from now on."""
        for fd in (self._events, self._usage):
            if fd >= 0:
                os.close(fd)
        self._events = self._usage = -1

    def remove(self) -> None:
        """Its last process is gone. Can take milliseconds: whoever joins a group holds a lock that it needs."""
        self.close()
        for folder in self.tree.folders:
            with suppress(OSError):  # a process that is only just going; the tool host's end takes the rest along
                if STEWARD.runs and self._alone(folder):
                    STEWARD.remove_group(int(self.name))
                else:
                    os.rmdir(self._at(folder))


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
