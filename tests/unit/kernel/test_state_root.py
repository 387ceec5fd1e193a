"""State roots: whose they are, what is closed, what is refused, and from which nothing is believed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from goondan.kernel import paths, state_root
from goondan.kernel.bundle.rules.problems import Report
from goondan.kernel.bundle.rules.shape import Document
from goondan.kernel.grants.granting import Accepted, Policy, Widening
from goondan.kernel.state_root import confirm, doubt, judge, look, open_state_root, others_could_write, project_above
from goondan.kernel.trust.policy import read_policies, write_decisions
from goondan.kernel.trust.written import ACCEPTED_FILE, Written, accept, read_accepted
from goondan.schemas.wire.errors import GoondanError
from tests.checks import refuses, there

STRANGER = 40_001
#: A group that nobody is in, so nobody knows who has its rights.
SHARED_GROUP = 40_002
WIDE = "widen:\n  - {tool: bash, sandbox: {network: public}}\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def grown(root: Path, mode: int) -> Path:
    """A state as an earlier version left it under an open umask; its workspace's directory."""
    workspace = root / "workspaces" / "0123"
    (workspace / "instances" / "main" / "default" / "workspace").mkdir(parents=True)
    for name in ("logs", "toolhosts", "blobs"):
        (workspace / name).mkdir()
    (workspace / "logs" / "toolhost.log").write_text("")
    for folder, _, _ in os.walk(root):
        if not folder.endswith("/workspace"):
            os.chmod(folder, mode)
    return workspace


def modes(root: Path) -> dict[str, int]:
    return {
        os.path.relpath(os.path.join(folder, name), root): stat.S_IMODE(os.lstat(os.path.join(folder, name)).st_mode)
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
    }


def refusal(root: Path, workspace: Path | None = None) -> GoondanError:
    with refuses("E_STATE") as caught:
        open_state_root(str(root), workspace=None if workspace is None else str(workspace), make=True)
    return caught.value


def test_a_new_one_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "a" / "state"
    before = os.umask(0)
    try:
        made = open_state_root(str(root), workspace=str(root / "workspaces" / "1"), make=True)
    finally:
        os.umask(before)
    assert (made.believable, made.why, made.mended) == (True, None, [])
    assert modes(tmp_path) == dict.fromkeys(["a", "a/state", "a/state/workspaces", "a/state/workspaces/1"], 0o700)
    again = open_state_root(str(root))
    assert (again.believable, again.mended) == (True, [])


def test_nothing_is_made_unless_that_is_asked_for(tmp_path: Path) -> None:
    assert open_state_root(str(tmp_path / "state"), workspace=str(tmp_path / "state/workspaces/1")).believable
    assert list(tmp_path.iterdir()) == []


def widened(policies: list[tuple[Document, Policy]]) -> list[Widening]:
    return [item for _, policy in policies for item in policy.widen]


def test_an_old_one_that_others_could_only_read_is_closed_with_a_line_and_believed(tmp_path: Path) -> None:
    root = tmp_path / "state"
    workspace = grown(root, 0o755)
    (root / "policy.yaml").write_text(WIDE)
    (root / "policy.yaml").chmod(0o644)
    workdir = workspace / "instances/main/default/workspace"
    workdir.chmod(0o755)
    (workdir / "notes").write_text("")
    (workdir / "notes").chmod(0o664)
    found = open_state_root(str(root), workspace=str(workspace))
    assert found.mended == [f"{root} was open to others (mode 0755); it is closed now, and so is what is in it"]
    assert found.believable
    open_ones = {name: mode for name, mode in modes(root).items() if mode & 0o077}
    assert open_ones == {
        "workspaces/0123/instances/main/default/workspace": 0o755,  # a workdir is its jails' and its person's
        "workspaces/0123/instances/main/default/workspace/notes": 0o664,
    }
    assert open_state_root(str(root), workspace=str(workspace)).mended == []
    report = Report()
    assert widened(read_policies([str(root / "policy.yaml")], report))
    assert report.errors == []


def test_what_others_could_write_is_closed_and_not_believed_until_it_is_confirmed(tmp_path: Path) -> None:
    root = tmp_path / "state"
    workspace = grown(root, 0o777)
    (root / "policy.yaml").write_text(WIDE)
    (root / ACCEPTED_FILE).write_text('{"/b/goondan.yaml": "ab"}')
    for _ in range(2):  # also the next command does not believe what the first one has closed
        found = open_state_root(str(root), workspace=str(workspace))
        assert not found.believable
        assert found.why is not None
        assert "mode 0777" in found.why
        assert state_root.CONFIRM in found.why
        assert doubt(str(root)) == found.why
        assert all(not mode & 0o077 for name, mode in modes(root).items() if not name.endswith("/workspace"))
        report = Report()
        assert not widened(read_policies([str(root / "policy.yaml")], report))
        (problem,) = report.errors
        assert state_root.CONFIRM in problem.message
        assert read_accepted(str(root)) == {}
        with pytest.raises(GoondanError, match="would not be read again"):
            accept([Written("/b", "/b", False, "ab")], str(root))
        with pytest.raises(GoondanError, match="would not be read again"):
            write_decisions(str(root / "policy.yaml"), [Accepted("@a/b/c", "sha256:0")], [])
    confirm(str(root))
    assert open_state_root(str(root)).believable
    assert read_accepted(str(root)) == {"/b/goondan.yaml": "ab"}
    assert widened(read_policies([str(root / "policy.yaml")], Report()))


def test_one_open_level_below_a_closed_root_is_enough(tmp_path: Path) -> None:
    root = tmp_path / "state"
    workspace = grown(root, 0o700)
    (workspace / "logs").chmod(0o777)
    found = open_state_root(str(root), workspace=str(workspace))
    assert found.mended == [f"{workspace}/logs was open to others (mode 0777); it is closed now"]
    assert not found.believable


def test_a_policy_that_others_could_write_is_not_believed(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    (root / "policy.yaml").write_text(WIDE)
    (root / "policy.yaml").chmod(0o666)
    found = open_state_root(str(root))
    assert not found.believable
    assert [stat.S_IMODE((root / "policy.yaml").stat().st_mode), len(found.mended)] == [0o644, 1]


@as_root
def test_a_group_of_others_counts_and_the_users_own_group_does_not(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for root in (shared, own):
        root.mkdir()
        root.chmod(0o775)
    os.chown(shared, 0, SHARED_GROUP)
    assert not open_state_root(str(shared)).believable
    assert open_state_root(str(own)).believable
    assert [stat.S_IMODE(root.stat().st_mode) for root in (shared, own)] == [0o700, 0o700]


@pytest.mark.parametrize(
    ("mode", "alone", "expected"),
    [(0o755, False, False), (0o775, True, False), (0o775, False, True), (0o702, True, True)],
)
def test_who_could_write(mode: int, alone: bool, expected: bool) -> None:
    assert others_could_write(mode, lambda: alone) is expected


@as_root
def test_one_of_somebody_else_is_refused_with_the_line_to_use(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o755)
    os.chown(root, STRANGER, STRANGER)
    error = refusal(root).info
    assert f"{root} belongs to uid {STRANGER}" in error.message
    assert "export GOONDAN_STATE_ROOT=/" in (error.suggestion or "")
    assert str(root) not in (error.suggestion or "").partition("#")[0]
    assert doubt(str(root))
    assert [level.problem for level in look(str(root))] == [f"belongs to uid {STRANGER}"]


@as_root
def test_one_in_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert "can be changed by everybody" in refusal(tmp_path / "shared" / "state").info.message
    assert not (tmp_path / "shared" / "state").exists()
    os.chown(tmp_path / "shared", STRANGER, STRANGER)
    (tmp_path / "shared").chmod(0o755)
    assert f"belongs to uid {STRANGER}" in refusal(tmp_path / "shared" / "state").info.message


@as_root
@pytest.mark.parametrize("place", ["workspaces/0123/logs/toolhost.log.1", "policy.yaml", "workspaces/0123/logs"])
def test_what_a_stranger_has_put_into_an_open_one_is_refused_and_named(tmp_path: Path, place: str) -> None:
    root, target = tmp_path / "state", tmp_path / "roots-own"
    workspace = grown(root, 0o777)
    target.write_text("precious")
    at = root / place
    if at.exists():
        at.rename(root / "moved")
    at.symlink_to(target)
    os.lchown(at, STRANGER, STRANGER)
    refusal(root, workspace)
    error = refusal(root, workspace).info  # also of the next command, which finds the root closed
    assert str(at) in error.message
    assert f"rm -r {at}" in (error.suggestion or "") or f"rm {at}" in (error.suggestion or "")
    assert target.read_text() == "precious"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@as_root
def test_what_others_could_write_is_remembered_although_something_was_refused(tmp_path: Path) -> None:
    root = tmp_path / "state"
    workspace = grown(root, 0o700)
    root.chmod(0o755)
    (root / "workspaces").chmod(0o777)
    planted = root / "workspaces" / "planted"
    planted.touch()
    os.chown(planted, STRANGER, STRANGER)
    refusal(root, workspace)
    planted.unlink()
    assert not open_state_root(str(root), workspace=str(workspace)).believable


@as_root
def test_a_link_of_a_stranger_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "mine")
    assert open_state_root(str(tmp_path / "state")).believable  # ours: people move their state to another disk
    os.lchown(tmp_path / "state", STRANGER, STRANGER)
    assert "is a link that belongs to uid" in refusal(tmp_path / "state").info.message


_OPENED = "import sys; from goondan.kernel.state_root import open_state_root; open_state_root(sys.argv[1])"


@as_root
def test_a_mount_that_cannot_be_closed_is_refused_with_the_line_to_use(tmp_path: Path) -> None:
    """A mount that keeps its modes, as one of vfat does: here one that is read-only, in a namespace of its own."""
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(0o777)
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3" "$1"'
    argv = ["unshare", "-m", "sh", "-c", script, "sh", str(root), sys.executable, _OPENED]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=30)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mounts can be made here")
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0
    assert f"{root} is open to others (mode 0777)" in last
    assert "its file system does not let us close it" in last


def test_one_in_a_bundle_or_a_checkout_is_used_and_never_believed(tmp_path: Path) -> None:
    for sign in (".git", "goondan.yaml"):
        folder = tmp_path / sign.strip(".")
        (folder / "deep").mkdir(parents=True)
        (folder / sign).touch()
        root = folder / "deep" / ".goondan"
        found = open_state_root(str(root), make=True)
        assert not found.believable
        assert str(folder) in there(found.why)
        (root / "policy.yaml").write_text(WIDE)
        report = Report()
        assert not widened(read_policies([str(root / "policy.yaml")], report))
        assert len(report.errors) == 1
        assert "--policy" in (report.errors[0].suggestion or "")
        named = Report()
        assert widened(read_policies(["/nonexistent", str(root / "policy.yaml")], named))  # named by hand: read
        (root / ACCEPTED_FILE).write_text('{"/b/goondan.yaml": "ab"}')
        assert read_accepted(str(root)) == {}
        confirm(str(root))
        assert not open_state_root(str(root)).believable


def test_the_home_directorys_own_is_believed_whatever_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert project_above(str(tmp_path / ".goondan"), home=str(tmp_path)) is None
    assert project_above(str(tmp_path / "x" / ".goondan"), home=str(tmp_path)) == str(tmp_path)


def test_what_lies_where_everybody_can_make_names_makes_no_project(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").touch()
    tmp_path.chmod(0o1777)
    assert project_above(str(tmp_path / "state"), home="/nowhere") is None


def test_what_is_said_of_a_root_that_is_closed() -> None:
    assert judge("/s", None) is None
    assert "/p" in (judge("/p/s", "/p", "others could write to it") or "")
    assert (judge("/s", None, "others could write to /s") or "").endswith(f"then run `{state_root.CONFIRM}`")


def test_nothing_is_changed_by_looking(tmp_path: Path) -> None:
    root = tmp_path / "state"
    workspace = grown(root, 0o755)
    before = modes(root)
    found = {level.path: level for level in look(str(root), str(workspace))}
    assert found[str(root)].problem == "is open to others (mode 0755)"
    assert all(level.mendable for level in found.values())
    assert set(found) >= {str(workspace), f"{workspace}/logs", f"{workspace}/blobs", f"{root}/workspaces"}
    assert modes(root) == before


# --- without a home directory -----------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where states of users without a home directory are; this user has none."""
    made = tmp_path / "kept"
    made.mkdir()
    made.chmod(0o1777)
    monkeypatch.setattr(paths, "HOMELESS", (str(made),))
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("GOONDAN_STATE_ROOT", raising=False)
    return made


def test_without_a_home_there_is_one_folder_of_this_user_each_time(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paths.state_root()
    assert first == str(kept / f"goondan-state-{os.geteuid()}")
    assert paths.is_homeless(first)
    assert open_state_root(first, make=True).believable
    assert paths.state_root() == first
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o700
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.state_root() == str(tmp_path / ".goondan")


@as_root
def test_a_name_that_somebody_else_has_taken_is_passed_over(kept: Path, tmp_path: Path) -> None:
    taken, linked = kept / "goondan-state-0", kept / "goondan-state-0.1"
    taken.mkdir()
    os.chown(taken, STRANGER, STRANGER)
    linked.symlink_to(tmp_path)
    os.lchown(linked, STRANGER, STRANGER)
    ours = paths.state_root()
    assert ours == str(kept / "goondan-state-0.2")
    assert open_state_root(ours, make=True).believable
    taken.rmdir()
    assert paths.state_root() == ours  # what was kept is found again, also when the better name is free
