"""Which part of the tree of control groups is ours.

Version 1 as root: a group `goondan.PID` of this tool host in each hierarchy, and in it one for each jail, `N`; beside
it, `goondan-jail.PID.N`, where processors are shared out. Version 2: the same inside the group that was delegated to
us, whose processes must first move into a group of their own, because a group that hands controllers on may hold none.
What a tool host that was killed has left behind is removed by the next.

Source: docs/design/sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents; systemd's CGROUP_DELEGATION.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from toolhost.launcher.descriptors import opened, write_text
from toolhost.launcher.operations import remove_group
from toolhost.privileges.tree import Tree

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


def read_text(path: str) -> str:
    """What a file of a group says; "" when it says nothing."""
    with suppress(OSError), opened(path, os.O_RDONLY) as fd:
        return os.read(fd, 1 << 16).decode("ascii", "replace").strip()
    return ""
