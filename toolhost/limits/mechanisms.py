"""Which mechanism keeps which limit of a jail, and what is written into its control groups. Pure.

Rules.
- Linux counts where it can: control groups of version 1 as root, of version 2 where a part of the tree was delegated to
  us. The watch looks from outside for what they do not count. Limits of each process are behind both.
- A group lets in one process more than the jail has: bubblewrap's own, which waits outside of the jail.

Source: docs/design/sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from goondan.schemas.launch import Limits
from goondan.schemas.receipts import Mechanism
from goondan.toolhost.limits.decide import ORDINARY, weight_of
from goondan.toolhost.privileges.tree import Tree

#: bubblewrap's process outside of the jail.
OUTSIDE: Final = 1
#: Where a control group says when it refused a process, the limit of the user namespace is only a second wall.
SPARE: Final = 16


class GroupPlan(Struct, frozen=True):
    """The groups of one jail."""

    #: The tree that they are made in.
    tree: Tree
    #: What is written, in order: folder of the tree, file, value.
    settings: list[tuple[str, str, str]]
    #: Files that the kernel may lack: swap accounting can be off.
    optional: tuple[str, ...] = ("memory.memsw.limit_in_bytes", "memory.swap.max")


def group_plan(tree: Tree | None, limits: Limits, trusted: int = 0) -> GroupPlan | None:
    """What is written into a jail's groups; None without groups. `trusted`: so many processes of ours are added."""
    if tree is None:
        return None
    settings: list[tuple[str, str, str]] = []
    if tree.memory is not None:
        size = str(limits.memory_mb << 20)
        if tree.version == 1:
            settings.append((tree.memory, "memory.limit_in_bytes", size))
            settings.append((tree.memory, "memory.memsw.limit_in_bytes", size))  # else what is over goes to swap
        else:
            settings.append((tree.memory, "memory.max", size))
            settings.append((tree.memory, "memory.swap.max", "0"))
            settings.append((tree.memory, "memory.oom.group", "1"))
    if tree.pids is not None:
        settings.append((tree.pids, "pids.max", str(limits.processes + OUTSIDE + trusted)))
    return GroupPlan(tree, settings)


def weight(tree: Tree, niceness: int) -> tuple[str, str]:
    """The file and the value that give a group the weight of a process of that niceness."""
    shares = weight_of(niceness)
    return ("cpu.shares", str(shares)) if tree.version == 1 else ("cpu.weight", str(max(1, shares * 100 // ORDINARY)))


def processes_of_a_namespace(tree: Tree | None, limits: Limits) -> int:
    """RLIMIT_NPROC inside the jail's user namespace."""
    return limits.processes + (SPARE if tree is not None and tree.pids is not None else 0)


def mechanisms(tree: Tree | None) -> dict[str, Mechanism]:
    """What keeps each limit, by its name in a manifest: the strongest, where several do."""
    memory = tree is not None and tree.memory is not None
    pids = tree is not None and tree.pids is not None
    cpu = tree is not None and tree.cpuacct is not None
    return {
        "memoryMb": "cgroup" if memory else "watched",
        "processes": "cgroup" if pids else "rlimit",
        "openFiles": "rlimit",
        "fileMb": "rlimit",
        "diskMb": "watched",
        "files": "watched",
        "cpuSeconds": "cgroup" if cpu else "watched",
        "wallSeconds": "host",
        "outputMb": "host",
    }
