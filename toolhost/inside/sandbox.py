"""For tools that open paths which a model names: telling "does not exist" from "is not in this sandbox".

    from goondan_tool.sandbox import denied
    error = denied(path)          # a ToolError with the code E_SANDBOX_DENIED, or None
    if error is not None: raise error

Source: docs/design/tools.md section 9.
"""

from __future__ import annotations

import posix

from .api import ToolError

#: Kinds of file systems that are the jail's own: empty at its start, gone with it.
_PRIVATE = (b"tmpfs", b"devtmpfs")


def denied(path: str) -> ToolError | None:
    """The error for an absolute `path` that is missing because the sandbox does not show it; None when that is not why.

    A missing path below the workdir, the tool's folder, a grant or a system folder is simply missing. Elsewhere there
    are only folders that lead to those, so what is missing may well exist outside.
    """
    if _exists(path):
        return None
    mounts = mount_points()
    covering = max((point for point in mounts if within(path, point)), key=len, default="/")
    if mounts.get(covering, b"tmpfs") not in _PRIVATE:
        return None
    # In a private file system: what a tool has made there itself is no way to the outside.
    names = path[len(covering.rstrip("/")) :].strip("/").split("/")
    first = covering.rstrip("/") + "/" + names[0]
    if _exists(first) and not any(within(point, first) for point in mounts):
        return None
    return ToolError(
        f"{path} is outside of the sandbox: it lies in no folder that this tool was given",
        code="E_SANDBOX_DENIED",
        suggestion=f"Use a path in the workdir, or grant it: spec.sandbox.filesystem.read: [{path}] (or write).",
    )


def within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it."""
    return path == folder or path.startswith(folder if folder.endswith("/") else folder + "/")


def mount_points() -> dict[str, bytes]:
    """Where something is mounted in this jail, and which kind of file system; the newest mount of a place counts."""
    found: dict[str, bytes] = {}
    with open("/proc/self/mountinfo", "rb") as source:
        for line in source:
            before, _, after = line.partition(b" - ")
            fields = before.split()
            if len(fields) > 4:
                found[_unescape(fields[4])] = after.split()[0]
    return found


def _unescape(field: bytes) -> str:
    """Spaces and the like stand as \\040 in mountinfo."""
    parts = field.split(b"\\")
    out = parts[0]
    for part in parts[1:]:
        out += bytes([int(part[:3], 8)]) + part[3:]
    return out.decode("utf-8", "surrogateescape")


def _exists(path: str) -> bool:
    try:
        posix.stat(path)
    except (OSError, ValueError):
        return False
    return True
