"""The plan of a jail on a host that refuses user namespaces: Landlock, the filter and limits, without bubblewrap. Pure.

Only for an ordinary user, and only for tools whose `minTier` says so. There are no mounts, so nothing below a path that
is allowed can be hidden or made read-only: where the full tier would do that, this one refuses.

Source: docs/design/sandbox.md section 7; what it does not hold is in docs/sandbox.md.
"""

from __future__ import annotations

from typing import Final

from schemas.errors import fail
from toolhost.limits.plan import group_plan, mechanisms
from toolhost.policy.conventions import JAIL_PATH
from toolhost.policy.landlock import DEVICES, READ, RUN, WRITE, for_file, ruleset
from toolhost.policy.launch_plan import LaunchPlan, resource_limits
from toolhost.policy.mounts import hidden_in, named, shown_of
from toolhost.policy.refusals import check_read_grant, check_uncovered, check_workdir, check_write_grant
from toolhost.policy.subject import HostFacts, Place, Request
from toolhost.seccomp.program import program

#: Landlock's scopes keep signals inside; without them a jail could end every process of the operator.
MINIMUM_LANDLOCK: Final = 6
#: Files of /etc that libc and programs read, beside what the host's facts name.
_ETC: Final = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
#: Of /proc only what tells about the machine; the list of processes, and what they were started with, stay closed.
_PROC: Final = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")
_DEVICES: Final = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_IOCTL: Final = 1 << 15


def plan_reduced(request: Request, host: HostFacts) -> LaunchPlan:
    """The launch plan of one jail. Raises GoondanError E_SANDBOX_UNAVAILABLE below the tool's `minTier` or with a
    network grant, E_SANDBOX_DENIED for what this tier cannot keep from being written or read.
    """
    tool = request.tool
    if tool.sandbox.min_tier != "reduced":
        lack = f": {host.lack}" if host.lack else ""
        text = f"the tool {tool.name} needs the full sandbox (minTier), and this host has the reduced one{lack}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    if tool.sandbox.network != "none":
        text = f"the tool {tool.name} was granted a network, which the reduced sandbox cannot bound"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    if request.private is None:
        raise fail("E_INTERNAL", "a reduced jail needs a private folder")
    if request.workdir_real is not None:
        check_workdir(request.workdir_real, host)
    for place in request.write:
        check_write_grant(place.path, host)
    for place in request.read:
        check_read_grant(place.path)
    _refuse_what_cannot_be_kept(request, host)
    home, temporary = f"{request.private}/home", f"{request.private}/tmp"
    writable = [home, temporary, *([request.workdir_real] if request.workdir_real else [])]
    rules = [(folder, RUN) for folder in ("/usr", *host.dirs, *([host.prefix] if host.prefix else []), host.inside)]
    rules += [(path, READ) for path in host.etc] + [(path, for_file(READ)) for path in _ETC]
    rules += [(f"/proc/{name}", for_file(READ)) for name in _PROC]
    rules += [("/proc/self", READ)]
    rules += [(path, for_file(DEVICES) & ~_IOCTL) for path in _DEVICES]
    rules += [(path, WRITE) for path in writable]
    root = Place(tool.entry, "file") if request.entry_only else Place(tool.root, "dir")
    venv = [Place(request.venv, "dir")] if request.venv else []
    rules += [(p.path, RUN if p.kind == "dir" else for_file(RUN)) for p in [root, *request.read, *venv]]
    rules += [(p.path, WRITE if p.kind == "dir" else for_file(WRITE)) for p in request.write]
    named_places = [root, *request.read, *venv, *request.write]
    seen = [*(p.path for p in named_places), *([request.workdir_real] if request.workdir_real else [])]
    folder = tool.entry.rpartition("/")[0]
    paths = [] if request.entry_only else list(dict.fromkeys([folder, tool.root]))
    return LaunchPlan(
        bwrap="",
        options=[],
        filter=program(host.machine, sockets=False, bare=True),
        landlock=ruleset(host.landlock, rules, network=False),
        limits=resource_limits(tool.sandbox.limits),
        totals=tool.sandbox.limits,
        writable=[*writable, *(place.path for place in request.write)],
        named=named(request),
        group=group_plan(host.groups, tool.sandbox.limits),
        command=[host.python, "-I", "-S", "-B", f"{request.private}/code/goondan_tool/boot.py"],
        open_workdir=None,
        workdir=request.workdir_real or home,
        import_paths=[*paths, *([request.venv_site] if request.venv_site else [])],
        seen=[(path, path) for path in dict.fromkeys(seen)],
        hiding=hidden_in(request, host),
        tier="reduced",
        walls=["seccomp", "landlock", "limits"],
        mechanisms=mechanisms(host.groups),
        alone=tool.sandbox.isolation == "call",
        private=request.private,
        code=host.inside,
        environment={
            "PATH": f"{JAIL_PATH}:{host.prefix}/bin" if host.prefix else JAIL_PATH,
            "HOME": home,
            "TMPDIR": temporary,
            "LANG": "C.UTF-8",
        },
    )


def _refuse_what_cannot_be_kept(request: Request, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED where the full tier would mount something over a place."""
    tool = request.tool
    for place in shown_of(request):
        check_uncovered(place, tool.root, host)
    for path in [*(place.path for place in [*request.guarded, *request.masked]), *hidden_in(request, host)]:
        if path in host.absent:
            continue  # the jail ends should it come to be there
        raise fail("E_SANDBOX_DENIED", f"the reduced sandbox cannot protect {path} from the tool {tool.name}")
