"""Finds a workdir, or a folder in one, that other jails can exchange: beneath a base, without following any link.

A spawned agent works in a folder that its spawner has named. The spawner's own jails may put links there at any time.
So each start of a jail looks for the folder again, name by name from the base's descriptor. The launch opens the folder
once more, takes it only if it is at that very path, and binds the descriptor (jails/launch.py).

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from goondan.schemas.errors import GoondanError, fail

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def folder_beneath(base: str, path: str, *, what: str = "workdir") -> str:
    """The path without links of the folder `path`, which is `base` or lies in it (both absolute and normalised).

    Links on the way to `base` are followed, none after it. Raises GoondanError E_SANDBOX_DENIED, in which the folder is
    called `what`.
    """
    real = os.path.realpath(base)
    names = [name for name in path[len(base) :].split("/") if name]
    at, here = real, -1
    try:
        here = os.open(real, _FOLDER)
        for name in names:
            at = f"{at.rstrip('/')}/{name}"
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
    except OSError as error:
        raise _refused(path, at, error, what) from None
    finally:
        if here >= 0:
            os.close(here)
    return at


def _refused(path: str, at: str, error: OSError, what: str) -> GoondanError:
    problem, suggestion = f"cannot be opened at {at}: {error.strerror}", "Name an existing folder."
    if error.errno == errno.ENOENT:
        problem = f"is no folder: there is no {at}"
        suggestion = (
            "Make the folder, or spawn the agent with another cwd." if what == "workdir" else "Make the folder."
        )
    elif os.path.islink(at):
        problem, suggestion = f"leads through a link, {at}", "Use a folder; links are not followed there."
    return fail("E_SANDBOX_DENIED", f"the {what} {path} {problem}", suggestion=suggestion)
