"""The quickstart as a newcomer meets it: without a key, with either vendor's, and with a server of one's own."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel_fixture import ROOT, Sandbox, sandbox
from tests.process.model_servers import KEY, server

QUICKSTART = str(ROOT / "examples" / "quickstart")
HERE = ("--bundle", QUICKSTART, "--workdir", str(ROOT))
LINES = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
#: Looks around, then counts with two tools at once.
SCRIPT = [
    [["file-system__list", {}]],
    [["text-file__count", {"path": "README.md"}], ["bash__exec", {"command": "wc -l < README.md"}]],
]
#: name -> variables, provider, model, what decided; BASE is the server's.
SETTINGS = {
    "anthropic": (
        {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": "BASE"},
        ["anthropic", "", "ANTHROPIC_API_KEY"],
    ),
    "openai": ({"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "BASE/v1"}, ["openai", "", "OPENAI_API_KEY"]),
    "a local server": ({"OPENAI_BASE_URL": "BASE/v1"}, ["openai", "", "OPENAI_BASE_URL"]),
}


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with server("fake_llm") as base:
        yield base


@pytest.fixture
def alone() -> Iterator[Sandbox]:
    """No key and no server; and nothing that trusts a bundle, for the quickstart needs nobody's answer."""
    with sandbox(extra_env={"GOONDAN_TRUST": ""}) as kernel:
        yield kernel


def test_without_a_key_the_console_counts_lines_and_the_reviewer_can_change_nothing(alone: Sandbox) -> None:
    assert alone.gdn("run", "--bundle", QUICKSTART, "--detach").status == 0
    lines = ["/text-file__count path=README.md", "/bash__exec command='wc -l < README.md'"]
    told = "\n".join([*lines, "/file-system__read path=README.md maxBytes=1000"])
    result = alone.gdn("run", *HERE, "--json", input=told)
    assert (result.status, result.err) == (0, "")
    counted, printed, read = [answer["response"] for answer in result.json["answers"]]
    assert json.loads(counted)["lines"] == LINES
    assert int(printed) == LINES
    assert json.loads(read)["content"] == (ROOT / "README.md").read_bytes()[:1000].decode(errors="ignore")
    (agent, _) = alone.gdn("validate", QUICKSTART, "--json").json["agents"]
    assert (agent["provider"], agent["chosenBy"]) == ("embedded", "")
    told_reviewer = ["/tools", "/text-file__show path=README.md lines=1", '/bash__exec {"command":"touch made"}']
    tools, shown, refused = [alone.gdn("send", *HERE, "reviewer", line).out for line in told_reviewer]
    assert "text-file__show" in tools
    assert not re.search("bash__|file-system__|write|mkdir", tools)
    assert "1: # Goondan kernel" in shown
    assert "E_TOOL_NOT_IN_CATALOG" in refused
    assert alone.gdn("stop", "--bundle", QUICKSTART).status == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_counts_the_lines_of_the_readme(fake: str, setting: str) -> None:
    variables, chosen = SETTINGS[setting]
    env = {name: value.replace("BASE", fake) for name, value in variables.items()}
    with sandbox(extra_env={"GOONDAN_TRUST": "", **env}) as kernel:
        for agent in kernel.gdn("validate", QUICKSTART, "--json").json["agents"]:
            assert [agent["provider"], agent["model"], agent["chosenBy"]] == chosen
        if setting != "anthropic":
            return  # test_model_turns.py asks both vendors, and test_walkthrough.py a local server
        result = kernel.gdn("run", *HERE, input=f"script {json.dumps(SCRIPT)}\n")
        assert (result.status, result.err) == (0, "")
        counted, printed = [json.loads(text) for text in result.out.removeprefix("done: ").split(" | ")]
        assert (counted["lines"], int(printed["stdout"])) == (LINES, LINES)


def on_a_terminal(kernel: Sandbox, *arguments: str) -> str:
    """What a person sees of `gdn`, whose input ends at once."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "rb+", buffering=0) as terminal:
        process = kernel.popen(*arguments, stdin=terminal, stdout=terminal, stderr=terminal)
    seen = b""
    with os.fdopen(ours, "rb+", buffering=0) as screen:
        try:
            while piece := screen.read(4096):
                if b"> " in piece:
                    screen.write(b"\x04")
                seen += piece
        except OSError:
            pass  # the terminal is closed with its last user
    assert process.wait(timeout=30) == 0
    return seen.decode()


def test_a_person_is_told_which_model_was_chosen_and_why(alone: Sandbox) -> None:
    assert "the embedded console (the environment names no other model)" in on_a_terminal(alone, "run", *HERE)
    alone.env |= {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "GOONDAN_MODEL": "qwen3"}
    assert "openai, qwen3 at http://127.0.0.1:1/v1 (chosen by OPENAI_BASE_URL)" in on_a_terminal(alone, "run", *HERE)


def test_a_workdir_in_the_kernels_own_state_is_refused_before_anything_starts(alone: Sandbox) -> None:
    (alone.home / "state" / "workspaces").mkdir(parents=True)
    for command in (["run"], ["send", "x"], ["call", "bash__exec", "{}"]):
        result = alone.gdn(*command, "--workdir", "state", "--json")
        assert (result.status, result.json["error"]["code"]) == (1, "E_SANDBOX_DENIED")
    assert not list(alone.home.glob("state/workspaces/*"))


@pytest.mark.requirement("CONTEXT-04")
def test_a_workdir_belongs_to_a_message(alone: Sandbox) -> None:
    assert alone.gdn("run", "--detach", "--workdir", ".", "--json").json["error"]["code"] == "E_USAGE"
    alone.detach()
    work = alone.home / "work"
    work.mkdir()
    assert alone.gdn("send", "--workdir", "work", "/bash__exec command='echo x > made; pwd'").out == f"{work}\n"
    assert (work / "made").read_text() == "x\n"
    assert alone.gdn("send", "/bash__exec command=pwd").out.endswith("/workspace\n")
    (workspace,) = alone.home.glob("state/workspaces/*/instances/main/default/workspace")
    assert alone.gdn("send", "--workdir", str(workspace), "/bash__exec command=pwd").out == f"{workspace}\n"


def test_an_installed_quickstart_is_the_whole_folder() -> None:
    """Every file of it is among the data files of the package."""
    named = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"(examples/quickstart/[^"]*)"', named)
    files = {path for path in Path(QUICKSTART).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for pattern in patterns for path in ROOT.glob(pattern)} == files
