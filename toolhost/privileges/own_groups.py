"""Finds and makes the part of the tree of control groups that is ours.

Version 1, as root: the tool host has a group `goondan.PID` in each hierarchy, and in it a group `N` for each jail.
Beside it is a group `goondan-jail.PID.N` for each jail, where processors are shared out. Version 2: the same inside the
group that was delegated to us. The processes of that group first move into a group of their own, because a group that
hands controllers on may hold no process. A tool host removes what a killed tool host has left behind.

Source: docs/design/sandbox.md section 4; Linux's cgroup-v1 and cgroup-v2 documents; systemd's CGROUP_DELEGATION.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from goondan.toolhost.launcher.descriptors import opened, write_text
from goondan.toolhost.launcher.operations import remove_group
from goondan.toolhost.limits.table import Tree

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
                remove_group(f"{base}/{name}")
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
