"""Grants on disk, each in a file of its own, encrypted with AES-256-GCM; and the key, in one file of the user.

A file is replaced as a whole and synced. Its name is a digest of app and subject. The content is bound to the name, so
no file can take the place of another. A file that cannot be read (another key, a damaged disk) is put aside under
another name and reported once. Then its person has to agree again.

The key lies outside of the state root, so a copy or a backup of the state root contains no readable token. The folder
of the key is private and holds nothing but keys, because jails see nothing of it (kernel/paths.py).

Source: docs/oauth.md; docs/decisions/068; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from goondan.features.oauth.process.rules import Grant
from goondan.kernel.paths import KEY_VARIABLE, is_shared
from goondan.schemas.system.directories import Directory, DirectoryRefused, open_directory, replace_in
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.grantable import within

#: The first bytes of a file: the format.
_MAGIC: Final = b"goondan-oauth-1\n"
_NONCE: Final = 12
_SUFFIX: Final = ".grant"
#: Added to the name of a file that cannot be read.
_ASIDE: Final = ".unreadable"
#: The largest file (bytes): two tokens and some more.
_MAX_BYTES: Final = 1 << 20
#: The most grants of one workspace. More are refused, so that invented subjects cannot fill the disk.
MAX_GRANTS: Final = 4096

log = logging.getLogger("oauth")


class Vault:
    """The grants of one workspace. `folder` is absolute, `root` the state root that it lies in."""

    def __init__(self, folder: str, root: str, key: bytes) -> None:
        self._folder = folder
        self._root = root
        self._cipher = AESGCM(key)

    def load(self, app: str, subject: str) -> Grant | None:
        """The stored grant. None when there is none, or when it cannot be read. Raises GoondanError E_STATE."""
        try:
            with self._open() as place:
                return self._read(place, _name(app, subject))
        except OSError as error:
            raise self._broken(error) from None

    def save(self, grant: Grant) -> None:
        """Store a grant in place of the earlier one, durably. Raises GoondanError E_STATE, E_DISK_FULL,
        E_OVERLOADED.
        """
        name = _name(grant.app, grant.subject)
        nonce = os.urandom(_NONCE)
        data = _MAGIC + nonce + self._cipher.encrypt(nonce, msgspec.msgpack.encode(grant), _bound(name))
        try:
            with self._open() as place:
                names = self._names(place)
                if name not in names and len(names) >= MAX_GRANTS:
                    raise fail("E_OVERLOADED", f"tokens of {MAX_GRANTS} subjects are held", suggestion="Revoke some.")
                replace_in(place.fd, name, data, sync=True)
                _sync(place)
        except OSError as error:
            raise self._broken(error) from None

    def drop(self, app: str, subject: str) -> None:
        """Remove a grant. Raises GoondanError E_STATE."""
        try:
            with self._open() as place, suppress(FileNotFoundError):
                os.unlink(_name(app, subject), dir_fd=place.fd)
                _sync(place)
        except OSError as error:
            raise self._broken(error) from None

    def all(self) -> list[Grant]:
        """All stored grants, ordered by app and subject. Raises GoondanError E_STATE."""
        try:
            with self._open() as place:
                found = [grant for name in self._names(place) if (grant := self._read(place, name)) is not None]
        except OSError as error:
            raise self._broken(error) from None
        return sorted(found, key=lambda grant: (grant.app, grant.subject))

    # --- inside

    def _open(self) -> Directory:
        try:
            return open_directory(self._folder, make=True, private_from=self._root)
        except DirectoryRefused as refused:
            raise fail("E_STATE", f"{refused.path} {refused.problem}", suggestion=refused.fix) from None

    def _names(self, place: Directory) -> list[str]:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.fd)
        try:
            return [name for name in os.listdir(fd) if name.endswith(_SUFFIX)]
        finally:
            os.close(fd)

    def _read(self, place: Directory, name: str) -> Grant | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as source:
            data = source.read(_MAX_BYTES + 1)
        begin = len(_MAGIC)
        try:
            if not data.startswith(_MAGIC) or len(data) > _MAX_BYTES:
                raise ValueError
            nonce, sealed = data[begin : begin + _NONCE], data[begin + _NONCE :]
            grant = msgspec.msgpack.decode(self._cipher.decrypt(nonce, sealed, _bound(name)), type=Grant)
            if _name(grant.app, grant.subject) != name:
                raise ValueError
        except (InvalidTag, ValueError, msgspec.DecodeError):
            os.rename(name, name + _ASIDE, src_dir_fd=place.fd, dst_dir_fd=place.fd)
            log.error("%s/%s cannot be decrypted with the key that is there now; it was put aside", place.path, name)
            return None
        return grant

    def _broken(self, error: OSError) -> GoondanError:
        code = "E_DISK_FULL" if error.errno in _FULL else "E_STATE"
        return fail(code, f"{self._folder}: {error.strerror}")


_FULL: Final = (28, 122)  # ENOSPC, EDQUOT


def _name(app: str, subject: str) -> str:
    return hashlib.sha256(f"{app}\0{subject}".encode("utf-8", "surrogateescape")).hexdigest()[:40] + _SUFFIX


def _bound(name: str) -> bytes:
    """The data that the content is bound to, besides the key."""
    return _MAGIC + name.encode("ascii")


def _sync(place: Directory) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- the key ---------------------------------------------------------------------------------------------------------

#: AES-256.
KEY_BYTES: Final = 32


def read_or_make(path: str, state_root: str) -> bytes:
    """The key. It is made if there is none. Raises GoondanError E_OAUTH_KEY, which names the file and the fault."""
    folder, name = os.path.split(path)
    if is_shared(folder, os.path.expanduser("~")):
        raise _unusable(path, "its folder has other uses", f"Set {KEY_VARIABLE} to a file in a folder of its own.")
    if within(os.path.realpath(folder), os.path.realpath(state_root)):
        raise _unusable(
            path, "it lies in the state root, beside what it encrypts", f"Set {KEY_VARIABLE} to another place."
        )
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


def _unusable(path: str, why: str, suggestion: str | None = None) -> GoondanError:
    return fail("E_OAUTH_KEY", f"the key {path} cannot be used: {why}", suggestion=suggestion)
