"""Files of the state that are put in place whole, and trees of files that a jail has written and that have to go.

Nobody reads half of a file of the state, and nothing is written through a name. The new content is written to a file of
its own whose name nobody can guess, made in this moment (O_EXCL, no links), and takes the old one's place by its name.
An entry that is there already, for example a link to another file, is replaced and not followed.

A tree that a jail has written may be deeper than any recursion, and closed to its owner.

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

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
