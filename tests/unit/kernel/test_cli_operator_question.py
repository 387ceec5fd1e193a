"""What an operator's command asks the broker: texts that no frame can hold are refused before anything is attached.
Commands that are rows of a table ask it their parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from goondan.kernel.cli import operator_question
from goondan.kernel.cli.operator_question import Op, ask_broker, operator_group
from goondan.schemas.wire.errors import GoondanError


@pytest.mark.parametrize("field", ["id", "eventId", "patchId", "reason"])
def test_a_text_that_is_not_utf8_is_a_usage_error_that_names_it(field: str, tmp_path: Path) -> None:
    bundle = tmp_path / "goondan.yaml"  # there is none: the text is looked at first
    with pytest.raises(GoondanError) as caught:
        ask_broker(str(bundle), {"op": "any", field: "a\udcff"})
    assert caught.value.info.code == "E_USAGE"
    assert field in caught.value.info.message
    assert caught.value.info.message.isascii()


def letters(
    monkeypatch: pytest.MonkeyPatch, *ops: Op
) -> tuple[click.Group, list[tuple[str | None, Mapping[str, Any]]]]:
    """A group of commands, and what its broker is asked."""
    asked: list[tuple[str | None, Mapping[str, Any]]] = []

    def answer(bundle: str | None, question: Mapping[str, Any]) -> dict[str, Any]:
        asked.append((bundle, question))
        return {"state": "dropped"}

    monkeypatch.setattr(operator_question, "ask_broker", answer)
    return operator_group("letters", "Show them.", *ops), asked


def drop(**fields: Any) -> Op:
    param = click.argument("event_id")
    return Op("letters.drop", "Forget one.", lambda answer, asked: [f"{asked} {answer['state']}"], (param,), **fields)


def test_a_parameter_is_a_field_of_the_question_and_the_answer_becomes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    group, asked = letters(monkeypatch, drop())
    printed = CliRunner().invoke(group, ["drop", "e1", "--bundle", "here"]).output
    question = {"op": "letters.drop", "eventId": "e1"}
    assert asked == [("here", question)]
    assert printed == f"{question} dropped\n"


def test_with_json_the_answer_is_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = letters(monkeypatch, drop())
    assert json.loads(CliRunner().invoke(group, ["drop", "e1", "--json"]).output) == {"state": "dropped"}


def test_fields_may_be_made_from_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    group, asked = letters(monkeypatch, drop(fields=lambda event_id: {"id": event_id.upper()}))
    CliRunner().invoke(group, ["drop", "e1"])
    assert asked == [(None, {"op": "letters.drop", "id": "E1"})]


def test_the_help_of_a_row_is_that_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = letters(monkeypatch, drop())
    text = CliRunner().invoke(group, ["drop", "--help"]).output
    assert "Forget one." in text
    assert text.index("--bundle") < text.index("--json")
