"""The plan of a jail on a host that refuses user namespaces: Landlock, the filter and limits, without bubblewrap. Pure.

Only for an ordinary user, and only for tools whose `minTier` allows it. There are no mounts, so nothing below an
allowed path can be hidden or made read-only: where the full tier would do that, this tier refuses.

Source: docs/design/sandbox.md section 7; what it does not hold is in docs/sandbox.md.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.receipts import Wall
from goondan.toolhost.limits.table import group_plan, mechanisms, resource_limits
from goondan.toolhost.policy.javascript import limits_data
from goondan.toolhost.policy.landlock import DEVICES, READ, RUN, WRITE, for_file, ruleset
from goondan.toolhost.policy.launch_plan import LaunchPlan, program_of
from goondan.toolhost.policy.mounts import granted_rights, hidden_in
from goondan.toolhost.policy.refusals import check_request
from goondan.toolhost.policy.subject import HostFacts, HostPath, Request
from goondan.toolhost.seccomp.program import program

#: Landlock's scopes keep signals inside; without them a jail could end every process of the operator.
MINIMUM_LANDLOCK: Final = 6
#: Files of /etc that libc and programs read, beside what the host's facts name.
_ETC: Final = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
#: Files of /proc that describe the machine. The list of processes, and their arguments, stay closed.
_PROC: Final = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")
_DEVICES: Final = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_IOCTL: Final = 1 << 15


def walls_reduced(host: HostFacts) -> list[Wall]:
    """The walls of a jail: the same on every host."""
    return ["seccomp", "landlock", "limits"]


def plan_reduced(request: Request, host: HostFacts) -> LaunchPlan:
    """The launch plan of one jail. Raises GoondanError E_SANDBOX_UNAVAILABLE with a network grant, E_SANDBOX_DENIED for
    what this tier cannot keep from being written or read.
    """
    tool = request.tool
    if tool.sandbox.network != "none":
        text = f"the tool {tool.name} was granted a network, which the reduced sandbox cannot bound"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    if request.private is None:
        raise fail("E_INTERNAL", "a reduced jail needs a private folder")
    check_request(request, host)
    for path in [*(place.path for place in [*request.guarded, *request.masked]), *hidden_in(request, host)]:
        if path not in host.absent:  # the jail ends should one of those come to be there
            raise fail("E_SANDBOX_DENIED", f"the reduced sandbox cannot protect {path} from the tool {tool.name}")
    if request.folder is not None:
        text = f"the reduced sandbox cannot keep {request.folder.shown} read-only for the tool {tool.name}"
        raise fail("E_SANDBOX_DENIED", text, suggestion=host.fix)
    home, temporary, code = f"{request.private}/home", f"{request.private}/tmp", f"{request.private}/code/goondan_tool"
    # There are no mounts: everything stands at its own path.
    shown = [HostPath(place.path, place.kind) for place in request.shown]
    writable = [HostPath(place.path, place.kind) for place in request.writable]
    own = [HostPath(home, "dir"), HostPath(temporary, "dir")]
    rules = [(folder, RUN) for folder in (*host.programs, host.inside)]
    rules += [(path, READ) for path in (*host.etc, "/proc/self")]
    rules += [(path, for_file(READ)) for path in (*_ETC, *(f"/proc/{name}" for name in _PROC))]
    rules += [(path, for_file(DEVICES) & ~_IOCTL) for path in _DEVICES]
    rules += granted_rights(shown, RUN) + granted_rights([*own, *writable], WRITE)
    return LaunchPlan(
        request=request,
        program=program_of(request, request.workdir_real or home, None, code, mounts=False),
        filter=program(host.machine, sockets=False, bare=True),
        landlock=ruleset(host.landlock, rules, network=False),
        limits=resource_limits(tool.sandbox.limits, data=limits_data(tool, host.groups)),
        writable=[place.path for place in [*own, *writable]],
        group=group_plan(host.groups, tool.sandbox.limits),
        command=host.boot(code),
        workdir=request.workdir_real or home,
        seen=[(path, path) for path in dict.fromkeys(place.path for place in [*shown, *writable])],
        hiding=hidden_in(request, host),
        tier="reduced",
        walls=walls_reduced(host),
        mechanisms=mechanisms(host.groups),
        alone=tool.server is None and tool.sandbox.isolation == "call",
        private=request.private,
        code=host.inside,
        environment=host.environment(home, temporary),
    )
