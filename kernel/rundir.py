"""The runtime directory. It is private and belongs to one kernel at a time. It is empty again when that kernel is gone.

It holds the sockets and the tokens of clients. The kernel that uses it has a lock on the directory itself (flock on its
descriptor). The record in the state says which directory it is (kernel/lock.py).

It is made in the first of the usual places that only we can change. Sometimes none of them can be used, because another
user was there first or because somebody has opened it to others. Then it is a fresh one with a name that nobody can
foresee, in /tmp or else in the state. A place that was named by hand is used, or refused.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.paths import FRESH_BASE, MAX_SOCKET_PATH, fresh_name, socket_bytes
from goondan.schemas.system.directories import Directory, DirectoryRefused, open_directory, replace_in
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire.errors import GoondanError, fail

CLIENT_TOKEN: Final = "client.token"  # noqa: S105 - a file's name
#: The kernel's secret, for whoever makes tokens by hand; only a broker that was started by hand leaves it.
SECRET_FILE: Final = "kernel.secret"  # noqa: S105 - a file's name
SUPERVISOR_SOCKET: Final = "supervisor.sock"
#: The folder in which a fork server plays the turns that warm it up; one that was killed meanwhile leaves it.
WARMUP_FOLDER: Final = "warm-up"
#: All other things that a kernel makes in its runtime directory; nothing else is ever removed from it.
_OWN_FILES: Final = (*SOCKETS.values(), SUPERVISOR_SOCKET, CLIENT_TOKEN, SECRET_FILE)
#: A kernel that ends takes its directory away; an attempt that met that is repeated this often.
_ATTEMPTS: Final = 20
#: How often another name is tried for a fresh directory: none of them is ever taken, unless somebody guesses well.
_FRESH_ATTEMPTS: Final = 20


def again(directory: Directory) -> Directory:
    """The same place for the same kernel, after somebody has removed the directory. Raises GoondanError E_RUN_DIR."""
    return _locked(directory.path)


def take(
    usual: Sequence[str], *, name: str, state_dir: str, given: str | None = None, base: str = FRESH_BASE
) -> tuple[Directory, list[str]]:
    """Make and lock the runtime directory of a kernel: `given`, else the first of `usual` that can be used, else a
    fresh one called `name` below `base` or the state. Also says why the usual ones before it were not used.

    Raises GoondanError E_RUN_DIR.
    """
    if given is not None:
        return _locked(given), []
    reasons: list[str] = []
    for path in usual:
        try:
            return _locked(path), reasons
        except GoondanError as error:
            reasons.append(error.info.message)
    for in_state in (False, True):
        try:
            return _locked(f"{state_dir}/run" if in_state else f"{_fresh_parent(base)}/{name}"), reasons
        except GoondanError as error:
            reasons.append(error.info.message)
    raise fail("E_RUN_DIR", f"no runtime directory can be made: {'; '.join(reasons)}")


def examine(path: str) -> None:
    """See whether a kernel could use `path`, without making anything. Raises GoondanError E_RUN_DIR."""
    _check_length(path, path)
    try:
        open_existing(path).close()
    except FileNotFoundError as missing:
        above = os.path.dirname(missing.filename)
        if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
            raise fail("E_RUN_DIR", f"{above} is not writable") from None


def examine_fresh(state_dir: str, base: str = FRESH_BASE) -> None:
    """See whether a fresh directory could be made, without making it. Raises GoondanError E_RUN_DIR."""
    try:
        examine(f"{base}/{fresh_name('')}")
    except GoondanError:
        examine(f"{state_dir}/run")


def open_existing(path: str) -> Directory:
    """The runtime directory at `path`, checked before anything in it is believed.

    Raises FileNotFoundError without one, and GoondanError E_RUN_DIR: too long for sockets, not a directory, owned by
    or open to others, or reached through what others may change.
    """
    return _open(path, make=False)


def clear(path: str) -> None:
    """Remove what a killed kernel has left in its runtime directory, unless another kernel uses it now."""
    with suppress(GoondanError, OSError), open_existing(path) as directory:
        fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(directory)


def remove(directory: Directory) -> None:
    """Take away what a kernel has made in its runtime directory, the directory, and the one above it if it was made
    for runtime directories, as far as nothing else is in them. Only for the holder of its lock.
    """
    if not is_intact(directory):
        return
    sweep(directory)
    above, name = os.path.split(directory.path)
    with suppress(DirectoryRefused, OSError), open_directory(above) as parent:
        os.rmdir(name, dir_fd=parent.fd)
        if os.path.basename(above).startswith("goondan"):
            os.rmdir(above)


def sweep(directory: Directory, keep: Sequence[str] = ()) -> None:
    """Remove the files of an earlier kernel from the directory. Only for the holder of its lock."""
    for name in _OWN_FILES:
        if name not in keep:
            with suppress(OSError):
                os.unlink(name, dir_fd=directory.fd)
    with suppress(OSError):
        os.stat(WARMUP_FOLDER, dir_fd=directory.fd, follow_symlinks=False)
        import shutil

        shutil.rmtree(WARMUP_FOLDER, dir_fd=directory.fd)


def is_intact(directory: Directory) -> bool:
    """Whether the path of the directory still leads to it: others of ours may have cleaned up."""
    try:
        return os.path.samestat(os.stat(directory.path, follow_symlinks=False), os.fstat(directory.fd))
    except OSError:
        return False


def owner_of(directory: Directory, name: str) -> int | None:
    """The owner of a socket in the directory; None when it is not there or no socket."""
    try:
        state = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError:
        return None
    return state.st_uid if stat.S_ISSOCK(state.st_mode) else None


def read_private(directory: Directory, name: str) -> str:
    """The content of a file of ours in the directory. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd)
    with open(fd) as source:
        return source.read()


def write_private(folder_fd: int, name: str, data: bytes) -> None:
    """Write a file that only we can read into an open directory, whole or not at all. Raises OSError."""
    replace_in(folder_fd, name, data)


def _fresh_parent(base: str) -> str:
    """A new directory with a name that nobody can foresee."""
    try:
        with open_directory(base) as above:
            for _ in range(_FRESH_ATTEMPTS):
                name = fresh_name(os.urandom(4).hex())
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=above.fd)
                    return f"{above.path}/{name}"
    except DirectoryRefused as refused:
        raise _unsafe(refused) from None
    except OSError as error:
        raise fail("E_RUN_DIR", f"{error.filename or base}: {error.strerror}") from None
    raise fail("E_RUN_DIR", f"no directory can be made in {base}")


def _locked(path: str) -> Directory:
    """Make the directory if it is not there, see that it is ours alone, and lock it. Raises GoondanError E_RUN_DIR."""
    _check_length(path, path)
    for _ in range(_ATTEMPTS):
        try:
            directory = _open(path, make=True)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_intact(directory):
                return directory
        except OSError as error:
            directory.close()
            if isinstance(error, BlockingIOError):
                raise fail("E_RUN_DIR", f"{path} is the runtime directory of another kernel") from None
            raise fail("E_RUN_DIR", f"{path}: {error.strerror}") from None
        directory.close()
    raise fail("E_RUN_DIR", f"{path} keeps vanishing")


def _open(path: str, *, make: bool) -> Directory:
    try:
        directory = open_directory(path, make=make, private_from=path)
    except FileNotFoundError:
        raise  # none, or a kernel that ended took it away in this moment
    except DirectoryRefused as refused:
        raise _unsafe(refused) from None
    except OSError as error:
        raise fail("E_RUN_DIR", f"{error.filename or path}: {error.strerror}") from None
    try:
        _check_length(path, directory.path)
    except GoondanError:
        directory.close()
        raise
    return directory


def _check_length(path: str, real: str) -> None:
    longest = socket_bytes(real)
    if longest > MAX_SOCKET_PATH:
        message = f"{path}: sockets in it would have paths of {longest} bytes, limit {MAX_SOCKET_PATH}"
        raise fail("E_RUN_DIR", message)


def _unsafe(refused: DirectoryRefused) -> GoondanError:
    return fail("E_RUN_DIR", str(refused), suggestion=refused.fix)
