"""The mounts of one jail that must be made with root's powers, in a mount namespace of the jail's own.

A jail's user may enter none of the folders above a workdir (they may be 0700) and owns nothing. So each place is copied
as a detached mount while we are still in the host's namespace, its owner mapped onto the jail's user (an idmapped
mount), and put under one folder of the new namespace, from where bubblewrap takes it. On disk nothing changes hands,
but for a workdir that we made for an instance on a file system without such mounts: it becomes that of its user.

Source: sandbox.md section 3, item 2; the kernel's idmappings.rst.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Final

from toolhost.launcher import calls
from toolhost.launcher.request import Stage

#: Descriptors of user namespaces that are kept; each is some kilobytes of the kernel's.
MAX_NAMESPACES: Final = 1024


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
    pid = calls.child_in_user_namespace()
    if pid == 0:
        calls.die_with_parent()  # which may be killed before it ends this process
        while os.getppid() == launcher:
            signal.pause()
        os._exit(0)
    try:
        for name, owner in (("uid_map", owner_uid), ("gid_map", owner_gid)):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as target:
                target.write(f"{owner} {uid} 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def copy(
    stages: list[Stage], fds: list[int], uid: int, heir: int | None, namespaces: UserNamespaces
) -> tuple[list[int], int]:
    """Detached copies of the places, as descriptors, with their owners mapped; and the jail's user.

    That is `heir` when a place had to be given to it. In the host's mount namespace. Raises OSError; then none is left.
    """
    if heir is not None and any(
        stage["unmapped"] == "given" and os.stat(fd).st_uid == heir for stage, fd in zip(stages, fds, strict=True)
    ):
        uid = heir  # given before, and perhaps in use
    trees: list[int] = []
    try:
        for stage, fd in zip(stages, fds, strict=True):
            try:
                trees.append(_copy(stage, fd, uid, namespaces))
            except OSError:
                if not stage["owned"] or stage["unmapped"] == "refused":
                    raise
                if stage["unmapped"] == "given":
                    if heir is None:
                        raise
                    give(fd, heir)
                    if uid != heir:
                        _close(trees)
                        return copy(stages, fds, heir, heir, namespaces)
                trees.append(_tree(stage, fd, None, recursive=False))
    except OSError:
        _close(trees)
        raise
    return trees, uid


def _close(trees: list[int]) -> None:
    while trees:
        os.close(trees.pop())


def give(fd: int, uid: int) -> None:
    """A folder of ours, and all that is in it, becomes that user's. Links are not followed. Raises OSError.

    No process of a jail is in it: whoever could be is that user already, and then there is nothing to do.
    """
    top = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(top).st_uid == uid:
            return
        for _, folders, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in (*folders, *files):
                os.chown(name, uid, uid, dir_fd=at, follow_symlinks=False)
        os.chown(top, uid, uid)  # last: it says that the rest is done
    except RecursionError:
        raise OSError(errno.ELOOP, "its folders are too deep to be given to a jail's user") from None
    finally:
        os.close(top)


def _copy(stage: Stage, fd: int, uid: int, namespaces: UserNamespaces) -> int:
    namespace: int | None = None
    status = os.stat(fd)
    if stage["owned"] and status.st_uid != uid:
        namespace = namespaces.get(status.st_uid, status.st_gid, uid)
    try:
        return _tree(stage, fd, namespace, recursive=True)
    except OSError:
        # Something is mounted below that cannot be mapped; without it the place itself can still be shown.
        return _tree(stage, fd, namespace, recursive=False)


def _tree(stage: Stage, fd: int, namespace: int | None, *, recursive: bool) -> int:
    tree = calls.copy_tree(fd, recursive=recursive)
    try:
        calls.set_attributes(tree, read_only=stage["readOnly"], user_namespace=namespace, recursive=recursive)
    except OSError as error:
        os.close(tree)
        raise OSError(error.errno, f"{os.readlink(f'/proc/self/fd/{fd}')}: {error.strerror}") from None
    return tree


def attach(folder: str, stages: list[Stage], trees: list[int]) -> None:
    """In a new mount namespace: an empty folder, and every copy in its place there."""
    calls.leave_mount_namespace()
    calls.mount_tmpfs(folder, "mode=0755,size=1m,nr_inodes=1k")
    for stage, tree in zip(stages, trees, strict=True):
        if stage["folder"]:
            os.mkdir(stage["at"], 0o755)
        else:
            os.close(os.open(stage["at"], os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        calls.attach(tree, stage["at"])
        os.close(tree)
