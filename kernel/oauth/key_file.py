"""The key that tokens are encrypted with: one file of the user, outside of the state root.

So a copy or a backup of the state root contains no readable token. The folder of the file is private and holds nothing
but keys, because jails see nothing of it (docs/design/sandbox.md section 1).

Source: docs/oauth.md; docs/decisions/068.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from goondan.schemas.system.directories import Directory, DirectoryRefused, open_directory
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import TOP, within
from goondan.schemas.worker.hidden import KEYS

#: AES-256.
KEY_BYTES: Final = 32
#: The environment variable that names another file.
VARIABLE: Final = "GOONDAN_KEY_FILE"
_NAME: Final = "oauth.key"


def key_path(env: Mapping[str, str], home: str) -> str:
    """The path of the key: $GOONDAN_KEY_FILE, otherwise goondan/keys/oauth.key below $XDG_CONFIG_HOME or ~/.config."""
    given = env.get(VARIABLE, "")
    if given.startswith("/"):
        return os.path.normpath(given)
    config = env.get("XDG_CONFIG_HOME", "")
    folder = f"{config}/goondan/keys" if config.startswith("/") else f"{home}/{KEYS}"
    return os.path.normpath(f"{folder}/{_NAME}")


def is_shared(folder: str, home: str) -> bool:
    """Whether a folder must not hold keys: the home directory, one above it, or one of the system. No jail sees a
    folder with a key, and jails have to see these.
    """
    return folder in TOP or within(home, folder) or folder.count("/") < 2


def read_or_make(path: str, state_root: str) -> bytes:
    """The key. It is made if there is none. Raises GoondanError E_OAUTH_KEY, which names the file and the fault."""
    folder, name = os.path.split(path)
    if is_shared(folder, os.path.expanduser("~")):
        raise _unusable(path, "its folder has other uses", f"Set {VARIABLE} to a file in a folder of its own.")
    if within(os.path.realpath(folder), os.path.realpath(state_root)):
        raise _unusable(path, "it lies in the state root, beside what it encrypts", f"Set {VARIABLE} to another place.")
    try:
        with open_directory(folder, make=True, private_from=folder) as place:
            for _ in range(2):
                found = _read(place, name, path)
                if found is not None:
                    return found
                _make(place, name)
    except DirectoryRefused as refused:
        raise _unusable(path, f"{refused.path} {refused.problem}", refused.fix) from None
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be used") from None
    raise _unusable(path, "it cannot be made")


def _read(place: Directory, name: str, path: str) -> bytes | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place.fd)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as source:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise _unusable(path, "it is no file")
        if state.st_uid != os.geteuid():
            raise _unusable(path, f"it belongs to uid {state.st_uid}")
        if stat.S_IMODE(state.st_mode) & 0o077:
            raise _unusable(path, "others may read it", f"Run chmod 0600 {path} if nobody has.")
        data = source.read(KEY_BYTES + 1)
    if len(data) != KEY_BYTES:
        raise _unusable(path, f"it has not {KEY_BYTES} bytes", "Remove it if no token is needed any more.")
    return data


def _make(place: Directory, name: str) -> None:
    """Make the file, whole or not at all: it is written under another name and then linked. Linking fails if another
    process was faster.
    """
    temporary = f"{name}.{os.urandom(8).hex()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600, dir_fd=place.fd), "wb") as out:
        out.write(os.urandom(KEY_BYTES))
        out.flush()
        os.fsync(out.fileno())
    try:
        with suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=place.fd, dst_dir_fd=place.fd, follow_symlinks=False)
    finally:
        os.unlink(temporary, dir_fd=place.fd)
    _sync(place)


def _sync(place: Directory) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unusable(path: str, why: str, suggestion: str | None = None) -> GoondanError:
    return fail("E_OAUTH_KEY", f"the key {path} cannot be used: {why}", suggestion=suggestion)
