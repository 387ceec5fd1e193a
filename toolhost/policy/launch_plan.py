"""The plan of one jail: all that its launch needs, and the limits that its boot stage sets. Pure.

The full tier's plan is made in plan.py, the reduced tier's in reduced.py.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from schemas.launch import Limits
from schemas.receipts import Mechanism, Wall
from toolhost.egress.rules import Layout
from toolhost.limits.plan import GroupPlan, processes_of_a_namespace
from toolhost.policy.enclosure import Enclosure
from toolhost.policy.landlock import Ruleset
from toolhost.policy.mounts import Stage
from toolhost.policy.nested import CallWalls
from toolhost.privileges.tree import Tree

# include/uapi/asm-generic/resource.h, the same on x86_64 and aarch64.
_RLIMIT_FSIZE, _RLIMIT_DATA, _RLIMIT_CORE, _RLIMIT_NPROC, _RLIMIT_NOFILE = 1, 2, 4, 6, 7
_RLIMIT_MEMLOCK, _RLIMIT_SIGPENDING = 8, 11
#: Locked memory (bytes), signals and timers that wait: they count for the operator as well where a jail runs as that
#: user, whose own programs then get none.
_LOCKED: Final = 64 << 10
_SIGNALS: Final = 1024


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """Everything a launch needs. `options` go to bwrap through ARGS_FD, so that no other user reads them.

    `heir` is the folder whose user (uids.instance_uid) the jail becomes where its own cannot be shown as its owner: the
    instance's workspace that the workdir is or lies in, else the workdir, or what was granted for writing last.
    `open_workdir` and the sources of `stages` are opened by us and must still be those very paths. Without a `stage`
    the former is handed over as WORKDIR_FD; with one, the jail has a user of its own, whichever is free. `filter` is
    the system call filter (FILTER_FD): bubblewrap
    puts it on every process of the jail, its own first one included.
    `landlock` and `limits` (resource, value) go to the jail's boot stage (BOOT_FD), which puts itself and all that
    follows under them. `files` are texts that bwrap reads from FILES_FD and the descriptors after it. `layout` is the
    inside of the network grant, None when there is none. In the reduced tier there is no bubblewrap: `command` is run
    with `environment`, and `private` is a folder to make for the jail, with a link to `code`; it goes with the jail.
    `hiding` are the hidden folders that lie in something the jail sees: what is there is covered, and what comes to
    be there afterwards is not. `seen` says which path of the host each place of the jail must be: (path there, path
    here). Between the look at the host and the mounts another jail could exchange a folder for a link; the boot stage
    sees that, and ends the jail.
    `totals` are the tool's limits, `writable` the folders of the host that the jail may write to, `named` those of them
    that we did not make, `guarded` what stays read-only in them, `made` what of it was put there for that. `group` are
    its control groups, `mechanisms` what keeps each limit. `enclosure` is there when the jail drops root itself.
    `calls`: the jail is a fork server's, and each call gets those walls; `trusted` is how many processes of ours that
    takes. `alone`: it is for one call, for want of walls.
    """

    bwrap: str
    options: list[str]
    filter: bytes
    landlock: Ruleset | None
    limits: list[tuple[int, int]]
    command: list[str]
    open_workdir: str | None
    workdir: str
    import_paths: list[str]
    files: list[str] = []
    layout: Layout | None = None
    stage: str | None = None
    stages: list[Stage] = []
    heir: str | None = None
    enclosure: Enclosure | None = None
    seen: list[tuple[str, str]] = []
    hiding: list[str] = []
    tier: Literal["full", "reduced"] = "full"
    walls: list[Wall] = []
    mechanisms: dict[str, Mechanism] = {}
    totals: Limits = Limits()
    writable: list[str] = []
    named: list[str] = []
    guarded: list[str] = []
    made: list[str] = []
    group: GroupPlan | None = None
    private: str | None = None
    code: str = ""
    environment: dict[str, str] = {}
    calls: CallWalls | None = None
    alone: bool = False
    trusted: int = 0


def resource_limits(limits: Limits, groups: Tree | None = None, trusted: int = 0) -> list[tuple[int, int]]:
    """The limits of each process of a jail, and of its processes in all: (resource, value), the kernel's numbers.

    `trusted`: so many processes of ours come on top.

    RLIMIT_DATA and not RLIMIT_AS: address space that nobody writes to is free, and threads and Node take much of it.
    """
    return [
        (_RLIMIT_CORE, 0),
        (_RLIMIT_DATA, limits.memory_mb << 20),
        (_RLIMIT_FSIZE, limits.file_mb << 20),
        (_RLIMIT_NOFILE, limits.open_files),
        (_RLIMIT_NPROC, processes_of_a_namespace(groups, limits) + trusted),
        (_RLIMIT_MEMLOCK, _LOCKED),
        (_RLIMIT_SIGPENDING, _SIGNALS),
    ]
