"""The process that runs the kernel of a workspace, as the folder `kernel` in its state says with two locks and a
record.

Two locks (flock: they end with the processes, whatever kills those):
- `lock` is held by the supervisor alone, or by a broker that was started by hand. A process that cannot have it is told
  E_KERNEL_RUNNING. So two kernels never share a state, wherever their sockets are.
- `alive` is held by every trusted process of the kernel through one inherited descriptor. A new start waits for it, so
  it never meets processes of a killed kernel.

`kernel.json` says where the sockets are. Every command finds the kernel by it: the runtime directory can be another
one than a command would choose, because the environment differs, or because another user was there first.

The files of the locks stay. The state may be deleted under a kernel. So a lock counts only if its path still leads to
the locked file. The folder lies in the state, so jails never see it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from goondan.kernel import rundir
from goondan.kernel.paths import FOLDER, RECORD
from goondan.schemas.system.directories import Directory, DirectoryRefused, open_directory
from goondan.schemas.wire.errors import GoondanError, fail

#: How long a start waits for the last processes of a killed kernel (seconds). Their parent-death signal is immediate.
LEFTOVERS_S: Final = 3.0
#: How often it looks (seconds).
LEFTOVERS_POLL_S: Final = 0.005
#: The folder may be deleted while it is opened; an attempt that met that is repeated this often.
_ATTEMPTS: Final = 20
#: A record is some hundred bytes and a few paths; more is no record.
_MAX_RECORD: Final = 65536

LOCK: Final = "lock"
ALIVE: Final = "alive"


class KernelRecord(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """`kernel.json`: who runs here, and where."""

    #: The holder of the lock: the supervisor, or a broker that was started by hand.
    pid: int
    #: The bundle.
    bundle: str
    #: Where the sockets and the clients' token are, without links.
    run_dir: str
    #: The state of the workspace.
    state_dir: str
    #: When it was started: RFC 3339.
    started_at: str
    #: The entry agent. It is there once the bundle is loaded.
    entry_agent: str | None = None
    #: The revision that runs. It is there once the bundle is loaded.
    revision: str | None = None
    #: It is a broker without a supervisor.
    by_hand: bool = False
    #: Runtime directories of kernels that were killed, which nobody has cleared yet.
    leftovers: list[str] = []


class Locks(msgspec.Struct):
    """The open descriptors of a running kernel's folder and of its two locks."""

    #: The folder.
    folder_fd: int
    #: The lock that the supervisor alone holds, or a broker that was started by hand.
    lock_fd: int
    #: The lock that every trusted process of the kernel holds.
    alive_fd: int

    def close(self) -> None:
        """Give the locks back, as far as no other process has inherited them."""
        for fd in (self.alive_fd, self.lock_fd, self.folder_fd):
            os.close(fd)


def lock(state_dir: str) -> Locks:
    """Become the kernel of a workspace, without waiting.

    `alive_fd` is open but not locked yet: `is_quiet` does it. Raises GoondanError E_KERNEL_RUNNING, E_STATE.
    """
    path = f"{state_dir}/{FOLDER}"
    for _ in range(_ATTEMPTS):
        with _opened(state_dir, make=True) as folder:
            try:
                lock_fd = _open(LOCK, folder)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock_fd)
                record = _read_record(folder.fd)
                sockets = "" if record is None else f"; its sockets are in {record.run_dir}"
                message = f"a kernel already runs with the state in {state_dir}{sockets}"
                raise fail("E_KERNEL_RUNNING", message) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"{path}/{LOCK}", follow_symlinks=False), os.fstat(lock_fd)):
                    alive_fd = _open(ALIVE, folder)
                    return Locks(os.dup(folder.fd), lock_fd, alive_fd)
            os.close(lock_fd)
    raise fail("E_STATE", f"{path} keeps vanishing")


def open_alive(folder_fd: int, state_dir: str) -> int:
    """A descriptor of `alive` of its own, for the holder of the lock. Raises GoondanError E_STATE."""
    path = f"{state_dir}/{FOLDER}"
    try:
        return _open(ALIVE, Directory(folder_fd, path))
    except FileNotFoundError:
        raise fail("E_STATE", f"{path} was removed") from None


def is_quiet(locks: Locks) -> bool:
    """Whether no process of an earlier kernel lives; then `alive` is ours, shared with whoever inherits it."""
    try:
        fcntl.flock(locks.alive_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(locks.alive_fd, fcntl.LOCK_SH)
    os.set_inheritable(locks.alive_fd, True)
    return True


def write_record(locks: Locks, record: KernelRecord) -> None:
    """Say who runs here. Only for the holder of the lock. Raises OSError."""
    rundir.write_private(locks.folder_fd, RECORD, msgspec.json.encode(record) + b"\n")


def remove_record(locks: Locks) -> None:
    """Nobody runs here any more. Only for the holder of the lock, when the files of its kernel are gone."""
    with suppress(OSError):
        os.unlink(RECORD, dir_fd=locks.folder_fd)


def held_record(locks: Locks) -> KernelRecord | None:
    """What an earlier kernel has left, for the holder of the lock."""
    return _read_record(locks.folder_fd)


def read_record(state_dir: str) -> KernelRecord | None:
    """The record of a workspace's kernel. The record of a killed kernel is still there. None without one.

    Raises GoondanError E_STATE when others can change the folder.
    """
    try:
        with _opened(state_dir, make=False) as folder:
            return _read_record(folder.fd)
    except FileNotFoundError:
        return None


def holder(state_dir: str) -> int | None:
    """A pidfd of the process that the record of a workspace names, if it holds the lock; None without one.

    Raises GoondanError E_STATE.
    """
    record = read_record(state_dir)
    if record is None:
        return None
    try:
        pidfd = os.pidfd_open(record.pid)
    except (OSError, ValueError, OverflowError):
        return None
    with suppress(OSError):
        inode = os.stat(f"{state_dir}/{FOLDER}/{LOCK}", follow_symlinks=False).st_ino
        with open("/proc/locks", encoding="ascii", errors="replace") as table:
            if any(_is_of(line.split(), record.pid, inode) for line in table):
                return pidfd
    os.close(pidfd)
    return None


def _is_of(fields: list[str], pid: int, inode: int) -> bool:
    """Whether a line of /proc/locks is the lock of `pid`: `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`."""
    # The device is left out: a stacked file system gives another one here than stat does.
    return (
        len(fields) > 5
        and fields[1] == "FLOCK"
        and fields[3] == "WRITE"
        and fields[4] == str(pid)
        and fields[5].rpartition(":")[2] == str(inode)
    )


def is_held(state_dir: str) -> bool:
    """Whether the process that the record names holds the lock. Raises GoondanError E_STATE."""
    pidfd = holder(state_dir)
    if pidfd is None:
        return False
    os.close(pidfd)
    return True


def clear_after_death(state_dir: str, wait_s: float = LEFTOVERS_S) -> bool:
    """Wait until every process of a kernel that died is gone, and remove what it left.

    True when nothing of it is left, or when another kernel runs already; False if a process of it still lives after
    `wait_s` seconds. Raises GoondanError E_STATE.
    """
    if read_record(state_dir) is None:
        return True
    try:
        locks = lock(state_dir)
    except GoondanError as error:
        if error.info.code == "E_KERNEL_RUNNING":
            return True
        raise
    until = time.monotonic() + wait_s
    try:
        while not is_quiet(locks):
            if time.monotonic() >= until:
                return False
            time.sleep(LEFTOVERS_POLL_S)
        clear(locks)
        return True
    finally:
        locks.close()


def clear(locks: Locks) -> None:
    """Remove the runtime directories that killed kernels have left, and the record. Only when it is quiet."""
    record = held_record(locks)
    if record is not None:
        for path in {record.run_dir, *record.leftovers}:
            rundir.clear(path)
    remove_record(locks)


@contextmanager
def _opened(state_dir: str, *, make: bool) -> Iterator[Directory]:
    """The folder. Raises FileNotFoundError without `make`, GoondanError E_STATE."""
    path = f"{state_dir}/{FOLDER}"
    try:
        folder = open_directory(path, make=make, private_from=path)
    except FileNotFoundError:
        if make:
            raise fail("E_STATE", f"{path} cannot be made") from None
        raise
    except DirectoryRefused as refused:
        raise fail("E_STATE", f"the state in {state_dir} is not safe: {refused}", suggestion=refused.fix) from None
    except OSError as error:
        raise fail("E_STATE", f"{error.filename or path}: {error.strerror}") from None
    with folder:
        yield folder


def _open(name: str, folder: Directory) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder.fd)
    except FileNotFoundError:
        raise  # the folder was deleted in this moment
    except OSError as error:
        raise fail("E_STATE", f"{folder.path}/{name}: {error.strerror}") from None


def _read_record(folder_fd: int) -> KernelRecord | None:
    try:
        fd = os.open(RECORD, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
        with open(fd, "rb") as source:
            return msgspec.json.decode(source.read(_MAX_RECORD), type=KernelRecord)
    except (OSError, msgspec.DecodeError):
        return None
