"""Which lines of `gdn run` are commands of its console, and how messages and arguments are shown in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.cli.console.conversation import HELP, Command, history_line, read_command, tool_lines
from goondan.kernel.cli.state import new_instance
from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.text.visible import MAX_LINE, argument_line
from goondan.schemas.wire.frames import OperatorTool


@pytest.mark.parametrize("name", HELP)
def test_a_line_that_begins_with_a_command_is_one_whatever_follows(name: str) -> None:
    assert read_command(f"/{name}") == Command(name)
    assert read_command(f"/{name}  a  b ") == Command(name, "a  b")
    assert read_command(f"/{name}\nmore") == Command(name, "more")


@pytest.mark.parametrize(
    "text",
    ["/etc/hosts is what?", "/", "/ help", "help", " /help", "/helper", "/TOOLS", "/tools__list", "/bash__exec x=1"],
)
def test_every_other_line_is_a_message(text: str) -> None:
    assert read_command(text) is None


@given(st.text())
def test_no_text_breaks_the_reading_of_a_line(text: str) -> None:
    command = read_command(text)
    assert command is None or text.startswith(f"/{command.name}")


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (
            {"path": "a.txt", "lines": 3, "deep": {"x": [1]}, "all": [], "on": True},
            "path=a.txt lines=3 deep={…} all=[] on=true",
        ),
        ({"command": "echo a\nb"}, 'command="echo a\\nb"'),
        ({}, ""),
        (None, ""),
        (["x"], ""),
    ],
)
def test_the_arguments_of_a_call_in_one_line(args: Any, shown: str) -> None:
    assert argument_line(args) == shown


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_arguments_of_any_kind_are_one_short_line(args: dict[str, Any]) -> None:
    line = argument_line(args)
    assert len(line) <= MAX_LINE
    assert "\n" not in line


def test_a_message_of_each_kind_is_one_line() -> None:
    call = {"type": "tool-call", "toolName": "a__b", "args": {"x": 1}}
    result = {"type": "tool-result", "toolName": "a__b", "result": {"status": "ok"}}
    rows = [
        ({"role": "user", "content": "hi\nthere"}, "user       hi there"),
        ({"role": "assistant", "content": [{"type": "text", "text": "so"}, call]}, "assistant  so a__b x=1"),
        ({"role": "tool", "content": [result]}, "tool       a__b: ok"),
        ({"role": "user", "content": "look", "files": [{"type": "file", "name": "a.png"}]}, "user       look [a.png]"),
    ]
    assert [history_line({"data": data}) for data, _ in rows] == [line for _, line in rows]
    assert history_line(7) == "None"


def test_only_the_embedded_console_shows_tools_as_they_are_typed() -> None:
    tools = [OperatorTool(name="a__b", description="Does\nit."), OperatorTool(name="long__name")]
    assert tool_lines(tools, typed=True) == ["2 tools:", "  /a__b        Does it.", "  /long__name"]
    assert tool_lines(tools, typed=False)[1] == "  a__b        Does it."


def test_the_key_of_a_new_conversation_is_a_key_and_another_one_each_time() -> None:
    keys = {new_instance() for _ in range(50)}
    assert all(is_instance_key(key) for key in keys)
    assert len(keys) > 40
