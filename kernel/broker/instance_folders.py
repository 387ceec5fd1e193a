"""Folders of deleted instances: moved away at once, and removed afterwards by a thread.

`<state_dir>/deleted/` holds the folders that are being removed. A broker that ended in the middle leaves folders there,
and the next broker removes them.

Tools have written into these folders. They may contain links, folders without permissions, and folders in folders of
any depth. So no link is followed, and permissions are restored first. A folder that is not empty is moved up before it
is read, so the removal never goes deeper than one level.

Source: docs/design/delivery.md section 9.
"""

from __future__ import annotations

import ctypes
import os
import queue
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from goondan.kernel.broker.journal.files import sync_folder
from goondan.kernel.broker.routing.deletions import Moved
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.text.visible import visible_line

#: The folder below the state directory.
DELETED: Final = "deleted"
#: The entries in an instance's folder that belong to its workdir: the folder itself, and the image of its file system.
_WORKDIR: Final = frozenset({"workspace", "workspace.ext4"})
_MOUNTED: Final = "workspace"
_UMOUNT_NOFOLLOW: Final = 8
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class WorkerThread:
    """A thread for work that may wait for the disk. It starts with the first work, and is a daemon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], object]) -> None:
        """Do this soon, after the work before it."""
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._work.get()()


class InstanceFolders:
    """The folders below `state_dir`."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._thread = WorkerThread("folders")
        self._moved: deque[Moved] = deque()
        if os.path.isdir(os.path.join(state_dir, DELETED)):
            self._thread.do(self._remove_all)

    def exists(self, agent: str, key: str) -> bool:
        """See Folders."""
        return os.path.lexists(instance_dir(self._state_dir, agent, key))

    def move(self, agent: str, key: str, keep_workdir: bool) -> None:
        """See Folders."""

        def work() -> None:
            try:
                move_away(self._state_dir, agent, key, keep_workdir=keep_workdir)
            except OSError as error:
                self._moved.append(Moved(agent, key, f"{error.filename or 'the folder'}: {error.strerror or error}"))
                return
            self._moved.append(Moved(agent, key))
            self._remove_all()

        self._thread.do(work)

    def moved(self) -> list[Moved]:
        """See Folders."""
        return [self._moved.popleft() for _ in range(len(self._moved))]

    def _remove_all(self) -> None:
        try:
            remove_deleted(self._state_dir)
        except OSError as error:
            text = f"a deleted instance is not removed yet: {error.filename or self._state_dir}: {error.strerror}"
            print(visible_line(text), file=sys.stderr, flush=True)


def move_away(state_dir: str, agent: str, key: str, *, keep_workdir: bool) -> None:
    """Move the folder of an instance into `deleted`, without the workdir if that stays. Raises OSError.

    When this returns, the move survives a loss of power: both names are on the disk.
    """
    folder = instance_dir(state_dir, agent, key)
    if not os.path.lexists(folder):
        return
    above = os.path.join(state_dir, DELETED)
    with suppress(FileExistsError):
        os.mkdir(above, 0o700)
    target = os.path.join(above, os.urandom(8).hex())
    if keep_workdir:
        os.mkdir(target, 0o700)
        for name in os.listdir(folder):
            if name not in _WORKDIR:
                os.rename(os.path.join(folder, name), os.path.join(target, name))
        sync_folder(target)
        sync_folder(folder)
    else:
        _unmount(os.path.join(folder, _MOUNTED))
        os.rename(folder, target)
        sync_folder(os.path.dirname(folder))
    sync_folder(above)


def remove_deleted(state_dir: str) -> None:
    """Remove everything in `deleted`. Raises OSError when something cannot be removed; that stays for the next time."""
    try:
        above = os.open(os.path.join(state_dir, DELETED), _FOLDER)
    except FileNotFoundError:
        return
    problem: OSError | None = None
    kept: set[str] = set()
    try:
        while names := set(os.listdir(above)) - kept:
            for name in names:
                try:
                    _remove(above, name)
                except OSError as error:
                    kept.add(name)
                    problem = problem or error
    finally:
        os.close(above)
    if problem is not None:
        raise problem


def _remove(above: int, name: str) -> None:
    """Remove one entry of `above`. Folders in it that are not empty become entries of `above`."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=above).st_mode):
        os.unlink(name, dir_fd=above)
        return
    os.chmod(name, 0o700, dir_fd=above)
    folder = os.open(name, _FOLDER, dir_fd=above)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                    continue
                try:
                    os.rmdir(entry.name, dir_fd=folder)
                except OSError:
                    # Moving a folder needs the right to write into it, because its entry for the parent changes.
                    os.chmod(entry.name, 0o700, dir_fd=folder)
                    os.rename(entry.name, os.urandom(8).hex(), src_dir_fd=folder, dst_dir_fd=above)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=above)


def _unmount(path: str) -> None:
    """Unmount a workdir that has a file system of its own. Its image is removed with the folder. Raises OSError."""
    if os.path.islink(path) or not os.path.ismount(path):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), _UMOUNT_NOFOLLOW) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
