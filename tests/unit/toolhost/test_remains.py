"""Removing what a hostile hand has written."""

from __future__ import annotations

import os
from pathlib import Path

from toolhost.remains import remove_tree


def test_a_tree_deeper_than_any_recursion(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for depth in range(3000):
        os.mkdir("d", dir_fd=here)
        os.close(os.open(f"f{depth}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(str(top))
    assert not top.exists()


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
