"""Answers that have to fit a schema: judged, asked for again, told to vendors; and tools that have to be called."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from goondan.agentproc.machine.messages import UserData
from goondan.agentproc.machine.turn import (
    AskModel,
    Begin,
    EnterStep,
    LeaveStep,
    ModelAnswered,
    Resume,
    StepEntered,
    StepLeft,
    Turn,
)
from goondan.agentproc.machine.verdicts import Verdict
from goondan.agentproc.providers.anthropic import Anthropic
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest, asked_call
from goondan.agentproc.providers.openai import OpenAI
from goondan.agentproc.providers.responses import Responses
from goondan.agentproc.providers.vendor import ANSWER_TOOL, OutputWay, Vendor, answered, is_closed
from goondan.agentproc.turn.instance import OutputRule
from goondan.schemas.bundle.launch import ForcedTool, ModelSpec, OutputSpec, ToolChoice
from tests.unit.agentproc.fakes import BASH
from tests.unit.agentproc.turn_driver import Driver
from tests.unit.agentproc.vendor_formats import conversation

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "number"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
OPEN: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}
SEOUL = '{"city": "Seoul", "degrees": 21}'


def judge(text: str, schema: dict[str, Any] = CITY) -> Verdict:
    return OutputRule(OutputSpec(schema)).judge(text)


@pytest.mark.parametrize("text", [SEOUL, f"\n {SEOUL}\n", f"```json\n{SEOUL}\n```", f"```\n{SEOUL}\n```"])
def test_an_answer_that_fits_has_its_value(text: str) -> None:
    verdict = judge(text)
    assert (verdict.text, verdict.violations) == (SEOUL, [])
    assert verdict.value is not None
    assert msgspec.msgpack.decode(verdict.value) == {"city": "Seoul", "degrees": 21}


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        ("It is 21 degrees.", "it is no JSON"),
        ('{"city": "Seoul"', "it is no JSON"),
        ('{"city": "Seoul"}', "answer.degrees: required property is missing"),
        ('{"city": 1, "degrees": 2}', "answer.city: expected string but got integer"),
        ("[1]", "answer: expected object but got array"),
        ('{"city": "Seoul", "degrees": NaN}', "it is no JSON"),
        ("[" * 5000 + "]" * 5000, "it is n"),
    ],
)
def test_an_answer_that_does_not_fit_says_why(text: str, violation: str) -> None:
    verdict = judge(text)
    assert verdict.value is None
    assert verdict.violations[0].startswith(violation)
    assert verdict.violations[0] in verdict.repair
    assert verdict.error.code == "E_OUTPUT_INVALID"


def test_violations_are_limited() -> None:
    schema = {"type": "object", "properties": {}, "required": [f"p{n}" for n in range(99)]}
    assert len(judge("{}", schema).violations) == 9


# --- the turn


def driver(*, max_steps: int = 8, wrapped: bool = False) -> Driver:
    made = Driver()
    made.turn = Turn("t1", max_steps=max_steps, wraps_steps=wrapped, judge=OutputRule(OutputSpec(CITY)).judge)
    return made


def test_a_turn_ends_with_the_value_of_its_answer() -> None:
    turn = driver()
    turn.give(Begin("go"), ModelAnswered(f"```json\n{SEOUL}\n```"))
    end = turn.ends[0]
    assert (end.status, end.response) == ("completed", SEOUL)
    assert end.value is not None


@pytest.mark.parametrize("second", [SEOUL, "no"])
def test_an_answer_that_does_not_fit_is_asked_for_again_once(second: str) -> None:
    turn = driver()
    asked = turn.give(Begin("go"), ModelAnswered("no"))
    assert [action.step for action in asked if isinstance(action, AskModel)] == [1, 2]
    told = turn.messages[-1]
    assert isinstance(told.data, UserData)
    assert (told.source.type, told.metadata) == ("system", {"repair": True})
    turn.give(ModelAnswered(second))
    end = turn.ends[0]
    if second == SEOUL:
        assert (end.status, end.response) == ("completed", SEOUL)
    else:
        assert end.error is not None
        assert (end.status, end.error.code) == ("failed", "E_OUTPUT_INVALID")


def test_without_a_step_left_the_first_answer_counts() -> None:
    turn = driver(max_steps=1)
    turn.give(Begin("go"), ModelAnswered("no"))
    assert [end.error.code for end in turn.ends if end.error is not None] == ["E_OUTPUT_INVALID"]


def test_step_middleware_that_ends_the_turn_ends_it_with_the_answer_that_does_not_fit() -> None:
    turn = driver(wrapped=True)
    left = turn.give(Begin("go"), StepEntered(), ModelAnswered("no"))
    assert [action.should_continue for action in left if isinstance(action, LeaveStep)] == [True]
    turn.give(StepLeft(False))
    assert [end.error.code for end in turn.ends if end.error is not None] == ["E_OUTPUT_INVALID"]


@pytest.mark.parametrize("stored", [2, 3])
def test_a_turn_that_is_taken_up_again_asks_once_in_all(stored: int) -> None:
    """With its answer only (2), or with the message that asks again (3)."""
    before = driver()
    before.give(Begin("go"), ModelAnswered("no"))
    messages = sorted(before.stored.items())[:stored]
    after = driver()
    actions = after.give(Resume(messages))
    assert [action.step for action in actions if isinstance(action, AskModel)] == [2]
    assert len(after.stored) == 3 - stored
    after.give(ModelAnswered("no"))
    assert [end.error.code for end in after.ends if end.error is not None] == ["E_OUTPUT_INVALID"]
    assert not [action for action in after.actions if isinstance(action, EnterStep)]


# --- the vendors


def request(
    schema: dict[str, Any] | None = None,
    choice: ToolChoice | None = None,
    *,
    via: Any = "auto",
    tools: Any = (BASH,),
    **params: Any,
) -> ModelRequest:
    return ModelRequest(
        agent="a",
        model=ModelSpec(provider="openai", model="m", params=params),
        messages=conversation(UserData("go")),
        tools=list(tools),
        step=1,
        output=None if schema is None else OutputSpec(schema, via),
        tool_choice=choice,
    )


def sent(vendor: Vendor[Any], asked: ModelRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(vendor.request(asked).body))
    return body


def test_a_schema_goes_to_the_vendor_in_its_own_way() -> None:
    body = sent(OpenAI(), request(CITY))
    form = {"name": "answer", "schema": CITY, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": form}
    assert sent(OpenAI(), request(OPEN))["response_format"]["json_schema"]["strict"] is False
    body = sent(Responses(), request(CITY, text={"verbosity": "low"}))
    assert body["text"] == {"verbosity": "low", "format": {"type": "json_schema", **form}}
    body = sent(Anthropic(), request(CITY, output_config={"effort": "low"}))
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": CITY}}
    assert "tool_choice" not in body


@pytest.mark.parametrize("vendor", [OpenAI(), Anthropic(), Responses()], ids=["openai", "anthropic", "responses"])
@pytest.mark.parametrize("choice", [None, "auto", "required", "none", ForcedTool("bash__exec")])
def test_else_the_model_has_to_call_a_tool(vendor: Vendor[Any], choice: ToolChoice | None) -> None:
    body = sent(vendor, request(CITY, choice, via="tool"))
    assert not body.keys() & {"response_format", "output_config", "text"}
    names = [tool.get("name") or tool["function"]["name"] for tool in body["tools"]]
    assert names == ["bash__exec", ANSWER_TOOL]
    forced = {"none": ANSWER_TOOL}.get(str(choice), choice.tool if isinstance(choice, ForcedTool) else None)
    if isinstance(vendor, OpenAI):
        assert body["tool_choice"] == (
            "required" if forced is None else {"type": "function", "function": {"name": forced}}
        )
    elif isinstance(vendor, Responses):
        assert body["tool_choice"] == ("required" if forced is None else {"type": "function", "name": forced})
    else:
        assert body["tool_choice"] == ({"type": "any"} if forced is None else {"type": "tool", "name": forced})


def test_anthropic_gets_a_tool_for_a_schema_that_it_does_not_take_and_no_force_while_it_thinks() -> None:
    body = sent(Anthropic(), request(OPEN))
    assert (body["tools"][-1]["name"], body["tool_choice"]) == ("answer", {"type": "any"})
    assert "tool_choice" not in sent(Anthropic(), request(OPEN, thinking={"type": "enabled", "budget_tokens": 1024}))


@pytest.mark.parametrize("make", [OpenAI, Anthropic], ids=["openai", "anthropic"])
def test_a_server_that_refuses_the_vendors_way_gets_the_tool(make: Callable[[], Vendor[Any]]) -> None:
    vendor = make()
    assert not vendor.gives_up(request(), "400 unknown parameter: response_format")
    assert not vendor.gives_up(request(CITY), "400 no such model")
    assert vendor.gives_up(request(CITY), "400 'response_format.json_schema' and output_config are not supported")
    assert sent(vendor, request(CITY))["tools"][-1].get("name", "answer") == "answer"
    assert not vendor.gives_up(request(CITY), "400 response_format")


@pytest.mark.parametrize(
    ("choice", "openai", "anthropic"),
    [
        ("auto", "auto", {"type": "auto"}),
        ("none", "none", {"type": "none"}),
        ("required", "required", {"type": "any"}),
        (ForcedTool("a__b"), {"type": "function", "function": {"name": "a__b"}}, {"type": "tool", "name": "a__b"}),
    ],
)
def test_a_tool_choice_is_told_and_tools_are_sent(choice: ToolChoice, openai: Any, anthropic: Any) -> None:
    for vendor, expected in ((OpenAI(), openai), (Anthropic(), anthropic)):
        body = sent(vendor, request(None, choice))
        assert (body["tool_choice"], len(body["tools"])) == (expected, 1)
        assert "tool_choice" not in sent(vendor, request(None, choice, tools=()))


def test_a_call_of_answer_becomes_the_text() -> None:
    call, other = asked_call("c1", "answer", SEOUL), asked_call("c2", "a__b", "{}")
    assert json.loads(answered(ModelAnswer(text="So:", calls=[call])).text) == json.loads(SEOUL)
    both = answered(ModelAnswer(text="So:", calls=[call, other]))
    assert (both.text, both.calls) == ("So:", [other])
    plain = ModelAnswer(text="x", calls=[other])
    assert answered(plain) is plain
    assert judge(answered(ModelAnswer(calls=[asked_call("c", "answer", "{")])).text).value is None


@pytest.mark.parametrize(
    ("schema", "closed", "strict"),
    [
        (CITY, True, True),
        ({**CITY, "required": ["city"]}, True, False),
        (OPEN, False, False),
        ({"type": "object", "properties": {"x": OPEN}, "additionalProperties": False}, False, False),
        ({**CITY, "properties": {"city": {"type": ["string", "null"]}, "degrees": {"$ref": "#/$defs/d"}}}, False, True),
        ({**CITY, "$defs": {"d": {"type": "object"}}}, False, False),
        ({**CITY, "properties": 3}, False, False),
    ],
)
def test_which_schemas_vendors_hold_a_model_to(schema: dict[str, Any], closed: bool, strict: bool) -> None:
    assert is_closed(schema, all_required=False) is closed
    assert is_closed(schema, all_required=True) is strict


def test_the_tool_is_one_object_so_that_its_json_is_kept() -> None:
    way, asked = OutputWay(lambda schema: False), request(CITY)
    assert way.tools(asked)[-1] is way.tools(asked)[-1]
