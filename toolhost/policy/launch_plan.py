"""The plan of one jail: everything that its launch needs, its Landlock ruleset, and the walls of each call that a fork
server in it makes. Pure.

Landlock is the second wall over files, connections and signals. It only takes away, and what it took never comes back.
It holds for what runs after it, so the jail's boot stage (inside/confine.py) applies it before any tool code. It cannot
make an exception below a path that it allows: only a mount keeps something inside a workdir read-only.

The jail of a tool in JavaScript or TypeScript differs from another one.
- Its tool stands at JAIL_TOOL. Both runtimes look for packages, `package.json` and `tsconfig.json` in every folder
  above a module. At its own path some of those could be a workdir, where any tool puts files.
- The boot stage becomes the runtime in place of our Python worker, when the walls are up.
- The runtime shows read-only, where it lies beside the system.
- Node takes half of the memory that its control group has for its heap. A jail shows no control group, so these files
  say what the tool has. An option would say it too, but with one Node throws away the compiled code that it brings,
  and starts 25 ms later.
- Linux counts address space that V8 takes ahead as data (RLIMIT_DATA). Where a control group keeps the memory, that
  limit is left out.

The plans of all tiers are made in plan.py.

With `isolation: call` a jail's first worker never loads the tool. It forks for every call, and the child gets process,
mount and IPC namespaces of its own, fresh private file systems, a fresh /proc, and then the walls that every jail has:
no capabilities, the filter, Landlock. For that the server keeps two capabilities inside of the jail's user namespace,
and a filter that lets it use them; neither reaches a call.

- What is private to a jail is fresh for every call. What was granted or mounted below such a place shows through.
- A new /proc is read-only, as the jail's is: the kernel refuses one that shows more.

Source: docs/design/sandbox.md sections 3.5, 5 and 9; the kernel's landlock.rst; docs/decisions/030 and 144.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from goondan.schemas.bundle.launch import JavaScriptRuntime, ToolSpec, entry_kind
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.receipts import STRONGEST, Mechanism, Tier, Wall
from goondan.toolhost.policy.limits import GroupPlan, Tree
from goondan.toolhost.policy.seccomp import NUMBERS, Machine
from goondan.toolhost.policy.subject import Request
from goondan.toolhost.traffic.rules import Layout

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import Enclosure, Stage

# --- Landlock ---------------------------------------------------------------------------------------------------------

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_MAKE_DEVICES: Final = 1 << 6 | 1 << 11

#: The rights on files of each version of the interface: all bits up to this one.
_FILE_RIGHTS: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_TCP: Final = 0b11  # bind and connect, from version 4
_SCOPES: Final = 0b11  # abstract sockets and signals, from version 6

LIST: Final = _READ_DIR
READ: Final = _READ_FILE | _READ_DIR
RUN: Final = READ | _EXECUTE
#: Everything that can be done to files and folders, except making device nodes and driving devices.
WRITE: Final = ((1 << 15) - 1) & ~_MAKE_DEVICES
DEVICES: Final = READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
#: The rights that something other than a folder can have; Linux refuses a rule with more.
_FOR_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


class Ruleset(Struct, frozen=True, rename="camel"):
    """A Landlock ruleset, as the boot stage applies it. The numbers are bits of the interface."""

    #: Rights on files that are taken away.
    files: int
    #: Rights on connections that are taken away.
    net: int
    #: What is kept inside the jail: abstract sockets, signals.
    scopes: int
    #: What is given back: (path, rights).
    rules: list[tuple[str, int]]


def ruleset(abi: int, rules: list[tuple[str, int]], *, network: bool) -> Ruleset | None:
    """The ruleset for a Linux kernel with that version of Landlock; None for one without it.

    `rules` give rights to what is at and below a path, as the jail sees it. `network`: a grant says what may be
    reached, so Landlock leaves TCP to it.
    """
    if abi < 1:
        return None
    known = _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]
    return Ruleset(
        files=known,
        net=_NET_TCP if abi >= 4 and not network else 0,
        scopes=_SCOPES if abi >= 6 else 0,
        rules=[(path, rights & known) for path, rights in rules if rights & known],
    )


def for_file(rights: int) -> int:
    """The part of the rights that a file can have."""
    return rights & _FOR_FILES


# --- tools in JavaScript and TypeScript -------------------------------------------------------------------------------

#: Where the tool's folder is, or its entry when only that shows.
JAIL_TOOL: Final = "/run/goondan/tool"
#: The worker, below the folder of our code.
WORKER: Final = "javascript/worker.mjs"
#: Where a runtime reads the memory of its control group (bytes), in both versions of these.
MEMORY_FILES: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.high",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.soft_limit_in_bytes",
)
#: Without these files, the part of `memoryMb` that Node's heap may take; the rest is its own, that of buffers and that
#: of programs.
_HEAP_PART: Final = 0.5


def is_javascript(tool: ToolSpec) -> bool:
    """Whether a JavaScript runtime loads the entry of this tool."""
    return tool.server is None and entry_kind(tool.entry) == "javascript"


def runtime_of(tool: ToolSpec) -> JavaScriptRuntime | None:
    """The runtime of the tool; None when its entry needs none. Raises GoondanError E_SANDBOX_UNAVAILABLE when it needs
    one and there is none.
    """
    if is_javascript(tool) and tool.javascript is None:
        text = f"no jail of the tool {tool.name} can be made: {tool.lack or 'it has no JavaScript runtime'}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=tool.lack_fix or None)
    return tool.javascript if is_javascript(tool) else None


def limits_data(tool: ToolSpec, groups: Tree | None) -> bool:
    """Whether each process of the tool is kept to its memory by itself (RLIMIT_DATA)."""
    return not is_javascript(tool) or groups is None or groups.memory is None


def command(runtime: JavaScriptRuntime, code: str, heap_of_mb: int | None) -> list[str]:
    """What the boot stage becomes; `code` is the folder of our code in the jail.

    `heap_of_mb`: the memory of the tool where no MEMORY_FILES say it (MiB).
    """
    worker = f"{code}/{WORKER}"
    if runtime.name == "bun":
        # Whatever lies in the workdir is any tool's: no settings, no variables and no packages come from there.
        return [runtime.program, "--no-install", "--config=/dev/null", "--env-file=/dev/null", "--smol", worker]
    heap = [] if heap_of_mb is None else [f"--max-old-space-size={max(16, int(heap_of_mb * _HEAP_PART))}"]
    # SIGUSR1, which any program in the jail can send, would open the inspector: that runs code in the worker.
    return [runtime.program, *heap, "--disable-sigusr1", "--disable-warning=ExperimentalWarning", worker]


def memory_files(tool: ToolSpec) -> list[tuple[str, str]]:
    """The files of a jail with mounts that say the memory of its tool: (path, text)."""
    return [(path, f"{tool.sandbox.limits.memory_mb << 20}\n") for path in MEMORY_FILES] if is_javascript(tool) else []


# --- the plan ---------------------------------------------------------------------------------------------------------

#: Stands for the workdir in the command and the variables of a server that has one.
WORKDIR: Final = "${WORKDIR}"
#: The capabilities that a fork server keeps, by the names that bubblewrap takes: to make namespaces and mounts, and to
#: take both capabilities from the bounding set of a call.
SERVER_CAPABILITIES: Final = {"CAP_SYS_ADMIN": 21, "CAP_SETPCAP": 8}
#: Calls that one jail runs at a time.
MAX_CALLS: Final = 16
#: Processes that are not the tool's: the server, the first process of each call's namespace, and one call made ahead.
OWN_PROCESSES: Final = 1 + MAX_CALLS + 2
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC = 1, 2, 4, 8


class Program(Struct, frozen=True):
    """What a jail runs in place of our Python worker: an MCP server, or a JavaScript runtime with its worker."""

    #: The program, by its absolute path or its name in PATH, and its arguments.
    argv: list[str]
    #: Variables on top of the jail's own.
    env: dict[str, str] = {}
    #: It waits until the host closes its end of the worker's socket, and does not get that socket.
    gated: bool = False

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without variables."""
        return f"Program(argv={self.argv!r})"


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """Everything that a launch needs: pure data, which the launcher executes as it is.

    Between the look at the host and the mounts, another jail could exchange a folder for a link. So a place that is
    opened must still be at its path, and the boot stage compares places with `seen`.
    """

    #: What was asked for.
    request: Request
    #: The bubblewrap to run; "" in the reduced tier.
    bwrap: str = ""
    #: Its options. They pass through ARGS_FD, so that no other user reads them.
    options: list[str] = []
    #: The system call filter (FILTER_FD). bubblewrap puts it on every process of the jail, the first one included.
    filter: bytes
    #: The Landlock ruleset, for the boot stage (BOOT_FD).
    landlock: Ruleset | None
    #: Resource limits (resource, value), for the boot stage.
    limits: list[tuple[int, int]]
    #: What runs in the jail; in the reduced tier what is run, without bubblewrap.
    command: list[str]
    #: The workdir that we open, which must still be at that path. Without `stage` it is handed over as WORKDIR_FD.
    open_workdir: str | None = None
    #: The workdir as the jail sees it.
    workdir: str
    #: Texts that bubblewrap reads from FILES_FD and the descriptors after it.
    files: list[str] = []
    #: The inside of the network grant; None when there is no grant.
    layout: Layout | None = None
    #: Where places are staged under root; the jail has a user of its own then. None: nothing is staged.
    stage: str | None = None
    #: What is staged there: the path of the host, which we open and which must still be at that path, and how.
    stages: list[tuple[str, Stage]] = []
    #: The folder whose user (uids.instance_uid) the jail becomes where a file system cannot show the jail's own user as
    #: owner: the instance's workspace that the workdir is or lies in, else the workdir, or the last write grant.
    fallback_owner: str | None = None
    #: Set when the jail drops root itself.
    enclosure: Enclosure | None = None
    #: Which path of the host each place of the jail must be: (path in the jail, path of the host).
    seen: list[tuple[str, str]] = []
    #: Hidden folders inside what the jail sees. Their content is covered; what appears there later is not.
    hiding: list[str] = []
    #: The tier of the jail.
    tier: Tier = STRONGEST
    #: Its walls, in the words of receipts.
    walls: list[Wall] = []
    #: What keeps each limit.
    mechanisms: dict[str, Mechanism] = {}
    #: Folders of the host that the jail may write to.
    writable: list[str] = []
    #: The jail's control groups.
    group: GroupPlan | None = None
    #: Reduced tier: a folder to make for the jail, with a link to `code`. It goes with the jail.
    private: str | None = None
    #: Reduced tier: our worker's folder.
    code: str = ""
    #: Reduced tier: the environment of `command`.
    environment: dict[str, str] = {}
    #: The walls of each call, when the jail is a fork server's.
    calls: CallWalls | None = None
    #: The jail is for one call, because calls cannot be forked here.
    alone: bool = False
    #: How many processes of ours count beside the tool's.
    trusted: int = 0
    #: The jail runs this in place of our Python worker.
    program: Program | None = None
    #: Its boot stage is the quicker one, which becomes `program` and does nothing else (inside/boot.pl).
    quick: bool = False


def program_of(
    request: Request, workdir: str, layout: Layout | None, code: str, *, mounts: bool = True
) -> Program | None:
    """What a jail runs in place of our Python worker, whose code is in `code`: a server, which works in `workdir`, or a
    JavaScript runtime. None for a tool in Python. `mounts`: the jail has mounts of its own.
    """
    server = request.tool.server
    if server is None:
        runtime = runtime_of(request.tool)
        heap_of_mb = None if mounts else request.tool.sandbox.limits.memory_mb
        return None if runtime is None else Program(command(runtime, code, heap_of_mb))
    argv, env = server.command, server.env
    if server.scope == "agent":
        argv = [word.replace(WORKDIR, workdir) for word in argv]
        env = {name: value.replace(WORKDIR, workdir) for name, value in env.items()}
    return Program(argv, {**({} if layout is None else layout.environment), **env}, gated=True)


def quick_boot_plan(plan: LaunchPlan, seen: Mapping[str, tuple[int, int]], machine: Machine) -> bytes:
    """The plan of the quicker boot stage (inside/boot.pl): words, each followed by a zero byte.

    `seen`: the device and the inode that places of the jail must have.
    """
    words: list[object] = [NUMBERS[machine]["prlimit64"]]
    for path, identity in seen.items():
        words += ["seen", path, *identity]
    for number, value in plan.limits:
        words += ["limit", number, value]
    if (ruleset := plan.landlock) is not None:
        words += ["ruleset", ruleset.files, ruleset.net, ruleset.scopes]
        for path, rights in ruleset.rules:
            words += ["rule", path, rights]
        words.append("restrict")
    assert plan.program is not None
    return b"".join(
        str(word).encode("utf-8", "surrogateescape") + b"\0" for word in [*words, "exec", *plan.program.argv]
    )


class Fresh(Struct, frozen=True):
    """A new file system for a call."""

    #: Its kind.
    kind: str
    #: Where it is mounted.
    at: str
    #: The flags of mount(2).
    flags: int
    #: Its own options.
    options: str


class CallWalls(Struct, frozen=True, kw_only=True):
    """What a call gets."""

    #: New file systems, in this order.
    fresh: list[Fresh]
    #: Places of the jail that show through, at their own paths.
    kept: list[str]
    #: Where the call starts.
    workdir: str
    #: The numbers of the capabilities that no call may have.
    drop: list[int]
    #: The call's system call filter (hexadecimal).
    filter: str
    #: Files of the new /proc that show empty.
    covered: list[str] = []


def call_walls(
    private: dict[str, str], mounted: Iterable[str], workdir: str, filter_: bytes, covered: Iterable[str] = ()
) -> CallWalls:
    """`private` are the jail's memory file systems (place -> options), `mounted` the other places where there is a
    mount.
    """
    points = set(mounted)
    own = [place for place in private if place not in points]  # one that was granted is no call's own
    below = [point for point in points if any(point != place and within(point, place) for place in own)]
    # A place comes with everything that lies inside it.
    kept = [point for point in below if not any(point != other and within(point, other) for other in below)]
    fresh = [Fresh("tmpfs", place, _NO_SUID | _NO_DEV, private[place]) for place in own]
    fresh.append(Fresh("devpts", "/dev/pts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=620"))
    fresh.append(Fresh("proc", "/proc", _READ_ONLY | _NO_SUID | _NO_DEV | _NO_EXEC, ""))
    return CallWalls(
        fresh=fresh,
        kept=sorted(kept),
        workdir=workdir,
        drop=sorted(SERVER_CAPABILITIES.values()),
        filter=filter_.hex(),
        covered=list(covered),
    )
