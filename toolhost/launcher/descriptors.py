"""Files and folders by descriptor, and the small files that the kernel makes (/proc, control groups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def opened(path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of that path, which is closed in the end and on exec. A new file gets `mode`. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def reopened(fd: int, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
    """A new descriptor of an open file or folder (O_PATH is enough), with other flags. Raises OSError."""
    return opened(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK)


def path_of(fd: int) -> str:
    """The path of an open file or folder, without links."""
    return os.readlink(f"/proc/self/fd/{fd}")


def write_all(fd: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    while content:
        content = content[os.write(fd, content) :]


def write_text(path: str, text: str) -> None:
    """Write a file of the Linux kernel. Raises OSError."""
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, text.encode())


def status_numbers(folder: str, name: str) -> list[int]:
    """The numbers in the line `name` of a process's status; `folder` is that of the process in /proc.

    Raises OSError, and ProcessLookupError when there is no such line: the process is gone.
    """
    with open(f"{folder}/status", encoding="ascii", errors="replace") as source:
        for line in source:
            if line.startswith(f"{name}:"):
                return [int(word) for word in line.split()[1:] if word.isdecimal()]
    raise ProcessLookupError(f"the process {folder.rpartition('/')[2]} is gone")
