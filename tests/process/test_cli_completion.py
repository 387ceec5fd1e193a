"""Completion as a shell asks for it, and as a real bash does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel.cli.commands import helps
from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, ROOT, Sandbox, environment

TOOL = "---\n" + documents(
    'Tool notes {entry: ./tools/evil.py, exports: [{name: add, description: "Keep a note.\\nSecond line."}, '
    '{name: "$(touch x)"}]}',
)
HOSTILE = "---\napiVersion: goondan.ai/v1\nkind: Agent\nmetadata: {name: '; touch x'}\n"


class Shell:
    """A command line whose current directory has a bundle and a state."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        program = home / "bin" / "gdn"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m goondan.kernel.cli "$@"\n')
        program.chmod(0o755)
        self.env = environment(home / "state", PATH=f"{home}/bin:{os.environ['PATH']}")

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.home, env=self.env, capture_output=True, text=True, timeout=20, check=True
        )
        assert done.stderr == ""
        return done.stdout

    def gdn(self, *arguments: str, **env: str) -> str:
        done = Sandbox(self.home, {**self.env, **env}, self.home / "goondan.yaml").gdn(*arguments)
        assert (done.status, done.err) == (0, "")
        return done.out

    def offers(self, line: str) -> list[str]:
        """What is offered for the last word of `line`, as `type,value`."""
        words = line.split(" ")
        answer = self.gdn(_GDN_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
        return answer.split()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "goondan.yaml").write_text(BUNDLE + TOOL + HOSTILE)
    made = Shell(tmp_path)
    yield made
    assert not (tmp_path / "x").exists()


def test_commands_and_options(shell: Shell) -> None:
    assert shell.offers("gdn ") == [f"plain,{name}" for name in helps()]
    assert shell.offers("gdn val") == ["plain,validate"]
    assert "plain,--detach" in shell.offers("gdn run --d")
    assert shell.offers("gdn init --template t") == ["plain,two-agents", "plain,team", "plain,tool"]
    assert shell.offers("gdn completion ") == ["plain,bash", "plain,zsh", "plain,fish"]
    assert shell.offers("gdn run --bundle x") == ["file,x"]
    assert shell.offers("gdn call --workdir ") == ["dir,"]
    assert shell.offers("gdn nonsense --") == ["plain,--version", "plain,--help"]


def test_names_of_the_bundle_without_running_anything_of_it(shell: Shell) -> None:
    (shell.home / "tools").mkdir()
    (shell.home / "tools" / "evil.py").write_text("open('x', 'w')\n")
    assert shell.offers("gdn send ") == ["plain,main"]
    assert shell.offers("gdn send main ") == []
    assert shell.offers("gdn trace --agent m") == ["plain,main"]
    offered = shell.offers("gdn call ")
    assert offered[0] == "plain,notes__add"
    assert "plain,bash__exec" in offered
    assert not [word for word in offered if "touch" in word]
    helped = shell.gdn(_GDN_COMPLETE="zsh_complete", COMP_WORDS="gdn call notes", COMP_CWORD="2")
    assert helped.splitlines() == ["plain", "notes__add", "Keep a note."]


def test_instances_that_a_shell_could_misread_are_not_offered(shell: Shell) -> None:
    from goondan.kernel.paths import state_dir
    from goondan.schemas.bundle.address import instance_dir

    state = state_dir(str(shell.home / "goondan.yaml"), {"GOONDAN_STATE_ROOT": str(shell.home / "state")})
    for agent, key in (
        ("main", "user@host.1"),
        ("main", "$(touch x)"),
        ("main", "a b"),
        ("_operator", "op"),
        ("z", "y"),
    ):
        os.makedirs(instance_dir(state, agent, key))
    assert shell.offers("gdn trace --instance ") == ["plain,op", "plain,user@host.1", "plain,y"]
    assert shell.offers("gdn trace --agent main --instance ") == ["plain,user@host.1"]
    assert shell.offers("gdn call --instance ") == ["plain,op"]
    os.makedirs(f"{state}/logs")
    for name in ("broker.log", "agent-main.log", "notes.txt"):
        Path(state, "logs", name).touch()
    assert shell.offers("gdn logs --role ") == ["plain,broker", "plain,agent", "plain,agent-main"]


def test_names_from_a_state_that_commands_refuse_are_not_offered(shell: Shell) -> None:
    from goondan.kernel.paths import state_dir
    from goondan.schemas.bundle.address import instance_dir

    above = shell.home / "above"
    above.mkdir()
    shell.env["GOONDAN_STATE_ROOT"] = str(above / "state")
    state = state_dir(str(shell.home / "goondan.yaml"), shell.env)
    os.makedirs(instance_dir(state, "main", "planted"))
    os.makedirs(f"{state}/logs")
    Path(state, "logs", "broker.log").touch()
    assert shell.offers("gdn trace --instance ") == ["plain,planted"]
    above.chmod(0o777)
    assert shell.offers("gdn trace --instance ") == []
    assert shell.offers("gdn logs --role ") == []


@pytest.mark.parametrize("content", [b"\xff\xfe", b"kind: [", b"- " * 100_000, b"kind: Agent\nmetadata: {name: {}}\n"])
def test_a_broken_bundle_offers_nothing_and_says_nothing(shell: Shell, content: bytes) -> None:
    (shell.home / "goondan.yaml").write_bytes(content)
    assert shell.offers("gdn send ") == []
    (shell.home / "goondan.yaml").unlink()
    (shell.home / "goondan.yaml").mkdir()
    assert shell.offers("gdn trace --agent ") == []


def test_a_real_bash_completes(shell: Shell) -> None:
    script = (
        "source <(gdn completion bash); complete -p gdn; COMP_WORDS=(gdn call notes); COMP_CWORD=2; "
        '_gdn_completion gdn; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    registered, *offered = shell.run("bash", "--norc", "-c", script).splitlines()
    assert registered == "complete -o nosort -F _gdn_completion gdn"
    assert offered == ["notes__add"]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_every_script_is_one_that_its_shell_understands(shell: Shell, name: str) -> None:
    script = shell.gdn("completion", name)
    assert f"_GDN_COMPLETE={name}_complete" in script
    program = shutil.which(name)
    if program is not None:
        subprocess.run([program, "-n"], input=script.encode(), check=True, timeout=20)
