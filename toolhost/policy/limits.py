"""What a jail may use in all, what keeps each limit, and when a limit is reached: memory, processes, processor time,
disk, files. Pure; times and sizes are arguments.

A limit has its field and its default in schemas/bundle/launch.py (Limits), its field for those who lower it in
schemas/bundle/resources.py (LimitsPart), and a row here. The rest of the tool host reads the rows.

Rules.
- Linux counts where it can: control groups of version 1 as root, of version 2 where a part of the tree was delegated to
  us. The watch looks from outside for what they do not count. Limits of each process are behind both.
- A group lets in one process more than the jail has: bubblewrap's own, which waits outside of the jail.

Processor time. A jail's clock counts all its processes. A call's share is the time that was used while the call ran,
divided by the number of calls that ran at the same time. So a call that runs alone is charged exactly, up to one look.
A call with processes of its own is charged what these were seen to use, and a share of the rest.

Disk. A jail has written at most what it was last seen to have written, plus what the file system has lost since,
whoever took it. Only when that nears the limit are its folders walked, which shows whose it was.

What a jail can hide. Files whose last descriptors lie in sockets of a jail show nowhere. Their size follows from what
the machine has lost, and only while a jail keeps descriptors there. A program that passes descriptors on has them
received within milliseconds; it must not be blamed for what others take.

Source: docs/design/sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents; docs/decisions/029.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import log
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from goondan.schemas.bundle.launch import Limits
from goondan.schemas.wire import errors, frames
from goondan.schemas.worker import receipts, worker_frames

# --- the table of limits ----------------------------------------------------------------------------------------------

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
    kept_by: receipts.Mechanism
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


def mechanisms(tree: Tree | None) -> dict[str, receipts.Mechanism]:
    """What keeps each limit, by its name in a manifest: the strongest, where several do."""

    def keeps(row: Row) -> receipts.Mechanism:
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


# --- when a limit is reached ------------------------------------------------------------------------------------------

#: The part of its limit at which a jail's disk counts as full: the jail goes on writing until it has ended.
DISK_PART: Final = 0.9
MIB: Final = 1 << 20
#: Descriptors count as kept in a socket after this time (seconds) and so many looks in turn.
KEPT_S: Final = 0.12
LOOKS: Final = 4
#: The same when they move from one socket to the next, and there were some at each look.
MOVED_S: Final = 2.0


class Used(NamedTuple):
    """What a jail's living processes have used."""

    #: Processor time (milliseconds).
    cpu_ms: int
    #: The sum of their memory's peaks (kB).
    memory_kb: int


class Usage(Struct, frozen=True, kw_only=True):
    """What was seen of a jail."""

    #: Memory (bytes), None when the kernel keeps that limit itself.
    memory: int | None = None
    #: Processes and threads, 0 when the kernel counts them.
    tasks: int = 0
    #: Whether the kernel has refused a new one.
    refused: bool = False
    #: Whether the kernel has met the limit of memory.
    out_of_memory: bool = False


def exceeded(usage: Usage, limits: Limits) -> str | None:
    """The name of the limit of a whole jail that is reached, or None."""
    if usage.out_of_memory or (usage.memory is not None and usage.memory > limits.memory_mb * MIB):
        return "memoryMb"
    if usage.refused or usage.tasks >= limits.processes:
        return "processes"
    return None


def limit_error(limit: str, limits: Limits) -> frames.ToolError:
    """The error of a call that has met a limit of its tool, which is named as in the manifest."""
    value, row = value_of(limits, limit), ROWS[limit]
    shown = f"{round(value * DISK_PART)} of {value}" if row.early else str(value)
    return errors.tool_error("E_TOOL_LIMIT", f"the limit {limit} was reached: {shown} {row.unit}", name="ToolLimit")


#: What V8 and JavaScriptCore say when a buffer gets no memory.
_NO_BUFFER: Final = ("Array buffer allocation failed", "Out of memory")
#: A jail with this part of its processes counts as out of processes: some may have ended since.
NEAR: Final = 0.9


def lacks_memory(words: str, *, began: bool, counted: bool) -> bool:
    """Whether a JavaScript runtime has ended itself because it got no memory, as its last words say.

    `began`: it had loaded its tool. `counted`: a control group counts its memory. Where none does, a runtime may not
    get what it takes ahead at its start, and Bun then says no more than that it panics.
    """
    return "out of memory" in words or (not began and not counted and words.startswith("panic("))


def lacks_processes(error: worker_frames.WorkerError) -> bool:
    """Whether a handler's error can be that it got no process or thread any more."""
    return error.code == "EAGAIN" or (error.name == "RuntimeError" and error.message == "can't start new thread")


def with_limit(
    error: worker_frames.WorkerError, limits: Limits, *, refused: bool = False, counted: bool = True
) -> worker_frames.WorkerError:
    """A handler's error, which names the limit that it has met if it is one of those by which the kernel says so.

    `refused`: the jail has, or had, as many processes as it may. `counted`: the kernel would know; if it does not, an
    error that `lacks_processes` is taken at its word, though a full pipe says the same ("try again"). A jail can lie
    here, about its own limits and to its own caller.
    """
    limit = OF_CODES.get(error.code or "")
    if (
        limit is None
        and (error.name == "MemoryError" or error.message in _NO_BUFFER)
        and error.code in (None, "E_TOOL")
    ):
        limit = "memoryMb"
    if limit is None and lacks_processes(error):
        if refused or (error.code == "EAGAIN" and not counted):
            limit = "processes"
        elif error.code != "EAGAIN":
            limit = "memoryMb"  # a thread's stack counts as the memory that it may come to
    if limit is None:
        return error
    message = f"{limit_error(limit, limits).message} ({error.message or error.name})"
    return worker_frames.WorkerError(name=error.name, message=message, code="E_TOOL_LIMIT")


class CpuMeter:
    """The processor time of the calls of one jail, in seconds."""

    def __init__(self) -> None:
        self._at = 0.0
        self._seen: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def charge(self, total_s: float, running: Collection[str], seen: Mapping[str, float] | None = None) -> None:
        """The jail has used `total_s` since it began; these calls run now. Ended ones are forgotten.

        `seen`: what the processes of calls have used that have some of their own. A call can hide some of that.
        """
        used = max(0.0, total_s - self._at)
        self._at = max(self._at, total_s)
        own = {call: max(0.0, at - self._seen.get(call, 0.0)) for call, at in (seen or {}).items() if call in running}
        whole = sum(own.values())
        if whole > used:  # /proc counts ticks
            own = {call: value * used / whole for call, value in own.items()}
        share = max(0.0, used - whole) / max(1, len(running))
        self._used = {call: self._used.get(call, 0.0) + own.get(call, 0.0) + share for call in running}
        self._seen = dict(seen or {})

    def over(self, limit_s: float) -> list[str]:
        """Calls that have used more than `limit_s`."""
        return [call for call, used in self._used.items() if used > limit_s]

    def used(self, call: str) -> float:
        """What a running call has used."""
        return self._used.get(call, 0.0)

    @property
    def total_s(self) -> float:
        """What the jail has used in all."""
        return self._at


#: What many jails that are not known to be quick weigh together, where one ordinary process weighs ORDINARY. A single
#: one weighs twice as much.
SLOW_WEIGHT: Final = 350
ORDINARY: Final = 1024
#: From one niceness to the next the weight of a process falls by this factor; and the scheduler's last niceness.
_STEP: Final = 1.25
_LAST: Final = 19
#: Processor time of late that counts as much (seconds). Half of it is forgotten in HALF_S. Starting takes some 0.1 s.
MUCH_S: Final = 0.2
HALF_S: Final = 1.0


def niceness_of_slow(count: int) -> int:
    """The niceness for each of so many jails that are not known to be quick. Quick ones have 0, like all programs.

    A jail that compiles for minutes gets nearly as much as any program, also on a busy machine. Of many jails that
    misbehave each gets little, and together they hold nobody up.
    """
    count = max(1, count)
    each = SLOW_WEIGHT * (1 + 1 / count) / count
    return min(_LAST, round(log(ORDINARY / each, _STEP)))


def weight_of(niceness: int) -> int:
    """The scheduler's weight of a process of that niceness."""
    return round(ORDINARY / _STEP**niceness)


class Pace:
    """Whether a jail is quick: it has answered a call, and of late has not used much."""

    def __init__(self) -> None:
        self._at = self._recent = self._total = 0.0

    def is_quick(self, total_s: float, now: float, *, answered: bool) -> bool:
        """The jail has used `total_s` in all. `answered`: one of its calls has ended."""
        self._recent = self._recent * 0.5 ** ((now - self._at) / HALF_S) + max(0.0, total_s - self._total)
        self._at, self._total = now, max(self._total, total_s)
        return answered and self._recent <= MUCH_S


class Growth(Struct, frozen=True):
    """What a walk has found that is newer than the jail, or was changed after its start."""

    #: Bytes.
    size: int
    #: Names in folders.
    entries: int


#: The part of a processor that walks over a jail's folders may take.
WALK_PART: Final = 0.25


def walk_again_at(now: float, cost_s: float, frozen_s: float) -> float:
    """When a jail whose walk found too little may be walked again, on the clock of `now` (seconds).

    The walk took so much processor time, and the jail was frozen for so long. So a jail that writes nothing loses half
    of its time at most, however much others write.
    """
    return now + max(cost_s * (1 / WALK_PART - 1), frozen_s)


class Allowance:
    """Time that may be spent: a part of all time, and some of it at once."""

    def __init__(self, part: float, at_once_s: float) -> None:
        self._part = part
        self._at_once_s = at_once_s
        self._at = self._spent_s = 0.0

    def allowed(self, now: float) -> bool:
        """Whether some time is left."""
        return self._spent_s - (now - self._at) * self._part < self._at_once_s

    def spend(self, began: float, done: float) -> None:
        """The time from `began` to `done` was spent."""
        self._spent_s = max(0.0, self._spent_s - (done - self._at) * self._part) + done - began
        self._at = done


def walked_before(frozen: bool, quick: bool) -> int:
    """The place of a jail in the order of walks, the lowest first.

    A frozen jail writes nothing, however long it waits. So jails come first that others wait for. Of the jails that are
    not frozen, those that have the processor are more likely to be the writer.
    """
    return (0 if quick else 1) if frozen else (3 if quick else 2)


class Lost(NamedTuple):
    """What a file system has lost in all since we look at it."""

    #: Free space (bytes).
    fallen: int
    #: Free entries; 0 where it does not count them.
    taken: int


class DiskMeter:
    """What one jail has written at most to one file system, which had lost `lost` when the jail began."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._size = self._entries = 0

    def _most(self, lost: Lost) -> Growth:
        return Growth(self._size + lost.fallen - self._lost.fallen, self._entries + lost.taken - self._lost.taken)

    def suspects(self, lost: Lost, limits: Limits) -> bool:
        """Whether the jail may have reached a limit, so that its folders must be walked."""
        most = self._most(lost)
        return most.size >= limits.disk_mb * MIB * DISK_PART or most.entries >= limits.files * DISK_PART

    def hides(self, growth: Growth, lost: Lost, limits: Limits) -> bool:
        """Whether more may have been written than was found, and it matters that nobody knows whose it was."""
        full = limits.disk_mb * MIB * DISK_PART
        return growth.size < full <= self._most(lost).size

    def walked(
        self, growth: Growth, began: Lost, done: Lost, limits: Limits, *, kept_in_flight: bool = False
    ) -> str | None:
        """The limit that is reached, after a walk found `growth`. The file system had lost `began` before it, `done`
        after it.

        What the file system has not lost the jail cannot have taken, however large its files are. What was lost during
        the walk may be in what it found or not: it counts towards the next walk. `kept_in_flight`: the jail keeps
        descriptors where nobody sees their files, so everything that was lost counts as its own.
        """
        most = self._most(done)
        if kept_in_flight:
            growth = Growth(max(growth.size, most.size), growth.entries)
        self._size = min(growth.size, most.size)
        self._entries = min(growth.entries, most.entries) if done.taken else growth.entries
        self._lost = began
        if self._size >= limits.disk_mb * MIB * DISK_PART:
            return "diskMb"
        if self._entries >= limits.files * DISK_PART:
            return "files"
        return None


class InFlight(NamedTuple):
    """Sockets (inodes) in which descriptors lay."""

    #: At the last of a few looks in turn.
    last: frozenset[int] = frozenset()
    #: At each of them: a program that passes descriptors on receives them meanwhile.
    each: frozenset[int] = frozenset()


class KeptDescriptors:
    """Whether a jail keeps descriptors in flight."""

    def __init__(self) -> None:
        self._same: frozenset[int] = frozenset()
        self._some = False
        self._since = self._moved_since = 0.0
        self._looks = 0

    def look(self, now: float, found: InFlight) -> bool:
        """Note the sockets that have descriptors now, on a clock in seconds. Returns whether they are kept there."""
        if not self._some:
            self._moved_since = now
        self._some = bool(found.last)
        same = self._same & found.each
        if not same:
            same, self._since, self._looks = found.each, now, 0
        self._same = same
        self._looks += 1
        if same and self._looks >= LOOKS and now - self._since >= KEPT_S:
            return True
        return self._some and now - self._moved_since >= MOVED_S


class HiddenMemory:
    """The most that a jail may have in files in memory that nobody sees (bytes). `shared` is that of the whole
    machine.
    """

    def __init__(self, shared: int) -> None:
        self._others = shared

    def most(self, shared: int, seen: int) -> int:
        """The jail is seen to have `seen` of `shared`. It may have taken what others have given back since."""
        others = max(0, shared - seen)
        self._others = min(self._others, others)
        return others - self._others

    def clear(self, shared: int, seen: int) -> None:
        """The jail has nothing in flight: everything else is others'."""
        self._others = max(0, shared - seen)
