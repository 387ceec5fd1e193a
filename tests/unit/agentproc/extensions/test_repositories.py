"""What is known of the repository in a workdir: git writes it, a tool may have written anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.extensions.workspaces import MAX_FILE, Repository, repository_at, without_user
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says
from tests.unit.agentproc.turns import Make, api_of


def git(folder: Path, *args: str) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, env=environment)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-b", "feature/가")
    git(folder, "remote", "add", "upstream", "https://example.org/up.git")
    git(folder, "remote", "add", "origin", "https://user:token@example.org:8080/own.git?x=1")
    return folder


@pytest.mark.requirement("EVENTS-07")
def test_a_repository_of_git(repository: Path) -> None:
    found = repository_at(str(repository))
    assert found == Repository(str(repository), "https://example.org:8080/own.git?x=1", "feature/가")
    git(repository, "remote", "remove", "origin")
    assert repository_at(str(repository)).remote == "https://example.org/up.git"  # type: ignore[union-attr]
    git(repository, "remote", "remove", "upstream")
    assert repository_at(str(repository)).metadata == {"branch": "feature/가"}  # type: ignore[union-attr]


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    (repository / ".git" / "HEAD").write_text("8d51122def5632836d1cb1026e879069e10a1e13\n")
    assert repository_at(str(repository)).branch is None  # type: ignore[union-attr]


def test_a_worktree_is_a_repository_of_which_nothing_else_is_known(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /somewhere/else\n")
    assert repository_at(str(tmp_path)) == Repository(str(tmp_path))


def test_what_is_no_repository(tmp_path: Path) -> None:
    assert repository_at(str(tmp_path)) is None
    assert repository_at(str(tmp_path / "missing")) is None
    (tmp_path / ".git").mkdir()
    assert repository_at(str(tmp_path)) is None


def test_links_pipes_and_large_files_are_not_read(repository: Path, tmp_path: Path) -> None:
    config, head = repository / ".git" / "config", repository / ".git" / "HEAD"
    config.unlink()
    os.mkfifo(config)
    assert repository_at(str(repository)) == Repository(str(repository), None, "feature/가")
    config.unlink()
    (tmp_path / "secret").write_text('[remote "origin"]\nurl = secret\n')
    config.symlink_to(tmp_path / "secret")
    assert repository_at(str(repository)).remote is None  # type: ignore[union-attr]
    config.unlink()
    config.write_text('[remote "origin"]\nurl = x\n' + "#" * MAX_FILE)
    assert repository_at(str(repository)).remote is None  # type: ignore[union-attr]
    head.unlink()
    head.symlink_to("/etc/passwd")
    assert repository_at(str(repository)) is None
    other = tmp_path / "linked"
    other.mkdir()
    (other / ".git").symlink_to(repository / ".git")
    assert repository_at(str(other)) is None


def test_what_a_tool_wrote_is_bounded_and_harmless(repository: Path) -> None:
    (repository / ".git" / "HEAD").write_bytes(b"ref: refs/heads/\x1b]0;x\x07" + b"y" * 2000)
    (repository / ".git" / "config").write_bytes(b'[remote "\xff"]\n\turl = \x1b[2Jhttps://x\n[remote\nurl=\n= =\n')
    found = repository_at(str(repository))
    assert found is not None
    assert "\x1b" not in f"{found.branch}{found.remote}"
    assert len(found.branch or "") < 600


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://u:p@h/x", "https://h/x"),
        ("https://token@h:1/x", "https://h:1/x"),
        ("ssh://git@h/x", "ssh://h/x"),
        ("git@h:x/y.git", "git@h:x/y.git"),
        ("/local/path", "/local/path"),
        ("https://[broken/x", "https://[broken/x"),
    ],
)
def test_users_and_passwords_are_taken_out(address: str, shown: str) -> None:
    assert without_user(address) == shown


# --- told to extensions -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPELINE-12", "PIPELINE-24", "EVENTS-07", "EXT-05")
async def test_extensions_are_told_once_of_the_repository_they_work_in(make: Make, repository: Path) -> None:
    runner = make(FakeLink(), FakeModel(*[says("done")] * 4))
    api, seen = api_of(runner), list[Any]()

    def more(ctx: Any) -> Any:
        seen.append(("mutator", ctx.path, ctx.type, ctx.metadata["branch"]))
        return ctx.replace(metadata={**ctx.metadata, "files": 3})

    api.pipelines.mutate("workspace.repoAvailable", more)
    api.events.on("workspace.*", lambda payload: seen.append(("event", payload)))
    workdir = str(repository)
    await runner.run(event_frame("e1", "go", workdir=workdir))
    metadata = {"branch": "feature/가", "remote": "https://example.org:8080/own.git?x=1", "files": 3}
    told = [
        ("mutator", workdir, "repo", "feature/가"),
        ("event", {"type": "workspace.repoAvailable", "path": workdir, "metadata": metadata}),
    ]
    assert seen == told
    await runner.run(event_frame("e2", "go", workdir=workdir))
    assert seen == told
    await runner.run(event_frame("e3", "go", workdir=str(repository.parent)))
    await runner.run(event_frame("e4", "go", workdir=workdir))
    assert seen == told * 2


async def test_a_handler_that_fails_spoils_neither_the_turn_nor_the_event(
    make: Make, link: FakeLink, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make(link, FakeModel(says("done")))
    api, seen = api_of(runner, "culprit"), list[Any]()
    api.pipelines.mutate("workspace.repoAvailable", lambda ctx: 5)
    api.events.on("workspace.repoAvailable", seen.append)
    await runner.run(event_frame("e1", "go", workdir=str(repository)))
    assert link.answers()[-1].status == "completed"
    assert seen[0]["metadata"]["branch"] == "feature/가"
    assert "the workspace.repoAvailable handler of extension culprit failed" in caplog.text
