"""The runtime directory: private, locked by one kernel at a time, empty again when that kernel is gone.

Two locks (flock: they end with the processes, whatever kills those):
- `lock` is held by the supervisor alone. Whoever cannot have it is told E_KERNEL_RUNNING.
- `alive` is held by every trusted process of the kernel through one inherited descriptor. A new start waits for it,
  so it never meets what a killed kernel has not finished dying of.

Both files go away with the directory, so a lock counts only if the path still leads to the locked file.

Source: delivery.md section 8; design section 10.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress
from typing import Final

import msgspec

from kernel.paths import LONGEST_SOCKET, MAX_SOCKET_PATH
from schemas.errors import GoondanError, fail

#: How long a start waits for the last processes of a killed kernel (seconds). Their parent-death signal is immediate.
LEFTOVERS_S: Final = 3.0
#: How often it looks (seconds).
LEFTOVERS_POLL_S: Final = 0.005
#: Starts and ends of kernels may cross; an attempt that met one is repeated this often.
_ATTEMPTS: Final = 20

LOCK: Final = "lock"
ALIVE: Final = "alive"
CLIENT_TOKEN: Final = "client.token"  # noqa: S105 - a file's name
SUPERVISOR_SOCKET: Final = "supervisor.sock"
RECORD: Final = "kernel.json"


class KernelRecord(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """`kernel.json`: who runs here. `entry_agent` and `revision` are there once the bundle is loaded."""

    pid: int
    bundle: str
    run_dir: str
    state_dir: str
    started_at: str
    entry_agent: str | None = None
    revision: str | None = None


class Locks(msgspec.Struct):
    """The two locks of a running kernel, as descriptors."""

    lock_fd: int
    alive_fd: int


def prepare(run_dir: str) -> None:
    """Make the directory if it is not there and check that it is ours alone. Raises GoondanError E_RUN_DIR."""
    try:
        os.makedirs(run_dir, 0o700, exist_ok=True)
    except OSError as error:
        raise fail("E_RUN_DIR", f"{run_dir}: {error.strerror}") from None
    check(run_dir)


def check(run_dir: str) -> None:
    """See that the directory is ours alone, before anything in it is believed.

    Raises FileNotFoundError without one, and GoondanError E_RUN_DIR: too long for sockets, not a directory, owned by
    or open to others, or reached through a directory that others may change.
    """
    longest = len(os.fsencode(f"{run_dir}/{LONGEST_SOCKET}"))
    if longest > MAX_SOCKET_PATH:
        raise fail(
            "E_RUN_DIR", f"{run_dir}: sockets in it would have paths of {longest} bytes, limit {MAX_SOCKET_PATH}"
        )
    try:
        state = os.lstat(run_dir)
        check_ancestors(os.path.dirname(run_dir))
    except FileNotFoundError:
        raise  # none, or a kernel that ended took it away in this moment; see lock()
    except OSError as error:
        raise fail("E_RUN_DIR", f"{run_dir}: {error.strerror}") from None
    if not stat.S_ISDIR(state.st_mode):
        raise fail("E_RUN_DIR", f"{run_dir} is not a directory")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        owner, mode = state.st_uid, stat.S_IMODE(state.st_mode)
        raise fail(
            "E_RUN_DIR", f"{run_dir} belongs to uid {owner} with mode {mode:04o}; it must be yours with mode 0700"
        )


def check_ancestors(path: str) -> None:
    """Nobody else may be able to move the directory away: sticky or closed directories of root or ours only.

    Raises GoondanError E_RUN_DIR, and OSError for what cannot be looked at.
    """
    path = os.path.realpath(path)
    while True:
        state = os.stat(path)
        others_may_write = state.st_mode & 0o002 and not state.st_mode & stat.S_ISVTX
        if state.st_uid not in (0, os.geteuid()) or others_may_write:
            raise fail("E_RUN_DIR", f"{path}, above the runtime directory, can be changed by other users")
        if path == "/":
            return
        path = os.path.dirname(path)


def lock(run_dir: str) -> Locks:
    """Prepare the directory and become its kernel, without waiting.

    `alive_fd` is open but not locked yet: take_over waits for it. Raises GoondanError E_KERNEL_RUNNING, E_RUN_DIR.
    """
    for _ in range(_ATTEMPTS):
        try:
            prepare(run_dir)
            lock_fd = _open(f"{run_dir}/{LOCK}")
        except FileNotFoundError:
            continue  # a kernel that ended took the directory away in this moment
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise fail("E_KERNEL_RUNNING", f"a kernel already runs in {run_dir}") from None
        if _leads_to(f"{run_dir}/{LOCK}", lock_fd):
            return Locks(lock_fd, _open(f"{run_dir}/{ALIVE}"))
        os.close(lock_fd)
    raise fail("E_RUN_DIR", f"{run_dir} keeps vanishing")


def is_quiet(locks: Locks) -> bool:
    """Whether no process of an earlier kernel lives; then `alive` is ours, shared with whoever inherits it."""
    try:
        fcntl.flock(locks.alive_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(locks.alive_fd, fcntl.LOCK_SH)
    os.set_inheritable(locks.alive_fd, True)
    return True


def sweep(run_dir: str, keep: frozenset[str] = frozenset((LOCK, ALIVE))) -> None:
    """Remove what an earlier kernel left in the directory. Only for the holder of the locks."""
    with suppress(OSError):
        for entry in os.scandir(run_dir):
            if entry.name in keep:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(entry.path)


def remove(run_dir: str) -> None:
    """Take the directory away, and its parent if nothing else is in it. Only for the holder of the locks."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):
        parent = os.path.dirname(run_dir)
        if os.path.basename(parent).startswith("goondan"):
            os.rmdir(parent)


def clear_after_death(run_dir: str, wait_s: float = LEFTOVERS_S) -> bool:
    """Wait until every process of a kernel that died is gone, and remove what it left.

    True when nothing of it is left, or when another kernel has taken the directory over; False if a process of it
    still lives after `wait_s` seconds.
    """
    if not os.path.isdir(run_dir):
        return True
    try:
        locks = lock(run_dir)
    except GoondanError as error:
        return error.info.code == "E_KERNEL_RUNNING"
    until = time.monotonic() + wait_s
    try:
        while not is_quiet(locks):
            if time.monotonic() >= until:
                return False
            time.sleep(LEFTOVERS_POLL_S)
        remove(run_dir)
        return True
    finally:
        os.close(locks.alive_fd)
        os.close(locks.lock_fd)


def write_private(path: str, data: bytes) -> None:
    """Write a file that only we can read, whole or not at all."""
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as out:
        out.write(data)
    os.rename(temporary, path)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _leads_to(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
