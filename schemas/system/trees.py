"""Removing a tree of files that a jail has written: it may be deeper than any recursion, and closed to its owner.

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import os
from contextlib import suppress


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
