"""What commands print goes through one place, which makes every line harmless and knows only our own colours."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import goondan.kernel.cli
from goondan.kernel.cli import output
from goondan.kernel.cli.output import Style, columns, pretty_lines, shown_line, width_of, write, write_json

EVIL = "a\x1b]0;pwned\x07\x9b31m\u202e\nforged\r\udc9b"


def test_only_our_own_colours_come_through() -> None:
    assert shown_line(Style(True).bad("no") + " \x1b[31m") == "\x1b[31mno\x1b[0m \\x1b[31m"
    assert shown_line(Style().bad("no")) == "no"


def test_korean_names_line_up() -> None:
    lines = columns([("NAME", "STATE"), ("도우미", "idle"), ("helper", "busy"), ("e\u0301", "idle")])
    assert lines == ["NAME    STATE", "도우미  idle", "helper  busy", "e\u0301       idle"]
    assert {width_of(line[: -len(word)]) for line, word in zip(lines[1:], ("idle", "busy", "idle"), strict=True)} == {8}
    assert width_of("\x1b가") == 2, "what is no letter is counted as one"


@given(st.text(st.one_of(st.characters(), st.sampled_from("\ufdd0\ufdd1031m;[\x1b")), max_size=40))
def test_nobody_else_can_write_a_mark_of_colour(text: str) -> None:
    assert "\x1b" not in shown_line(text)


def test_a_mark_is_the_secret_of_a_process() -> None:
    mark = Style(True).bold("x").partition("x")[0]
    assert len(mark) > 16
    assert output._SECRET in mark
    assert "\x1b" not in shown_line(mark.replace(output._SECRET, "0" * 16))


@pytest.mark.parametrize("err", [False, True])
def test_each_line_is_one_line(err: bool, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    write("first", EVIL, stream=sys.stderr if err else None)
    printed = capsys.readouterr()
    assert (printed.err if err else printed.out) == "first\na\\x1b]0;pwned\\x07\\x9b31m\\u202e\\x0aforged\\x0d\\udc9b\n"


@pytest.mark.parametrize("print_json", [write_json, lambda value: write(*pretty_lines(value))])
def test_json_is_json(print_json: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(print_json)
    print_json({"name": EVIL, EVIL: [EVIL]})
    printed = capsys.readouterr().out
    name = EVIL.replace("\udc9b", "\ufffd")
    assert json.loads(printed) == {"name": name, name: [name]}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", printed)


def test_no_command_prints_by_itself() -> None:
    """Only goondan.kernel.cli.output prints; prompt.py and screen.py draw on the terminal what they made harmless."""
    found = []
    for path in sorted(Path(goondan.kernel.cli.__file__).parent.rglob("*.py")):
        if path.name in ("output.py", "prompt.py", "screen.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "print" or called.startswith(("click.echo", "click.secho", "sys.stdout", "sys.stderr")):
                    found.append(f"{path.name}: {called}")
    allowed = {"sys.stdout.flush", "sys.stderr.flush", "sys.stdout.fileno", "sys.stderr.fileno"}
    assert [item for item in found if item.partition(": ")[2] not in allowed] == []
