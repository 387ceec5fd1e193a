"""The bundled extension `logging`: what it writes of turns, steps and calls."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from goondan.schemas.wire.errors import fail
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, the_answer


async def lines(make: Make, caplog: pytest.LogCaptureFixture, *script: Any, **config: Any) -> list[tuple[str, str]]:
    """Level and text of what is logged of a turn; ids and times as letters."""
    caplog.set_level(logging.DEBUG)
    link = FakeLink()
    runner = make(link, FakeModel(*script), extensions=[bundled("logging", config)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    found = [(line.levelname, line.getMessage()) for line in caplog.records if line.name == "agentproc.extension"]
    return [
        (level, re.sub(r"turn [0-9a-zA-Z_.-]+", "turn ID", re.sub(r"\(\d+\.\d{3} s\)", "(T)", text)))
        for level, text in found
    ]


CALLS = wants(("a", "notes__add", {"text": "between us"}))


async def test_a_line_for_each_turn_step_and_call(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert await lines(make, caplog, CALLS, says("done")) == [
        ("INFO", "logging: call a of notes__add: ok (T)"),
        ("INFO", "logging: step 0 of turn ID: notes__add (T)"),
        ("INFO", "logging: step 1 of turn ID: no tool calls (T)"),
        ("INFO", "logging: turn ID: stop (T)"),
    ]
    assert "between us" not in caplog.text


async def test_only_what_is_asked_for_with_arguments_cut(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = {"of": ["toolCall"], "arguments": True, "maxChars": 12, "level": "debug"}
    assert await lines(make, caplog, CALLS, says("done"), **config) == [
        ("DEBUG", 'logging: call a of notes__add {"text": "be ...: ok (T)')
    ]


async def test_what_fails_is_a_warning_with_its_code(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    said = await lines(make, caplog, wants(("a", "nothing__here", {})), fail("E_MODEL_FAILED", "no model"))
    assert [level for level, _ in said] == ["WARNING", "INFO", "WARNING", "WARNING"]
    assert "E_TOOL_NOT_IN_CATALOG" in said[0][1]
    assert "E_MODEL_FAILED: no model" in said[3][1]


async def test_a_config_that_a_step_gives_is_checked_as_well(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("done")), extensions=[bundled("logging", {"levle": "info"})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert code_of(answer) == "E_EXTENSION_FAILED"
    assert "config.levle: unexpected property" in (answer.error.message if answer.error else "")
