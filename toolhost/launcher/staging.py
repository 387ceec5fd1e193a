"""The mounts of one jail that must be made with root's powers, in a mount namespace of the jail's own.

A jail's user owns nothing, and may not enter the folders above a workdir (they may be 0700). So the launcher copies
each place as a detached mount while it is still in the host's namespace. The owner of the place is mapped onto the
jail's user there (an idmapped mount). Then the launcher puts the copy under one folder of the new namespace, from where
bubblewrap takes it. Owners on disk do not change. There is one exception: a workdir that we made for an instance, on a
file system without such mounts, is given to a user of the instance.

Where owners cannot be mapped, what the jail's user cannot read is copied into memory if it is small: its content, not
its owners. The originals stay as they are, and no link is followed. A file or folder whose name begins with a dot is
copied empty: a jail covers it anyway.

Where bubblewrap runs as root, it gets a root directory with what jails are made from, and nothing else of the host.
bubblewrap follows paths in folders that other jails may be changing at that moment. A link there can lead only to
something in this root directory. For the same reason bubblewrap gets no power over files: it may look everywhere, and
write only where root as an owner could. Here that is the memory that this directory is made of.
toolhost/policy/plan.py says what is in it.

Source: docs/design/sandbox.md section 3.2; docs/decisions/038; the kernel's idmappings.rst.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Iterator
from itertools import islice

from goondan.toolhost.launcher import syscalls
from goondan.toolhost.launcher.places import ReadOnlyPlace, keep, opened, path_of, reopened, write_all, write_text

TYPE_CHECKING = False  # see allow_list.py
if TYPE_CHECKING:
    from typing import Final

    from goondan.toolhost.launcher.requests import Enclosure, Stage

#: Descriptors of user namespaces that are kept; each takes some kilobytes of the Linux kernel's memory.
MAX_NAMESPACES: Final = 1024
#: Limits of the copies for one jail: entries, bytes and nested folders. A tool is a few files; a folder that brings an
#: environment along is larger.
MAX_ENTRIES: Final = 2048
MAX_BYTES: Final = 16 << 20
MAX_DEPTH: Final = 64
#: Room for mount points, and for one file that is copied (bytes).
_ROOM: Final = MAX_BYTES + (1 << 20)
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
#: CAP_DAC_READ_SEARCH (to mount in folders that are closed to root); SETGID, SETUID and SETPCAP (the jail drops them);
#: NET_ADMIN (the loopback interface); SYS_ADMIN (mounts and namespaces).
KEPT_IN_ENCLOSURE: Final = (2, 6, 7, 8, 12, 21)
#: CAP_DAC_OVERRIDE, in place of the first: containers have this one.
_ELSE_KEPT: Final = 1
#: Room for mount points and accounts, which need inodes most of all.
_ENCLOSURE_OPTIONS: Final = "mode=0755,size=1m,nr_inodes=2k"


class UserNamespaces:
    """User namespaces that only say "this owner is shown as that user". Made once, as one costs milliseconds."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], int] = {}

    def get(self, owner_uid: int, owner_gid: int, uid: int) -> int:
        """The descriptor of one. Raises OSError where the kernel has none, or none are left."""
        key = (owner_uid, owner_gid, uid)
        if key not in self._known:
            if len(self._known) >= MAX_NAMESPACES:
                os.close(self._known.pop(next(iter(self._known))))
            self._known[key] = _make(owner_uid, owner_gid, uid)
        return self._known[key]


def _make(owner_uid: int, owner_gid: int, uid: int) -> int:
    launcher = os.getpid()
    pid = syscalls.child_in_user_namespace()
    if pid == 0:
        syscalls.die_with_parent()  # which may be killed before it ends this process
        while os.getppid() == launcher:
            signal.pause()
        os._exit(0)
    try:
        for name, owner in (("uid_map", owner_uid), ("gid_map", owner_gid)):
            write_text(f"/proc/{pid}/{name}", f"{owner} {uid} 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


#: A detached mount, or the content of a file that is not mounted but written.
Tree = int | bytes


class Staged:
    """What is ready to be put in its places, in the order of the stages. `uid`: the jail's user. `unmapped`: why some
    owner could not be shown as that user; None when all could. `copied`: the paths of the places that were copied.
    """

    def __init__(self, trees: list[Tree], uid: int, unmapped: str | None = None, copied: tuple[str, ...] = ()) -> None:
        self.trees = trees
        self.uid = uid
        self.unmapped = unmapped
        self.copied = copied


class NotReadable(OSError):
    """The jail's user cannot be given a place. `fix` says what the owner of the place can do."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(errno.EPERM, problem)
        self.fix = fix


def copy(stages: list[Stage], fds: list[int], uid: int, fallback: int | None, namespaces: UserNamespaces) -> Staged:
    """Make detached copies of the places, with their owners mapped.

    The jail's user is `fallback` when a place had to be given to it, or is its own already. Call it in the host's mount
    namespace. Raises OSError; then no copy is left.
    """
    if fallback is not None and any(
        not stage["readOnly"] and os.stat(fd).st_uid == fallback for stage, fd in zip(stages, fds, strict=True)
    ):
        uid = fallback  # given before, and perhaps in use
    trees: list[Tree] = []
    unmapped: str | None = None
    copied: list[str] = []
    try:
        for stage, fd in zip(stages, fds, strict=True):
            try:
                if stage["owned"]:
                    trees.append(_mapped(stage, fd, uid, namespaces))
                    continue
            except OSError as error:
                unmapped = unmapped or error.strerror
                if stage["unmapped"] == "given" and fallback is not None:
                    give(fd, fallback)
                    if uid != fallback:
                        close(trees)
                        staged = copy(stages, fds, fallback, fallback, namespaces)
                        staged.unmapped = unmapped
                        return staged
                elif stage["unmapped"] in ("given", "refused"):
                    raise _not_shown(stage, fd, fallback, error) from None
            trees.append(_readable(stage, fd, uid, copied))
    except OSError:
        close(trees)
        raise
    return Staged(trees, uid, unmapped, tuple(copied))


def close(trees: list[Tree]) -> None:
    """Close the trees that are descriptors."""
    while trees:
        tree = trees.pop()
        if isinstance(tree, int):
            os.close(tree)


def _not_shown(stage: Stage, fd: int, fallback: int | None, why: OSError) -> NotReadable:
    path, owner = path_of(fd), os.stat(fd).st_uid
    fix = "Leave it out, so that tools work in the instance's own workspace"
    if fallback is not None:
        import shlex  # few refuse

        fix += f"; or give it to the user of this workdir's jails: `chown -R {fallback}:{fallback} {shlex.quote(path)}`"
    return NotReadable(
        f"{path} belongs to user {owner}, and this host cannot show it to a jail as the jail's own, which takes a user "
        f"namespace and an idmapped mount ({why.strerror})",
        f"{fix}.",
    )


def _readable(stage: Stage, fd: int, uid: int, copied: list[str]) -> Tree:
    """The place as it is, for a user who is not its owner, or a copy, whose path is then added to `copied`.

    Raises NotReadable for one that the user cannot read.
    """
    closed = None if stage["unmapped"] == "given" else first_unreadable(fd, uid, deep=stage["unmapped"] == "copied")
    if closed is None:
        return _tree(stage, fd, None)
    path = path_of(fd)
    name = path if closed == "." else os.path.normpath(os.path.join(path, closed))
    if stage["unmapped"] == "copied" and (made := copy_of_place(fd)) is not None:
        copied.append(path)
        return made
    too_much = ""
    if stage["unmapped"] == "copied":
        too_much = f", and {path} is too large to be copied for each jail"
    import shlex

    raise NotReadable(
        f"{name} cannot be read by everybody, and here jails read as a user of their own{too_much}",
        f"Let others read it: `chmod -R o+rX {shlex.quote(name)}`.",
    )


def give(fd: int, uid: int) -> None:
    """Give a folder of ours, and all that is in it, to that user. Links are not followed. Raises OSError.

    No process of a jail is in it. A process that could be there has that user already, and then there is nothing to do.
    """
    with reopened(fd, os.O_RDONLY | os.O_DIRECTORY) as top:
        if os.fstat(top).st_uid == uid:
            return
        try:
            for _, folders, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                for name in (*folders, *files):
                    os.chown(name, uid, uid, dir_fd=at, follow_symlinks=False)
        except RecursionError:
            raise OSError(errno.ELOOP, "its folders are too deep to be given to a jail's user") from None
        os.chown(top, uid, uid)  # last: it says that the rest is done


def _mapped(stage: Stage, fd: int, uid: int, namespaces: UserNamespaces) -> int:
    status = os.stat(fd)
    return _tree(stage, fd, None if status.st_uid == uid else namespaces.get(status.st_uid, status.st_gid, uid))


def _tree(stage: Stage, fd: int, namespace: int | None) -> int:
    try:
        return _detached(stage, fd, namespace, recursive=True)
    except OSError:
        # Something is mounted below that cannot be mapped; without it the place itself can still be shown.
        return _detached(stage, fd, namespace, recursive=False)


def _detached(stage: Stage, fd: int, namespace: int | None, *, recursive: bool) -> int:
    tree = syscalls.copy_tree(fd, recursive=recursive)
    try:
        syscalls.set_attributes(tree, read_only=stage["readOnly"], user_namespace=namespace, recursive=recursive)
    except OSError:
        os.close(tree)
        raise
    return tree


def attach(folder: str, stages: list[Stage], trees: list[Tree], kept: list[ReadOnlyPlace]) -> None:
    """In a new mount namespace: make an empty folder with every copy in its place, and keep places read-only in
    them.
    """
    syscalls.leave_mount_namespace()
    syscalls.mount_tmpfs(folder, f"mode=0755,size={_ROOM},nr_inodes=1k")
    place("", stages, trees, kept)


def place(top: str, stages: list[Stage], trees: list[Tree], kept: list[ReadOnlyPlace]) -> None:
    """Put the copies in their places, as seen from the folder `top`. The `kept` places in them are made read-only."""
    for stage, tree in zip(stages, trees, strict=True):
        at = top + stage["at"]
        if isinstance(tree, bytes):
            write(at, tree)
        else:
            put(at, stage["folder"], tree)
    keep(top, stages, kept)


def put(at: str, is_folder: bool, tree: int) -> None:
    """Mount a copy at a new place, and close the copy."""
    os.makedirs(at if is_folder else os.path.dirname(at), 0o755, exist_ok=True)
    if not is_folder:
        write(at, b"")
    syscalls.attach(tree, at)
    os.close(tree)


def write(at: str, content: bytes) -> None:
    """Write a new file that everybody may read."""
    with opened(at, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644) as fd:
        write_all(fd, content)


class _Entry:
    """A file, folder or link below the folder that is walked: its path from there, a descriptor of the folder that it
    is in, its name in that folder, and its status; a link's is its own.
    """

    def __init__(self, path: str, folder: int, name: str, status: os.stat_result) -> None:
        self.path = path
        self.folder = folder
        self.name = name
        self.status = status


def first_unreadable(fd: int, uid: int, *, deep: bool) -> str | None:
    """The first place at (".") or below `fd` (O_PATH) that the user may not read; None when there is none.

    Checks mode bits of the first MAX_ENTRIES entries; without `deep` only those of `fd` itself. Raises OSError.
    """
    status = os.fstat(fd)
    if not _may_read(status, uid):
        return "."
    if not deep or not stat.S_ISDIR(status.st_mode):
        return None
    with reopened(fd) as top:
        for entry in islice(_walk(top, "", 0), MAX_ENTRIES):
            if not entry.name.startswith(".") and not _may_read(entry.status, uid):
                return entry.path
    return None


def copy_of_place(fd: int) -> int | bytes | None:
    """Make a copy that everybody may read: of a folder a detached mount, of a file its content; None when too large.

    Raises OSError.
    """
    with reopened(fd) as source:
        status = os.fstat(source)
        if not stat.S_ISDIR(status.st_mode):
            return _content(source) if status.st_size <= MAX_BYTES else None
        copy = syscalls.detached_tmpfs({"mode": "0755", "size": str(2 * MAX_BYTES), "nr_inodes": str(2 * MAX_ENTRIES)})
        made = False
        try:
            if _fill(copy, source):
                syscalls.set_attributes(copy, read_only=True, user_namespace=None, recursive=False)
                made = True
        finally:
            if not made:
                os.close(copy)
        return copy if made else None


def _fill(copy: int, source: int) -> bool:
    """Copy the content of one folder into another. False when it is too much."""
    size = 0
    for number, entry in enumerate(_walk(source, "", 0)):
        mode = entry.status.st_mode
        if number >= MAX_ENTRIES or entry.path.count("/") >= MAX_DEPTH:
            return False
        if stat.S_ISDIR(mode):
            os.mkdir(entry.path, 0o755, dir_fd=copy)
            os.chmod(entry.path, 0o755, dir_fd=copy)  # noqa: S103 - as a jail sees it, whatever our umask
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(entry.name, dir_fd=entry.folder), entry.path, dir_fd=copy)
        elif stat.S_ISREG(mode):
            size += entry.status.st_size
            if size > MAX_BYTES:
                return False
            _copy_file(entry, copy)
    return True


def _copy_file(entry: _Entry, copy: int) -> None:
    run = 0o755 if entry.status.st_mode & 0o111 else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(entry.path, flags, dir_fd=copy) as target:
        os.fchmod(target, run)  # whatever our umask
        if not entry.name.startswith("."):
            with opened(entry.name, _READ, dir_fd=entry.folder) as source:
                write_all(target, _content(source))
        # Compiled Python names the modification time of its source.
        os.utime(target, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))


def _content(source: int) -> bytes:
    data = b""
    while len(data) <= MAX_BYTES and (more := os.read(source, MAX_BYTES)):
        data += more
    return data


def _walk(folder: int, above: str, depth: int) -> Iterator[_Entry]:
    """Everything below a folder, each folder before its content. What is in a folder with a dotted name is left out."""
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        yield _Entry(above + name, folder, name, status)
        if stat.S_ISDIR(status.st_mode) and not name.startswith(".") and depth < MAX_DEPTH:
            with opened(name, _READ | os.O_DIRECTORY, dir_fd=folder) as below:
                yield from _walk(below, f"{above}{name}/", depth + 1)


def _may_read(status: os.stat_result, uid: int) -> bool:
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4 if stat.S_ISREG(status.st_mode) else 0
    bits = status.st_mode >> 6 if status.st_uid == uid else status.st_mode
    return bits & wanted == wanted


def enter_enclosure(
    top: str, enclosure: Enclosure, stages: list[Stage], trees: list[Tree], uid: int, kept: list[ReadOnlyPlace]
) -> None:
    """In a new mount namespace, make that directory and go there. `top` is a folder that it may cover for that."""
    shown = [_shown(path) for path in enclosure["shown"]]  # now: `top` may cover some, and then they are another's
    syscalls.leave_mount_namespace()
    if enclosure["network"]:
        syscalls.leave_network_namespace()
    syscalls.mount_tmpfs(top, _ENCLOSURE_OPTIONS)
    for path, is_folder, tree in shown:
        put(top + path, is_folder, tree)
    for name, target in enclosure["links"]:
        os.symlink(target, top + name)
    for folder in ("/tmp", enclosure["home"]):  # bubblewrap begins in the first
        os.makedirs(top + folder, 0o755, exist_ok=True)
    place(top, stages, trees, kept)
    syscalls.mount_tmpfs(top + enclosure["home"], f"mode=0700,size={enclosure['homeBytes']},uid={uid},gid={uid}")
    for path, text in enclosure["texts"]:
        write(top + path, text.replace("{uid}", str(uid)).encode())
    syscalls.change_root(top)
    syscalls.bound_capabilities(
        KEPT_IN_ENCLOSURE if syscalls.is_bounding(KEPT_IN_ENCLOSURE[0]) else (*KEPT_IN_ENCLOSURE, _ELSE_KEPT)
    )


def _shown(path: str) -> tuple[str, bool, int]:
    """A path, whether it is a folder, and a detached copy of what it leads to."""
    with opened(path, os.O_PATH) as fd:
        mode = os.fstat(fd).st_mode
        tree = syscalls.copy_tree(fd, recursive=True)
    if not stat.S_ISCHR(mode):
        syscalls.set_attributes(tree, read_only=True, user_namespace=None, recursive=True)
    return path, stat.S_ISDIR(mode), tree
