"""Folders and files of the state: a directory is opened step by step from the root, so that other users of this machine
cannot exchange it; files are put in place whole, and trees that jails have written are removed.

A path is text: it can lead to another file a moment after it was checked. So `open_directory` opens every component
relative to the one before it, without following links, looks at what it has opened, and gives the last one back as a
descriptor. Callers use the descriptor (`dir_fd=`), or the path that was found on the way.

Rules for each component.
- It belongs to root or to us.
- Nobody else may change it: it is not writable for its group or for others, unless it is sticky (there, everybody can
  add names and nobody can take ours away). A group whose only member is the user counts as the user.
- A link is followed by hand if it belongs to root or to us and lies in a directory that nobody else can add names to.
  In a sticky directory that everybody can write to, no link is followed: others can give a link of root's a second
  name.
- A missing directory is made, if the caller asks for that, with mode 0700, in a directory that was checked before.
- From `private_from` on, a directory belongs to us, not to root, and is closed to everybody else.

Nobody reads half of a file of the state, and nothing is written through a name. The new content is written to a file of
its own whose name nobody can guess, made in this moment (O_EXCL, no links), and takes the old one's place by its name.
An entry that is there already, for example a link to another file, is replaced and not followed.

A tree that a jail has written may be deeper than any recursion, and closed to its owner.

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

#: Links followed on the way to one directory: the system's own limit.
MAX_LINKS: Final = 40
#: The mode of what is made here.
PRIVATE: Final = 0o700
#: Opens without permission to read, and so a directory that we may only pass through.
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL: Final = "system.posix_acl_access"
_PASSWD: Final = "/etc/passwd"  # noqa: S105 - a file with no passwords
_GROUP: Final = "/etc/group"

#: Told of what was mended: the path and the mode that it had.
Mended = Callable[[str, int], None]


def quoted(word: str) -> str:
    """`word` as one word of a POSIX shell, whatever is in it."""
    from shlex import quote  # every program checks folders when it starts; only one that refuses a folder needs this

    return quote(word)


class DirectoryRefused(Exception):
    """A directory that must not be used. `path` is the component, `problem` what is wrong with it, `fix` what helps."""

    def __init__(self, path: str, problem: str, fix: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem
        self.fix = fix


class Directory:
    """An open directory: `fd` is its descriptor, `path` leads to it without any link. Close it, or use `with`."""

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_directory(
    path: str,
    *,
    make: bool = False,
    private_from: str | None = None,
    mend: Mended | None = None,
    owners: Collection[int] | None = None,
) -> Directory:
    """Open the directory at `path` (absolute), if nobody else can change which one that is.

    `make`: make what is missing, with mode 0700. `private_from`: this component of `path` and those below it must be
    ours and closed to others; `mend`: where only their mode is wrong, it is set right, and this function is told.
    `owners`: the users that count as us besides root (default: the effective user).

    Raises DirectoryRefused, FileNotFoundError without `make`, and other OSErrors; their `filename` is the component.
    """
    if not path.startswith("/") or "\0" in path:
        raise DirectoryRefused(repr(path), "is not an absolute path", "Give an absolute path.")
    ours = frozenset((os.geteuid(),) if owners is None else owners)
    walk = _Walk(ours, make, mend)
    try:
        return walk.to(path, private_from)
    finally:
        walk.close()


class _Walk:
    """The way to one directory: `fd` is the directory that it has come to, with its path and state."""

    def __init__(self, owners: frozenset[int], make: bool, mend: Mended | None) -> None:
        self._owners = owners
        self._make = make
        self._mend = mend
        self._links = 0
        self._fd = -1
        self._path = ""
        self._open = False
        #: Names that are still to be entered, the next one last, and whether each must be private.
        self._pending: list[tuple[str, bool]] = []

    def to(self, path: str, private_from: str | None) -> Directory:
        """Go all the way; once only."""
        names = _names(path)
        public = len(names) if private_from is None else len(_names(private_from)) - 1
        if private_from is not None and names[: public + 1] != _names(private_from):
            raise ValueError(f"{path} is not in {private_from}")
        self._pending = [(name, at >= public) for at, name in enumerate(names)][::-1]
        self._enter(os.open("/", _LOOK | os.O_DIRECTORY), "/", False)
        while self._pending:
            self._step(*self._pending.pop())
        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except PermissionError:  # one to pass through only
            fd, self._fd = self._fd, -1
        return Directory(fd, self._path)

    def close(self) -> None:
        """Leave where it has come to."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _step(self, name: str, private: bool) -> None:
        path = os.path.dirname(self._path) if name == ".." else os.path.join(self._path, name)
        try:
            fd = self._look(name)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        try:
            state = os.fstat(fd)
            target = self._target(fd, path, state) if stat.S_ISLNK(state.st_mode) else None
            if target is None and not stat.S_ISDIR(state.st_mode):
                raise DirectoryRefused(path, "is not a directory", f"Remove it: rm {quoted(path)}")
        except BaseException:
            os.close(fd)
            raise
        if target is None:
            self._enter(fd, path, private)
            return
        os.close(fd)
        names = _names(target)
        # The link stands for its target, so the target's last component is what the link was expected to be.
        self._pending += [(name, private and at == len(names) - 1) for at, name in enumerate(names)][::-1]
        if target.startswith("/"):
            self._enter(os.open("/", _LOOK | os.O_DIRECTORY), "/", private and not names)

    def _look(self, name: str) -> int:
        try:
            return os.open(name, _LOOK, dir_fd=self._fd)
        except FileNotFoundError:
            if not self._make:
                raise
        with suppress(FileExistsError):  # made by another process in this moment, and looked at like any other
            os.mkdir(name, PRIVATE, dir_fd=self._fd)
        return os.open(name, _LOOK, dir_fd=self._fd)

    def _enter(self, fd: int, path: str, private: bool) -> None:
        """Go on from the directory `fd`, if it is in order. Takes the descriptor over, also when it raises."""
        try:
            state = os.fstat(fd)
            if private and self._mend is not None and state.st_uid in self._owners and state.st_mode & 0o077:
                mode = stat.S_IMODE(state.st_mode)
                with suppress(OSError):
                    os.chmod(f"/proc/self/fd/{fd}", mode & PRIVATE)
                state = os.fstat(fd)
                if not state.st_mode & 0o077:
                    self._mend(path, mode)
            here = f"/proc/self/fd/{fd}"
            self._open = check(path, state, self._owners, private=private, listed=lambda: has_list(here, follow=True))
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd, self._path = fd, path

    def _target(self, fd: int, path: str, state: os.stat_result) -> str:
        """What the link `fd` leads to, if it may be followed."""
        remove = f"Name the directory itself, or remove the link: rm {quoted(path)}"
        if state.st_uid != 0 and state.st_uid not in self._owners:
            raise DirectoryRefused(path, f"is a link that belongs to uid {state.st_uid}", remove)
        if self._open:
            raise DirectoryRefused(path, "is a link in a directory that everybody can write to", remove)
        self._links += 1
        if self._links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.readlink("", dir_fd=fd)


def check(
    path: str,
    state: os.stat_result,
    owners: Collection[int],
    *,
    private: bool = False,
    listed: Callable[[], bool] = lambda: False,
) -> bool:
    """Check that nobody but root and `owners` can change a directory, from its `state`. Raises DirectoryRefused.

    `listed` is asked whether it has an access control list. True if everybody can add names to it: it is sticky.
    """
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid not in owners and (private or state.st_uid != 0):
        raise DirectoryRefused(
            path, f"belongs to uid {state.st_uid}", "Use another directory, or have its owner remove it."
        )
    if private and mode & 0o077:
        raise DirectoryRefused(
            path, f"is open to others (mode {mode:04o}); it must be yours with mode 0700", f"chmod 0700 {quoted(path)}"
        )
    if not mode & 0o022:
        return False
    if mode & stat.S_ISVTX:
        return True
    if mode & 0o002:
        raise DirectoryRefused(path, f"can be changed by everybody (mode {mode:04o})", f"chmod go-w {quoted(path)}")
    # The group's bits are the mask of an access control list, where there is one: it can name anybody.
    if listed():
        problem = f"has an access control list by which others may change it (mode {mode:04o})"
        raise DirectoryRefused(path, problem, f"setfacl -b {quoted(path)}; chmod g-w {quoted(path)}")
    if not is_group_of(state.st_gid, (0, *owners)):
        problem = f"can be changed by group {state.st_gid} (mode {mode:04o}), which is not yours alone"
        raise DirectoryRefused(path, problem, f"chmod g-w {quoted(path)}")
    return False


def is_group_of(gid: int, users: Collection[int]) -> bool:
    """Whether a group of this machine holds some of `users` and nobody else; see `holds_only`. Reads two files."""
    return holds_only(gid, users, text_of(_PASSWD), text_of(_GROUP))


def holds_only(gid: int, users: Collection[int], passwd: str, group: str) -> bool:
    """Whether the members of a group are some of `users`, and nobody else, by the texts of the two files (pure).

    Its members are those whose first group it is, and those who are listed. A group without members, or one that is not
    in the file, does not count as the users' own: a directory service can give it members, and a program can have its
    rights.
    """
    ids: dict[str, int] = {}
    members: set[int] = set()
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) < 4 or not fields[2].isdecimal():
            continue
        ids.setdefault(fields[0], int(fields[2]))
        if fields[3] == str(gid):
            members.add(int(fields[2]))
    known = False
    for line in group.splitlines():
        fields = line.split(":")
        if len(fields) < 4 or fields[2] != str(gid):
            continue
        known = True
        for name in fields[3].split(","):
            if name.strip():
                members.add(ids.get(name.strip(), -1))
    return known and bool(members) and members <= set(users)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def has_list(path: str, *, follow: bool = False) -> bool:
    """Whether a file or folder has an access control list. Its entries can name anybody, and the group's bits of the
    mode are then its mask. True also when this cannot be found out.
    """
    try:
        return bool(os.getxattr(path, _ACL, follow_symlinks=follow))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)


def text_of(path: str) -> str:
    """The text of a file; "" when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read()
    except OSError:
        return ""


def leads_to(path: str, device: int, inode: int) -> bool:
    """Whether the path is still that of this file."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (device, inode)


Item = TypeVar("Item")

#: Hexadecimal digits of a name that is used for some microseconds: too many to be made beforehand.
_DIGITS: Final = 16
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def create_beside(name: str, folder: int) -> tuple[int, str]:
    """A new empty file that only we can read, to take the place of `name` in `folder`: its descriptor and its name.

    Raises OSError.
    """
    temporary = f"{name}.{os.urandom(_DIGITS // 2).hex()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(temporary, flags, 0o600, dir_fd=folder), temporary


def replace_in(folder: int, name: str, data: bytes, *, sync: bool = False) -> None:
    """Put `data` in the place of the file `name` in `folder`, a descriptor; with `sync` it survives a loss of power.

    Raises OSError; then what was there stays, and nothing else is left.
    """
    fd, temporary = create_beside(name, folder)
    try:
        with open(fd, "wb") as out:
            out.write(data)
            if sync:
                out.flush()
                os.fsync(out.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def replace_file(path: str, data: bytes, *, sync: bool = False) -> None:
    """The same by a path, whose folder exists and is no link. Raises OSError."""
    folder = os.open(os.path.dirname(path), _FOLDER)
    try:
        replace_in(folder, os.path.basename(path), data, sync=sync)
    finally:
        os.close(folder)


def read_list(path: str, item: type[Item], max_bytes: int) -> list[Item]:
    """The JSON list that stands in a file of ours; empty when there is none, and when it is no list of `item`.

    Of a file that is longer nothing is believed.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            return msgspec.json.decode(file.read(max_bytes), type=list[item])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []


# --- trees that go ----------------------------------------------------------------------------------------------------


def remove_tree(path: str) -> None:
    """Remove a folder and all that is in it, without recursion. What cannot be removed stays. No jail may be in it."""
    with suppress(OSError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove(top, name)
        finally:
            os.close(top)
        os.rmdir(path)


def _remove(top: int, name: str) -> None:
    """Remove one entry; folders in a folder are moved up to the top, so that nothing is ever deep."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for child in os.listdir(folder):
            try:
                os.unlink(child, dir_fd=folder)
            except IsADirectoryError:
                os.chmod(child, 0o700, dir_fd=folder)  # a folder that is moved is written to
                os.rename(child, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
