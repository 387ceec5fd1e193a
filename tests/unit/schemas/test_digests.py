"""The digest of a folder, and the copy that is made of what it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.schemas.system.digests import NoDigest, folder_digest


def digest(folder: Path, copy_to: Path | None = None, max_files: int = 100, max_bytes: int = 1 << 20) -> str:
    target = None if copy_to is None else str(copy_to)
    return folder_digest(str(folder), max_files=max_files, max_bytes=max_bytes, copy_to=target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "top"
    (top / "b/c").mkdir(parents=True)
    (top / "a.txt").write_text("a")
    (top / "b/run.sh").write_text("#!/bin/sh\n")
    (top / "b/run.sh").chmod(0o755)
    (top / "b/c/.hidden").write_bytes(b"\0\xff")
    (top / "link").symlink_to("a.txt")
    return top


def test_the_digest_of_a_known_folder_never_changes(folder: Path) -> None:
    """What operators have accepted would have to be accepted again."""
    assert digest(folder) == "sha256:94d8f4b80c8662403ce6af2abb75310548b08216474982cd3d734da15c1c43eb"


def test_every_change_changes_it(folder: Path) -> None:
    seen = {digest(folder)}
    (folder / "a.txt").write_text("b")
    seen.add(digest(folder))
    (folder / "b/c/.hidden").rename(folder / "b/c/.other")
    seen.add(digest(folder))
    (folder / "b/new").mkdir()
    seen.add(digest(folder))
    (folder / "link").unlink()
    (folder / "link").symlink_to("b")
    seen.add(digest(folder))
    assert len(seen) == 5


def test_the_copy_is_what_was_read(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    assert digest(folder, copy) == digest(folder) == digest(copy)
    assert os.readlink(copy / "link") == "a.txt"
    assert (copy / "b/run.sh").stat().st_mode & 0o777 == 0o755
    assert (copy / "a.txt").stat().st_mode & 0o777 == 0o644
    assert (copy / "b").stat().st_mode & 0o777 == 0o755


def test_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    before = digest(folder)
    (folder / "outside").symlink_to(secret)
    after = digest(folder)
    (secret / "key").write_text("another")
    assert digest(folder) == after != before


def test_what_has_no_digest(folder: Path) -> None:
    with pytest.raises(NoDigest, match="more than 3 files"):
        digest(folder, max_files=3)
    (folder / "b/large").write_bytes(b"x" * 2048)
    with pytest.raises(NoDigest, match="holds more than"):
        digest(folder, max_bytes=2000)
    os.mkfifo(folder / "pipe")
    with pytest.raises(NoDigest, match="pipe is no regular file"):
        digest(folder)
    with pytest.raises(NoDigest, match="cannot be read"):
        digest(folder / "nothing")
