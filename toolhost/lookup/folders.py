"""Folders that jails work in: how they are found without a link, what a jail gets that works in one, and what is
read-only and hidden there at this moment.

A workdir, or a folder in one, can be exchanged by other jails. A spawned agent works in a folder that its spawner has
named, and the spawner's own jails may put links there at any time. So each start of a jail looks for the folder again,
name by name from the base's descriptor (`folder_beneath`). The launch opens the folder once more, takes it only if it
is at that very path, and binds the descriptor (jails/launch.py).

An agent's process names the folder of a call, and may have been taken over. So a name proves nothing:
- A folder beneath the workdir is found without following a link. Tools can write there, so its jail gets the defaults.
  Where the operator has pinned the content of the folder, it gets what that pin says, and a private copy of just this
  content: nothing that is changed afterwards runs with the pin's powers.
- A folder in a place that the tool was granted for reading is found in the same way, and gets the tool's sandbox.
- Any other folder is refused.

What exists is mounted read-only onto itself. A name that does not exist has nothing to mount onto. So in a folder that
holds the bundle, such names are made as empty folders before the first jail starts there, and removed after the last
one has ended. git and Python ignore empty ones.

Source: docs/design/sandbox.md sections 1 and 2; docs/design/tools.md section 14; requirement SKILL-14.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from goondan.schemas.bundle import address, launch
from goondan.schemas.system.digests import MAX_PINNED_BYTES, MAX_PINNED_FILES, NoDigest, folder_digest
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within
from goondan.toolhost.policy.subject import GUARDED_NAMES, CallFolder, HostPath
from goondan.toolhost.privileges.powers import Powers

#: How many copies of pinned folders are kept. Operators pin few; another one is copied again.
MAX_COPIES: Final = 64
_COPY_MODE: Final = 0o755
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderCopies:
    """Private copies of pinned folders, each by its digest. Not for two threads at a time."""

    def __init__(self, place: str | None = None) -> None:
        """`place` is a folder for the copies. It need not exist. What is in it is removed. None: a temporary one."""
        self._place = place
        self._top: str | None = None
        self._made: dict[str, str] = {}

    def of(self, folder: str, digest: str) -> str | None:
        """A copy of the folder with exactly this content; None when it has another one by now. Raises OSError."""
        if (known := self._made.get(digest)) is not None:
            return known
        if self._top is None:
            self._top = self._make_top()
        from tempfile import mkdtemp  # few tools ask for a copy, and it takes 2 ms to import

        place = mkdtemp(dir=self._top)
        os.chmod(place, _COPY_MODE)  # it is shown to the user of a jail
        try:
            found = folder_digest(folder, max_files=MAX_PINNED_FILES, max_bytes=MAX_PINNED_BYTES, copy_to=place)
        except NoDigest:
            found = ""
        if found != digest:
            remove_tree(place)
            return None
        if len(self._made) >= MAX_COPIES:
            remove_tree(self._made.pop(next(iter(self._made))))
        self._made[digest] = place
        return place

    def _make_top(self) -> str:
        if self._place is None:
            from tempfile import mkdtemp

            return mkdtemp(prefix="gdn-folders-")
        remove_tree(self._place)
        os.makedirs(self._place, 0o700, exist_ok=True)
        return self._place

    def close(self) -> None:
        """Remove all copies."""
        if self._top is not None:
            remove_tree(self._top)
            self._top, self._made = None, {}


def folder_of_call(
    folder: str,
    tool: launch.ToolSpec,
    agent: str,
    workdir: str | None,
    base: str | None,
    writable: Iterable[str],
    copies: FolderCopies,
) -> CallFolder:
    """The folder that a call of this agent names. Reads files. Raises GoondanError E_SANDBOX_DENIED, and OSError when a
    copy cannot be made.

    `workdir` and `base` are the call's. `writable` are the places that some tool may write to.
    """
    grants = tool.folders.get(agent)
    if grants is None:
        raise fail("E_SANDBOX_DENIED", f"calls of the tool {tool.name} name no folder")
    if not address.is_path(folder) or os.path.normpath(folder) != folder:
        raise fail("E_SANDBOX_DENIED", f"the folder {folder[:200]!r} is no absolute path without `.` and `..`")
    if workdir is not None and within(folder, named := os.path.normpath(workdir)) and folder != named:
        real = folder_beneath(os.path.normpath(base or workdir), folder, what="folder")
        digest = _digest(real) if grants.pinned else ""
        if digest in grants.pinned and (copy := copies.of(real, digest)) is not None:
            return CallFolder(folder, copy, digest, grants.pinned[digest])
        return CallFolder(folder, real, _identity(real), grants.workdir)
    # A link can give the workdir another name than the one under which the place was granted.
    own = [] if workdir is None else [workdir]
    for place in tool.sandbox.filesystem.read:
        top = os.path.normpath(os.path.expanduser(place))
        if address.is_path(top) and within(folder, top):
            real = folder_beneath(top, folder, what="folder")
            if any(within(real, os.path.realpath(other)) for other in (*writable, *own)):
                readable = msgspec.structs.replace(grants.workdir, filesystem=launch.Filesystem(read=[place]))
                return CallFolder(folder, real, _identity(real), readable)
            return CallFolder(folder, real, _identity(real), tool.sandbox)
    raise _outside(folder, tool)


def _digest(folder: str) -> str:
    """The digest of a folder; "" when it has none, so that nothing is pinned for it."""
    try:
        return folder_digest(folder, max_files=MAX_PINNED_FILES, max_bytes=MAX_PINNED_BYTES)
    except NoDigest:
        return ""


def _identity(folder: str) -> str:
    status = os.stat(folder)
    return f"{status.st_dev}:{status.st_ino}"


def _outside(folder: str, tool: launch.ToolSpec) -> GoondanError:
    text = f"the folder {folder} is neither in the workdir nor in a place that the tool {tool.name} was granted"
    return fail("E_SANDBOX_DENIED", text, suggestion="Put it into the workdir, or grant its place for reading.")


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


# --- what is read-only, and what is hidden ----------------------------------------------------------------------------

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
