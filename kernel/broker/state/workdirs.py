"""Which working directory an instance has, and which one a spawned instance gets. Pure: no file is looked at.

Rules.
- Without `cwd` an instance has a working directory of its own. With `cwd` it shares the asker's directory, or a folder
  in it. Any other directory must be opened by the operator's policy (`spawn.workdirs`).
- Jails that work in a directory can change its folders: a folder can become a link at any moment. So a shared directory
  has a base, the folder that the kernel or the operator has named. Tool hosts follow no link beneath the base
  (toolhost/lookup/folders.py). An instance that passes its directory on passes on the base, too.
- Agents with `workdir: shared` work in the directory of the entry agent's instance of the same key. What one of them
  asks another is done where the asker works, so an operator's directory counts for all of them. A directory that a
  spawn gave stays what it is.
- The policy can close a directory that it had opened. Then calls in this directory are refused.

Source: docs/design/sandbox.md section 1; requirement AGENTS-22.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from goondan.schemas.bundle.address import is_path
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within

#: The setting that a refusal names.
SETTING: Final = "spawn.workdirs"


class Beneath(Struct, frozen=True, array_like=True):
    """How a shared working directory is reached."""

    #: Links on the path to this folder are followed, links beneath it are not.
    base: str
    #: True when only the operator's policy has opened the directory.
    by_policy: bool = False


class Workdir(Struct, frozen=True):
    """A working directory."""

    #: An absolute path.
    path: str
    #: How it is reached when it is shared. None: it is the instance's own, or an operator has named it.
    beneath: Beneath | None = None


def shared(mine: Workdir, cwd: str, opened: Sequence[str]) -> Workdir:
    """The directory that `cwd` names for an asker that works in `mine`. `opened` are the folders of the policy.

    Raises GoondanError E_FORBIDDEN, E_TOOL_INVALID_ARGS.
    """
    home = posixpath.normpath(mine.path)
    path = posixpath.normpath(posixpath.join(home, cwd))
    if not is_path(path):
        raise fail("E_TOOL_INVALID_ARGS", "cwd is no path that the system takes", suggestion="Correct the argument.")
    if within(path, home):
        return Workdir(path, mine.beneath if mine.beneath is not None else Beneath(home))
    base = opening(path, opened)
    if base is None:
        message = f"cwd {path[:200]!r} lies outside of the asker's working directory"
        suggestion = (
            "Give a folder in the working directory, or leave cwd out. The operator opens other folders in "
            f"policy.yaml: {SETTING}."
        )
        raise fail("E_FORBIDDEN", message, suggestion=suggestion)
    return Workdir(path, Beneath(base, by_policy=True))


def passed_on(asker: Workdir, named: str | None, target: Workdir) -> str | None:
    """The path of the directory in which an agent does what another one asks, when both share their directory.

    `named` is that of the asker's turn, if an operator or an asker gave one. None: the target works where it always
    does.
    """
    if asker.beneath is not None or target.beneath is not None:
        return None
    path = named or asker.path
    return None if path == target.path else path


def opening(path: str, opened: Sequence[str]) -> str | None:
    """The folder of the policy that contains `path` or is `path`; None when there is none."""
    return next((folder for folder in opened if within(path, folder)), None)


def check_opened(workdir: Workdir, opened: Sequence[str]) -> None:
    """Raise GoondanError E_FORBIDDEN when the policy no longer opens this working directory."""
    beneath = workdir.beneath
    if beneath is not None and beneath.by_policy and beneath.base not in opened:
        message = f"the operator's policy does not open the working directory {workdir.path[:200]!r} any more"
        raise fail("E_FORBIDDEN", message, suggestion=f"Open it again in policy.yaml: {SETTING}.")
