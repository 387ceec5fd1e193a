"""Paths that no tool may be granted, no matter who asks and who accepts. Pure.

The kernel asks while it checks a bundle, so that the answer has a position. The tool host asks again for the real paths
of each launch, and adds folders that only it knows (the interpreter, our own code, the state root, the runtime
directory).

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterable
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
