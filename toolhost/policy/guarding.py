"""What stays read-only inside a folder that a jail may write to, as it is on this host: found, or made to be there.

What exists is mounted read-only onto itself. A name that does not exist has nothing to mount onto: in a folder that
holds the bundle, such names are made as empty folders before the first jail starts there, and removed after the last
one has ended; git and Python take no notice of empty ones.

Source: docs/design/sandbox.md section 2; docs/decisions/034.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from schemas.errors import fail
from toolhost.policy.refusals import GUARDED_NAMES
from toolhost.policy.scanning import scan
from toolhost.policy.subject import Place
from toolhost.privileges.powers import Powers

#: Made where they are missing: what lies in them is run by whoever next works in the folder, git's hooks, say.
MADE_NAMES: Final = GUARDED_NAMES
#: Folders that are not looked into: they hold thousands of others, or are guarded as a whole.
_SKIPPED: Final = frozenset({"node_modules", "__pycache__", ".venv", ".git"})


def existing(paths: list[str]) -> list[Place]:
    """Those that are real files or folders under their very names; a link cannot be mounted over."""
    places = []
    for path in paths:
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        if os.path.realpath(path) == path and (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            places.append(Place(path, "dir" if stat.S_ISDIR(mode) else "file"))
    return places


def refuse_links(folder: str) -> None:
    """Raise E_SANDBOX_DENIED when a guarded name of an operator's folder is a link: a tool could replace it."""
    for name in GUARDED_NAMES:
        path = f"{folder}/{name}"
        if os.path.islink(path):
            text = f"{path} is a link, which a tool could replace by something that you run later"
            raise fail("E_SANDBOX_DENIED", text, suggestion="Put the folder itself there, or name another directory.")


def repositories(folder: str) -> list[str]:
    """`.git` of repositories, submodules and worktrees below a folder, as far as MAX_SCANNED entries tell."""
    below = scan(folder, lambda name: name not in _SKIPPED)
    return [entry.path for entry in below if entry.name == ".git" and os.path.dirname(entry.path) != folder]


def remove_placeholders(paths: list[str], powers: Powers) -> None:
    """Remove those that are still empty, unless another tool host guards them."""
    for path in paths:
        with suppress(OSError):
            powers.remove_placeholder(path)
