"""Paths and descriptors that root's processes use for somebody who may not be trusted: no link leads anywhere else.

Our code and our state stay read-only in every folder that a jail may write to, whatever the tool host plans. An honest
tool host's plan mounts all of it read-only as well (toolhost/policy). `keep` protects it from a tool host that is not.

Source: docs/design/sandbox.md section 5; docs/decisions/039.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from goondan.toolhost.launcher import syscalls
from goondan.toolhost.launcher.allow_list import NotAllowed, check_workspace, check_writable, within

TYPE_CHECKING = False  # see allow_list.py
if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import AllowList, Stage


@contextmanager
def opened(path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of that path, which is closed in the end and on exec. A new file gets `mode`. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def reopened(fd: int, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
    """A new descriptor of an open file or folder (O_PATH is enough), with other flags. Raises OSError."""
    return opened(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK)


def path_of(fd: int) -> str:
    """The path of an open file or folder, without links."""
    return os.readlink(f"/proc/self/fd/{fd}")


def write_all(fd: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    while content:
        content = content[os.write(fd, content) :]


def write_text(path: str, text: str) -> None:
    """Write a file of the Linux kernel. Raises OSError."""
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, text.encode())


def status_numbers(folder: str, name: str) -> list[int]:
    """The numbers in the line `name` of a process's status; `folder` is that of the process in /proc.

    Raises OSError, and ProcessLookupError when there is no such line: the process is gone.
    """
    with open(f"{folder}/status", encoding="ascii", errors="replace") as source:
        for line in source:
            if line.startswith(f"{name}:"):
                return [int(word) for word in line.split()[1:] if word.isdecimal()]
    raise ProcessLookupError(f"the process {folder.rpartition('/')[2]} is gone")


# --- places -----------------------------------------------------------------------------------------------------------

#: How many folders a path can have: Linux's paths have at most 4096 bytes.
_MAX_DEPTH = 2048
_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_folder(path: str) -> Iterator[int]:
    """Open the folder at exactly that path (O_PATH). Raises OSError, also when a link is on the way."""
    with opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
        if path_of(fd) != path:
            raise NotAllowed(f"{path} leads through a link")
        yield fd


def make_folders(root: str, names: list[str]) -> None:
    """Make a folder in a folder and so on, below `root`. They are root's and closed to others. Raises OSError.

    The owner of the last one can use it afterwards, whatever a tool made of its mode. Links on the way are followed
    only where root alone can have put them.
    """
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if name in ("", ".", ".."):
                raise NotAllowed("that is no path of a folder")
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=here)
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if _is_roots(here, name) else os.O_NOFOLLOW)
            inner = os.open(name, flags, dir_fd=here)
            os.close(here)
            here = inner
        let_owner_in(here)
    finally:
        os.close(here)


def let_owner_in(folder: int) -> None:
    """Give the owner of an open folder (O_PATH) the right to use it, which tools can take away. Raises OSError."""
    mode = stat.S_IMODE(os.fstat(folder).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(f"/proc/self/fd/{folder}", mode | stat.S_IRWXU)


def _is_roots(folder: int, name: str) -> bool:
    above = os.fstat(folder)
    return above.st_uid == 0 and not above.st_mode & 0o022 and os.lstat(name, dir_fd=folder).st_uid == 0


def hand_over(folder: int, uid: int) -> None:
    """Give a folder and the plain files in it to that user. Raises OSError.

    A former owner may be at work in it. So each name is looked at once, and the very file that was looked at is given
    away. A file with a second name is left alone.
    """
    with opened(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) as top:
        os.fchown(top, uid, uid)
        for name in os.listdir(top):
            with opened(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=top) as fd:
                found = os.fstat(fd)
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    os.chown(f"/proc/self/fd/{fd}", uid, uid)


def check_stages(
    stages: list[Stage], fds: list[int], allowed: AllowList, state_root: str | None
) -> list[ReadOnlyPlace]:
    """What must stay read-only in the stages that can be written to.

    Raises NotAllowed for a stage that could be written to, or would be given away, and must not be.

    Both its path and the folders that it lies in count: a folder of the system may be mounted elsewhere as well.
    """
    closed = None
    kept: list[ReadOnlyPlace] = []
    never = [*allowed["closed"], *([state_root] if state_root else [])]
    for index, (stage, fd) in enumerate(zip(stages, fds, strict=True)):
        if stage["unmapped"] == "given":
            check_workspace(path_of(fd), state_root)
        if stage["readOnly"]:
            continue
        check_writable(path_of(fd), allowed, state_root)
        if closed is None:
            closed = _identities(allowed["closed"])
        if not closed.isdisjoint(_above(fd)):
            raise NotAllowed(f"{path_of(fd)} lies in a folder that is never writable for a jail")
        kept += kept_in(index, path_of(fd), never)
    return kept


def _identities(paths: list[str]) -> set[tuple[int, int]]:
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(_identity(os.stat(path)))
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _above(fd: int) -> list[tuple[int, int]]:
    """A place and all folders above it, as (device, inode)."""
    status = os.fstat(fd)
    found = [_identity(status)]
    is_folder = stat.S_ISDIR(status.st_mode)
    here = os.dup(fd) if is_folder else os.open(os.path.dirname(path_of(fd)), os.O_PATH | os.O_CLOEXEC)
    try:
        for _ in range(_MAX_DEPTH):
            identity = _identity(os.fstat(here))
            if found[-1] == identity and len(found) > 1:
                return found  # the root
            found.append(identity)
            outer = os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = outer
    finally:
        os.close(here)
    raise NotAllowed(f"{path_of(fd)} lies too deep")


class ReadOnlyPlace:
    """A place in a stage that stays read-only: the number of the stage, the names that lead from there to the place,
    and the device and the inode that it has.
    """

    def __init__(self, stage: int, names: list[str], device: int, inode: int) -> None:
        self.stage = stage
        self.names = names
        self.device = device
        self.inode = inode


def kept_in(index: int, folder: str, places: list[str]) -> list[ReadOnlyPlace]:
    """Those of the places that lie in the folder of that stage. A place that lies in another one is left out."""
    inside = [path for path in dict.fromkeys(places) if path != folder and within(path, folder)]
    found = []
    for path in inside:
        if not any(path != other and within(path, other) for other in inside):
            with suppress(OSError):  # there is none on this machine
                status = os.lstat(path)
                names = path[len(folder.rstrip("/")) + 1 :].split("/")
                found.append(ReadOnlyPlace(index, names, status.st_dev, status.st_ino))
    return found


def keep(top: str, stages: list[Stage], kept: list[ReadOnlyPlace]) -> None:
    """Mount each kept place onto itself, read-only, in a mount namespace with the stages in their places.

    The folders on the way are mounted onto themselves as they are: a mount point cannot be renamed away. `top` is the
    folder from which the stages are seen. Raises OSError, also when something else is there meanwhile.
    """
    for place in kept:
        here = os.open(top + stages[place.stage]["at"], _FLAGS | os.O_DIRECTORY)
        try:
            for name in place.names:
                inner = _mounted(here, name)
                os.close(here)
                here = inner
            status = os.fstat(here)
            if (status.st_dev, status.st_ino) != (place.device, place.inode):
                raise _replaced(place.names)
            syscalls.set_attributes(here, read_only=True, user_namespace=None, recursive=True)
        finally:
            os.close(here)


def _mounted(folder: int, name: str) -> int:
    """Make that place in a folder a mount of its own. Returns a descriptor of it."""
    with opened(name, _FLAGS, dir_fd=folder) as fd:
        before = os.fstat(fd)
        if stat.S_ISLNK(before.st_mode):
            raise _replaced([name])
        if _mount_of(fd) != _mount_of(folder):
            return os.dup(fd)
        syscalls.bind_to_itself(fd)
    fd = os.open(name, _FLAGS, dir_fd=folder)
    if not os.path.samestat(before, os.fstat(fd)) or _mount_of(fd) == _mount_of(folder):
        os.close(fd)
        raise _replaced([name])
    return fd


def _mount_of(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as source:
        return next(line for line in source if line.startswith("mnt_id:"))


def _replaced(names: list[str]) -> OSError:
    return OSError(errno.EBUSY, f"{'/'.join(names)} was replaced while a jail was being started")
