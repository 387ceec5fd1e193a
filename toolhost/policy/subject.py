"""What a plan is made from: what is known about this host, and about one jail to be.

Source: docs/design/sandbox.md sections 1 and 2.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.launch import ToolSpec
from toolhost.privileges.tree import Tree
from toolhost.seccomp.numbers import Machine


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
    `code` are places of ours that stay read-only, `home` is the operator's home directory. `hide` are folders that
    never show, as they were named; `hidden` are all places at which those that exist stand, without links, and
    `absent` those that do not exist (hiding.py). `landlock` is the version of the kernel's interface, 0 without it.

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
    hide: list[str] = []
    hidden: list[str] = []
    absent: list[str] = []
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
    for an instance, or it lies in one that we made, whose path is `fallback_owner`; `sized`: and its file system
    keeps jails to `diskMb`; `made` is what was put into it so that it can be guarded. `entry_only`: the tool's folder
    is the bundle's, so only its entry file shows. `venv` is the declared environment, `venv_site` its package folder.
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
    fallback_owner: str | None = None
    sized: bool = False
    made: list[str] = []
