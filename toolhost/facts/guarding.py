"""What is read-only in a folder that a jail may write to, and what is hidden in a folder that it sees, at this moment.

What exists is mounted read-only onto itself. A name that does not exist has nothing to mount onto. So in a folder that
holds the bundle, such names are made as empty folders before the first jail starts there, and removed after the last
one has ended. git and Python ignore empty ones.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from goondan.schemas.wire.errors import fail
from goondan.toolhost.policy.subject import GUARDED_NAMES, HostPath
from goondan.toolhost.privileges.powers import Powers

#: Names that are made where they are missing: programs of whoever next works in the folder run their content (git
#: hooks).
MADE_NAMES: Final = GUARDED_NAMES
#: Entries that are looked at, which takes some milliseconds of a cold start: a bundled environment can have 100,000.
MAX_SCANNED: Final = 2048
#: Folders that are not looked into: they hold thousands of others, or are guarded as a whole.
_SKIPPED: Final = frozenset({"node_modules", "__pycache__", ".venv", ".git"})


def existing(paths: list[str]) -> list[HostPath]:
    """Those that are real files or folders under exactly that name; a link cannot be mounted over."""
    places = []
    for path in paths:
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            if os.path.realpath(path) == path and (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                places.append(HostPath(path, "dir" if stat.S_ISDIR(mode) else "file"))
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
    """Remove the placeholders that are still empty, unless another tool host guards them."""
    for path in paths:
        with suppress(OSError):
            powers.remove_placeholder(path)


def dotfiles(root: str, documents: Iterable[str]) -> list[HostPath]:
    """What is masked in a tool's folder: names that begin with a dot, and the bundle's documents."""
    hidden = {os.path.realpath(path) for path in documents}
    masked: list[HostPath] = []
    for entry in scan(root, lambda name: not name.startswith(".")):
        is_dir = entry.is_dir(follow_symlinks=False)
        if not is_dir and not entry.is_file(follow_symlinks=False):
            continue  # a link leads to something that is masked itself, or out of what the jail sees
        if entry.name.startswith(".") or (not is_dir and entry.path in hidden):
            masked.append(HostPath(entry.path, "dir" if is_dir else "file"))
    return masked


def scan(root: str, enters: Callable[[str], bool]) -> Iterator[os.DirEntry[str]]:
    """The entries below a folder, breadth first and by name, at most MAX_SCANNED of them.

    `enters` says by a folder's name whether it is looked into. Links are not followed; what cannot be read is left out.
    """
    todo = deque([root])
    left = MAX_SCANNED
    while todo and left > 0:
        try:
            entries = sorted(os.scandir(todo.popleft()), key=lambda entry: entry.name)[:left]
        except OSError:
            continue
        left -= len(entries)
        for entry in entries:
            yield entry
            if enters(entry.name) and entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
