"""Removing what a hostile hand has written."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from goondan.schemas.system.directories import remove_tree


def make_deep(top: Path) -> None:
    here = os.open(top, os.O_RDONLY)
    for depth in range(1200):
        os.mkdir("d", dir_fd=here)
        os.close(os.open(f"f{depth}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_a_tree_deeper_than_any_recursion(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    make_deep(top)
    remove_tree(str(top))
    assert not top.exists()


@pytest.mark.feature("try_out")
def test_the_folder_of_an_example_goes_whatever_its_tool_has_made_there(tmp_path: Path) -> None:
    from goondan.features.try_out.command.tool_test import workdir

    (tmp_path / "tools").mkdir()
    with workdir(SimpleNamespace(entry=str(tmp_path / "tools" / "t.py"))) as folder:  # type: ignore[arg-type]
        make_deep(Path(folder))
    assert not os.path.exists(folder)


def test_closed_folders_and_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    top = tmp_path / "top"
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "a" / "link").symlink_to(tmp_path / "kept")
    (top / "out").symlink_to(tmp_path / "kept")
    (top / "a" / "b").chmod(0)
    (top / "a").chmod(0)
    remove_tree(str(top))
    assert not top.exists()
    assert (tmp_path / "kept" / "file").read_text() == "x"
    remove_tree(str(top))  # gone already
