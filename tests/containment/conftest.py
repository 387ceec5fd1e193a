"""Fixtures for tests of jails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def unmappable(short_tmp: Path) -> Iterator[Path]:
    """A file system of a kind that cannot show owners as others, like some network file systems."""
    folder = short_tmp / "ramfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
