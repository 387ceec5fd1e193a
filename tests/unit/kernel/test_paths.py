"""Where the bundle, its state and its sockets are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel import paths
from tests.checks import refuses


def test_a_bundle_by_any_spelling_is_one_workspace(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "goondan.yaml").write_text("")
    (tmp_path / "b" / "mine.yaml").write_text("")
    (tmp_path / "link").symlink_to("b")
    cwd = str(tmp_path)
    spellings = ["b", "b/", "./b/goondan.yaml", "link", "link/goondan.yaml", str(tmp_path / "b")]
    found = {paths.digest(paths.find_bundle(given, cwd=cwd)) for given in spellings}
    assert len(found) == 1
    assert paths.digest(paths.find_bundle("b/mine.yaml", cwd=cwd)) not in found


def test_the_default_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "goondan.yaml").write_text("")
    assert paths.find_bundle(None, cwd=str(tmp_path)) == str(tmp_path / "goondan.yaml")
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    quickstart = paths.find_bundle(None, cwd=str(elsewhere))
    assert quickstart.endswith("examples/quickstart/goondan.yaml")
    monkeypatch.setattr(paths, "quickstart_folders", list)
    with refuses("E_CONFIG_NOT_FOUND"):
        paths.find_bundle(None, cwd=str(elsewhere))


#: A name that the system allows and no text can hold.
NOT_TEXT = os.fsdecode(b"\xff")


@pytest.mark.parametrize("given_path", ["", "nope", "a\0b", NOT_TEXT], ids=["empty", "none", "zero", "bytes"])
def test_a_bundle_that_is_not_there(tmp_path: Path, given_path: str) -> None:
    (tmp_path / NOT_TEXT).mkdir()
    with refuses("E_CONFIG_NOT_FOUND"):
        paths.find_bundle(given_path, cwd=str(tmp_path))


def test_a_current_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: os.listdir(str(tmp_path / "gone")))
    for given_path in (None, "x"):
        with refuses("E_CONFIG_NOT_FOUND"):
            paths.find_bundle(given_path)
    assert paths.find_bundle(str(tmp_path)) == str(tmp_path)


def test_the_state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.state_root({"GOONDAN_STATE_ROOT": "/x/../y"}) == "/y"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.state_root({}) == paths.state_root({"GOONDAN_STATE_ROOT": ""}) == str(tmp_path / ".goondan")
    with refuses("E_STATE"):
        paths.state_root({"GOONDAN_STATE_ROOT": f"/{NOT_TEXT}"})
    assert paths.state_dir("/b", {"GOONDAN_STATE_ROOT": "/s"}) == f"/s/workspaces/{paths.digest('/b')}"


def test_the_runtime_directory(short_tmp: Path) -> None:
    private = short_tmp / "r"
    private.mkdir(mode=0o700)
    env = {"XDG_RUNTIME_DIR": str(private), "GOONDAN_STATE_ROOT": "/s"}
    assert paths.run_dirs("/b", env)[0].startswith(f"{private}/goondan/")
    shared = f"/tmp/goondan-{os.geteuid()}/"
    private.chmod(0o755)
    for bad in ({}, {"XDG_RUNTIME_DIR": "relative"}, {"XDG_RUNTIME_DIR": str(short_tmp / "no")}, env):
        assert paths.run_dirs("/b", {"GOONDAN_STATE_ROOT": "/s", **bad})[0].startswith(shared), bad


def test_a_runtime_directory_that_is_too_long_for_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 40)
    deep.mkdir(parents=True)
    deep.chmod(0o700)
    (run_dir,) = paths.run_dirs("/b", {"XDG_RUNTIME_DIR": str(deep), "GOONDAN_STATE_ROOT": "/s"})
    assert run_dir.startswith("/tmp/goondan-")
    assert paths.run_dirs("/b", {"GOONDAN_STATE_ROOT": "/s"}, base="/" + "x" * 90) == []


def test_kernels_with_different_state_never_meet() -> None:
    one = paths.run_dirs("/b", {"GOONDAN_STATE_ROOT": "/s"})
    assert one != paths.run_dirs("/b", {"GOONDAN_STATE_ROOT": "/t"})
    assert one != paths.run_dirs("/c", {"GOONDAN_STATE_ROOT": "/s"})


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300))
def test_socket_paths_are_short_enough_for_any_bundle(bundle: str) -> None:
    (run_dir,) = paths.run_dirs("/" + bundle, {"GOONDAN_STATE_ROOT": "/s"})
    assert paths.socket_bytes(run_dir) == len(os.fsencode(f"{run_dir}/{paths.LONGEST_SOCKET}")) <= paths.MAX_SOCKET_PATH


def test_private_directories(tmp_path: Path) -> None:
    paths.prepare_private(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with refuses("E_STATE"):
        paths.prepare_private(str(tmp_path / "file" / "x"))
