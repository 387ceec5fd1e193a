"""The exact launch plan of one jail in each tier of the sandbox, with its mounts: what shows, where, what Landlock
gives back for it, and where it is taken from. Pure, so that every line of it can be tested.

Rules of the full tier.
- A jail sees /usr, an interpreter, this package's `inside` folder, the tool's own folder, what was granted, and its
  workdir. Only the workdir, the write grants and private memory file systems can be written to.
- Inside a writable folder, what trusted programs later read or run stays read-only: `.git`, `.venv`, the bundle's
  documents, tool and extension folders, the kernel's own code, interpreters. The folders above such a place are
  mounted onto themselves, because a folder that is a mount point cannot be renamed away.
- State roots and runtime directories never show: not even in a workdir or a grant that contains them, under whatever
  name that stands there. They cannot be moved. A grant that is one of them, or lies in one, is refused.
- Mounts are made from the outermost to the innermost path, so that no later mount hides an earlier one by accident.
- As root, every place that bubblewrap takes something from is staged first: copied into a mount namespace where the
  jail's own user can reach it. What the system shows to everybody is taken from where it is.
- The plan is all of it: the launcher executes it and chooses nothing.

Where root has no user namespaces, bubblewrap runs as root, and the jail drops that itself (`enclosure_of`). Elsewhere
bubblewrap runs as the jail's own user, so its mistakes do no harm. Here it has root's powers over mounts, while it goes
through folders that other jails of the same workdir may be changing. So it gets a root directory of its own, in memory,
with what jails are made from and nothing else: no link leads out of it. The jail begins there as root with three
capabilities. They can be used only to give everything up (inside/confine.py).

On a host that refuses user namespaces, a jail has Landlock, the filter and limits, without bubblewrap (the reduced
tier). Only an ordinary user has it, and only tools whose `minTier` allows it. There are no mounts, so nothing below an
allowed path can be hidden or made read-only: where the full tier would do that, this tier refuses.

The table of tiers has the strongest first. A tier has its name in schemas/worker/receipts.py, its plan and a row here,
and in toolhost/survey.py how a host is tried for it. Nothing else asks for a tier by its name.

Source: docs/design/tools.md section 9; docs/design/sandbox.md sections 1, 2, 3 and 7; docs/decisions/038.
docs/sandbox.md has what the reduced tier does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.hosts import BadHost, read_network
from goondan.schemas.worker.receipts import Tier, Wall, is_weaker
from goondan.toolhost.policy import launch_plan, subject
from goondan.toolhost.policy.limits import group_plan, mechanisms, resource_limits
from goondan.toolhost.policy.seccomp import program
from goondan.toolhost.traffic.rules import RESOLVER, Layout, lay_out

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import Enclosure, Stage, Unmapped


class Sources:
    """Where bubblewrap finds what it mounts: at its place, or staged."""

    def __init__(self, request: subject.Request, host: subject.HostFacts) -> None:
        #: What the launcher stages before bubblewrap starts: the path of the host, and how it is staged.
        self.stages: list[tuple[str, Stage]] = []
        self._at: dict[str, str] = {}
        if host.stage is None:
            return
        rooted = not host.user_namespaces
        for place in request.writable:
            ours = request.workspace is not None and place.path == request.workdir_real
            self._add(host.stage, place, "given" if ours else "refused")
        if host.prefix is not None:
            self._add(host.stage, subject.HostPath(host.prefix, "dir"), "shown", owned=not rooted)
        self._add(host.stage, subject.HostPath(host.inside, "dir"), "copied", owned=not rooted)
        if host.bwrap_root is not None and not rooted:
            self._add(host.stage, subject.HostPath(host.bwrap_root, "dir"), "shown")
        for place in request.own:
            self._add(host.stage, place, "copied")
        for place in request.granted:
            self._add(host.stage, place, "shown")
        if request.folder is not None and not any(
            within(request.folder.path, place.path) for place in request.writable
        ):
            self._add(host.stage, request.folder, "shown")

    def stages_alone(self, place: subject.HostPath) -> bool:
        """Whether this place is staged itself, and not only a folder that it lies in."""
        return place.path in self._at

    def _add(self, stage: str, place: subject.HostPath, unmapped: Unmapped, *, owned: bool = True) -> None:
        if place.path in self._at or within(place.path, "/usr"):
            return
        at = self._at[place.path] = f"{stage}/{len(self.stages)}"
        how: Stage = {
            "at": at,
            "readOnly": unmapped in ("shown", "copied"),
            "owned": owned,
            "folder": place.kind == "dir",
            "unmapped": unmapped,
        }
        self.stages.append((place.path, how))

    def of(self, path: str, root: str) -> str:
        """Where `path` can be taken from; it is or lies in the staged place `root`."""
        return self._at[root] + path[len(root) :] if root in self._at and within(path, root) else path


#: Options that put something at a place, and how many words each has: the place is the last word.
_PLACING: Final = {
    "--ro-bind": 3, "--bind": 3, "--bind-fd": 3, "--ro-bind-data": 3, "--symlink": 3,
    "--tmpfs": 2, "--proc": 2, "--dev": 2,
}  # fmt: skip


def with_parents(options: list[str]) -> list[str]:
    """The options with the folders above each place, open to everybody. bubblewrap would make them for their owner
    only.
    """
    made = {"/"}
    done: list[str] = []
    waiting: list[str] = []  # --perms and --size are for the option that comes next
    words = iter(options)
    for option in words:
        if option in ("--perms", "--size"):
            waiting += [option, next(words)]
        elif option not in _PLACING:
            done.append(option)
        else:
            *rest, place = (next(words) for _ in range(_PLACING[option] - 1))
            for above in _between("", place):
                if above not in made:
                    made.add(above)
                    done += ["--perms", "0755", "--dir", above]
            made.add(place)
            done += [*waiting, option, *rest, place]
            waiting = []
    return done


class Mount(NamedTuple):
    """One mount. Mounts are sorted by path, a list of names, so that inner ones come later, and then by rank."""

    #: The place in the jail, as names.
    path: list[str]
    #: The order of mounts at the same place.
    rank: int
    #: bubblewrap's options for it.
    options: list[str]
    #: The path of the host that shows there; None for what belongs to the jail itself.
    source: str | None


_SHOWN, _WRITABLE, _GUARDED, _MASKED = range(4)


def mounts_of(request: subject.Request, host: subject.HostFacts, sources: Sources) -> list[Mount]:
    """The mounts that depend on the request, in the order in which they are made."""
    found = [
        _mount(place.shown, _SHOWN, place.path, "--ro-bind", sources.of(place.path, place.path), place.shown)
        for place in request.shown
        if place.name is not None or not any(within(place.path, writable.path) for writable in request.writable)
    ]
    for place in request.writable:
        found += _writable_mounts(request, host, sources, place)
    for place in request.masked:
        if place.kind == "file":
            for at in _seen_at(place.path, request):
                found.append(_mount(at, _MASKED, None, "--ro-bind", "/dev/null", at))
    found += [_mount(at, _MASKED, None, "--perms", "0555", "--tmpfs", at) for at in emptied_of(request, host)]
    mounts: dict[tuple[str, int], Mount] = {}
    for mount in found:
        mounts.setdefault(("/".join(mount.path), mount.rank), mount)
    return sorted(mounts.values(), key=lambda mount: (mount.path, mount.rank))


def _mount(path: str, rank: int, source: str | None, *options: str) -> Mount:
    return Mount(path.split("/"), rank, list(options), source)


def _writable_mounts(
    request: subject.Request, host: subject.HostFacts, sources: Sources, place: subject.HostPath
) -> Iterator[Mount]:
    """A writable folder, the places in it that stay read-only, and the folders above those."""
    real, shown = place.path, place.shown
    if shown == request.workdir and host.stage is None:
        yield _mount(shown, _WRITABLE, real, "--bind-fd", str(subject.WORKDIR_FD), shown)
    else:
        yield _mount(shown, _WRITABLE, real, "--bind", sources.of(real, real), shown)
    # A writable mount inside a read-only folder would be a hole in it.
    guarded = [
        inner.path
        for inner in request.guarded
        if inner.path != real
        and within(inner.path, real)
        and not any(inner != outer and within(inner.path, outer.path) for outer in request.guarded)
    ]
    hidden = [path for path in host.hidden if path != real and within(path, real)]
    folder = request.folder
    inside = folder is not None and shown != folder.shown and within(folder.shown, shown)
    named = [real + folder.shown[len(shown) :]] if folder is not None and inside else []
    for kept in [*guarded, *hidden, *named]:
        for above in _between(real, kept):
            if not any(within(above, path) for path in guarded):
                at = shown + above[len(real) :]
                yield _mount(at, _WRITABLE, above, "--bind", sources.of(above, real), at)
    for path in guarded:
        at = shown + path[len(real) :]
        yield _mount(at, _GUARDED, path, "--ro-bind", sources.of(path, real), at)
    if folder is not None and inside:
        root = folder.path if sources.stages_alone(folder) else real
        yield _mount(folder.shown, _GUARDED, folder.path, "--ro-bind", sources.of(folder.path, root), folder.shown)


def seen_places(mounts: list[Mount]) -> list[tuple[str, str]]:
    """LaunchPlan.seen for these mounts, which are in their order: of several at one place the last one shows."""
    shows = {"/".join(mount.path): mount.source for mount in mounts}
    return [(at, source) for at, source in shows.items() if source is not None]


def rights_of(request: subject.Request, host: subject.HostFacts) -> list[tuple[str, int]]:
    """What Landlock gives back: the same as the mounts show, by the jail's paths."""
    rights = [
        ("/", launch_plan.LIST),
        ("/etc", launch_plan.READ),
        ("/proc", launch_plan.READ),
        ("/dev", launch_plan.DEVICES),
        (subject.JAIL_CODE, launch_plan.READ),
    ]
    rights += [(folder, launch_plan.RUN) for folder in host.programs]
    rights += [(path, launch_plan.WRITE) for path in ("/dev/shm", "/tmp", subject.JAIL_HOME)]
    rights += [(path, launch_plan.for_file(launch_plan.READ)) for path, _ in launch_plan.memory_files(request.tool)]
    return rights + granted_rights(request.shown, launch_plan.RUN) + granted_rights(request.writable, launch_plan.WRITE)


def granted_rights(places: list[subject.HostPath], rights: int) -> list[tuple[str, int]]:
    """These rights for each of the places, by its path in the jail; a file gets only the rights that a file can
    have.
    """
    return [(place.shown, rights if place.kind == "dir" else launch_plan.for_file(rights)) for place in places]


def _seen_at(path: str, request: subject.Request) -> list[str]:
    """The paths in the jail of a path of the tool's folder: a workdir keeps the name that the caller has for it."""
    found = [place.shown + path[len(place.path) :] for place in request.writable if within(path, place.path)][-1:]
    if request.home is not None:
        return [*found, request.home + path[len(request.tool.root) :]]
    return found or [path]


def emptied_of(request: subject.Request, host: subject.HostFacts) -> list[str]:
    """Folders that show empty: masked folders of the tool, and hidden folders inside anything that shows, at each place
    where they would show.
    """
    paths = [at for place in request.masked if place.kind == "dir" for at in _seen_at(place.path, request)]
    for folder in _folders_of(request, host):
        # The workdir usually lies inside the state root; then nothing of the state root shows but the workdir.
        paths += [folder.shown + path[len(folder.path) :] for path in host.hidden if _is_inside(path, folder)]
    return list(dict.fromkeys(paths))


def hidden_in(request: subject.Request, host: subject.HostFacts) -> list[str]:
    """The hidden folders inside something that shows, whether they exist or not."""
    folders = _folders_of(request, host)
    return [path for path in [*host.hidden, *host.absent] if any(_is_inside(path, folder) for folder in folders)]


def _is_inside(path: str, folder: subject.HostPath) -> bool:
    return path != folder.path and within(path, folder.path)


def _folders_of(request: subject.Request, host: subject.HostFacts) -> list[subject.HostPath]:
    """Every folder of the host that shows."""
    system = [subject.HostPath(path, "dir") for path in [*host.programs, *host.etc]]
    return [*system, *(place for place in request.shown if place.kind == "dir"), *request.writable]


def _between(outer: str, inner: str) -> list[str]:
    """The folders strictly between two paths, outermost first."""
    names = inner[len(outer) + 1 :].split("/")[:-1]
    return [outer + "/" + "/".join(names[: index + 1]) for index in range(len(names))]


# --- the full tier ----------------------------------------------------------------------------------------------------

#: Private memory file systems (bytes): room for a compiler's temporary files, a quarter of a small machine at most.
TMP_BYTES: Final = 256 << 20
SHM_BYTES: Final = 64 << 20
#: Places that belong to the jail and are gone with it: place, size in bytes, mode.
_PRIVATE: Final = (
    ("/dev/shm", SHM_BYTES, "1777"), ("/tmp", TMP_BYTES, "1777"), (subject.JAIL_HOME, subject.HOME_BYTES, "0700"),
)  # fmt: skip
_NET_ADMIN: Final = "Give the container CAP_NET_ADMIN, or let it have user namespaces."
#: With these the boot stage gives itself up; bubblewrap takes these names. Without them nothing can be dropped.
DROPPED_CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
#: Devices that bubblewrap takes from its own root directory.
ENCLOSURE_DEVICES: Final = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
#: The accounts of a jail. The launcher replaces `{uid}` by the number of the jail's user on this host.
ACCOUNTS: Final = {
    "passwd": (
        "root:x:0:0:root:/:/usr/sbin/nologin\n"
        f"tool:x:{{uid}}:{{uid}}:tool:{subject.JAIL_HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntool:x:{uid}:\nnogroup:x:65534:\n",
}


def plan_full(request: subject.Request, host: subject.HostFacts) -> launch_plan.LaunchPlan:
    """The launch plan of one jail. Raises GoondanError E_SANDBOX_DENIED for what cannot be given."""
    tool = request.tool
    subject.check_request(request, host)
    layout = _layout(tool)
    if layout is not None and not host.net_admin:
        text = f"the tool {tool.name} was granted a network, and no jail can have one here: root lacks CAP_NET_ADMIN"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=_NET_ADMIN)
    sources = Sources(request, host)
    serves = forks(tool, host)
    trusted = launch_plan.OWN_PROCESSES if serves else 0
    made = mounts_of(request, host, sources)
    files = [] if layout is None else [("/etc/hosts", layout.hosts), ("/etc/resolv.conf", RESOLVER)]
    files += launch_plan.memory_files(tool)
    options = [*isolation(host, serves), *_system(host, sources, layout)]
    for number, (path, _) in enumerate(files, subject.FILES_FD):
        options += ["--perms", "0444", "--ro-bind-data", str(number), path]
    for path in [] if serves else host.covered:  # each call of a fork server has a new /proc, which covers them itself
        options += ["--ro-bind", "/dev/null", path]
    options += [*_private(host), *_interpreter(host, sources)]
    for mount in made:
        options += mount.options
    options = with_parents(options)
    for path in ["/proc", "/dev", *emptied_of(request, host), "/"]:
        options += ["--remount-ro", path]  # last, because innermost mounts may still need their mount points made
    for name, value in host.environment(subject.JAIL_HOME, "/tmp").items():
        options += ["--setenv", name, value]
    network = tool.sandbox.network != "none"
    cwd = request.workdir or subject.JAIL_HOME
    writable = [place.path for place in request.writable]
    quick = launch_plan.is_javascript(tool) and bool(host.perl) and host.user_namespaces
    return launch_plan.LaunchPlan(
        request=request,
        program=launch_plan.program_of(request, cwd, layout, subject.JAIL_CODE),
        quick=quick,
        bwrap=sources.of(host.bwrap, host.bwrap_root) if host.bwrap_root and host.user_namespaces else host.bwrap,
        options=[*options, "--chdir", cwd if host.user_namespaces else "/"],
        filter=program(host.machine, sockets=network, server=serves, drops=not host.user_namespaces),
        limits=resource_limits(
            tool.sandbox.limits, host.groups, trusted, data=launch_plan.limits_data(tool, host.groups)
        ),
        landlock=launch_plan.ruleset(host.landlock, rights_of(request, host), network=network),
        command=[host.perl, f"{subject.JAIL_CODE}/boot.pl"] if quick else host.boot(subject.JAIL_CODE),
        open_workdir=None if host.stage else request.workdir_real,
        workdir=cwd,
        files=[text for _, text in files],
        layout=layout,
        stage=host.stage,
        stages=sources.stages,
        seen=seen_places(made),
        hiding=hidden_in(request, host),
        fallback_owner=request.workspace or (writable[-1] if writable else None),
        enclosure=enclosure_of(host),
        walls=walls_full(host),
        mechanisms=mechanisms(host.groups),
        writable=writable,
        group=group_plan(host.groups, tool.sandbox.limits, trusted),
        alone=tool.server is None and tool.sandbox.isolation == "call" and not serves,
        trusted=trusted,
        calls=launch_plan.call_walls(
            {place: f"size={size},mode={mode}" for place, size, mode in _PRIVATE},
            ["/".join(mount.path) for mount in made],
            cwd,
            program(host.machine, sockets=network),
            host.covered,
        )
        if serves
        else None,
    )


def start_of(bwrap: str, command: list[str]) -> list[str]:
    """The command that starts bubblewrap. Its options come over ARGS_FD, so that no other user reads them."""
    return [bwrap, "--args", str(subject.ARGS_FD), "--", *command]


def forks(tool: ToolSpec, host: subject.HostFacts) -> bool:
    """Whether the tool's calls are forked in a jail that they share, each behind walls of its own."""
    if tool.server is not None or tool.sandbox.isolation != "call" or launch_plan.is_javascript(tool):
        return False  # a JavaScript runtime has threads, and cannot be forked
    return host.nests and bool(host.bwrap) and host.user_namespaces


def walls_full(host: subject.HostFacts) -> list[Wall]:
    """The walls of every jail that a plan for this host has, in the words of receipts and of `gdn doctor`."""
    landlock: list[Wall] = ["landlock"] if host.landlock > 0 else []
    uid: list[Wall] = [] if host.stage is None else ["uid"]
    return ["namespaces", "seccomp", *landlock, *uid, "limits"]


def _layout(tool: ToolSpec) -> Layout | None:
    try:
        network = read_network(tool.sandbox.network)
    except BadHost as error:
        raise fail("E_SANDBOX_DENIED", f"the network of the tool {tool.name} cannot be read: {error}") from None
    return None if network.none else lay_out(network)


def isolation(host: subject.HostFacts, serves: bool = False) -> list[str]:
    """What bubblewrap separates before any mount: its first options."""
    if host.user_namespaces:
        user = ["--unshare-user", "--uid", str(subject.JAIL_UID), "--gid", str(subject.JAIL_GID)]
        kept = [*launch_plan.SERVER_CAPABILITIES] if serves else []
        last = ["--disable-userns"] if host.disable_userns else []
    else:
        user, kept, last = ["--as-pid-1"], [*DROPPED_CAPABILITIES], []
    options = [
        *user, "--unshare-pid",
        *(["--unshare-net"] if host.net_admin or host.user_namespaces else []),  # brings the loopback interface up
        "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
        "--hostname", subject.JAIL_HOSTNAME, "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        "--json-status-fd", str(subject.STATUS_FD), "--seccomp", str(subject.FILTER_FD),
    ]  # fmt: skip
    for name in kept:
        options += ["--cap-add", name]
    return options + last


def _system(host: subject.HostFacts, sources: Sources, layout: Layout | None) -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name, target in host.links:
        options += ["--symlink", target, name]
    for folder in host.dirs:
        options += ["--ro-bind", folder, folder]
    for name in ("passwd", "group", *(() if layout else ("hosts",)), "nsswitch.conf"):
        ours = sources.of(f"{host.inside}/etc/{name}", host.inside)
        if name in ACCOUNTS and host.stage and not host.user_namespaces:
            ours = f"{host.stage}/{name}"
        options += ["--ro-bind", ours, f"/etc/{name}"]
    for path in host.etc:
        options += ["--ro-bind", path, path]
    # /proc as a whole becomes read-only at the end: sysctls, sysrq and other processes' memory are files in it.
    return [*options, "--proc", "/proc", "--dev", "/dev"]


def _private(host: subject.HostFacts) -> list[str]:
    options: list[str] = []
    made = enclosure_of(host)
    for place, size, mode in _PRIVATE:
        if place == subject.JAIL_HOME and made is not None:
            options += ["--bind", made["home"], place]  # bubblewrap can give its own to nobody but itself
        else:
            options += ["--size", str(size), "--perms", mode, "--tmpfs", place]
    return options


def _interpreter(host: subject.HostFacts, sources: Sources) -> list[str]:
    prefix = ["--ro-bind", sources.of(host.prefix, host.prefix), host.prefix] if host.prefix else []
    return [*prefix, "--ro-bind", sources.of(host.inside, host.inside), subject.JAIL_CODE]


def enclosure_of(host: subject.HostFacts) -> Enclosure | None:
    """The root directory of bubblewrap; None where it needs none.

    A file of ACCOUNTS is taken from `stage`/NAME. Without net_admin bubblewrap gets a network namespace, in which
    nothing is up.
    """
    if host.stage is None or host.user_namespaces:
        return None
    around = [] if host.bwrap_root is None else [host.bwrap_root]
    return {
        "shown": ["/usr", *host.dirs, *host.etc, *around, *ENCLOSURE_DEVICES, "/proc"],
        "links": host.links,
        "texts": [(f"{host.stage}/{name}", text) for name, text in ACCOUNTS.items()],
        "home": f"{host.stage}/home",
        "homeBytes": subject.HOME_BYTES,
        "network": not host.net_admin,
    }


# --- the reduced tier -------------------------------------------------------------------------------------------------

#: Landlock's scopes keep signals inside; without them a jail could end every process of the operator.
MINIMUM_LANDLOCK: Final = 6
#: Files of /etc that libc and programs read, beside what the host's facts name.
_ETC: Final = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
#: Files of /proc that describe the machine. The list of processes, and their arguments, stay closed.
_PROC: Final = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")
_DEVICES: Final = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_IOCTL: Final = 1 << 15


def walls_reduced(host: subject.HostFacts) -> list[Wall]:
    """The walls of a jail: the same on every host."""
    return ["seccomp", "landlock", "limits"]


def plan_reduced(request: subject.Request, host: subject.HostFacts) -> launch_plan.LaunchPlan:
    """The launch plan of one jail. Raises GoondanError E_SANDBOX_UNAVAILABLE with a network grant, E_SANDBOX_DENIED for
    what this tier cannot keep from being written or read.
    """
    tool = request.tool
    if tool.sandbox.network != "none":
        text = f"the tool {tool.name} was granted a network, which the reduced sandbox cannot bound"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    if request.private is None:
        raise fail("E_INTERNAL", "a reduced jail needs a private folder")
    subject.check_request(request, host)
    for path in [*(place.path for place in [*request.guarded, *request.masked]), *hidden_in(request, host)]:
        if path not in host.absent:  # the jail ends should one of those come to be there
            raise fail("E_SANDBOX_DENIED", f"the reduced sandbox cannot protect {path} from the tool {tool.name}")
    if request.folder is not None:
        text = f"the reduced sandbox cannot keep {request.folder.shown} read-only for the tool {tool.name}"
        raise fail("E_SANDBOX_DENIED", text, suggestion=host.fix)
    home, temporary, code = f"{request.private}/home", f"{request.private}/tmp", f"{request.private}/code/goondan_tool"
    # There are no mounts: everything stands at its own path.
    shown = [subject.HostPath(place.path, place.kind) for place in request.shown]
    writable = [subject.HostPath(place.path, place.kind) for place in request.writable]
    own = [subject.HostPath(home, "dir"), subject.HostPath(temporary, "dir")]
    rules = [(folder, launch_plan.RUN) for folder in (*host.programs, host.inside)]
    rules += [(path, launch_plan.READ) for path in (*host.etc, "/proc/self")]
    rules += [(path, launch_plan.for_file(launch_plan.READ)) for path in (*_ETC, *(f"/proc/{name}" for name in _PROC))]
    rules += [(path, launch_plan.for_file(launch_plan.DEVICES) & ~_IOCTL) for path in _DEVICES]
    rules += granted_rights(shown, launch_plan.RUN) + granted_rights([*own, *writable], launch_plan.WRITE)
    return launch_plan.LaunchPlan(
        request=request,
        program=launch_plan.program_of(request, request.workdir_real or home, None, code, mounts=False),
        filter=program(host.machine, sockets=False, bare=True),
        landlock=launch_plan.ruleset(host.landlock, rules, network=False),
        limits=resource_limits(tool.sandbox.limits, data=launch_plan.limits_data(tool, host.groups)),
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


# --- the table of tiers -----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One tier."""

    #: Makes the launch plan of one jail. Raises GoondanError for what the tier cannot give.
    plan: Callable[[subject.Request, subject.HostFacts], launch_plan.LaunchPlan]
    #: The walls of its jails on a host, in the words of receipts.
    walls: Callable[[subject.HostFacts], list[Wall]]
    #: Whether a jail has namespaces and mounts of its own. Then bubblewrap makes it, and installs the filter.
    namespaces: bool


ROWS: Final[dict[Tier, Row]] = {
    "full": Row(plan_full, walls_full, namespaces=True),
    "reduced": Row(plan_reduced, walls_reduced, namespaces=False),
}


def plan(request: subject.Request, host: subject.HostFacts) -> launch_plan.LaunchPlan:
    """The launch plan of one jail.

    Raises GoondanError E_SANDBOX_UNAVAILABLE below the tool's `minTier`, and E_SANDBOX_DENIED for what cannot be given.
    """
    tool = request.tool
    least = tool.sandbox.min_tier
    if is_weaker(host.tier, least):
        lack = f": {host.lack}" if host.lack else ""
        text = f"the tool {tool.name} needs the {least} sandbox (minTier), and this host has the {host.tier} one{lack}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    return ROWS[host.tier].plan(request, host)


def has_namespaces(tier: Tier) -> bool:
    """Whether jails of that tier have namespaces and mounts of their own."""
    return ROWS[tier].namespaces
