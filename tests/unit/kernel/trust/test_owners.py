"""Who else can change files: owners, groups, everybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.kernel.grants.powers import Owner, Writers
from goondan.kernel.trust.judgement import is_own_group, others_who_can_write
from goondan.schemas.system import directories

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True, mode=0o755)
    made = folder / "goondan.yaml"
    made.touch(mode=0o644)
    return made


def test_ones_own_files_are_nobody_elses(file: Path) -> None:
    assert others_who_can_write([str(file)]) == []


@pytest.mark.parametrize("which", ["file", "folder", "above"])
@pytest.mark.parametrize(("mode", "who"), [(0o777, [Writers(None)]), (0o1777, []), (0o755, [])])
def test_everybody(file: Path, which: str, mode: int, who: list[Writers]) -> None:
    path = {"file": file, "folder": file.parent, "above": file.parent.parent}[which]
    path.chmod(mode)
    expected = [Writers(None)] if which == "file" and mode & 0o002 else who
    assert others_who_can_write([str(file)]) == expected


@needs_root
@pytest.mark.parametrize("which", ["file", "folder", "above"])
def test_other_owners_and_groups(file: Path, which: str) -> None:
    path = {"file": file, "folder": file.parent, "above": file.parent.parent}[which]
    os.chown(path, 4711, 4712)
    assert others_who_can_write([str(file)]) == [Owner(4711)]
    path.chmod(0o775)
    assert others_who_can_write([str(file)]) == [Owner(4711), Writers(4712)]


@needs_root
def test_the_owner_of_a_link_and_what_is_above_it(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    link = other / "link.yaml"
    link.symlink_to(file)
    assert others_who_can_write([str(link)]) == []
    os.chown(link, 4711, 0, follow_symlinks=False)
    assert others_who_can_write([str(link)]) == [Owner(4711)]
    os.chown(link, 0, 0, follow_symlinks=False)
    os.chown(other, 4713, 0)
    assert others_who_can_write([str(link)]) == [Owner(4713)]


@needs_root
def test_many_owners_are_everybody(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(9)]
    for number, file in enumerate(files):
        file.touch(mode=0o644)
        os.chown(file, 5000 + number, 0)
    found = others_who_can_write(map(str, files))
    assert (len(found), found[-1]) == (9, Writers(None))


@pytest.mark.parametrize("members", ["", "bob"])
def test_a_group_of_ones_own_is_oneself(file: Path, monkeypatch: pytest.MonkeyPatch, members: str) -> None:
    """Debian's users have a group of their own, and a umask of 002. Who is in it is read from files of this test."""
    file.chmod(0o664)
    file.parent.chmod(0o775)
    gid = file.stat().st_gid
    accounts = {
        "_PASSWD": f"me:x:{os.geteuid()}:{gid}::/:\nbob:x:40003:40003::/:\n",
        "_GROUP": f"me:x:{gid}:{members}\n",
    }
    for name, text in accounts.items():
        (file.parent.parent / name).write_text(text)
        monkeypatch.setattr(directories, name, str(file.parent.parent / name))
    is_own_group.cache_clear()
    try:
        assert others_who_can_write([str(file)]) == ([Writers(gid)] if members else [])
    finally:
        is_own_group.cache_clear()


def test_what_is_gone_is_left_out(tmp_path: Path) -> None:
    assert others_who_can_write([str(tmp_path / "nothing" / "there")]) == []
