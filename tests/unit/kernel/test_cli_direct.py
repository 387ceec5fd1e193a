"""What is read without click is read as click reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.cli import output
from goondan.kernel.cli.commands import command_of
from goondan.kernel.cli.rules import direct

OPTIONS = ["--bundle", "--policy", "--workdir", "--instance", "--json", "--trust", "--batch", "--allow-net", "--detach"]
OPTIONS += ["--watch", "--accept-loss", "--new", "--reasoning", "--bundle=b", "--inst", "--help", "--", "-h", "-"]
WORDS = st.sampled_from([*OPTIONS, "bash__exec", "{}", "a=b", "b.yaml", ""]) | st.text(max_size=4)


def as_click_reads(arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The parameters of a command line, and whether it asks for JSON."""
    output.say_json(wanted=False)
    context = command_of(arguments[0]).make_context(arguments[0], arguments[1:])
    return context.params, output.wants_json()


def same(arguments: list[str]) -> bool:
    """Whether a line is read directly; then click reads the same."""
    line = direct.read(arguments)
    if line is None:
        return False
    assert (line.given, line.as_json) == as_click_reads(arguments)
    return True


@given(st.sampled_from(["call", "run"]), st.lists(WORDS, max_size=6))
def test_what_is_read_directly_click_reads_the_same(command: str, words: list[str]) -> None:
    same([command, *words])


@pytest.mark.parametrize(
    "line",
    [
        ["call", "bash__exec"],
        ["call", "bash__exec", '{"command":"true"}', "--bundle", "b.yaml"],
        ["call", "--json", "--trust", "bash__exec", "command=true", "more=1", "--instance", "i", "--workdir", "."],
        ["call", "--policy", "p.yaml", "bash__exec", ""],
        ["run"],
        ["run", "--detach", "--json", "--bundle", "b.yaml"],
        ["run", "--watch", "--accept-loss", "--trust", "--new", "--reasoning", "--policy", "p", "--workdir", "w"],
    ],
)
def test_the_lines_of_scripts_are_read_directly(line: list[str]) -> None:
    assert same(line)


OTHERS = ["", "ps", "call", "call a --", "call a -", "call a --bundle=b", "call a -h", "call a --bundle", "run a"]
OTHERS += ["call a --bundle --json", "call a --json --json", "call a --batch f", "call a --allow-net h:1", "run --help"]


@pytest.mark.parametrize("line", [*map(str.split, OTHERS), ["--version"]])
def test_all_other_lines_are_left_to_click(line: list[str]) -> None:
    assert direct.read(line) is None


def test_a_command_that_is_read_directly_imports_no_click(tmp_path: Path) -> None:
    look = "import sys; from goondan.kernel.cli import execute; print(execute(sys.argv[1:]), 'click' in sys.modules)"
    run = [sys.executable, "-I", "-c", look, "call", "bash__exec", "{}", "--bundle", str(tmp_path / "none.yaml")]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=30, env={"HOME": str(tmp_path)})
    assert done.stdout.split() == ["2", "False"]
    assert "E_CONFIG_NOT_FOUND" in done.stderr
