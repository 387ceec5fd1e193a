"""Folders of the kernel that no jail may see: state roots, places of runtime directories, the folder of the key. Pure.

A state root holds conversations, logs, packages and the operator's policy; a runtime directory holds sockets and
tokens; the folder of the key holds what OAuth tokens are encrypted with. Nothing that is granted may be such a folder
or lie in one. There are exceptions: a workdir that is an instance's workspace, the package that a tool belongs to, and
the tool's own folder in the private copy that it is run from.

The kernel asks while it checks a bundle, by the paths as they are written. The tool host asks again for the real paths
of each launch.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from goondan.schemas.worker.grantable import within

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
