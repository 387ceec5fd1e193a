"""Which working directory a spawned instance gets. Pure: no file is looked at.

Rules.
- Without `cwd` an instance has a working directory of its own. With it, it shares the asker's or a folder below that;
  any other only where the operator's policy opens it (`spawn.workdirs`).
- Folders in a working directory belong to the jails that work there: what is a folder now is a link a moment later. So
  a shared directory has a base, the folder that the kernel or the operator has named, and tool hosts follow no link
  beneath it (toolhost/policy/beneath.py). An instance that hands its directory on hands on the base, too.
- What the policy has opened, it can close: then calls in there are refused.

Source: docs/decisions/060; requirement AGENTS-22.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from schemas.address import is_path
from schemas.errors import fail
from schemas.grantable import within

#: What a refusal names.
SETTING: Final = "spawn.workdirs"


class Beneath(Struct, frozen=True, array_like=True):
    """How a shared working directory is reached: links on the way to `base` are followed, none beneath it. `by_policy`:
    the operator's policy has opened it, and nothing else has.
    """

    base: str
    by_policy: bool = False


class Workdir(Struct, frozen=True):
    """A working directory, an absolute path. `beneath` None: it is the instance's own, or an operator's word."""

    path: str
    beneath: Beneath | None = None


def shared(mine: Workdir, cwd: str, opened: Sequence[str]) -> Workdir:
    """What `cwd` means for an asker that works in `mine`. `opened` are the folders of the policy.

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


def opening(path: str, opened: Sequence[str]) -> str | None:
    """The folder of the policy that `path` is or lies in; None when there is none."""
    return next((folder for folder in opened if within(path, folder)), None)


def check_opened(workdir: Workdir, opened: Sequence[str]) -> None:
    """Raise GoondanError E_FORBIDDEN when the policy opens this working directory no more."""
    beneath = workdir.beneath
    if beneath is not None and beneath.by_policy and beneath.base not in opened:
        message = f"the operator's policy does not open the working directory {workdir.path[:200]!r} any more"
        raise fail("E_FORBIDDEN", message, suggestion=f"Open it again in policy.yaml: {SETTING}.")
