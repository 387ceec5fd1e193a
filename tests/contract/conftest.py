"""Where the recorded cases run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of all cases; a jail has it mounted, so it is emptied between them and not made anew."""
    path = tmp_path_factory.mktemp("p", numbered=True) / "work"
    path.mkdir()
    return path


@pytest.fixture
def place(folder: Path) -> Iterator[Path]:
    """An empty workdir inside an otherwise empty folder."""
    yield folder
    for path in (*folder.iterdir(), *(other for other in folder.parent.iterdir() if other != folder)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
