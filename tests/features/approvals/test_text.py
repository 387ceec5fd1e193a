"""Items as a person reads them, and answers that fit a question: docs/approvals.md, "Answering"."""

from __future__ import annotations

import unicodedata
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.approvals.command import answer_issues, approve
from goondan.features.approvals.command.text import MARK, OUTSIDE, command_lines, item_lines, list_lines
from goondan.schemas.text.visible import TURNING

ITEM: dict[str, Any] = {
    "id": "t1/c1",
    "code": "3f9a2c1b0d",
    "kind": "approval",
    "agent": "coder",
    "instanceKey": "k",
    "tool": "bash__exec",
    "digest": "0" * 64,
    "askedMs": 0,
    "expiresMs": 3_600_000,
    "state": "waits",
    "args": {"command": "ls"},
}


def kept(text: str) -> str:
    """Text of an item without its marks, labels and breaks."""
    return "".join(line.partition(OUTSIDE)[2] for line in text.splitlines())


@settings(max_examples=25)
@given(st.text(max_size=60), st.integers(1, 120))
def test_every_line_of_an_item_has_its_mark_and_fits_and_steers_no_terminal(text: str, columns: int) -> None:
    item = {**ITEM, "args": {"command": text}, "message": text, "reason": text, "workdir": text, "waitedForBy": [text]}
    lines = item_lines(item, columns)
    assert all(line.startswith(MARK) for line in lines)
    assert not {unicodedata.category(character) for line in lines for character in line} & {"Cc", "Zl", "Zp", "Cs"}
    assert not {chr(code) for code in TURNING} & set("".join(lines))
    assert max(len(line) for line in lines) < max(24, columns)


def test_control_characters_are_shown_by_their_number() -> None:
    shown = "".join(item_lines({**ITEM, "message": "a\x1b[2Jb\nc"}))
    assert "\x1b" not in shown
    assert "1b" in shown.lower()


def test_nothing_of_a_long_line_is_left_out() -> None:
    text = "".join(chr(97 + at % 26) for at in range(3000))
    assert text in kept("\n".join(item_lines({**ITEM, "message": text}, 40)))


def test_the_code_the_callid_and_the_command_are_there() -> None:
    shown = "\n".join(item_lines(ITEM))
    for part in ("3f9a2c1b0d", "t1/c1", "coder/k", "bash__exec", "ls", "0" * 64, "denied if not answered by"):
        assert part in shown
    assert command_lines(ITEM) == ["answer it with: gdn approve yes 3f9a2c1b0d   or: gdn approve no 3f9a2c1b0d"]
    assert "gdn approve answer 3f9a2c1b0d" in command_lines({**ITEM, "kind": "question"})[0]
    assert list_lines([], 0) == ["nothing waits for a person"]
    assert list_lines([ITEM], 2)[-1] == "and 2 more"


@pytest.mark.parametrize("name", ["list", "show", "yes", "no", "answer"])
def test_json_works_with_all_of_them(name: str) -> None:
    assert isinstance(approve, click.Group)
    options = {option for parameter in approve.commands[name].params for option in parameter.opts}
    assert "--json" in options


def test_an_answer_fits_the_schema_of_its_question() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert answer_issues(schema, {"name": "Kim"}) == []
    for wrong in ({"name": 5}, {}, "Kim", None, ["Kim"]):
        assert answer_issues(schema, wrong), wrong
    assert answer_issues(None, 5) == [], "a question without a schema takes any value"
