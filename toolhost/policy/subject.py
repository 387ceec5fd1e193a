"""What a plan is made from, and which folders it refuses: what is known about this host and about one jail to be, and
what all jails have in common.

Source: docs/design/sandbox.md sections 1 and 2.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.bundle.launch import SandboxSpec, ToolSpec
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import runtime_place, uncovered, unreadable, unwritable, within, workspace_of
from goondan.schemas.worker.receipts import STRONGEST, Tier
from goondan.schemas.worker.worker_frames import WORKER_FD
from goondan.toolhost.policy.limits import Tree
from goondan.toolhost.policy.seccomp import Machine

Kind = Literal["dir", "file"]
#: Descriptors that jails/launch.py puts where the plan says. The worker's socket is WORKER_FD.
STATUS_FD: Final = 4
ARGS_FD: Final = 5
WORKDIR_FD: Final = 6
FILTER_FD: Final = 7
BOOT_FD: Final = 8
#: The first of the descriptors that hold LaunchPlan.files, in their order.
FILES_FD: Final = 10
#: Where this package's `inside` folder is in a jail. Tools import it by its name.
JAIL_CODE: Final = "/run/goondan/goondan_tool"
#: The home of every jail. It is private, empty at the start and gone with the jail; then its room (bytes).
JAIL_HOME: Final = "/run/goondan/home"
HOME_BYTES: Final = 64 << 20
#: The user of every jail, as the jail sees it; never 0, whoever runs the host.
JAIL_UID: Final = 1000
JAIL_GID: Final = 1000
JAIL_HOSTNAME: Final = "tool"
JAIL_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_FDS: Final = {WORKER_FD, STATUS_FD, ARGS_FD, WORKDIR_FD, FILTER_FD, BOOT_FD}


class HostPath(Struct, frozen=True):
    """An existing file or folder of the host."""

    #: Its path, without links.
    path: str
    #: Whether it is a file or a folder.
    kind: Kind
    #: How it was named; None: by its path.
    name: str | None = None

    @property
    def shown(self) -> str:
        """Where it stands in a jail."""
        return self.name or self.path


class CallFolder(Struct, frozen=True):
    """A folder that a call may work in."""

    #: Its path as the caller names it, at which it stands in the jail.
    path: str
    #: What is shown there: the folder without links, or a copy of it.
    source: str
    #: Which folder it is: another one gets another jail.
    identity: str
    #: What the jail gets.
    sandbox: SandboxSpec


class HostFacts(Struct, frozen=True, kw_only=True):
    """What the policy must know about this machine; lookup/this_host.py gathers it once."""

    #: The bubblewrap to run; "" in the tier reduced, and where there is none that can be used.
    bwrap: str
    #: The interpreter that jails run.
    python: str
    #: The folder of what is ours inside jails.
    inside: str
    #: The system's Perl, whose boot stage is the quicker one (inside/boot.pl); "" without one.
    perl: str = ""
    #: The kind of the processor, for the system call filter.
    machine: Machine
    #: Set when this host was started as root: the folder that the launcher may cover, in a namespace of its own, with
    #: what a jail is made from.
    stage: str | None = None
    #: What bubblewrap's program needs around it; None when it is the system's.
    bwrap_root: str | None = None
    #: The interpreter's installation; None when it is inside of /usr.
    prefix: str | None = None
    #: Links beside /usr that programs need, such as /lib64: (path, target).
    links: list[tuple[str, str]] = []
    #: Folders beside /usr that programs need.
    dirs: list[str] = []
    #: Paths below /etc that show in jails.
    etc: list[str] = []
    #: Files of /proc that tell about an ordinary user, such as the names of keys. They show empty.
    covered: list[str] = []
    #: Folders of ours that stay read-only.
    code: list[str] = []
    #: Folders that never show, as they were named.
    hide: list[str] = []
    #: All paths, without links, at which those of them stand that exist (hiding.py).
    hidden: list[str] = []
    #: Those of them that do not exist.
    absent: list[str] = []
    #: The operator's home directory.
    home: str = ""
    #: bubblewrap can forbid further user namespaces.
    disable_userns: bool = True
    #: There are user namespaces. Only root can do without: the jail begins as root then and drops that itself
    #: (plan.enclosure_of).
    user_namespaces: bool = True
    #: Root may bring up interfaces. Without this, and without user namespaces, no jail has a loopback interface.
    net_admin: bool = True
    #: The version of Landlock that the Linux kernel has; 0 without it.
    landlock: int = 0
    #: The best tier that the host can give.
    tier: Tier = STRONGEST
    #: In the tier reduced: what would give the full one.
    fix: str | None = None
    #: In the tier reduced, and without bubblewrap: why it is not the full one.
    lack: str | None = None
    #: What that bubblewrap answers to --version, for people.
    bwrap_version: str = ""
    #: Where control groups can be made; None where none can.
    groups: Tree | None = None
    #: The walls around one call were shown to hold inside of a jail: calls with `isolation: call` share one.
    nests: bool = False

    @property
    def programs(self) -> list[str]:
        """The folders that programs are in, and what they need."""
        return ["/usr", *self.dirs, *([self.prefix] if self.prefix else [])]

    @property
    def trusted(self) -> list[str]:
        """The folders, outside of the system's, whose code runs outside of jails: no jail may write there."""
        return [*self.code, *([self.prefix] if self.prefix else [])]

    def environment(self, home: str, temporary: str) -> dict[str, str]:
        """The variables that every jail has, with these folders."""
        path = f"{JAIL_PATH}:{self.prefix}/bin" if self.prefix else JAIL_PATH
        return {"PATH": path, "HOME": home, "TMPDIR": temporary, "LANG": "C.UTF-8"}

    def boot(self, folder: str) -> list[str]:
        """The command that is a jail's first; `folder` is where our code stands in the jail."""
        return [self.python, "-I", "-S", "-B", f"{folder}/boot.py"]


class Request(Struct, frozen=True, kw_only=True):
    """One jail to be made: its tool, and what lookup/jail_request.py found out about the paths that concern it."""

    #: The tool.
    tool: ToolSpec
    #: The workdir as the caller names it; None: there is none.
    workdir: str | None = None
    #: The workdir without links.
    workdir_real: str | None = None
    #: What exists in the workdir or a write grant and stays read-only (refusals.guard_candidates).
    guarded: list[HostPath] = []
    #: What is hidden in the tool's folder.
    masked: list[HostPath] = []
    #: What was granted for reading.
    read: list[HostPath] = []
    #: What was granted for writing.
    write: list[HostPath] = []
    #: The tool's folder is the bundle's, so only its entry file shows.
    entry_only: bool = False
    #: The declared environment.
    venv: str | None = None
    #: The folder of packages in it.
    venv_site: str | None = None
    #: The tier reduced: a folder to make for the jail.
    private: str | None = None
    #: The folder that we made for an instance, when the workdir is that or lies in it.
    workspace: str | None = None
    #: Placeholders that were made in the workdir so that they can be guarded.
    made: list[str] = []
    #: The folder that its calls work in, read-only, with its name in the jail. None: they name no folder, or one that
    #: shows anyway because it was granted for reading.
    folder: HostPath | None = None
    #: Where the tool's folder, or its entry alone, stands in the jail. None: at its own path.
    home: str | None = None
    #: The program and the folders of libraries of the JavaScript runtime, as far as they lie beside the system.
    runtime: list[HostPath] = []
    #: The folder of what bundled tools share, of one that lies elsewhere.
    shared: str | None = None

    @property
    def own(self) -> list[HostPath]:
        """The tool's folder, or its entry. A server without a folder has none."""
        if not self.tool.root:
            return []
        if self.entry_only:
            name = None if self.home is None else f"{self.home}/{self.tool.entry.rpartition('/')[2]}"
            return [HostPath(self.tool.entry, "file", name)]
        return [HostPath(self.tool.root, "dir", self.home)]

    @property
    def entry(self) -> str:
        """The path of the entry in the jail."""
        own = self.own[0]
        return own.shown + self.tool.entry[len(own.path) :]

    @property
    def granted(self) -> list[HostPath]:
        """The places that were granted for reading, the declared environment, what is shared, and the runtime."""
        folders = [HostPath(path, "dir") for path in (self.venv, self.shared) if path]
        return [*self.read, *folders, *self.runtime]

    @property
    def shown(self) -> list[HostPath]:
        """The places that show read-only."""
        return [*self.own, *self.granted]

    @property
    def writable(self) -> list[HostPath]:
        """What can be written to: write grants, then the workdir."""
        if self.workdir is None or self.workdir_real is None:
            return self.write
        return [*self.write, HostPath(self.workdir_real, "dir", self.workdir)]

    @property
    def named(self) -> list[str]:
        """The writable places that belong to somebody, as opposed to workdirs that we made."""
        return [place.path for place in self.writable if self.workspace is None or place.path != self.workdir_real]

    @property
    def import_paths(self) -> list[str]:
        """Folders of modules that the tool may import.

        A folder of which only the entry shows is left out: it may be the workdir, where any tool puts modules.
        """
        folder = self.tool.entry.rpartition("/")[0]
        paths = [] if self.entry_only else list(dict.fromkeys([folder, self.tool.root]))
        return [*paths, *(path for path in (self.shared, self.venv_site) if path)]


assert len(_FDS) == 6
assert max(_FDS) < FILES_FD


# --- folders that no jail may see, and those that no jail may write to ------------------------------------------------

#: Read-only in every workdir: their content later runs on the host (hooks and fsmonitor; .pth files; packages, grants).
GUARDED_NAMES: Final = (".git", ".venv", ".goondan")
#: Folders of the system, and those that a jail makes itself; no workdir lies in them.
SYSTEM: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32",
    "/proc", "/run/goondan", "/sbin", "/sys", "/usr",
)  # fmt: skip
#: These folders are no workdirs either; folders in them can be.
TOP: Final = ("/", "/run", "/home", "/var", "/tmp", "/var/tmp")

#: What helps against such a workdir. No grant does.
_ANOTHER: Final = "Give another folder, one for this work alone: mkdir ~/work, then --workdir ~/work."


def check_request(request: Request, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED for a place that no jail may have, or not in the way that is asked for."""
    if request.workdir_real is not None:
        check_workdir(request.workdir_real, host)
    for place in request.write:
        _check_write_grant(place.path, host)
    for place in request.granted:
        _check_read_grant(place.path)
        _check_read_grant(place.shown)
    for place in request.shown:
        for path in (place.path, place.shown):
            if (folder := uncovered(path, host.hidden, request.tool.root)) is not None:
                raise _hidden(place.shown, folder)


def check_workdir(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when a person's programs run or trust what lies in `path` (resolved)."""
    _check_writable(path, host)
    hidden = [folder for folder in host.hidden if within(path, folder)]
    if hidden:
        if all(workspace_of(path, folder) is None for folder in hidden):
            raise _hidden(f"the workdir {path}", hidden[0])
        return
    if (folder := runtime_place(path)) is not None:
        raise _hidden(f"the workdir {path}", folder)
    if host.home not in ("", "/") and within(host.home, path):
        text = f"{path} is or holds the home directory, with what your own programs run"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)
    if host.home not in ("", "/") and within(path, host.home) and path[len(host.home) + 1 :].startswith("."):
        text = f"{path} lies in a hidden folder of the home directory, which your programs trust"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)


def _check_writable(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED when no jail may write to `path` (resolved): a system folder, an interpreter, our code."""
    if path in TOP or any(within(path, folder) for folder in SYSTEM):
        text = f"{path} is a system folder and cannot be writable for a tool"
        raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)
    for folder in host.trusted:
        if within(path, folder):
            text = f"{path} lies in {folder}, which holds code that runs outside of jails"
            raise fail("E_SANDBOX_DENIED", text, suggestion=_ANOTHER)


def _check_write_grant(path: str, host: HostFacts) -> None:
    """Raise E_SANDBOX_DENIED for a write grant to a folder that has our state or code in it or around it."""
    place = runtime_place(path)
    reason = unwritable(path, [*host.hidden, *([place] if place else []), *host.trusted])
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted for writing: {reason}")


def _check_read_grant(path: str) -> None:
    """Raise E_SANDBOX_DENIED for a grant to read that would put the host's /proc, /dev or the like into a jail."""
    reason = "every jail has its own" if path == "/" else unreadable(path)
    if reason is not None:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be granted: {reason}")


def hidden_in_it(path: str, folder: str) -> GoondanError:
    """The error for a place that is, lies in or holds a hidden folder under a name that is not in the list."""
    text = f"{path} leads to {folder}, which no tool may see: the kernel keeps its state or its sockets there"
    return fail("E_SANDBOX_DENIED", text, suggestion="Name a folder outside of it, and as it is spelt.")


def _hidden(what: str, folder: str) -> GoondanError:
    text = f"{what} lies in {folder}, which no tool may see: the kernel keeps its state or its sockets there"
    return fail("E_SANDBOX_DENIED", text, suggestion="Name a folder outside of it.")


def guard_candidates(folder: str, tool: ToolSpec, protected: list[str], host: HostFacts) -> list[str]:
    """Paths inside the writable `folder` that must be read-only if they exist, each once."""
    wanted = [f"{folder}/{name}" for name in GUARDED_NAMES]
    roots = [*protected, *([tool.root] if tool.root else []), *host.trusted]
    wanted += [path for path in roots if within(path, folder) and path != folder]
    if within(tool.entry, folder):
        wanted.append(tool.entry)
    return list(dict.fromkeys(wanted))
