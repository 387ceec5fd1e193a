"""`python -m goondan.toolhost.disk check FOLDER`, and `list|mount|unmount STATE_ROOT`: workdirs with file systems
of their own.

    check:                 {"state": "sized" | "unable" | …, "allowed": 0, "why": TEXT}
    list, mount, unmount:  [{"workdir": PATH, "mounted": true, "usedBytes": 4096, "imageBytes": 8192, "problem": ""}, …]

`check` tries in an empty folder of its own below FOLDER whether such file systems can be made there. It leaves nothing
behind. `problem` says why a workdir could not be mounted or unmounted; "" when it was. Unmounting is never lazy: a file
system in use stays mounted.

The exit status is 0 for every result. Source: docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from typing import Final

import msgspec

from goondan.schemas.tool_host_reports import DiskRow
from goondan.toolhost.launcher import sized, sizes
from goondan.toolhost.launcher.request import Held

#: The paths of workdirs below a state root, and below the state directory of one workspace.
_IMAGES: Final = ("workspaces/*/instances/*/*", "instances/*/*")


def check(folder: str) -> Held:
    """Whether such file systems can be made below this folder."""
    try:
        with tempfile.TemporaryDirectory(prefix=".disk-check-", dir=folder) as empty:
            fd = os.open(empty, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return sized.check(fd)
            finally:
                os.close(fd)
    except OSError as error:
        return {"state": "unable", "allowed": 0, "why": error.strerror or str(error)}


def go_through(root: str, action: str) -> list[DiskRow]:
    """Mount or unmount all such file systems below a state root. `list` does neither."""
    folders = {folder for pattern in _IMAGES for folder in glob.glob(os.path.join(glob.escape(root), pattern))}
    return [_row(folder, action) for folder in sorted(folders) if os.path.lexists(f"{folder}/{sizes.IMAGE}")]


def _row(folder: str, action: str) -> DiskRow:
    problem = ""
    mounted = False
    workdir, image = f"{folder}/{sizes.POINT}", f"{folder}/{sizes.IMAGE}"
    used_bytes = 0
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if action == "unmount":
                sized.unmount(fd)
            elif action == "mount" and not sized.is_mounted(fd):
                problem = sized.mount(fd, None, make=False)["why"]
            mounted = sized.is_mounted(fd)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        mounted = os.path.ismount(workdir)
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if mounted:
        at = os.statvfs(workdir)
        used_bytes = (at.f_blocks - at.f_bfree) * at.f_frsize
    return DiskRow(
        workdir=workdir,
        mounted=mounted,
        used_bytes=used_bytes,
        image_bytes=os.lstat(image).st_blocks * 512,
        problem=problem,
    )


def main(arguments: list[str]) -> int:
    """Print the answer. Returns 0, or 2 for bad usage."""
    match arguments:
        case ["check", folder]:
            answer: object = check(folder)
        case [("list" | "mount" | "unmount") as action, root]:
            answer = go_through(root, action)
        case _:
            print(
                "usage: python -m goondan.toolhost.disk check FOLDER | list|mount|unmount STATE_ROOT", file=sys.stderr
            )
            return 2
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
