"""The mounts of one jail that must be made with root's powers, in a mount namespace of the jail's own.

A jail's user may enter none of the folders above a workdir (they may be 0700) and owns nothing. So each place is copied
as a detached mount while we are still in the host's namespace, its owner mapped onto the jail's user (an idmapped
mount), and put under one folder of the new namespace, from where bubblewrap takes it. On disk nothing changes hands.

Source: sandbox.md section 3, item 2; the kernel's idmappings.rst.
"""

from __future__ import annotations

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
    pid = calls.child_in_user_namespace()
    if pid == 0:
        while True:
            signal.pause()
    try:
        for name, owner in (("uid_map", owner_uid), ("gid_map", owner_gid)):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as target:
                target.write(f"{owner} {uid} 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def copy(stages: list[Stage], fds: list[int], uid: int, namespaces: UserNamespaces) -> list[int]:
    """Detached copies of the places, as descriptors, with their owners mapped. In the host's mount namespace."""
    return [_copy(stage, fd, uid, namespaces) for stage, fd in zip(stages, fds, strict=True)]


def _copy(stage: Stage, fd: int, uid: int, namespaces: UserNamespaces) -> int:
    namespace: int | None = None
    if stage["owned"]:
        status = os.stat(fd)
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
