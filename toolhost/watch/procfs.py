"""Processes as the host sees them: what /proc shows of a jail, signals, and the end of those that nothing else ends.

Two kinds of processes outlive what made them.

- A jail without namespaces: whatever it started belongs to its process session, because the launcher begins a session
  for each jail and the filter refuses another.
- A jail that was being made when its tool host was killed. bubblewrap is two processes. The second one, the first of
  the jail's pid namespace, waits until the first one lets it go on, and asks the kernel only later to be killed with
  it. When the first one is killed in between, the second one waits for ever, with the jail's namespaces and mounts.
  Nothing in the jail runs by then. So a tool host that begins looks for such processes. A jail that lives is never one:
  its second process has the first one for a parent.

Of a jail it is told how many processes there are, their memory, and what they hold open. Everything is read through the
jail's first process, whose namespaces tell its processes from all others. Processes come and go while we look; a
process that is gone does not count.

Source: docs/design/sandbox.md sections 4, 5 and 7.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.toolhost.launcher.places import status_numbers
from goondan.toolhost.policy import limits, subject

#: Rounds of finding and killing. Each takes some milliseconds; a process that is stopped first starts no other one.
MAX_ROUNDS: Final = 50
#: A part of the arguments of every jail's bubblewrap: what boots in it.
_OURS: Final = f"{subject.JAIL_CODE}/boot.".encode()


def process_stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the process's name, its state first; none when the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as source:
        return source.read().rpartition(b")")[2].split()
    return []


def process_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; empty when the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as source:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in source)}
    return {}


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/children", "rb") as source:
                found += map(int, source.read().split())
    return found


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(session: int) -> list[int]:
    """The living processes of a process session."""
    number = b"%d" % session
    return [pid for pid in _all() if (stat := process_stat(pid))[3:4] == [number] and stat[0] not in (b"Z", b"X")]


def end_session(session: int) -> None:
    """Kill every process of a process session. They are stopped first, so that none can start another meanwhile."""
    for _ in range(MAX_ROUNDS):
        if signal_all(lambda: members(session), signal.SIGSTOP) == 0:
            return
        signal_all(lambda: members(session), signal.SIGKILL)


def stranded() -> list[int]:
    """The processes of jails that were being made when their tool host was killed, as far as this user may see."""
    return [pid for pid in _all() if _is_stranded(pid)]


def end_stranded() -> int:
    """Kill these processes. Returns how many there were."""
    return signal_all(stranded, signal.SIGKILL)


def _is_stranded(pid: int) -> bool:
    status = process_status(pid)
    ended, inside = status.get("State", "X")[0] in "ZX", status.get("NSpid", "").split()[1:]
    if status.get("Name") != "bwrap" or ended or inside != ["1"]:
        return False
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as source:
        return _OURS in source.read() and process_status(int(status["PPid"])).get("Name") != "bwrap"
    return False


def signal_all(find: Callable[[], Collection[int]], number: int) -> int:
    """Send a signal to every process that `find` finds, and to none that took the number of one: how many it found.

    It is asked twice. Who is found again while we hold it by a descriptor is the one that we hold, or that has ended.
    """
    held: dict[int, int] = {}
    first = find()
    try:
        for pid in first:
            with suppress(OSError):  # it has ended, or we have no descriptor left: the next round's, or the kernel's
                held[pid] = os.pidfd_open(pid)
        found = set(find()) if held else set()
        for pid, pidfd in held.items():
            if pid in found:
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, number)
    finally:
        for pidfd in held.values():
            os.close(pidfd)
    return len(first)


# --- the processes of a jail ------------------------------------------------------------------------------------------

#: Memory file systems of a jail, seen from its first process (policy/plan.py sizes them).
MEMORY_PLACES: Final = ("tmp", "dev/shm", "run/goondan/home")
#: So many sockets of a process are not asked what they hold: together it is less than a MiB or two.
_FEW_SOCKETS: Final = 8
#: A table has 512 entries: in an address space of so many times the limit they come to a sixteenth of it.
_FEW_TABLES: Final = 512 // 16
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: Ticks of the clock in which /proc counts processor time, in a second.
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
#: Looks in turn at what is in flight while the jail runs. A program that passes descriptors on seldom outlasts them.
_LOOKS_IN_TURN: Final = 6
#: How long the jail runs between them (seconds).
_TURN_S: Final = 0.001


class Process(NamedTuple):
    """One process of a jail."""

    #: Its number in the view.
    pid: int
    #: The number of its parent there.
    parent: int
    #: How many threads it has.
    threads: int
    #: Resident memory (bytes); pages that processes share count in each.
    resident: int
    #: Processor time (seconds), with that of children that were waited for.
    cpu_s: float
    #: Its address space (bytes): what is mapped and never touched costs page tables when it is read.
    mapped: int = 0
    #: The thread that is asked what the process holds: its first one, unless that has ended before the others.
    alive: int = 0
    #: Whether it runs, or waits for a processor.
    runnable: bool = False


#: What these sockets (descriptors) of a process hold (bytes); OSError where that is refused.
HeldBy = Callable[[int, list[int]], int]


class View(NamedTuple):
    """How a jail's processes can be seen."""

    #: A folder like /proc.
    proc: str
    #: The jail's root, None when it has none of its own.
    root: str | None = None
    #: The number here of its first process.
    init_pid: int = 0
    #: When that process was started (ticks), which tells it from another one with its number.
    born: int = 0
    #: Gives the numbers of its processes; None when all that show in `proc` are the jail's.
    members: Callable[[], list[int]] | None = None


def by_namespace(init_pid: int) -> View:
    """The view of the jail whose first process has that number here. In it, processes have the jail's numbers."""
    root = f"/proc/{init_pid}/root"
    return View(f"{root}/proc", root, init_pid, _born(init_pid))


def _born(pid: int) -> int:
    """When a process was started (ticks since the machine was); 0 when there is none."""
    return int((process_stat(pid)[19:20] or [b"0"])[0])


def processes(view: View) -> list[Process]:
    """Every process of the jail; `pid` is the number in the view.

    Empty while the jail still sees the host's /proc: bubblewrap's first process exists before its mounts.
    """
    found = []
    with suppress(OSError):
        if view.root is not None and os.stat(view.proc).st_dev == os.stat("/proc").st_dev:
            return []
        names = [name for name in os.listdir(view.proc) if name.isdigit()] if view.members is None else view.members()
        for name in names:
            with suppress(OSError, IndexError, ValueError):
                found.append(_process(view.proc, int(name)))
    return found


def _stat(path: str) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 2048).rpartition(b")")[2].split()
    finally:
        os.close(fd)


def _process(proc: str, pid: int) -> Process:
    fields = _stat(f"{proc}/{pid}/stat")
    alive = pid
    if fields[0] == b"Z" and int(fields[17]) > 1:  # what others still use the kernel shows by them only
        for name in os.listdir(f"{proc}/{pid}/task"):
            with suppress(OSError, IndexError):
                thread = _stat(f"{proc}/{pid}/task/{name}/stat")
                if thread[0] not in (b"Z", b"X"):
                    alive, fields[20:22] = int(name), thread[20:22]
                    break
    ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    resident, mapped = int(fields[21]) * _PAGE, int(fields[20])
    return Process(
        pid, int(fields[1]), int(fields[17]), resident, ticks / TICKS_PER_S, mapped, alive, fields[0] == b"R"
    )


def trees(there: list[Process], tops: Mapping[str, int]) -> dict[str, list[Process]]:
    """The processes of each process tree, by the name of the one at its top."""
    children: dict[int, list[Process]] = {}
    for process in there:
        children.setdefault(process.parent, []).append(process)
    found: dict[str, list[Process]] = {}
    for name, top in tops.items():
        tree = found[name] = [process for process in there if process.pid == top]
        for process in tree:
            tree += children.get(process.pid, [])  # the list grows while it is walked
    return found


class Memory(NamedTuple):
    """The size of a jail's memory."""

    #: All of it (bytes).
    size: int
    #: Files in memory, and what processes share (bytes).
    shared: int


def memory(
    view: View,
    limit: int,
    there: list[Process],
    held_by: HeldBy,
    sandboxes: Iterable[int] = (),
    *,
    every_thread: bool = False,
) -> Memory:
    """The size of the jail's memory. Pages that processes share count once, if it would come near `limit` otherwise.

    `held_by` says what sockets of a process hold. `sandboxes`: processes, by their numbers in the view, that have
    mounts of their own. `every_thread`: ask each thread for its descriptors, because a thread can have its own.
    """
    files, sockets = _held(view, there, held_by, every_thread)
    if view.root is not None:
        counted = set()
        for root in (view.root, *(f"{view.proc}/{pid}/root" for pid in sandboxes)):
            for place in MEMORY_PLACES:
                with suppress(OSError):
                    device = os.stat(f"{root}/{place}").st_dev
                    if device not in counted:
                        counted.add(device)
                        at = os.statvfs(f"{root}/{place}")
                        files += (at.f_blocks - at.f_bfree) * at.f_frsize
    sockets += _tables(view, limit, there)
    rough = sum(process.resident for process in there) + files + sockets
    if rough <= limit:
        return Memory(rough, files)
    own = shared = 0
    for process in there:
        fields = _smaps(f"{view.proc}/{process.alive}/smaps_rollup")
        own += fields.get("Pss_Anon", 0)
        shared += fields.get("Pss_Shmem", 0)
    # A mapped file of a memory file system is in both: count the larger one.
    return Memory(own + max(shared, files) + sockets, max(shared, files))


def _tables(view: View, limit: int, there: list[Process]) -> int:
    """Page tables of the processes (bytes); 0 when so little is mapped that they cannot be large.

    Linux's zero page and its huge pages are nobody's resident memory, but there is a table for each 2 MiB of them.
    """
    if sum(process.mapped for process in there) < limit * _FEW_TABLES:
        return 0
    total = 0
    for process in there:
        with suppress(OSError):
            total += status_numbers(f"{view.proc}/{process.alive}", "VmPTE")[0] << 10
    return total


def _smaps(path: str) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError), open(path, encoding="ascii", errors="replace") as source:
        for line in source:
            name, _, value = line.partition(":")
            if name.startswith("Pss_"):
                found[name] = int(value.split()[0]) << 10
    return found


def _folders(view: View, process: Process) -> list[str]:
    """The folders that show the descriptors of all its threads."""
    if process.threads > 1:
        with suppress(OSError):
            task = f"{view.proc}/{process.pid}/task"
            return [f"{task}/{name}" for name in os.listdir(task)]
    return [f"{view.proc}/{process.alive}"]


def _descriptors(folder: str) -> Iterator[tuple[str, str, str]]:
    """The descriptors in the folder of a process or thread: number, path, and target."""
    with suppress(OSError):
        for name in os.listdir(f"{folder}/fd"):
            path = f"{folder}/fd/{name}"
            with suppress(OSError):
                yield name, path, os.readlink(path)


def _held(view: View, there: list[Process], held_by: HeldBy, every_thread: bool) -> tuple[int, int]:
    """What open files without a name in memory hold, and what sockets have under way (bytes)."""
    files: dict[tuple[int, int], int] = {}
    sockets: set[str] = set()
    under_way = 0
    for process in there:
        first = f"{view.proc}/{process.alive}"
        own: dict[str, int] = {}
        for folder in dict.fromkeys((first, *(_folders(view, process) if every_thread else ()))):
            for number, path, link in _descriptors(folder):
                if link.startswith("/memfd:"):
                    with suppress(OSError):
                        status = os.stat(path)
                        files[status.st_dev, status.st_ino] = status.st_blocks * 512
                elif link.startswith("socket:") and folder == first:
                    own[link] = int(number)
        if len(own) > _FEW_SOCKETS:
            new = [number for link, number in own.items() if link not in sockets]
            sockets.update(own)
            pid = process.pid if view.root is None else _outer(view, process.pid)
            with suppress(OSError):
                under_way += 0 if pid is None else held_by(pid, new)
    return sum(files.values()), under_way


def _outer(view: View, inner_pid: int) -> int | None:
    """The number here of a process that has that number in the jail."""
    for pid in outer_processes(view):
        with suppress(OSError):
            if status_numbers(f"/proc/{pid}", "NSpid")[-1] == inner_pid:
                return pid
    return None


def outer_processes(view: View) -> list[int]:
    """Every process of a jail that has a process namespace, by its number here; none when the jail is gone."""
    found = [view.init_pid]
    for pid in found:
        found += children(pid)  # the list grows while it is walked
    return found if view.born and _born(view.init_pid) == view.born else []


def unwritten() -> int:
    """Pages of files that this machine has in memory and not yet on disk (bytes)."""
    return _of_the_machine(b"\nDirty:", b"\nWriteback:")


def shared() -> int:
    """What files in memory hold, and what processes share, on this machine (bytes)."""
    return _of_the_machine(b"\nShmem:")


def _of_the_machine(*names: bytes) -> int:
    fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
    try:
        said = os.read(fd, 8192)
    finally:
        os.close(fd)
    return sum(int(said.partition(name)[2].split(None, 1)[0]) << 10 for name in names)


class Nameless(NamedTuple):
    """A file without a name that a process still holds: it takes room, and no walk finds it."""

    #: Its file system.
    device: int
    #: Its number there.
    inode: int
    #: What it takes (bytes).
    size: int


#: A line of /proc/PID/maps that shows a mapped file without a name: its addresses, and its device and inode.
_MAPPED: Final = re.compile(r"^(\w+)-(\w+) \S+ \S+ (\w+):(\w+) (\d+) .*\(deleted\)$", re.MULTILINE)


def nameless(view: View) -> set[Nameless]:
    """Regular files without a name that processes of the jail have open or mapped."""
    found: set[Nameless] = set()
    for process in processes(view):
        for folder in _folders(view, process):
            for _, path, _ in _descriptors(folder):
                with suppress(OSError):
                    status = os.stat(path)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        found.add(Nameless(status.st_dev, status.st_ino, status.st_blocks * 512))
        open_ones = {(file.device, file.inode) for file in found}
        with suppress(OSError), open(f"{view.proc}/{process.alive}/maps", encoding="utf-8", errors="replace") as source:
            for first, last, major, minor, inode in _MAPPED.findall(source.read()):
                file = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
                if file not in open_ones:
                    found.add(Nameless(*file, int(last, 16) - int(first, 16)))
    return found


def in_flight(view: View, there: Iterable[Process]) -> frozenset[int]:
    """Sockets (inodes) of the jail with descriptors in their queues that nobody has received.

    A socket that lies in such a queue may hold more. A listening socket counts for connections that it has not
    accepted. Linux before 5.6 does not tell.
    """
    found: set[int] = set()
    seen: set[str] = set()
    for folder in (folder for process in there for folder in _folders(view, process)):
        for number, _, link in _descriptors(folder):
            if link.startswith("socket:") and link not in seen:
                seen.add(link)
                with suppress(OSError), open(f"{folder}/fdinfo/{number}", "rb") as source:
                    count = source.read().partition(b"\nscm_fds:")[2].split(None, 1)
                    if count and int(count[0]):
                        found.add(int(link[8:-1]))
    return frozenset(found)


def still_in_flight(view: View, counted_s: Callable[[], float | None]) -> limits.InFlight | None:
    """A few looks in turn at a jail that runs. `counted_s` says how much processor time it has used (seconds).

    None: the jail wanted to run and got no processor. Then nothing is known, because it could not receive anything.
    """
    there = processes(view)
    began = counted_s()
    each = last = in_flight(view, there)
    for _ in range(_LOOKS_IN_TURN - 1):
        if not last:
            break
        time.sleep(_TURN_S)
        last = in_flight(view, there)
        each &= last
    if last and began is not None and counted_s() == began and any(process.runnable for process in processes(view)):
        return None
    return limits.InFlight(last, each)
