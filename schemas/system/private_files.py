"""Files of the state that are put in place whole: nobody reads half of one, and nothing is written through a name.

The new content is written to a file of its own whose name nobody can guess, made in this moment (O_EXCL, no links), and
takes the old one's place by its name. An entry that is there already, for example a link to another file, is replaced
and not followed.
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
