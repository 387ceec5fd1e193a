"""The work of ordinary handlers: nothing, some files, a program of the system."""

from __future__ import annotations

import os
import subprocess
from typing import Any

#: Bytes of one file: the size of a source file.
SIZE = 4096
FILES = 10


def nothing(ctx: Any, input: dict[str, Any]) -> dict[str, Any]:
    """The arguments, as they came."""
    return input


def files(ctx: Any, input: dict[str, Any]) -> dict[str, Any]:
    """Write, stat, read and delete FILES files in the workdir."""
    total = 0
    for number in range(FILES):
        path = os.path.join(ctx.workdir, f"{number}.txt")
        with open(path, "wb") as file:
            file.write(b"x" * SIZE)
        total += os.stat(path).st_size
        with open(path, "rb") as file:
            total += len(file.read())
        os.unlink(path)
    return {"bytes": total}


def program(ctx: Any, input: dict[str, Any]) -> dict[str, Any]:
    """Run a program that does nothing."""
    return {"exitCode": subprocess.run(["/bin/true"], check=False).returncode}


handlers = {"nothing": nothing, "files": files, "program": program}
