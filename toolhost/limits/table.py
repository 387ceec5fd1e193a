"""The table of limits: what keeps each limit of a jail, how its errors name it, and what follows for its processes and
control groups. Pure.

A limit has its field and its default in schemas/bundle/launch.py (Limits), its field for those who lower it in
schemas/bundle/resources.py (LimitsPart), and a row here. The rest of the tool host reads the rows.

Rules.
- Linux counts where it can: control groups of version 1 as root, of version 2 where a part of the tree was delegated to
  us. The watch looks from outside for what they do not count. Limits of each process are behind both.
- A group lets in one process more than the jail has: bubblewrap's own, which waits outside of the jail.

Source: docs/design/sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.bundle.launch import Limits
from goondan.schemas.worker.receipts import Mechanism

# include/uapi/asm-generic/resource.h, the same on x86_64 and aarch64.
_RLIMIT_FSIZE, _RLIMIT_DATA, _RLIMIT_CORE, _RLIMIT_NPROC, _RLIMIT_NOFILE = 1, 2, 4, 6, 7
_RLIMIT_MEMLOCK, _RLIMIT_SIGPENDING = 8, 11
#: Limits on locked memory (bytes) and on waiting signals and timers. Where a jail runs as the operator's user, they
#: count for the operator as well, whose own programs would then get none.
_LOCKED: Final = 64 << 10
_SIGNALS: Final = 1024
#: bubblewrap's process outside of the jail.
OUTSIDE: Final = 1
#: Where a control group says when it refused a process, the limit of the user namespace is only a second wall.
SPARE: Final = 16


class Tree(Struct, frozen=True, kw_only=True):
    """Where groups can be made: a folder for each controller, None for one that we may not use.

    In version 2 all are the same folder.
    """

    #: The version of control groups.
    version: Literal[1, 2]
    #: Limits memory and counts it.
    memory: str | None = None
    #: Limits processes and counts them.
    pids: str | None = None
    #: Shares the processors out.
    cpu: str | None = None
    #: Counts processor time. Version 2 does that without a controller.
    cpuacct: str | None = None
    #: Freezes all processes of a group. Version 2 does that without a controller.
    freezer: str | None = None

    @property
    def folders(self) -> list[str]:
        """Every folder, each once."""
        found = (self.memory, self.pids, self.cpu, self.cpuacct, self.freezer)
        return list(dict.fromkeys(folder for folder in found if folder is not None))


class Row(Struct, frozen=True, kw_only=True):
    """One limit."""

    #: What is counted, behind the number in an error.
    unit: str = ""
    #: What keeps it where no control group does.
    kept_by: Mechanism
    #: The controller of control groups that keeps it where there is one.
    controller: Literal["memory", "pids", "cpuacct"] | None = None
    #: The resource limit that each process of the jail has, too, and by how many bits the number is shifted for it.
    resource: tuple[int, int] | None = None
    #: Linux's error of a handler that has met it.
    code: str | None = None
    #: The watch ends a jail a little before it (decide.DISK_PART).
    early: bool = False


#: By their names in a manifest.
ROWS: Final = {
    # RLIMIT_DATA and not RLIMIT_AS: address space that is never written to is free, and threads and Node take much.
    "memoryMb": Row(
        unit="MiB of memory", kept_by="watched", controller="memory", resource=(_RLIMIT_DATA, 20), code="ENOMEM"
    ),
    "processes": Row(
        unit="processes and threads", kept_by="rlimit", controller="pids", resource=(_RLIMIT_NPROC, 0)
    ),
    "openFiles": Row(
        unit="open files in one process", kept_by="rlimit", resource=(_RLIMIT_NOFILE, 0), code="EMFILE"
    ),
    "fileMb": Row(unit="MiB in one file", kept_by="rlimit", resource=(_RLIMIT_FSIZE, 20), code="EFBIG"),
    "diskMb": Row(unit="MiB on disk", kept_by="watched", early=True),
    "files": Row(unit="files", kept_by="watched", early=True),
    "cpuSeconds": Row(unit="s of processor time", kept_by="watched", controller="cpuacct"),
    "wallSeconds": Row(kept_by="host"),
    "outputMb": Row(kept_by="host"),
}  # fmt: skip
#: The limits that Linux's errors of a handler stand for.
OF_CODES: Final = {row.code: name for name, row in ROWS.items() if row.code is not None}
_FIELDS: Final = dict(zip(Limits.__struct_encode_fields__, Limits.__struct_fields__, strict=True))


def value_of(limits: Limits, name: str) -> int:
    """The limit of that name."""
    return int(getattr(limits, _FIELDS[name]))


def mechanisms(tree: Tree | None) -> dict[str, Mechanism]:
    """What keeps each limit, by its name in a manifest: the strongest, where several do."""

    def keeps(row: Row) -> Mechanism:
        counted = tree is not None and row.controller is not None and getattr(tree, row.controller) is not None
        return "cgroup" if counted else row.kept_by

    return {name: keeps(row) for name, row in ROWS.items()}


def resource_limits(
    limits: Limits, groups: Tree | None = None, trusted: int = 0, *, data: bool = True
) -> list[tuple[int, int]]:
    """The limits of each process of a jail, and of its processes in all: (resource, value), the kernel's numbers.

    `trusted`: so many processes of ours come on top. `data`: see javascript.limits_data.
    """
    found = {_RLIMIT_CORE: 0}
    for name, row in ROWS.items():
        if row.resource is not None:
            number, shift = row.resource
            found[number] = value_of(limits, name) << shift
    found[_RLIMIT_NPROC] = processes_of_a_namespace(groups, limits) + trusted
    if not data:
        del found[_RLIMIT_DATA]
    return [*found.items(), (_RLIMIT_MEMLOCK, _LOCKED), (_RLIMIT_SIGPENDING, _SIGNALS)]


def processes_of_a_namespace(tree: Tree | None, limits: Limits) -> int:
    """RLIMIT_NPROC inside the jail's user namespace."""
    return limits.processes + (SPARE if tree is not None and tree.pids is not None else 0)


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
