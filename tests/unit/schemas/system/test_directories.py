"""Walks to directories: who may own what is on the way, which links are followed, what is made and mended."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.system import directories
from goondan.schemas.system.directories import MAX_LINKS, DirectoryRefused, check, holds_only, open_directory

STRANGER = 40_001
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def reach(path: Path, **options: object) -> str:
    """Where the walk comes to."""
    with open_directory(str(path), **options) as found:  # type: ignore[arg-type]
        assert os.path.samestat(os.fstat(found.fd), os.stat(found.path))
        return found.path


def refusal(path: Path, **options: object) -> DirectoryRefused:
    with pytest.raises(DirectoryRefused) as caught, open_directory(str(path), **options):  # type: ignore[arg-type]
        pass
    assert caught.value.fix
    return caught.value


def test_a_plain_way_leads_to_its_directory(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    assert reach(tmp_path / "a/b") == str((tmp_path / "a/b").resolve())
    assert reach(Path(f"{tmp_path}/a//./b/../b")) == str((tmp_path / "a/b").resolve())
    assert reach(Path("/")) == "/"
    assert reach(Path("/..")) == "/"


def test_the_descriptor_is_what_was_checked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open_directory(str(tmp_path / "a")) as found:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        os.close(os.open("mark", os.O_CREAT | os.O_WRONLY, dir_fd=found.fd))
    assert (tmp_path / "b/mark").exists() and not (tmp_path / "a/mark").exists()


def test_what_is_missing_is_made_private_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_directory(str(tmp_path / "a/b"))
    assert caught.value.filename == str(tmp_path.resolve() / "a") and not (tmp_path / "a").exists()
    old = os.umask(0)
    try:
        reach(tmp_path / "a/b", make=True, private_from=str(tmp_path / "a"))
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_nothing_is_made_in_a_directory_that_everybody_can_change(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    refused = refusal(tmp_path / "open/new", make=True)
    assert refused.path == str(tmp_path.resolve() / "open") and "everybody" in refused.problem
    assert refused.fix == f"chmod go-w {refused.path}"
    assert os.listdir(tmp_path / "open") == []


def test_a_sticky_directory_that_is_open_to_all_holds_ours(tmp_path: Path) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    assert reach(tmp_path / "sticky/ours", make=True) == str(tmp_path.resolve() / "sticky/ours")


@as_root
def test_a_group_that_others_are_in_may_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 0775 parent with a shared group."""
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", 0, 40_777)  # nobody is in it that we know of
    (tmp_path / "shared").chmod(0o775)
    refused = refusal(tmp_path / "shared/new", make=True)
    assert "group 40777" in refused.problem and refused.fix.startswith("chmod g-w ")
    assert os.listdir(tmp_path / "shared") == []
    os.chown(tmp_path / "shared", 0, 0)
    accounts = {"_PASSWD": "root:x:0:0::/:\n", "_GROUP": "root:x:0:\n"}
    for name, text in accounts.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(directories, name, str(tmp_path / name))
    assert reach(tmp_path / "shared/new", make=True)


def test_others_directories_are_refused(tmp_path: Path) -> None:
    """By `owners`, so that it needs no second user: then what is ours is a stranger's."""
    if os.geteuid() == 0:
        os.chown(tmp_path, STRANGER, STRANGER)
        refused = refusal(tmp_path)
    else:
        refused = refusal(tmp_path, owners=[STRANGER])
    assert "belongs to uid" in refused.problem


@as_root
def test_links_of_others_are_refused(tmp_path: Path) -> None:
    """The attack by a link: an ordinary user links a name that root will use to a folder of root's."""
    (tmp_path / "roots").mkdir()
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    link = tmp_path / "sticky/goondan-0"
    link.symlink_to(tmp_path / "roots")
    os.lchown(link, STRANGER, STRANGER)
    refused = refusal(link / "kernel", make=True)
    assert refused.path == str(tmp_path.resolve() / "sticky/goondan-0")
    assert f"link that belongs to uid {STRANGER}" in refused.problem
    assert os.listdir(tmp_path / "roots") == []


def test_our_links_are_followed_where_nobody_else_can_make_any(tmp_path: Path) -> None:
    (tmp_path / "target/in").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "target")
    (tmp_path / "relative").symlink_to("target/in/../../target")
    (tmp_path / "twice").symlink_to("relative/in")
    (tmp_path / "root").symlink_to("/")
    assert reach(tmp_path / "absolute/in") == str(tmp_path.resolve() / "target/in")
    assert reach(tmp_path / "relative/in/..") == str(tmp_path.resolve() / "target")
    assert reach(tmp_path / "twice") == str(tmp_path.resolve() / "target/in")
    assert reach(tmp_path / "root") == "/"
    (tmp_path / "dangling").symlink_to("made")
    assert reach(tmp_path / "dangling/x", make=True) == str(tmp_path.resolve() / "made/x")


def test_no_link_is_followed_in_a_directory_that_everybody_can_add_to(tmp_path: Path) -> None:
    """Others can give a link of ours a second name there (link(2)), and so choose where it is met."""
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "target").mkdir()
    (tmp_path / "sticky/link").symlink_to(tmp_path / "target")
    assert "everybody can write to" in refusal(tmp_path / "sticky/link").problem


def test_what_a_link_leads_through_is_checked_as_well(tmp_path: Path) -> None:
    (tmp_path / "open/target").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open/target")
    assert refusal(tmp_path / "link").path == str(tmp_path.resolve() / "open")


def test_links_in_circles_and_long_chains_end(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links") as caught:
        open_directory(str(tmp_path / "circle"))
    assert not isinstance(caught.value, FileNotFoundError)
    (tmp_path / "0").mkdir()
    for number in range(MAX_LINKS + 1):
        (tmp_path / str(number + 1)).symlink_to(str(number))
    assert reach(tmp_path / str(MAX_LINKS))
    with pytest.raises(OSError, match="symbolic links"):
        open_directory(str(tmp_path / str(MAX_LINKS + 1)))


def test_files_and_bad_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    assert "not a directory" in refusal(tmp_path / "file").problem
    assert "not a directory" in refusal(tmp_path / "pipe/x", make=True).problem
    for path in ("relative", "", f"{tmp_path}/a\0b"):
        with pytest.raises(DirectoryRefused, match="absolute path"):
            open_directory(path)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_private_directories_are_closed_or_mended(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state/below").mkdir(parents=True)
    (tmp_path / "state/below").chmod(mode)
    (tmp_path / "state").chmod(0o700)
    start = str(tmp_path / "state")
    refused = refusal(tmp_path / "state/below", private_from=start)
    assert refused.fix == f"chmod 0700 {refused.path}" and f"{mode:04o}" in refused.problem
    told: list[tuple[str, int]] = []
    mended = reach(tmp_path / "state/below", private_from=start, mend=lambda path, old: told.append((path, old)))
    assert told == [(mended, mode)] and stat.S_IMODE(os.stat(mended).st_mode) == mode & 0o700


def test_what_a_link_at_the_beginning_leads_to_must_be_private(tmp_path: Path) -> None:
    """`~/.goondan` may be a link to another disk; what it leads through need not be private."""
    (tmp_path / "disk/state").mkdir(parents=True)
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "disk/state").chmod(0o755)
    (tmp_path / "link").symlink_to("disk/state")
    refused = refusal(tmp_path / "link/kernel", private_from=str(tmp_path / "link"), make=True)
    assert refused.path == str(tmp_path.resolve() / "disk/state")
    (tmp_path / "disk/state").chmod(0o700)
    assert reach(tmp_path / "link/kernel", private_from=str(tmp_path / "link"), make=True)


@as_root
def test_a_private_directory_is_not_roots_but_ours(tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir(mode=0o700)
    refused = refusal(tmp_path / "roots", private_from=str(tmp_path / "roots"), owners=[STRANGER])
    assert "belongs to uid 0" in refused.problem
    assert reach(tmp_path / "roots", owners=[STRANGER])


def test_an_access_control_list_is_no_private_group() -> None:
    """Where there is a list, the group's bits say what it allows at most, for whomever it names."""
    mine = Path("/").stat()
    fields = list(mine)
    fields[stat.ST_MODE], fields[stat.ST_UID], fields[stat.ST_GID] = stat.S_IFDIR | 0o770, 0, 0
    state = os.stat_result(fields)
    with pytest.raises(DirectoryRefused, match="access control list"):
        check("/x", state, [0], listed=lambda: True)


PASSWD = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/h:/s\nbob:x:1001:1001::/h:/s\ncem:x:1002:1000::/h:/s\nbroken\n"


@pytest.mark.parametrize(
    ("gid", "group", "alone"),
    [
        (1001, "bob:x:1001:", True),
        (1001, "bob:x:1001:bob,root", True),
        (1001, "bob:x:1001:bob,ann", False),
        (1001, "bob:x:1001:gone", False),
        (1001, "bob:x:1001:\nalias:x:1001:ann", False),
        (1001, "", False),
        (1000, "ann:x:1000:", False),
        (50, "staff:x:50:", False),
        (50, "staff:x:50:bob", True),
        (0, "root:x:0:", True),
    ],
)
def test_a_group_that_holds_only_the_user(gid: int, group: str, alone: bool) -> None:
    assert holds_only(gid, {0, 1001}, PASSWD, group) is alone


@given(st.integers(0, 5), st.sets(st.integers(0, 5)), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_no_member_is_overlooked(gid: int, users: set[int], people: list[tuple[int, int]]) -> None:
    passwd = "\n".join(f"u{uid}:x:{uid}:{first}::/:/" for uid, first in people)
    members = {uid for uid, first in people if first == gid}
    assert holds_only(gid, users, passwd, f"g:x:{gid}:") is (bool(members) and members <= users)
