"""Paths that no tool may be granted, no matter who asks and who accepts, and folders of the kernel that no jail may
see. Pure.

The kernel asks while it checks a bundle, so that the answer has a position. The tool host asks again for the real paths
of each launch, and adds folders that only it knows (the interpreter, our own code, the state root, the runtime
directory).

A state root holds conversations, logs, packages and the operator's policy; a runtime directory holds sockets and
tokens; the folder of the key holds what OAuth tokens are encrypted with. Nothing that is granted may be such a folder
or lie in one. There are exceptions: a workdir that is an instance's workspace, the package that a tool belongs to, and
the tool's own folder in the private copy that it is run from.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

#: Folders that are the system's, or that a jail makes itself; nothing in them can be a workdir or a grant to write.
SYSTEM: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32",
    "/proc", "/run", "/sbin", "/sys", "/usr", "/var/run",
)  # fmt: skip
#: A jail has these of its own, and the host's would replace them; /run besides holds the sockets of other programs.
OWN: Final = ("/dev", "/proc", "/run", "/sys")
#: These themselves cannot be a workdir or a write grant either, only folders in them.
TOP: Final = ("/", "/home", "/root", "/var", "/tmp", "/opt", "/srv", "/mnt", "/media")
#: Sockets that are as good as root: whoever speaks on them starts containers.
_SOCKETS: Final = ("docker.sock", "containerd.sock", "podman.sock", "crio.sock")


def within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it. Both absolute and without `..`."""
    return path == folder or path.startswith(folder if folder.endswith("/") else folder + "/")


def unreadable(path: str) -> str | None:
    """Why no tool may read `path` (absolute, normalised); None when one may. `/` stands for everything except the
    jail's own places.
    """
    if path.rpartition("/")[2] in _SOCKETS:
        return "it is the socket of a container engine, which is as good as root"
    if path == "/tmp" or (path != "/" and any(within(path, own) or within(own, path) for own in OWN)):
        return "every jail has its own"
    if within(path, "/var/run"):  # the same as /run, by a link that a jail's /var may show
        return "every jail has its own"
    return None


def unwritable(path: str, kept: Iterable[str] = (), home: str = "") -> str | None:
    """Why no tool may write to `path`; None when one may.

    `kept` are folders that must not be reached, not even through one that contains them: the state root, the runtime
    directory, interpreters, our code. `home` is the operator's.
    """
    reason = unreadable(path)
    if reason is not None:
        return reason
    if path in TOP or any(within(path, folder) for folder in SYSTEM):
        return "it is a folder of the system"
    for folder in kept:
        if within(folder, path) or within(path, folder):
            return f"it would reach {folder}"
    if home and home != "/":
        if within(home, path):
            return "it is the home directory, which holds what your own programs run and trust"
        if within(path, home) and path[len(home) + 1 :].startswith("."):
            return "it lies in a hidden folder of the home directory, which your own programs run and trust"
    return None


# --- folders that no jail may see -------------------------------------------------------------------------------------

#: The state root's name in the home directory of whoever has set no GOONDAN_STATE_ROOT.
STATE_ROOT: Final = ".goondan"
#: The place of the key of OAuth tokens in the same home directory, unless the environment names another place.
KEYS: Final = ".config/goondan/keys"
#: Entries below a state root, or below the state directory of one workspace, that are the kernel's alone.
_KERNELS: Final = ("workspaces", "instances", "toolhosts", "blobs", "logs")
_PACKAGES: Final = "packages"
#: The places of every user's runtime directories. Kernels make those with random names when the usual one is taken.
_RUNTIME: Final = re.compile(r"/tmp/goondan-[0-9]+(?:-[^/]*)?(?=/|$)")
#: Beneath the state directory of a workspace: copies of a bundle's code, which run if others can write to the bundle.
COPIES: Final = "private"


def runtime_bases(env: Mapping[str, str], uid: int) -> list[str]:
    """The folders in which kernels of the user `uid` have their runtime directories, as far as `env` tells."""
    bases = [f"/tmp/goondan-{uid}"]
    runtime = env.get("XDG_RUNTIME_DIR", "")
    return [f"{runtime.rstrip('/')}/goondan", *bases] if runtime.startswith("/") else bases


def runtime_place(path: str) -> str | None:
    """The folder of runtime directories in /tmp that `path` is or lies in, by its name; None when it lies in none."""
    found = _RUNTIME.match(path)
    return None if found is None else found[0]


def workspace_of(path: str, state: str) -> str | None:
    """The instance's workspace that `path` is or lies in; None when it lies in none.

    `state` is a state root or the state directory of one workspace. Both are absolute and without links and `..`.
    """
    if not within(path, state):
        return None
    parts = path[len(state) :].strip("/").split("/")
    depth = 6 if parts[0] == "workspaces" else 4
    below = parts[depth - 4 : depth]
    if len(parts) < depth or (below[0], below[3]) != ("instances", "workspace"):
        return None
    return "/".join([state.rstrip("/"), *parts[:depth]])


def uncovered(path: str, hidden: Iterable[str], own: str = "") -> str | None:
    """The hidden folder that `path` is or lies in; None when it may be shown for reading.

    `own` is the folder of the tool that asks: what belongs to its package is no secret to it.
    """
    folders = [folder for folder in hidden if within(path, folder)]
    if folders:
        return None if any(_is_own(path, folder, own) for folder in folders) else folders[0]
    return runtime_place(path)


def _is_own(path: str, folder: str, own: str) -> bool:
    if not own or own == folder or not within(own, folder):
        return False
    parts = own[len(folder) :].strip("/").split("/")
    if parts[0] == _PACKAGES:
        depth = 3 if parts[1:2] and parts[1].startswith("@") else 2
        # The folder of all packages, or of all of one scope, is no package.
        return len(parts) >= depth and within(path, "/".join([folder.rstrip("/"), *parts[:depth]]))
    copy = parts[2:] if parts[0] == "workspaces" else parts
    if copy[:1] == [COPIES] and len(copy) > 1:
        return within(path, own)
    if (workspace := workspace_of(own, folder)) is not None:  # a bundle that lies in a workspace
        return within(path, workspace)
    return parts[0] not in _KERNELS and within(path, own)
