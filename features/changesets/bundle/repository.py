"""The repository of a bundle: where it is, what is checked out, and whether somebody else is at work in it; and a new
one for a new bundle.

It is looked for from the bundle's folder upwards, by names and owners alone; git is asked only when the place is known.

Source: docs/decisions/067; docs/changesets.md.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from goondan.features.changesets.bundle.entries import EXECUTABLE, LINK, REGULAR, TreeEntry, within_prefix
from goondan.features.changesets.bundle.git import KERNEL, References, Store, installed, io_error, run
from goondan.schemas.wire.errors import GoondanError, fail

#: Of a file `.git` or `commondir` (bytes).
_MAX_POINTER: Final = 4096
#: Signs that somebody has begun an operation in a checkout and not ended it.
_BUSY: Final = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply", "BISECT_LOG")
#: How to get a repository.
MAKE_ONE: Final = "Make one in the bundle's folder: git init && git add -A && git commit -m 'The bundle'."


class Head(Struct, frozen=True):
    """The branch that is checked out, by its full name, and its commit."""

    #: The full name of the branch.
    ref: str
    #: Its commit.
    commit: str


class Repository:
    """The repository that the bundle at `root` (a folder: absolute, without links) is part of. `private` is a folder of
    our own for what belongs to it and not to them. Raises GoondanError E_CHANGESET_IO.
    """

    def __init__(self, root: str, private: str) -> None:
        self.top, git_dir = find(root)
        #: The bundle's folder in the repository, "" when it is its top.
        self.prefix = os.path.relpath(root, self.top) if root != self.top else ""
        self.git_dir = git_dir
        self.refs = References(git_dir)
        layout = self.refs.layout()
        self.common_dir, self.index = layout.common_dir, layout.index
        for place in (git_dir, self.common_dir):
            check_owner(place)
        self.store = Store(private, layout.objects, layout.object_format)

    def head(self) -> Head:
        """What is checked out. Raises GoondanError E_CHANGESET_IO without a branch or a commit, E_CHANGESET_CONFLICT
        while something is under way.
        """
        ref = self.refs.branch()
        if ref is None or not ref.startswith("refs/heads/"):
            message = f"{self.top} has no branch checked out that a changeset could become part of"
            raise io_error(message, "Check out a branch: git switch BRANCH.")
        commit = self.refs.commit_of(ref)
        if commit is None:
            message = f"{self.top} has no commit yet"
            raise io_error(message, "Commit the bundle: git add -A && git commit -m 'The bundle'.")
        for name in _BUSY:
            if os.path.lexists(os.path.join(self.git_dir, name)):
                raise conflict(f"a merge or rebase is under way in {self.top} ({name})", "Finish it, or give it up.")
        return Head(ref, commit)

    def uncommitted(self, commit: str, files: Mapping[str, TreeEntry]) -> list[str]:
        """The tracked files of the bundle's folder that are not as in the commit that is checked out."""
        if not os.path.exists(self.index):
            return sorted(path for path in files if within_prefix(path, self.prefix))
        found = {path for path in self.store.staged(self.index, commit) if within_prefix(path, self.prefix)}
        touched = [path for path in self.store.touched(self.index, self.top) if within_prefix(path, self.prefix)]
        entries = self.store.index_entries(self.index) if touched else {}
        for path in touched:
            entry = entries.get(path)
            if entry is None or not self.is_as(path, entry):
                found.add(path)
        return sorted(found)

    def is_as(self, path: str, entry: TreeEntry) -> bool:
        """Whether a file of the checkout has this content and mode."""
        place = os.path.join(self.top, path)
        try:
            state = os.lstat(place)
            if stat.S_ISLNK(state.st_mode):
                return entry.mode == LINK and self.store.oid_of(os.fsencode(os.readlink(place))) == entry.oid
            if not stat.S_ISREG(state.st_mode) or entry.mode == LINK:
                return False
            if bool(state.st_mode & stat.S_IXUSR) != (entry.mode != REGULAR):
                return False
            with open(place, "rb", buffering=0) as source:
                return self.store.is_content(source.fileno(), state.st_size, entry.oid)
        except OSError:
            return False

    def admin_dir(self, worktree: str) -> str:
        """Where the repository keeps what it knows of a worktree, by the worktree's name."""
        return os.path.join(self.common_dir, "worktrees", worktree)


def conflict(message: str, suggestion: str | None = None) -> GoondanError:
    """E_CHANGESET_CONFLICT."""
    return fail("E_CHANGESET_CONFLICT", message, suggestion=suggestion)


def find(root: str) -> tuple[str, str]:
    """The top of the checkout that a folder is in, and its git directory. Raises GoondanError E_CHANGESET_IO."""
    top = _top_of(root)
    if top is None:
        raise io_error(f"{root} is in no git repository", MAKE_ONE)
    place = os.path.join(top, ".git")
    check_owner(top)
    check_owner(place)
    mode = os.lstat(place).st_mode
    if stat.S_ISDIR(mode):
        return top, place
    if stat.S_ISREG(mode):
        return top, _pointed_at(place)
    raise io_error(f"{place} is neither a folder nor a file")


def _top_of(root: str) -> str | None:
    """The folder with a `.git`, a folder or one above it; None: it is in no repository, whoever one belongs to."""
    here = root
    while not os.path.lexists(os.path.join(here, ".git")):
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above
    return here


def check_owner(place: str) -> None:
    """Raises GoondanError E_CHANGESET_IO for what belongs to another user: they could make a repository of it that does
    what they want.
    """
    try:
        owner = os.lstat(place).st_uid
    except OSError as error:
        raise io_error(f"{place}: {error.strerror}") from None
    if owner != os.geteuid():
        raise io_error(f"{place} belongs to another user, of number {owner}", "Make the repository your own: chown -R.")


def _pointed_at(place: str) -> str:
    """The git directory that a file `.git` names: of a linked worktree or a submodule."""
    try:
        with open(place, "rb") as source:
            text = os.fsdecode(source.read(_MAX_POINTER)).strip()
    except OSError as error:
        raise io_error(f"{place}: {error.strerror}") from None
    if not text.startswith("gitdir: "):
        raise io_error(f"{place} names no git directory")
    found = os.path.realpath(os.path.join(os.path.dirname(place), text.removeprefix("gitdir: ")))
    if not os.path.isdir(found):
        raise io_error(f"{place} names {found}, which is not there")
    return found


def named(paths: Iterable[str], limit: int = 5) -> str:
    """The first of so many paths."""
    listed = list(paths)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


#: The branch of a new repository.
BRANCH = "main"


def begin_repository(folder: str, names: Iterable[str]) -> str:
    """Make a repository in `folder` (absolute), and commit the files of these names. `made`; `there`: the folder is in
    one already, which is left alone; `no git`; `failed`.
    """
    root = os.path.realpath(folder)
    if _top_of(root) is not None:
        return "there"
    if not installed():
        return "no git"
    try:
        _begin(root, list(names))
    except (GoondanError, OSError):
        return "failed"
    return "made"


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
        tree = store.write_tree(None, entries, layout.index)
        refs.begin(f"refs/heads/{BRANCH}", store.commit(tree, None, "A new bundle, from gdn init", KERNEL))
