"""What a turn asks of other agents, without a bus."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.questions import Asker, Question, event_frame, late, response_of, spawn_frame
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, Frame
from goondan.schemas.wire.questions import MAX_ANSWER_BYTES
from goondan.schemas.wire.spans import call_span, step_span, turn_span

ME = Asker("alpha", "k", "t1")
AT = "2026-01-01T00:00:00.000Z"


def asked(op: Any = "request", left_ms: int | None = None, **changes: Any) -> Frame:
    fields = {"name": "c1", "target": "beta", "input": "hi", **changes}
    return event_frame(ME, Question(op=op, **fields), left_ms, AT)


def code(op: Any = "request", **changes: Any) -> str:
    with pytest.raises(GoondanError) as caught:
        asked(op, **changes)
    return caught.value.info.code


def test_the_same_question_has_the_same_id_and_another_one_another() -> None:
    assert asked().event_id == asked().event_id
    others = [
        asked(target="gamma"),
        asked(input="ho"),
        asked(event_type="x"),
        asked(metadata={"a": 1}),
        asked(instance_key="l"),
        asked(name="c2"),
        asked("send"),
    ]
    assert len({frame.event_id for frame in (asked(), *others)}) == 8
    assert str(asked().event_id).startswith("t1/c1~")


@pytest.mark.parametrize(
    ("name", "span"),
    [("c1", call_span("t1/c1")), ("@turn.reviewer.1", turn_span("t1")), ("@step3.reviewer.2", step_span("t1", 3))],
)
def test_a_question_comes_from_the_call_or_from_the_middleware_that_asks(name: str, span: str) -> None:
    assert [asked(op, name=name).parent_span_id for op in ("request", "send", "handoff")] == [span] * 3


@given(st.text(max_size=300), st.text(max_size=50))
def test_ids_fit_whatever_a_model_calls_its_calls(name: str, text: str) -> None:
    frame = asked(name=name, input=text)
    assert 0 < len(str(frame.event_id)) <= 256 - len(":answer")


@pytest.mark.requirement("AGENTS-03")
def test_a_request_wants_an_answer_and_a_message_does_not() -> None:
    frame = asked()
    assert frame.reply_to is not None
    assert frame.reply_to.correlation_id == f"corr:{frame.event_id}"
    event = from_raw(frame.payload, AgentEvent)
    assert (event.type, event.reply_to, event.instance_key) == ("agent.request", frame.reply_to, "k")
    sent = asked("send", metadata={"trace": 1})
    event = from_raw(sent.payload, AgentEvent)
    assert (sent.reply_to, sent.deadline_ms, event.reply_to) == (None, None, None)
    assert (event.type, event.metadata) == ("agent.send", {"trace": 1})


def test_a_request_has_its_time_and_no_more_than_the_turn() -> None:
    assert asked().deadline_ms == 60_000
    assert asked(timeout_ms=100).deadline_ms == 100
    assert asked(left_ms=50, timeout_ms=100).deadline_ms == 50


@pytest.mark.parametrize("op", ["request", "send", "handoff"])
def test_an_agent_does_not_ask_itself(op: str) -> None:
    assert code(op, target="alpha") == "E_AGENT_CYCLE"
    assert code(op, target="alpha", instance_key="k") == "E_AGENT_CYCLE"
    assert asked(op, target="alpha", instance_key="other").instance_key == "other"
    with pytest.raises(GoondanError):
        spawn_frame(ME, "c1", "alpha", None, None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_key": "a\x07b"},
        {"instance_key": ""},
        {"instance_key": "k" * 257},
        {"instance_key": 3},
        {"target": ""},
        {"target": "x" * 300},
        {"event_type": "operator.call"},
        {"event_type": "tool.completed"},
        {"event_type": "a b"},
        {"timeout_ms": 0},
        {"metadata": ["no object"]},
        {"input": "\ud800"},
        {"input": {1, 2}},
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(changes: dict[str, Any]) -> None:
    assert code(**changes) == "E_TOOL_INVALID_ARGS"


def test_too_much_is_refused_before_it_is_sent() -> None:
    assert code(input="x" * (20 << 20)) == "E_FRAME_TOO_LARGE"


def answer(**fields: Any) -> Frame:
    told = Answer(turn_id="t2", **fields)
    return Frame("event", payload=to_raw(AgentEvent(id="a", type="agent.response", created_at=AT, answer=told)))


@pytest.mark.requirement("AGENTS-13")
def test_what_comes_back() -> None:
    frame = asked()
    assert response_of(frame, answer(status="completed", response="yes")) == {
        "target": "beta",
        "eventId": frame.event_id,
        "correlationId": f"corr:{frame.event_id}",
        "accepted": True,
        "async": False,
        "response": "yes",
    }


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"status": "failed"}, "E_AGENT_FAILED"),
        ({"status": "failed", "error": ErrorPayload("E_MODEL_FAILED", "no")}, "E_AGENT_FAILED"),
        pytest.param(
            {"status": "failed", "error": ErrorPayload("E_BUDGET_SPENT", "the budget of agent")},
            "E_BUDGET_SPENT",
            marks=pytest.mark.feature("budgets"),
        ),
        ({"status": "failed", "error": ErrorPayload("E_AGENT_SPAWN_FAILED", "no")}, "E_AGENT_SPAWN_FAILED"),
        ({"status": "completed", "response": "x" * (MAX_ANSWER_BYTES + 1)}, "E_TOOL_LIMIT"),
    ],
)
def test_a_failure_is_an_error(told: dict[str, Any], code: str) -> None:
    with pytest.raises(GoondanError) as caught:
        response_of(asked(), answer(**told))
    assert caught.value.info.code == code


def test_no_answer_in_time_names_the_agent_and_the_time() -> None:
    error = late(asked(timeout_ms=100)).info
    assert (error.code, error.message) == ("E_AGENT_TIMEOUT", "agent 'beta' (k) did not answer within 100 ms")
