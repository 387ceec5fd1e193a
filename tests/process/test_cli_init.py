"""`gdn init`: every template is written, is valid, and runs without a key; nothing is overwritten by accident."""

from __future__ import annotations

import glob
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from goondan.kernel.cli import execute
from goondan.kernel.cli.commands.bundles import TEMPLATES, template_files
from tests.kernel_fixture import ROOT, Sandbox, sandbox


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `gdn init` trusts here is kept here, and not in the state of whoever runs the tests."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path_factory.mktemp("state")))


#: What is sent to the entry agent of a template, and what the file then says. The console does what it is told.
SHARED = {
    "two-agents": ("reviewer", "/agents__request target=reviewer "
                   "input='/file-system__write path=REVIEW.md content=fine'"),
    "team": ("coder", "/agents__request target=coder input=\"/agents__request target=reviewer "
             "input='/bash__exec command=\\\"cat PLAN.md > REVIEW.md\\\"'\""),
}  # fmt: skip


def made(home: Sandbox, template: str) -> Path:
    folder = home.home / "new" / template
    result = home.gdn("init", str(folder), "--template", template)
    assert (result.status, result.err) == (0, "")
    for name in template_files(template):
        assert f"wrote {folder / name}" in result.out
    valid = home.gdn("validate", str(folder), "--json").json
    assert (valid["valid"], valid["warnings"]) == (True, [])
    return folder


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in SHARED])
def test_a_template_is_valid_and_answers_without_a_key(template: str) -> None:
    with sandbox() as home:
        folder = made(home, template)
        lines = ["hello", "/bash__exec command='echo $((6*7))'"]
        if template == "tool":
            lines += ['/notes__add {"text": "water the  plants"}', "/notes__list {}", "/notes__add {}"]
        result = home.gdn("run", "--bundle", str(folder), input="\n".join(lines) + "\n")
        assert (result.status, result.err) == (0, "")
        assert "embedded console" in result.out
        assert "42" in result.out
        if template == "tool":
            assert "water the plants" in result.out
            assert "E_TOOL_INVALID_ARGS" in result.out


@pytest.mark.parametrize("template", list(SHARED))
def test_agents_of_a_template_ask_each_other_and_share_files_as_it_is_printed(template: str) -> None:
    with sandbox() as home, home.on_path() as path:
        folder = made(home, template)
        home.here, home.bundle = folder, folder / "goondan.yaml"
        printed = home.gdn("init", "--force", "--template", template, "--json").json["next"]
        commands = [step["command"] for step in printed]
        named = home.home / "named"
        named.mkdir()
        other, asked = SHARED[template]
        (detached,) = [line for line in commands if line.startswith("gdn run --detach; gdn send")]
        (there,) = [line for line in commands if "--workdir DIR" in line]

        def shell(line: str, said: str = "") -> str:
            env = {**home.env, "PATH": path}
            done = subprocess.run(line, shell=True, cwd=folder, env=env, input=said, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        # In their own folder: what the entry agent wrote the others read, and it reads what they wrote.
        shell(detached.replace("TEXT", shlex.quote("/file-system__write path=PLAN.md content=plan")))
        assert '"plan' in home.gdn("send", "/file-system__read path=PLAN.md").out
        assert "embedded console" in home.gdn("send", "hello").out
        without = [other] if template == "two-agents" else []  # who has no shell; of the team, who takes the questions
        assert "E_TOOL_NOT_IN_CATALOG" in home.gdn("send", *without, "/bash__exec command=ls").out
        home.gdn("send", asked)
        assert "REVIEW.md" in home.gdn("send", "/file-system__list").out
        shell("gdn stop")
        if template == "two-agents":
            return  # the folder is a person's in the same way for all of them
        # In the person's, for all of them.
        said = f"/file-system__write path=PLAN.md content=mine\n{asked}\n"
        shell(there.replace("DIR", str(named)), said)
        assert sorted(path.name for path in named.iterdir()) == ["PLAN.md", "REVIEW.md"]
        assert (named / "REVIEW.md").read_text() == "mine"


def test_the_test_of_the_tool_passes_and_can_fail(tmp_path: Path) -> None:
    assert execute(["init", str(tmp_path), "--template", "tool"]) == 0
    command = [sys.executable, "-B", "-m", "unittest", "discover", "-s", "tests"]
    passed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert passed.returncode == 0, passed.stderr
    assert "Ran 2 tests" in passed.stderr
    tool = tmp_path / "tools" / "notes.py"
    tool.write_text(tool.read_text().replace('"count": len(', '"count": 1 + len('))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30).returncode == 1


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "b"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "notes.py").symlink_to(outside)
    assert execute(["init", str(folder), "--template", "tool", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E_INIT"
    assert str(folder / "tools" / "notes.py") in error["message"]
    assert not (folder / "goondan.yaml").exists()
    assert execute(["init", str(folder), "--template", "tool", "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == ["goondan.yaml", "tests/test_notes.py", "tools/notes.py"]
    assert (folder / "goondan.yaml").read_bytes() == template_files("tool")["goondan.yaml"]
    assert outside.read_text() == "mine"
    assert not (folder / "tools" / "notes.py").is_symlink()
    assert sorted(path.name for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts) == [
        "goondan.yaml",
        "notes.py",
        "test_notes.py",
    ]


def test_what_was_written_is_in_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(folder: Path, *more: str) -> str:
        assert execute(["init", str(folder), "--json", *more]) == 0
        return str(json.loads(capsys.readouterr().out)["repository"])

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("not part of it")
    assert init(tmp_path / "b", "--template", "tool") == "made"
    status = subprocess.run(["git", "-C", tmp_path / "b", "status", "--porcelain"], capture_output=True, text=True)
    assert status.stdout == "?? mine\n"
    assert init(tmp_path / "b" / "inside") == "there"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert init(tmp_path / "c") == "no git"
    assert not (tmp_path / "c" / ".git").exists()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_one_error_and_leaves_nothing(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert execute(["init", str(tmp_path / where), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_INIT"
    assert sorted(tmp_path.rglob("*")) == before


def test_what_fails_half_way_is_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools").write_text("a file where a folder must be")
    assert execute(["init", str(tmp_path), "--template", "tool"]) == 1
    assert "E_INIT" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["tools"]


def test_every_file_of_a_template_is_part_of_an_installation() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "goondan.kernel"
    ]
    packed = {
        os.path.relpath(path, ROOT / "kernel" / "templates")
        for pattern in patterns
        for path in glob.glob(str(ROOT / "kernel" / pattern), recursive=True)
    }
    for template in TEMPLATES:
        assert {f"{template}/{name}" for name in template_files(template)} <= packed
