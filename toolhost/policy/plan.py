"""What a jail sees, as one exact launch plan: pure, so that every line of it can be tested.

Rules.
- A jail sees /usr, an interpreter, this package's `inside` folder, the tool's own folder, what was granted, and its
  workdir. Only the workdir, the write grants and private memory file systems can be written to.
- Inside a writable folder, what trusted programs later read or run stays read-only: `.git`, `.venv`, the bundle's
  documents, tool and extension folders, the kernel's own code, interpreters. The folders above such a place are
  mounted onto themselves, because a folder that is a mount point cannot be renamed away.
- The state root and the runtime directory never show, not even in a workdir that contains them, and cannot be moved.
- Mounts are made from the outermost to the innermost path, so that no later mount hides an earlier one by accident.
- As root, every place that bubblewrap takes something from is staged first: copied into a mount namespace where the
  jail's own user can reach it. What the system shows to everybody is taken from where it is.
- The plan is all of it: the launcher executes it and chooses nothing.

Source: sandbox.md sections 1 to 3; design section 12a.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from msgspec import Struct

from schemas.errors import fail
from schemas.grantable import unreadable, unwritable, within
from schemas.hosts import BadHost, read_network
from schemas.launch import Limits, ToolSpec
from schemas.receipts import Mechanism, Wall
from schemas.worker_frames import WORKER_FD
from toolhost.egress.rules import RESOLVER, Layout, lay_out
from toolhost.limits.plan import GroupPlan, Tree, group_plan, mechanisms, processes_of_a_namespace
from toolhost.policy.enclosure import CAPABILITIES as TO_DROP_WITH
from toolhost.policy.enclosure import Enclosure, account, enclosure
from toolhost.policy.landlock import DEVICES, LIST, READ, RUN, WRITE, Ruleset, for_file, ruleset
from toolhost.policy.nested import CAPABILITIES, OWN_PROCESSES, CallWalls, call_walls
from toolhost.seccomp.numbers import Machine
from toolhost.seccomp.program import program

#: Descriptors that jails/launch.py puts where the plan says; the worker's socket is schemas.worker_frames.WORKER_FD.
STATUS_FD: Final = 4
ARGS_FD: Final = 5
WORKDIR_FD: Final = 6
FILTER_FD: Final = 7
BOOT_FD: Final = 8
#: The first of the descriptors that hold LaunchPlan.files, in their order.
FILES_FD: Final = 10

#: Where this package's `inside` folder stands in a jail; its name is how tools import it.
JAIL_CODE: Final = "/run/goondan/goondan_tool"
#: Home of every jail: private, empty, gone with it.
JAIL_HOME: Final = "/run/goondan/home"
#: The one user of every jail; never 0, whoever runs the host.
JAIL_UID: Final = 1000
JAIL_GID: Final = 1000
JAIL_HOSTNAME: Final = "tool"
JAIL_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
#: Private memory file systems (bytes): room for a compiler's temporary files, a quarter of a small machine at most.
TMP_BYTES: Final = 256 << 20
HOME_BYTES: Final = 64 << 20
SHM_BYTES: Final = 64 << 20
#: What is a jail's own and gone with it: place, size in bytes, mode.
_PRIVATE: Final = (
    ("/dev/shm", SHM_BYTES, "1777"), ("/tmp", TMP_BYTES, "1777"), (JAIL_HOME, HOME_BYTES, "0700"),
)  # fmt: skip
# include/uapi/asm-generic/resource.h, the same on x86_64 and aarch64.
_RLIMIT_FSIZE, _RLIMIT_DATA, _RLIMIT_CORE, _RLIMIT_NPROC, _RLIMIT_NOFILE = 1, 2, 4, 6, 7
_RLIMIT_MEMLOCK, _RLIMIT_SIGPENDING = 8, 11
#: Locked memory (bytes), signals and timers that wait: they count for the operator as well where a jail runs as that
#: user, whose own programs then get none.
_LOCKED: Final = 64 << 10
_SIGNALS: Final = 1024
#: Read-only in every workdir: these run code on the host later (hooks and fsmonitor; .pth files; packages and grants).
GUARDED_NAMES: Final = (".git", ".venv", ".goondan")
_NET_ADMIN: Final = "Give the container CAP_NET_ADMIN, or let it have user namespaces."
#: Folders that are the system's, or that a jail makes itself; no workdir lies in them.
SYSTEM: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32",
    "/proc", "/run/goondan", "/sbin", "/sys", "/usr",
)  # fmt: skip
#: These themselves are no workdir either, only folders in them.
TOP: Final = ("/", "/run", "/home", "/var", "/tmp", "/var/tmp")


class Place(Struct, frozen=True):
    """An existing file or folder of the host: `path` is resolved, `name` is how it was named (default: the same)."""

    path: str
    kind: Literal["dir", "file"]
    name: str | None = None

    @property
    def shown(self) -> str:
        """Where it stands in a jail."""
        return self.name or self.path


class HostFacts(Struct, frozen=True, kw_only=True):
    """What the policy must know about this machine; facts.py gathers it once.

    `links` and `dirs` are the top-level entries beside /usr that programs need (/bin, /lib64, …), as link targets or
    as folders. `etc` are host paths below /etc to show. `prefix` is the interpreter's installation, None inside /usr.
    `covered` are files of /proc that tell about an ordinary user's own, such as the names of keys; they show empty.
    `code` are places of ours that stay read-only, `hidden` folders that never show, `home` is the operator's home
    directory. `landlock` is the version of the kernel's interface, 0 without it.

    `stage` is set when this host runs as root: the folder that the launcher may cover, in a namespace of its own, with
    what a jail is made from. `bwrap_root` is what bubblewrap's program needs around it, None when it is the system's.
    `groups` is where control groups can be made. On a host of the `tier` reduced `lack` says why it has not the full
    one, and `fix` what would give it. `nests`: the walls around one call have been shown to hold inside of a jail, so
    that calls with `isolation: call` share one; else each has its own. Without `user_namespaces`, which only root can
    do without, a jail begins as root and drops that itself (enclosure.py); nobody can bring up its loopback interface
    then without `net_admin`, which root mostly has.
    """

    bwrap: str
    python: str
    inside: str
    machine: Machine
    stage: str | None = None
    bwrap_root: str | None = None
    prefix: str | None = None
    links: list[tuple[str, str]] = []
    dirs: list[str] = []
    etc: list[str] = []
    covered: list[str] = []
    code: list[str] = []
    hidden: list[str] = []
    home: str = ""
    disable_userns: bool = True
    user_namespaces: bool = True
    net_admin: bool = True
    landlock: int = 0
    tier: Literal["full", "reduced"] = "full"
    fix: str | None = None
    lack: str | None = None
    groups: Tree | None = None
    nests: bool = False


class Request(Struct, frozen=True, kw_only=True):
    """One jail to be: the tool, and what facts.py found out about the paths that concern it.

    `workdir` is the path as the caller names it, `workdir_real` the same without symbolic links. `guarded` are the
    existing places inside the workdir or a write grant that stay read-only (candidates: `guard_candidates`), `masked`
    what is hidden in the tool's folder. `read` and `write` are the granted places. `own_workdir`: we made the workdir
    for an instance, `sized`: and its file system keeps jails to `diskMb`; `made` is what was put into it so that it can
    be guarded. `entry_only`: the tool's folder is the bundle's, so only its entry file shows. `venv` is the declared
    environment, `venv_site` its package folder.
    """

    tool: ToolSpec
    workdir: str | None = None
    workdir_real: str | None = None
    guarded: list[Place] = []
    masked: list[Place] = []
    read: list[Place] = []
    write: list[Place] = []
    entry_only: bool = False
    venv: str | None = None
    venv_site: str | None = None
    private: str | None = None
    own_workdir: bool = False
    sized: bool = False
    made: list[str] = []


Unmapped = Literal["shown", "copied", "given", "refused"]


class Stage(Struct, frozen=True):
    """A place that the launcher mounts at `at` before bubblewrap starts, its owner shown as the jail's user.

    `unmapped` is for a file system, or a host, on which owners cannot be shown as others. What is only read is `shown`
    as it is, or in a copy where not everybody may read it and it is small (`copied`); a workdir of ours is `given` to
    the instance's user, and what is somebody's own is `refused`. Without `mapped` this counts everywhere: root reads
    it before it drops its powers, and the jail's user afterwards.
    """

    source: str
    at: str
    kind: Literal["dir", "file"]
    read_only: bool
    unmapped: Unmapped = "refused"
    mapped: bool = True


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """Everything a launch needs. `options` go to bwrap through ARGS_FD, so that no other user reads them.

    `heir` is the folder whose user (uids.instance_uid) the jail becomes where its own cannot be shown as its owner: the
    workdir, or what was granted for writing last. `open_workdir` and the sources of `stages`
    are opened by us and must still be those very paths. Without a `stage` the former is handed over as WORKDIR_FD; with
    one, the jail has a user of its own, whichever is free. `filter` is the system call filter (FILTER_FD): bubblewrap
    puts it on every process of the jail, its own first one included.
    `landlock` and `limits` (resource, value) go to the jail's boot stage (BOOT_FD), which puts itself and all that
    follows under them. `files` are texts that bwrap reads from FILES_FD and the descriptors after it. `layout` is the
    inside of the network grant, None when there is none. In the reduced tier there is no bubblewrap: `command` is run
    with `environment`, and `private` is a folder to make for the jail, with a link to `code`; it goes with the jail.
    `seen` says which path of the host each place of the jail must be: (path there, path here). Between the look at the
    host and the mounts another jail could exchange a folder for a link; the boot stage sees that, and ends the jail.
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


def check_workdir(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when a person's programs run or trust what lies in `path` (resolved)."""
    check_writable(path, host)
    if any(within(path, folder) for folder in host.hidden):
        return  # of the state, which only an instance's workspace can be named in
    if host.home not in ("", "/") and within(host.home, path):
        raise fail("E_SANDBOX_DENIED", f"{path} is or holds the home directory, with what your own programs run")
    if host.home not in ("", "/") and within(path, host.home) and path[len(host.home) + 1 :].startswith("."):
        raise fail(
            "E_SANDBOX_DENIED", f"{path} lies in a hidden folder of the home directory, which your programs trust"
        )


def check_writable(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when no jail may write to `path` (resolved): a system folder, an interpreter, our code."""
    if path in TOP or any(within(path, folder) for folder in SYSTEM):
        raise fail("E_SANDBOX_DENIED", f"{path} is a system folder and cannot be writable for a tool")
    for folder in [*host.code, *([host.prefix] if host.prefix else [])]:
        if within(path, folder):
            raise fail("E_SANDBOX_DENIED", f"{path} lies in {folder}, which holds code that runs outside of jails")


def check_write_grant(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED for a grant to write where, or around where, our state or code is (sandbox.md 1)."""
    reason = unwritable(path, [*host.hidden, *host.code, *([host.prefix] if host.prefix else [])])
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted for writing: {reason}")


def check_read_grant(path: str) -> None:
    """Raise E_SANDBOX_DENIED for a grant to read that would put the host's /proc, /dev or the like into a jail."""
    reason = "every jail has its own" if path == "/" else unreadable(path)
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted: {reason}")


def guard_candidates(folder: str, tool: ToolSpec, protected: list[str], host: HostFacts) -> list[str]:
    """Paths inside the writable `folder` that must be read-only if they exist, each once."""
    wanted = [f"{folder}/{name}" for name in GUARDED_NAMES]
    roots = [*protected, tool.root, *host.code, *([host.prefix] if host.prefix else [])]
    wanted += [path for path in roots if within(path, folder) and path != folder]
    if within(tool.entry, folder):
        wanted.append(tool.entry)
    return list(dict.fromkeys(wanted))


def plan(request: Request, host: HostFacts) -> LaunchPlan:
    """The launch plan of one jail. Raises GoondanError E_SANDBOX_DENIED for what cannot be given."""
    if host.tier == "reduced":
        from toolhost.policy.reduced import plan_reduced  # it builds on what is here

        return plan_reduced(request, host)
    tool = request.tool
    if request.workdir_real is not None:
        check_workdir(request.workdir_real, host)
    for place in request.write:
        check_write_grant(place.path, host)
    for place in [*request.read, *([Place(request.venv, "dir")] if request.venv else [])]:
        check_read_grant(place.path)
        check_read_grant(place.shown)
    layout = _layout(tool)
    if layout is not None and not host.net_admin:
        text = f"the tool {tool.name} was granted a network, and no jail can have one here: root lacks CAP_NET_ADMIN"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=_NET_ADMIN)
    files = [] if layout is None else [layout.hosts, RESOLVER]
    sources = Sources(request, host)
    serves = forks(tool, host)
    trusted = OWN_PROCESSES if serves else 0
    mounts = sorted(_mounts(request, host, sources), key=lambda mount: (mount.path, mount.rank))
    covered = [] if serves else host.covered  # each call of a fork server has a new /proc, which covers them itself
    options = [
        *isolation(host, serves),
        *_system(host, sources, layout, covered),
        *_private(host),
        *_interpreter(host, sources),
    ]
    for mount in mounts:
        options += mount.options
    options = _with_parents(options)
    for path in ["/proc", "/dev", *_emptied(request, host), "/"]:
        options += ["--remount-ro", path]  # last, because innermost mounts may still need their mount points made
    network = tool.sandbox.network != "none"
    cwd = request.workdir or JAIL_HOME
    path = f"{JAIL_PATH}:{host.prefix}/bin" if host.prefix else JAIL_PATH
    environment = {"PATH": path, "HOME": JAIL_HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    for name, value in environment.items():
        options += ["--setenv", name, value]
    options += ["--chdir", cwd if host.user_namespaces else "/"]
    folder = tool.entry.rpartition("/")[0]
    # A folder of which only the entry shows may be the workdir, where any tool puts modules.
    import_paths = [] if request.entry_only else list(dict.fromkeys([folder, tool.root]))
    if request.venv_site is not None:
        import_paths.append(request.venv_site)
    return LaunchPlan(
        bwrap=sources.of(host.bwrap, host.bwrap_root) if host.bwrap_root and host.user_namespaces else host.bwrap,
        options=options,
        filter=program(host.machine, sockets=network, server=serves, drops=not host.user_namespaces),
        limits=resource_limits(tool.sandbox.limits, host.groups, trusted),
        landlock=ruleset(host.landlock, _rights(request, host), network=network),
        command=boot_command(host),
        open_workdir=None if host.stage else request.workdir_real,
        workdir=cwd,
        import_paths=import_paths,
        files=files,
        layout=layout,
        stage=host.stage,
        stages=sources.stages,
        seen=_seen_places(mounts),
        heir=next((real for real, _ in reversed(_writable(request))), None),
        enclosure=enclosure_of(host),
        walls=walls(host),
        mechanisms=mechanisms(host.groups, sized=request.sized and not request.write),
        totals=tool.sandbox.limits,
        writable=[real for real, _ in _writable(request)],
        named=named(request),
        guarded=[place.path for place in request.guarded],
        made=request.made,
        group=group_plan(host.groups, tool.sandbox.limits, trusted),
        alone=tool.sandbox.isolation == "call" and not serves,
        trusted=trusted,
        calls=call_walls(
            {place: f"size={size},mode={mode}" for place, size, mode in _PRIVATE},
            ["/".join(mount.path) for mount in mounts],
            cwd,
            program(host.machine, sockets=network),
            host.covered,
        )
        if serves
        else None,
    )


def start_of(bwrap: str, command: list[str]) -> list[str]:
    """How bubblewrap is started: its options come on ARGS_FD, so that no other user reads them."""
    return [bwrap, "--args", str(ARGS_FD), "--", *command]


def boot_command(host: HostFacts) -> list[str]:
    """What bubblewrap executes."""
    return [host.python, "-I", "-S", "-B", f"{JAIL_CODE}/boot.py"]


def forks(tool: ToolSpec, host: HostFacts) -> bool:
    """Whether the tool's calls are forked in a jail that they share, each behind walls of its own."""
    return tool.sandbox.isolation == "call" and host.nests and host.tier == "full" and host.user_namespaces


class Sources:
    """Where bubblewrap finds what it mounts: at its place, or staged."""

    def __init__(self, request: Request, host: HostFacts) -> None:
        self.stages: list[Stage] = []
        self._at: dict[str, str] = {}
        if host.stage is None:
            return
        for path, _ in _writable(request):
            kind: Literal["dir", "file"] = "file" if _is_file(request.write, path) else "dir"
            ours = request.own_workdir and path == request.workdir_real
            self._add(host.stage, Place(path, kind), "given" if ours else "refused")
        rooted = not host.user_namespaces
        if host.prefix is not None:
            self._add(host.stage, Place(host.prefix, "dir"), "shown", mapped=not rooted)
        self._add(host.stage, Place(host.inside, "dir"), "copied", mapped=not rooted)
        if host.bwrap_root is not None and not rooted:
            self._add(host.stage, Place(host.bwrap_root, "dir"), "shown")
        own, *granted = _shown(request)
        self._add(host.stage, own, "copied")
        for place in granted:
            self._add(host.stage, place, "shown")

    def _add(self, stage: str, place: Place, unmapped: Unmapped, *, mapped: bool = True) -> None:
        if place.path not in self._at and not within(place.path, "/usr"):
            at = self._at[place.path] = f"{stage}/{len(self.stages)}"
            read_only = unmapped in ("shown", "copied")
            self.stages.append(Stage(place.path, at, place.kind, read_only, unmapped, mapped))

    def of(self, path: str, root: str) -> str:
        """Where `path`, which is or lies in the staged place `root`, can be taken from."""
        return self._at[root] + path[len(root) :] if root in self._at and within(path, root) else path


def _is_file(places: list[Place], path: str) -> bool:
    return any(place.path == path and place.kind == "file" for place in places)


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


def walls(host: HostFacts) -> list[Wall]:
    """The walls of every jail that a plan for this host has, in the words of receipts and of `gdn doctor`."""
    there: list[tuple[Wall, bool]] = [
        ("namespaces", True),
        ("seccomp", True),
        ("landlock", host.landlock > 0),
        ("uid", host.stage is not None),
        ("limits", True),
    ]
    return [wall for wall, is_there in there if is_there]


def _layout(tool: ToolSpec) -> Layout | None:
    try:
        network = read_network(tool.sandbox.network)
    except BadHost as error:
        raise fail("E_SANDBOX_DENIED", f"the network of the tool {tool.name} cannot be read: {error}") from None
    return None if network.none else lay_out(network)


def isolation(host: HostFacts, serves: bool = False) -> list[str]:
    """What bubblewrap separates, before any mount: its first options."""
    options = (
        ["--unshare-user", "--uid", str(JAIL_UID), "--gid", str(JAIL_GID)] if host.user_namespaces else ["--as-pid-1"]
    )
    options += [
        "--unshare-pid",
        *(["--unshare-net"] if host.net_admin or host.user_namespaces else []),  # brings the loopback interface up
        "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
        "--hostname", JAIL_HOSTNAME, "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        "--json-status-fd", str(STATUS_FD), "--seccomp", str(FILTER_FD),
    ]  # fmt: skip
    for name in TO_DROP_WITH if not host.user_namespaces else CAPABILITIES if serves else ():
        options += ["--cap-add", name]
    return [*options, "--disable-userns"] if host.disable_userns and host.user_namespaces else options


def enclosure_of(host: HostFacts) -> Enclosure | None:
    """The root directory of bubblewrap; None where it needs none."""
    if host.stage is None or host.user_namespaces:
        return None
    shown = ["/usr", *host.dirs, *host.etc, *([host.bwrap_root] if host.bwrap_root else [])]
    return enclosure(host.stage, shown, host.links, JAIL_HOME, HOME_BYTES, network=not host.net_admin)


def _system(host: HostFacts, sources: Sources, layout: Layout | None, covered: list[str]) -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name, target in host.links:
        options += ["--symlink", target, name]
    for folder in host.dirs:
        options += ["--ro-bind", folder, folder]
    for name in ("passwd", "group", *(() if layout else ("hosts",)), "nsswitch.conf"):
        ours = sources.of(f"{host.inside}/etc/{name}", host.inside)
        if name in ("passwd", "group") and host.stage and not host.user_namespaces:
            ours = account(host.stage, name)
        options += ["--ro-bind", ours, f"/etc/{name}"]
    for index, name in enumerate(("hosts", "resolv.conf") if layout else ()):
        options += ["--perms", "0444", "--ro-bind-data", str(FILES_FD + index), f"/etc/{name}"]
    for path in host.etc:
        options += ["--ro-bind", path, path]
    # /proc as a whole becomes read-only at the end: sysctls, sysrq and other processes' memory are files in it.
    options += ["--proc", "/proc", "--dev", "/dev"]
    for path in covered:
        options += ["--ro-bind", "/dev/null", path]
    return options


def _private(host: HostFacts) -> list[str]:
    options: list[str] = []
    made = enclosure_of(host)
    for place, size, mode in _PRIVATE:
        if place == JAIL_HOME and made is not None:
            options += ["--bind", made.home, place]  # bubblewrap can give its own to nobody but itself
        else:
            options += ["--size", str(size), "--perms", mode, "--tmpfs", place]
    return options


def _interpreter(host: HostFacts, sources: Sources) -> list[str]:
    prefix = ["--ro-bind", sources.of(host.prefix, host.prefix), host.prefix] if host.prefix else []
    return [*prefix, "--ro-bind", sources.of(host.inside, host.inside), JAIL_CODE]


#: Options that put something at a place, and how many words they have: the place is the last one.
_PLACING: Final = {
    "--ro-bind": 3, "--bind": 3, "--bind-fd": 3, "--ro-bind-data": 3, "--symlink": 3,
    "--tmpfs": 2, "--proc": 2, "--dev": 2,
}  # fmt: skip


def _with_parents(options: list[str]) -> list[str]:
    """The options with the folders above each place, open to everybody: those that bubblewrap makes itself are closed
    to all but their owner.
    """
    made = {"/"}
    done: list[str] = []
    waiting: list[str] = []  # --perms and --size are for the option that comes next
    at = 0
    while at < len(options):
        words = _PLACING.get(options[at], 1)
        option = options[at : at + words]
        at += words
        if words == 1:
            if option[0] in ("--perms", "--size"):
                waiting += [option[0], options[at]]
                at += 1
            else:
                done += option
            continue
        place = option[-1]
        for above in _between("", place):
            if above not in made:
                made.add(above)
                done += ["--perms", "0755", "--dir", above]
        made.add(place)
        done += [*waiting, *option]
        waiting = []
    return done


class _Mount(NamedTuple):
    """It sorts by its path, as a list of names so that what is inside comes later, then by rank. `source` is the path
    of the host that shows there, None for what is of the jail's own.
    """

    path: list[str]
    rank: int
    options: list[str]
    source: str | None


_SHOWN, _WRITABLE, _GUARDED, _MASKED = range(4)


def _mounts(request: Request, host: HostFacts, sources: Sources) -> list[_Mount]:
    mounts: dict[tuple[str, int], _Mount] = {}

    def mount(path: str, rank: int, source: str | None, *options: str) -> None:
        mounts.setdefault((path, rank), _Mount(path.split("/"), rank, list(options), source))

    writable = _writable(request)
    for place in _shown(request):
        if not any(within(place.path, real) for real, _ in writable):
            mount(place.shown, _SHOWN, place.path, "--ro-bind", sources.of(place.path, place.path), place.shown)
    for real, shown in writable:
        if shown == request.workdir and host.stage is None:
            mount(shown, _WRITABLE, real, "--bind-fd", str(WORKDIR_FD), shown)
        else:
            mount(shown, _WRITABLE, real, "--bind", sources.of(real, real), shown)
        guarded = [place for place in _outermost(request.guarded) if place.path != real and within(place.path, real)]
        hidden = [path for path in host.hidden if path != real and within(path, real)]
        for kept in [*(place.path for place in guarded), *hidden]:
            for above in _between(real, kept):
                if not any(within(above, place.path) for place in guarded):
                    at = shown + above[len(real) :]
                    mount(at, _WRITABLE, above, "--bind", sources.of(above, real), at)
        for place in guarded:
            at = shown + place.path[len(real) :]
            mount(at, _GUARDED, place.path, "--ro-bind", sources.of(place.path, real), at)
    for place in request.masked:
        at = _seen(place.path, writable)
        if place.kind == "file":
            mount(at, _MASKED, None, "--ro-bind", "/dev/null", at)
    for at in _emptied(request, host):
        mount(at, _MASKED, None, "--perms", "0555", "--tmpfs", at)
    return list(mounts.values())


def _seen_places(mounts: list[_Mount]) -> list[tuple[str, str]]:
    """LaunchPlan.seen of these mounts, which are in their order: of several at one place the last one shows."""
    shows = {"/".join(mount.path): mount.source for mount in mounts}
    return [(at, source) for at, source in shows.items() if source is not None]


def _rights(request: Request, host: HostFacts) -> list[tuple[str, int]]:
    """What Landlock gives back: the same that the mounts give, by the paths of the jail."""
    rights = [("/", LIST), ("/usr", RUN), ("/etc", READ), ("/proc", READ), ("/dev", DEVICES), (JAIL_CODE, READ)]
    rights += [(folder, RUN) for folder in [*host.dirs, *([host.prefix] if host.prefix else [])]]
    rights += [(path, WRITE) for path in ("/dev/shm", "/tmp", JAIL_HOME)]
    writable = [place for place in request.write if place.kind == "file"]
    for place in _shown(request):
        rights.append((place.shown, RUN if place.kind == "dir" else for_file(RUN)))
    rights += [(shown, WRITE) for _, shown in _writable(request) if all(shown != file.shown for file in writable)]
    return rights + [(place.shown, for_file(WRITE)) for place in writable]


def _writable(request: Request) -> list[tuple[str, str]]:
    """Writable folders: the real path, and where it stands in the jail."""
    pairs = [(place.path, place.shown) for place in request.write]
    if request.workdir is not None and request.workdir_real is not None:
        pairs.append((request.workdir_real, request.workdir))
    return pairs


def named(request: Request) -> list[str]:
    """The writable places that are somebody's own."""
    return [real for real, _ in _writable(request) if not request.own_workdir or real != request.workdir_real]


def _shown(request: Request) -> list[Place]:
    """What shows read-only: the tool's folder, read grants, the declared environment."""
    tool = request.tool
    own = Place(tool.entry, "file") if request.entry_only else Place(tool.root, "dir")
    return [own, *request.read, *([Place(request.venv, "dir")] if request.venv else [])]


def _seen(path: str, writable: list[tuple[str, str]]) -> str:
    """Where a path of the host stands in the jail: a workdir keeps the name that the caller has for it."""
    for real, shown in reversed(writable):
        if within(path, real):
            return shown + path[len(real) :]
    return path


def _emptied(request: Request, host: HostFacts) -> list[str]:
    """Folders that show as empty ones: masked folders of the tool, and what is hidden inside anything that shows."""
    writable = _writable(request)
    folders = [shown for _, shown in writable] + [place.shown for place in _shown(request) if place.kind == "dir"]
    paths = [_seen(place.path, writable) for place in request.masked if place.kind == "dir"]
    for hidden in host.hidden:
        at = _seen(hidden, writable)
        # The workdir usually lies inside the state root; then nothing of the state root shows but the workdir.
        if any(at != folder and within(at, folder) for folder in folders):
            paths.append(at)
    return list(dict.fromkeys(paths))


def _outermost(places: list[Place]) -> list[Place]:
    """Without those that lie in another one: a writable mount inside a read-only folder would be a hole in it."""
    return [p for p in places if not any(p != other and within(p.path, other.path) for other in places)]


def _between(outer: str, inner: str) -> list[str]:
    """The folders strictly between two paths, outermost first."""
    names = inner[len(outer) + 1 :].split("/")[:-1]
    return [outer + "/" + "/".join(names[: index + 1]) for index in range(len(names))]


assert len({WORKER_FD, STATUS_FD, ARGS_FD, WORKDIR_FD, FILTER_FD, BOOT_FD}) == 6
assert max(WORKER_FD, STATUS_FD, ARGS_FD, WORKDIR_FD, FILTER_FD, BOOT_FD) < FILES_FD
