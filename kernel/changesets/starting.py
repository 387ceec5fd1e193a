"""A git repository for a new bundle.

Source: docs/changesets.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from goondan.kernel.changesets.entries import EXECUTABLE, REGULAR, TreeEntry
from goondan.kernel.changesets.git import KERNEL, References, Store, installed, run
from goondan.kernel.changesets.repository import find
from goondan.schemas.wire.errors import GoondanError

#: The branch of a new repository.
BRANCH = "main"


def begin_repository(folder: str, names: Iterable[str]) -> str:
    """Make a repository in `folder` (absolute), and commit the files of these names. `made`; `there`: the folder is in
    one already, which is left alone; `no git`; `failed`.
    """
    root = os.path.realpath(folder)
    if _is_in_repository(root):
        return "there"
    if not installed():
        return "no git"
    try:
        _begin(root, list(names))
    except (GoondanError, OSError):
        return "failed"
    return "made"


def _is_in_repository(root: str) -> bool:
    """Whether a folder is in a repository, whoever it belongs to."""
    here = root
    while True:
        if os.path.lexists(os.path.join(here, ".git")):
            return True
        above = os.path.dirname(here)
        if above == here:
            return False
        here = above


def _begin(root: str, names: list[str]) -> None:
    git_dir = os.path.join(root, ".git")
    run(git_dir, ["init", "--quiet", "--template=", f"--initial-branch={BRANCH}", root])
    refs = References(find(root)[1])
    layout = refs.layout()
    with tempfile.TemporaryDirectory() as private:
        store = Store(os.path.join(private, "private"), layout.objects, layout.object_format)
        entries: dict[str, TreeEntry | None] = {}
        for name in names:
            with open(os.path.join(root, name), "rb") as source:
                mode = EXECUTABLE if os.stat(source.fileno()).st_mode & 0o100 else REGULAR
                entries[name] = TreeEntry(mode, store.write_blob(source.read()))
        tree = store.new_tree(entries, layout.index)
        refs.begin(f"refs/heads/{BRANCH}", store.first_commit(tree, "A new bundle, from gdn init", KERNEL))
