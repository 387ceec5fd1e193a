"""Advice to the person who runs a swarm reaches no model, and the person has it all the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from goondan.agentproc.machine.catalog import not_in_catalog
from goondan.agentproc.machine.questions import read_answer, read_completion
from goondan.agentproc.providers.history import result_text
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import CODES, FOR_MODELS, error_payload, for_model, for_people, tool_error
from goondan.schemas.wire.frames import TOOL_COMPLETED, AgentEvent, Answer, Completion, Frame, Source, ToolResult
from goondan.schemas.wire.questions import ANSWER_SUFFIX, handoff_correlation

ROOT = Path(__file__).parents[3]
#: What only the person who runs the swarm has.
FOR_A_PERSON = re.compile(
    r"gdn |spec\.|policy\.|\b[Gg]rant\b|Install|Extension/|\blogs?\b|\bbundle\b|[Oo]perator|Model\.|Raise |endpoint"
)
#: Codes of commands, of bundles and of kernels that do not run: no tool result has them, or what they say is no advice.
NEVER_FOR_MODELS = re.compile(
    "E_(CONFIG|KERNEL|BUNDLE)_|E_(APPROVAL_(NOT_FOUND|DECIDED)|UNDO_REFUSED|CHANGESET_DENIED|TURN_NOT_FOUND|MCP_INSTALL)"
)
GRANT = "Use a path in the workdir, or grant it: spec.sandbox.filesystem.read: [/etc/shadow]."


@pytest.mark.parametrize("code", sorted(CODES))
def test_no_stock_advice_to_a_person_is_a_models(code: str) -> None:
    if not NEVER_FOR_MODELS.match(code):
        told = for_model(tool_error(code, "m", name="E"))
        assert told.suggestion and not FOR_A_PERSON.search(told.suggestion)


def test_no_place_that_writes_advice_to_a_person_has_a_code_whose_advice_is_a_models() -> None:
    for path in [*ROOT.glob("agentproc/**/*.py"), *ROOT.glob("toolhost/**/*.py")]:
        source = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)) if "suggestion" in source else ():
            if isinstance(call, ast.Call):
                values = [*call.args, *(word.value for word in call.keywords if word.arg == "code")]
                texts = [value.value for value in values if isinstance(value, ast.Constant)]
                code = next((text for text in texts if isinstance(text, str) and text.startswith("E_")), None)
                said = [ast.unparse(word.value) for word in call.keywords if word.arg == "suggestion"]
                if code is not None and code not in FOR_MODELS and said and not NEVER_FOR_MODELS.match(code):
                    assert not FOR_A_PERSON.search(said[0]), f"{path}:{call.lineno}: {code} {said[0]}"


def test_a_link_out_of_the_sandbox_tells_the_model_of_no_grant_and_the_person_of_it() -> None:
    error = tool_error("E_SANDBOX_DENIED", "/etc/shadow is outside of the sandbox", name="ToolError", suggestion=GRANT)
    shown = result_text(ToolResult(status="error", error=error))
    assert "outside of the sandbox" in shown and "grant it" not in shown and FOR_MODELS["E_SANDBOX_DENIED"] in shown
    assert for_people(error) == f"/etc/shadow is outside of the sandbox\n{GRANT}"
    own = tool_error("E_TOOL_LIMIT", "too much", name="ToolError", suggestion="Ask for less.")
    assert "Ask for less." in result_text(ToolResult(status="error", error=own)) and for_people(own) == "too much"


def test_what_comes_later_tells_the_model_no_more() -> None:
    error = tool_error("E_SANDBOX_DENIED", "no", name="ToolError", suggestion=GRANT)
    ended = Completion(
        handle="h",
        tool_name="t__x",
        tool_call_id="c",
        turn_id="t",
        result=to_raw(ToolResult(status="error", error=error)),
    )
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(ended))
    event = AgentEvent(id="e", type=TOOL_COMPLETED, created_at="", input=told)
    text = read_completion(Frame(TOOL_COMPLETED, source=Source("tool", "tool:1")), event).text
    failure = error_payload("E_MODEL_FAILED", "the model server refused the key")
    answer = AgentEvent(id="a", type="x", created_at="", answer=Answer(turn_id="t", status="failed", error=failure))
    asked = "t1/h1~ab"
    frame = Frame("event.send", from_="b", event_id=asked + ANSWER_SUFFIX, payload=to_raw(answer))
    frame.in_reply_to = handoff_correlation(asked)
    later = read_answer(frame).text
    assert "grant it" not in text and FOR_MODELS["E_SANDBOX_DENIED"] in text
    assert "Check the model's endpoint" not in later and FOR_MODELS["E_MODEL_FAILED"] in later


def test_a_near_name_is_advice_for_both() -> None:
    refused = not_in_catalog("bash_exec", ["bash__exec", "wait__seconds"])
    assert refused.suggestion == for_model(refused).suggestion == "Did you mean 'bash__exec'?"
    assert for_people(refused) == refused.message
    assert not_in_catalog("nothing", ["bash__exec"]).suggestion == CODES["E_TOOL_NOT_IN_CATALOG"]
