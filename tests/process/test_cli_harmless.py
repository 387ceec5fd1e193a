"""Names of strangers on a person's terminal: whatever a command prints, no name in it steers the terminal.

The bundle lies in a folder whose name holds a sequence that sets the title, a C1 control, DEL, a mark that turns the
order of letters round, and a line end with a forged line behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel.cli import execute
from tests.kernel_fixture import BUNDLE, Result, Sandbox, sandbox
from tests.process.terminal import Terminal

EVIL = "a\x1b]0;pwned\x07\x1b[31m\x9b31m\x7f\u202eb\u2028\nforged: line\rx"
#: What our own colours are.
COLOUR = re.compile(r"\x1b\[(?:0|1|2|3[1-6])m")
#: To the beginning of a line and erase it: the line of status.
ERASE = "\r\x1b[K"

TOOL = """\
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: odd}
spec:
  entry: ./odd.py
  exports:
    - name: run
      description: "one\\e]0;pwned\\x07 \\x9b31m \\u202etwo\\nforged: line"
      parameters: {type: object, properties: {"a\\e[2J\\x9b": {type: string, description: "x\\e[2Jy\\x9bz"}}}
      examples:
        - {input: {"a\\e[2J\\x9b": "x\\e[2J"}, output: "\\x9b\\u202e"}
"""
MODULE = (
    "def run(ctx, input):\n    raise ValueError('b\\x1b]0;pwned\\x07\\x9b\\nforged: line')\nhandlers = {'run': run}\n"
)
WRONG = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: "b\\e[2J\\x9b"}
spec: {provider: embedded, "c\\e[2J\\x9b\\nforged": 1}
"""


def harmless(shown: str) -> None:
    """Nothing in the text steers a terminal, and no name made a line of its own."""
    rest = COLOUR.sub("", shown.replace(ERASE, "").replace("\r\n", "\n"))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", rest), ascii(rest)
    assert not re.search("^forged", rest, re.MULTILINE), rest


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Sandbox, Path]]:
    """A kernel's home, and the folder of a bundle in it that has the name."""
    with sandbox() as made:
        folder = made.home / EVIL
        folder.mkdir()
        (folder / "goondan.yaml").write_text(BUNDLE.replace("[Tool/bash]", "[Tool/bash, Tool/odd]") + TOOL)
        (folder / "odd.py").write_text(MODULE)
        (made.home / f"{EVIL}2").mkdir()
        (made.home / f"{EVIL}2" / "goondan.yaml").write_text(WRONG)
        yield made, folder


def both(home: Sandbox, *arguments: str) -> Result:
    """A command's output in pipes, which is checked; so is what it shows on a terminal."""
    result = home.gdn(*arguments)
    harmless(result.out)
    harmless(result.err)
    with Terminal(home, *arguments) as terminal:
        assert terminal.wait() == result.status
    harmless(terminal.shown.decode())
    return result


@pytest.mark.parametrize(
    "command",
    [
        ["validate", "FOLDER"],
        ["validate", "FOLDER2"],
        ["validate", "FOLDER/missing.yaml"],
        ["ps", "--bundle", "FOLDER"],
        ["stop", "--bundle", "FOLDER"],
        ["send", "--bundle", "FOLDER", "hello"],
        ["cancel", "--bundle", "FOLDER", EVIL],
        ["logs", "--bundle", "FOLDER2"],
        ["trace", "--bundle", "FOLDER", EVIL],
        pytest.param(["doctor", "--bundle", "FOLDER"], marks=pytest.mark.feature("doctor")),
        ["grant", "list", "--bundle", "FOLDER"],
        ["grant", "files", "--bundle", "FOLDER"],
        ["grant", "accept", "--bundle", "FOLDER", EVIL],
        ["tool", "list", "--bundle", "FOLDER"],
        ["tool", "show", "odd", "--bundle", "FOLDER"],
        ["tool", "show", EVIL, "--bundle", "FOLDER"],
        ["tool", "new", EVIL, "--dir", "FOLDER"],
        ["tool", "new", "odd", "--dir", "FOLDER"],
        ["tool"],
        ["init", "FOLDER"],
        ["init", "FOLDER/goondan.yaml"],
        ["run", "--bundle", "FOLDER2"],
        ["run", "--bundle", "FOLDER", "--policy", f"FOLDER/{EVIL}"],
        ["call", "bash__exec", "{}", "--bundle", "FOLDER", "--workdir", f"FOLDER/{EVIL}"],
        ["schema", "export", "FOLDER/goondan.yaml"],
        ["completion", EVIL],
        [EVIL],
        ["run", f"--{EVIL}"],
    ],
    ids=lambda command: " ".join(command).replace(EVIL, "EVIL"),
)
def test_what_a_command_prints_steers_no_terminal(
    place: tuple[Sandbox, Path],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    home, folder = place
    monkeypatch.chdir(home.home)
    for name, value in home.env.items():
        monkeypatch.setenv(name, value)
    arguments = [word.replace("FOLDER", str(folder)) for word in command]
    execute(arguments)
    if command[0] != "logs":
        execute([*arguments, "--json"])
    printed = capfdbinary.readouterr()
    assert printed.out + printed.err
    for output in (printed.out, printed.err):
        harmless(output.decode())
        assert b"E_INTERNAL" not in output


@pytest.mark.parametrize("command", [["validate", "FOLDER2"], ["tool", "show", "odd", "--bundle", "FOLDER"]])
def test_neither_does_what_it_shows_in_colours(place: tuple[Sandbox, Path], command: list[str]) -> None:
    home, folder = place
    both(home, *[word.replace("FOLDER", str(folder)) for word in command])


def test_names_stand_in_json_as_they_are(place: tuple[Sandbox, Path]) -> None:
    home, folder = place
    assert home.gdn("validate", str(folder), "--json").json["bundle"] == str(folder)


def test_a_running_swarm_in_such_a_folder_steers_no_terminal(place: tuple[Sandbox, Path]) -> None:
    home, folder = place
    bundle = ["--bundle", str(folder)]
    try:
        started = home.gdn("run", "--detach", *bundle)
        harmless(started.out)
        assert started.status == 0, started.err
        # A model's own text has lines of its own, and stands in a pipe as it is (test_live.py).
        assert home.gdn("send", *bundle, "/odd__run {}", "--instance", "o\u0301dd \u00a0").status == 2
        assert home.gdn("send", *bundle, "/odd__run {}", "--instance", "o\u0301dd").status == 0
        for command in (
            ["ps", *bundle],
            ["logs", *bundle],
            ["trace", *bundle],
            ["call", "odd__run", "{}", *bundle],
            ["tool", "test", "odd", *bundle],
        ):
            both(home, *command)
    finally:
        stopped = home.gdn("stop", *bundle)
    harmless(stopped.out)


def test_what_a_tool_says_of_itself_is_completed_harmlessly(place: tuple[Sandbox, Path]) -> None:
    home, folder = place
    words = {"COMP_WORDS": f"gdn call --bundle '{folder}' odd", "COMP_CWORD": "odd", "_GDN_COMPLETE": "fish_complete"}
    before = dict(home.env)
    home.env |= words
    try:
        offered = home.gdn()
    finally:
        home.env = before
    assert "odd__run" in offered.out
    harmless(offered.out)


@pytest.mark.parametrize(
    "command",
    [
        ["validate"],
        ["ps", "--bundle"],
        ["init"],
        ["tool", "new", "x", "--dir"],
        pytest.param(["doctor", "--bundle"], marks=pytest.mark.feature("doctor")),
    ],
)
def test_a_name_that_is_no_utf8(place: tuple[Sandbox, Path], command: list[str]) -> None:
    home, _ = place
    folder = os.path.join(os.fsencode(home.home), b"c\x9b31m")
    os.makedirs(folder, exist_ok=True)
    for more in ([], ["--json"]):
        process = home.popen(*command, os.fsdecode(folder), *more)
        for output in process.communicate(timeout=60):
            harmless(output.decode())  # and it is UTF-8
            assert b"E_INTERNAL" not in output
