"""Running git so that nothing in a repository, a worktree or the environment makes it run a program.

Two kinds of commands.
- *About objects and indexes* (`Store`): their repository is a folder of our own, with a configuration that we wrote.
  Only its objects are those of the bundle's repository. So no configuration, no attributes and no hooks of anybody else
  are read: no filter, no merge driver and no file system monitor can be named.
- *About refs and worktrees* (`References`): these have to name the bundle's repository. Hooks, the file system monitor
  and every transport are switched off on the command line, which wins over that repository's configuration.

No command is ever run in a worktree, and none looks for a repository by itself.

Source: docs/decisions/067.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

from msgspec import Struct

from goondan.features.changesets.bundle.entries import TreeEntry
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError, fail

NAME: Final = "git"
#: How long one git command may take (seconds). The longest reads or writes every file of a repository once.
COMMAND_S: Final = 60.0
#: Characters of what git says that a message repeats.
MAX_SAID: Final = 300
#: Files in one commit of a repository. More make each look at it slow; such a bundle needs a repository of its own.
MAX_FILES: Final = 50_000
#: Switched off for every command, whatever the repository's own configuration says.
_OFF: Final = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.splitIndex=false",
    "core.fsync=all",
    "commit.gpgSign=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
    "submodule.recurse=false",
)


#: A lock that commands hold, too: when whoever runs one is killed, the lock is free only when the command has ended.
lent_lock: ContextVar[int | None] = ContextVar("lent_lock", default=None)


class Author(Struct, frozen=True):
    """Who a commit is by."""

    #: The name.
    name: str
    #: The address.
    email: str


#: Who moves branches: it stands in reflogs.
KERNEL: Final = Author("Goondan kernel", "kernel@goondan.invalid")


def io_error(message: str, suggestion: str | None = None) -> GoondanError:
    """E_CHANGESET_IO."""
    return fail("E_CHANGESET_IO", message, suggestion=suggestion)


def program() -> str:
    """Where git is. Raises GoondanError E_CHANGESET_IO."""
    found = shutil.which(NAME)
    if found is None:
        raise io_error("git is not installed", "Install git, then make a repository in the bundle's folder: git init.")
    return os.path.realpath(found)


def installed() -> bool:
    """Whether there is a git."""
    return shutil.which(NAME) is not None


def environment() -> dict[str, str]:
    """What git sees: nothing of ours but the search path."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": "/dev/null",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_COMMITTER_NAME": KERNEL.name,
        "GIT_COMMITTER_EMAIL": KERNEL.email,
    }


def run(
    git_dir: str,
    arguments: Iterable[str],
    *,
    data: bytes = b"",
    env: Mapping[str, str] | None = None,
    allowed: Iterable[int] = (0,),
) -> tuple[int, bytes]:
    """Run one command on a repository; its exit status, one of `allowed`, and its output.

    Raises GoondanError E_CHANGESET_IO.
    """
    settings = [part for setting in _OFF for part in ("-c", setting)]
    command = [program(), f"--git-dir={git_dir}", *settings, *arguments]
    lock = lent_lock.get()
    try:
        done = subprocess.run(
            command,
            input=data,
            capture_output=True,
            env={**environment(), **(env or {})},
            cwd="/",
            timeout=COMMAND_S,
            check=False,
            pass_fds=() if lock is None else (lock,),
        )
    except subprocess.TimeoutExpired:
        raise io_error(f"git {_verb(arguments)} took longer than {COMMAND_S:g} s") from None
    except (OSError, ValueError) as error:
        raise io_error(f"git {_verb(arguments)} could not be run: {error}") from None
    if done.returncode not in allowed:
        said = visible_line(done.stderr.decode("utf-8", "replace").strip())[:MAX_SAID]
        raise io_error(f"git {_verb(arguments)} failed: {said or f'exit status {done.returncode}'}")
    return done.returncode, done.stdout


def _verb(arguments: Iterable[str]) -> str:
    return next((part for part in arguments if not part.startswith("-")), "")


class Layout(Struct, frozen=True):
    """The places of a repository."""

    #: Where it keeps what all its worktrees share.
    common_dir: str
    #: The index of the checkout.
    index: str
    #: Where it keeps objects.
    objects: str
    #: How objects are named: `sha1` or `sha256`.
    object_format: str


class References:
    """The refs and worktrees of the bundle's repository. `git_dir` is that of its checkout."""

    def __init__(self, git_dir: str) -> None:
        self._git_dir = git_dir

    def layout(self) -> Layout:
        """Where the repository keeps what. Raises GoondanError E_CHANGESET_IO."""
        said = self._run(
            "rev-parse", "--path-format=absolute", "--git-common-dir", "--git-path", "index", "--git-path", "objects",
            "--show-object-format",
        )  # fmt: skip
        lines = said.decode("utf-8", "surrogateescape").split("\n")[:-1]
        if len(lines) != 4:
            raise io_error("the repository's path holds a line break")
        common, index, objects, object_format = lines
        return Layout(os.path.realpath(common), os.path.realpath(index), os.path.realpath(objects), object_format)

    def branch(self) -> str | None:
        """The full name of the branch that is checked out; None when it is a commit."""
        status, out = run(self._git_dir, ["symbolic-ref", "--quiet", "HEAD"], allowed=(0, 1))
        return None if status else os.fsdecode(out.removesuffix(b"\n"))

    def commit_of(self, ref: str) -> str | None:
        """The commit that a ref names; None when there is none."""
        status, out = run(self._git_dir, ["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], allowed=(0, 1))
        return None if status else out.decode().strip()

    def move(self, ref: str, new: str, old: str, message: str) -> None:
        """Move `ref` from `old` to `new`. Raises GoondanError E_CHANGESET_IO when it is not at `old`."""
        self._run("update-ref", "-m", message, ref, new, old)

    def begin(self, ref: str, commit: str) -> None:
        """Make a ref. Raises GoondanError E_CHANGESET_IO when there is one of that name."""
        self._run("update-ref", "-m", "begin", ref, commit, "")

    def add_worktree(self, folder: str, commit: str) -> None:
        """Register an empty worktree of a commit."""
        self._run("worktree", "add", "--quiet", "--detach", "--no-checkout", folder, commit)

    def _run(self, *arguments: str) -> bytes:
        return run(self._git_dir, arguments)[1]


class Store:
    """Objects and indexes. `private` is the folder of a repository of our own, which is made when it is missing. It has
    only a configuration. `objects` is the folder of the objects of the bundle's repository.
    """

    def __init__(self, private: str, objects: str, object_format: str) -> None:
        self._private = private = f"{private}-{object_format}"
        self._env = {"GIT_OBJECT_DIRECTORY": objects}
        self._format = object_format
        if not os.path.exists(os.path.join(private, "HEAD")):
            run(private, ["init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", private])

    def oid_of(self, data: bytes) -> str:
        """The name of a blob with this content."""
        digest = self._digest(len(data))
        digest.update(data)
        return digest.hexdigest()

    def is_content(self, file: int, size: int, oid: str) -> bool:
        """Whether a file, read from where its descriptor is, has `size` bytes, and as a blob this name."""
        digest, left = self._digest(size), size
        while left > 0 and (part := os.read(file, min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
        return left == 0 and not os.read(file, 1) and digest.hexdigest() == oid

    def _digest(self, size: int) -> hashlib._Hash:
        return (hashlib.sha256 if self._format == "sha256" else hashlib.sha1)(b"blob %d\0" % size)

    def tree_of(self, commit: str) -> str:
        """The tree of a commit."""
        return self._run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def files(self, treeish: str) -> dict[str, TreeEntry]:
        """Every file of a commit or tree, by its path. Raises GoondanError E_CHANGESET_IO for more than MAX_FILES."""
        found: dict[str, TreeEntry] = {}
        for line in self._run("ls-tree", "-r", "-l", "-z", "--full-tree", treeish).split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            mode, _, oid, size = about.split()
            found[os.fsdecode(path)] = TreeEntry(mode.decode(), oid.decode(), int(size) if size != b"-" else -1)
        if len(found) > MAX_FILES:
            raise io_error(f"the repository has more than {MAX_FILES} files")
        return found

    def blob(self, oid: str) -> bytes:
        """The content of one blob."""
        return self._run("cat-file", "blob", oid)

    def blobs(self, oids: Iterable[str], take: Callable[[str, bytes], Any]) -> None:
        """Call `take(oid, content)` for each, in order."""
        wanted = list(oids)
        for at in range(0, len(wanted), 256):
            part = wanted[at : at + 256]
            out = self._run("cat-file", "--batch", data="".join(f"{oid}\n" for oid in part).encode())
            here = 0
            for oid in part:
                line_end = out.index(b"\n", here)
                words = out[here:line_end].split()
                if len(words) != 3 or words[1] != b"blob":
                    raise io_error(f"the repository lacks the object {oid}")
                begin, size = line_end + 1, int(words[2])
                take(oid, out[begin : begin + size])
                here = begin + size + 1

    def write_blob(self, data: bytes) -> str:
        """Store a content as it is; its name."""
        return self._run("hash-object", "-w", "-t", "blob", "--no-filters", "--stdin", data=data).decode().strip()

    def write_tree(self, base: str | None, changes: Mapping[str, TreeEntry | None], index: str) -> str:
        """The tree of `base` (None: an empty one) with `changes`, in which None removes a file. `index` is a file that
        becomes an index of it.
        """
        clear_index(index)
        self._run("read-tree", base or "--empty", env=_index(index))
        self.change_index(index, changes)
        return self._run("write-tree", env=_index(index)).decode().strip()

    def change_index(self, index: str, changes: Mapping[str, TreeEntry | None]) -> None:
        """Put files into an index, or take them out."""
        none = "0" * (64 if self._format == "sha256" else 40)
        lines = b"".join(
            (f"0 {none}\t" if entry is None else f"{entry.mode} {entry.oid}\t").encode() + os.fsencode(path) + b"\0"
            for path, entry in changes.items()
        )
        self._run("update-index", "-z", "--index-info", data=lines, env=_index(index))

    def fill_index(self, index: str, treeish: str) -> None:
        """Make an index that has the files of a tree."""
        self._run("read-tree", treeish, env=_index(index))

    def staged(self, index: str, treeish: str) -> set[str]:
        """The files in which an index differs from a tree."""
        words = ("diff-index", "--cached", "--ignore-submodules=all", "--no-renames", "--name-only", "-z", treeish)
        return _paths(self._run(*words, env=_index(index)))

    def index_entries(self, index: str) -> dict[str, TreeEntry]:
        """What an index has, by path."""
        found: dict[str, TreeEntry] = {}
        for line in self._run("ls-files", "-s", "-z", "--full-name", env=_index(index)).split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            mode, oid, _ = about.split()
            found[os.fsdecode(path)] = TreeEntry(mode.decode(), oid.decode())
        return found

    def touched(self, index: str, work_tree: str) -> set[str]:
        """The files whose size or time differs from that in an index: they may have changed. No content is read."""
        env = {**self._env, **_index(index), "GIT_WORK_TREE": work_tree}
        _, out = run(
            self._private,
            ["-c", "core.bare=false", "diff-files", "--ignore-submodules=all", "--no-renames", "--name-only", "-z"],
            env=env,
        )
        return _paths(out)

    def commit(self, tree: str, parent: str | None, message: str, author: Author) -> str:
        """A commit; no branch names it yet. `parent` None: nothing comes before it."""
        env = {"GIT_AUTHOR_NAME": author.name, "GIT_AUTHOR_EMAIL": author.email}
        before = [] if parent is None else ["-p", parent]
        return self._run("commit-tree", "--no-gpg-sign", *before, tree, data=message.encode(), env=env).decode().strip()

    def has_ancestor(self, commit: str, ancestor: str) -> bool:
        """Whether `ancestor` is `commit` or comes before it."""
        status, _ = run(
            self._private, ["merge-base", "--is-ancestor", ancestor, commit], env=self._env, allowed=(0, 1, 128)
        )
        return status == 0

    def merge_file(self, ours: bytes, base: bytes, theirs: bytes, folder: str) -> bytes | None:
        """A text with the changes of both sides. None: both changed the same lines. `folder` is one of our own."""
        names = [os.path.join(folder, name) for name in ("ours", "base", "theirs")]
        try:
            for name, data in zip(names, (ours, base, theirs), strict=True):
                with open(name, "wb") as out:
                    out.write(data)
            status, merged = run(self._private, ["merge-file", "-p", "--quiet", *names], allowed=range(256))
        finally:
            for name in names:
                if os.path.exists(name):
                    os.unlink(name)
        return merged if status == 0 else None

    def diff(self, before: str, after: str) -> bytes:
        """The difference of two trees as a patch."""
        return self._run(
            "diff-tree", "-r", "-p", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", before, after
        )

    def _run(self, *arguments: str, data: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
        return run(self._private, arguments, data=data, env={**self._env, **(env or {})})[1]


def clear_index(index: str) -> None:
    """Remove an index of our own, and the files that a killed command has left beside it."""
    for path in (index, f"{index}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _paths(out: bytes) -> set[str]:
    return {os.fsdecode(path) for path in out.split(b"\0")[:-1]}


def _index(path: str) -> dict[str, str]:
    return {"GIT_INDEX_FILE": path}
