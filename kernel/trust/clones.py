"""Whether a folder is a clone of a repository that somebody else can change. Git itself is never run there.

A repository's configuration can name programs that git runs, so it is only read, and only for sections that say where
the repository comes from. In doubt the answer is yes: then a person is asked once more.
"""

from __future__ import annotations

import os
import re
from typing import Final

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.lookup import Unreadable

#: Larger is no configuration that a person or git has written (bytes).
MAX_CONFIG: Final = 1 << 20
#: Of `.git` files, which hold one line with a path (bytes).
MAX_LINK: Final = 8192
#: A remote by itself, a branch that comes from an address, or a further file that can name one. Git reads several
#: sections in one line, so they are looked for anywhere.
_REMOTE: Final = re.compile(
    rb"\[\s*(?:remote|include|includeif|svn-remote)\b|\bremote[ \t]*=(?![ \t]*\.[ \t]*$)", re.IGNORECASE | re.MULTILINE
)


def comes_from_elsewhere(folder: str) -> bool:
    """Whether `folder` lies in a work tree with a remote: of git, also a worktree or a submodule, Mercurial,
    Subversion or Jujutsu. `folder` is absolute, with links resolved.
    """
    here = folder
    while True:
        if os.path.lexists(f"{here}/.git") and _has_remote(here):
            return True
        if os.path.lexists(f"{here}/.svn") or os.path.lexists(f"{here}/.hg/hgrc") or os.path.lexists(f"{here}/.jj"):
            return True
        if here == "/":
            return False
        here = os.path.dirname(here)


def _has_remote(top: str) -> bool:
    folder = f"{top}/.git"
    try:
        if not os.path.isdir(folder):
            text = read_file(folder, MAX_LINK)
            if not text.startswith(b"gitdir:"):
                return True
            named = os.fsdecode(text.partition(b":")[2].strip())
            folder = os.path.join(top, named)
        if os.path.lexists(f"{folder}/commondir"):  # a worktree: the configuration is the main one's
            folder = os.path.join(folder, os.fsdecode(read_file(f"{folder}/commondir", MAX_LINK).strip()))
        if not os.path.lexists(f"{folder}/config"):
            return True  # every repository has one, so this is something else
        for name in ("config", "config.worktree"):
            if os.path.lexists(f"{folder}/{name}") and _REMOTE.search(read_file(f"{folder}/{name}", MAX_CONFIG)):
                return True
        return os.path.lexists(f"{folder}/remotes") and bool(os.listdir(f"{folder}/remotes"))
    except (Unreadable, OSError, ValueError):
        return True
