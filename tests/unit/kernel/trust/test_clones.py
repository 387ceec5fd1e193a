"""Whether a folder is a clone: read from files, without running git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from goondan.kernel.trust.judgement import comes_from_elsewhere


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    git(made, "init", "-q")
    git(made, "commit", "-q", "--allow-empty", "-m", "x")
    return made


def test_a_repository_without_a_remote_is_ones_own(repository: Path) -> None:
    (repository / "a" / "b").mkdir(parents=True)
    assert not comes_from_elsewhere(str(repository / "a" / "b"))
    assert not comes_from_elsewhere(str(repository.parent))


def test_a_clone_is_seen_from_every_folder_of_it(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repository), "clone")
    (tmp_path / "clone" / "a").mkdir()
    assert comes_from_elsewhere(str(tmp_path / "clone" / "a"))


def test_a_worktree_and_a_submodule_of_a_clone(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repository), "clone")
    git(tmp_path / "clone", "worktree", "add", "-q", str(tmp_path / "tree"))
    assert comes_from_elsewhere(str(tmp_path / "tree"))
    git(repository, "worktree", "add", "-q", str(tmp_path / "own"))
    assert not comes_from_elsewhere(str(tmp_path / "own"))
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(repository), "inner")
    assert comes_from_elsewhere(str(outer / "inner"))


@pytest.mark.parametrize(
    "text",
    [
        '[remote "origin"]\n\turl = x\n',
        '  [ remote "x" ]\n',
        '[REMOTE "x"]\n',
        "[remote.x]\nurl = y\n",
        "[include]\n\tpath = ../x\n",
        '[includeIf "gitdir:/"]\n\tpath = x\n',
    ],
)
def test_what_counts_as_a_remote(repository: Path, text: str) -> None:
    config = repository / ".git" / "config"
    config.write_text(config.read_text() + text)
    assert comes_from_elsewhere(str(repository))


@pytest.mark.parametrize(
    "plant",
    [
        lambda top: (top / ".git").write_text("rubbish"),
        lambda top: (top / ".git").write_text("gitdir: " + "x" * 10_000),
        lambda top: (top / ".git").write_bytes(b"gitdir: \0"),
        lambda top: (top / ".git").symlink_to("/nonexistent"),
        lambda top: ((top / ".git").mkdir(), (top / ".git" / "config").mkdir()),
        lambda top: ((top / ".git").mkdir(), (top / ".git" / "config").write_bytes(b"x" * (2 << 20))),
        lambda top: (top / ".svn").mkdir(),
        lambda top: ((top / ".hg").mkdir(), (top / ".hg" / "hgrc").write_text("")),
    ],
)
def test_in_doubt_it_is_somebody_elses(tmp_path: Path, plant: object) -> None:
    assert callable(plant)
    plant(tmp_path)
    assert comes_from_elsewhere(str(tmp_path))


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    import os

    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "config")
    assert comes_from_elsewhere(str(tmp_path))
