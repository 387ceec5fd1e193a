"""Questions of handlers: their names on the bus, their limits, and what their answers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from goondan.schemas.wire.codec import MAX_FRAME_BYTES, encode, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import OPERATOR_AGENT, AgentEvent, AgentsList, AgentsSpawn, Answer, Frame, ReplyTo
from goondan.schemas.wire.questions import (
    MAX_ANSWER_BYTES,
    MAX_INNER_CALLS,
    MAX_OPEN,
    TIMEOUT_MS,
    ToolAnswer,
    ToolAsk,
    correlation,
)
from goondan.schemas.worker.worker_frames import Ask
from goondan.toolhost.calls.asks import (
    MAX_ASKED,
    MAX_INPUT,
    MAX_SAID,
    MAX_SAID_TO_TOOLS,
    Asker,
    may_ask,
    value_of,
)
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.inside import runtime
from tests.checks import refuses
from tests.unit.toolhost.test_calls import call

NOW, AT = 100.0, "2026-01-01T00:00:00.000Z"


def ask(op: Any = "request", number: int = 1, **fields: Any) -> Ask:
    fields.setdefault("target", "helper" if op in ("request", "send", "spawn") else None)
    if op in ("request", "send"):
        fields["input"] = Raw(msgspec.msgpack.encode(fields.get("input", "hello")))
    return Ask(call_id="7", ask_id=number, op=op, **fields)


def made(question: Ask, asker: Asker | None = None, of: Call | None = None) -> Frame:
    return (asker or Asker()).frame(of or call("t1/c1"), question, NOW, AT, lambda answer: None)


def refused(question: Ask, asker: Asker | None = None) -> str:
    with pytest.raises(GoondanError) as caught:
        made(question, asker)
    assert caught.value.info.message
    return caught.value.info.code


def test_a_request_names_its_call_its_answer_and_the_callers_instance() -> None:
    frame = made(ask(metadata=Raw(msgspec.msgpack.encode({"why": "test"}))))
    assert (frame.type, frame.to, frame.instance_key, frame.call_id) == ("event", "helper", "k", "t1/c1")
    assert frame.reply_to == ReplyTo("a", correlation(frame.event_id or ""))
    event = from_raw(frame.payload, AgentEvent)
    assert (event.id, event.type, event.input, event.created_at) == (frame.event_id, "agent.request", "hello", AT)
    assert (event.reply_to, event.metadata, event.instance_key) == (frame.reply_to, {"why": "test"}, "k")
    assert (frame.from_, frame.chain, frame.auth, frame.workdir, frame.source) == (None,) * 5, "the broker's to say"


def test_what_is_sent_wants_no_answer_and_does_not_expire() -> None:
    frame = made(ask("send", event_type="note"))
    assert (frame.reply_to, frame.deadline_ms) == (None, None)
    assert from_raw(frame.payload, AgentEvent).type == "note"


def test_an_asynchronous_request_outlives_its_call_and_is_answered_at_once() -> None:
    short = call("t1/c1")
    short.deadline = NOW + 0.5
    question = ask(asynchronous=True)
    frame = made(question, of=short)
    assert (frame.asynchronous, frame.deadline_ms, frame.reply_to is not None) == (True, None, True)
    assert made(ask(asynchronous=True, timeout_ms=9000), of=short).deadline_ms == 9000, "the call's end is not its own"
    value = from_raw(value_of(question, frame, Frame("ack", stage="accepted")), dict)
    assert (value["accepted"], value["async"], value["response"]) == (True, True, None)
    assert value["eventId"] == frame.event_id != made(ask(), of=short).event_id


@pytest.mark.parametrize("fields", [{}, {"asynchronous": True}, {"op": "send"}])
def test_an_agent_does_not_ask_itself(fields: dict[str, Any]) -> None:
    itself = call("t1/c1")
    with refuses("E_AGENT_CYCLE"):
        made(ask(**{"target": itself.agent, **fields}), of=itself)
    made(ask(**{"target": itself.agent, "instance_key": "another", **fields}), of=itself)


def test_a_call_from_outside_has_nowhere_for_a_late_answer() -> None:
    outside = call("t1/c1")
    outside.agent = OPERATOR_AGENT
    with refuses("E_USAGE"):
        made(ask(asynchronous=True), of=outside)
    made(ask(), of=outside)


def test_the_others_are_questions_to_the_broker() -> None:
    spawn = made(ask("spawn", instance_key="z", cwd="."))
    assert (spawn.type, spawn.to, spawn.instance_key) == ("agents.spawn", "helper", "z")
    assert from_raw(spawn.payload, AgentsSpawn) == AgentsSpawn(".")
    listed = made(ask("list", include_all=True))
    assert (listed.type, from_raw(listed.payload, AgentsList)) == ("agents.list", AgentsList(True))
    assert made(ask("catalog")).type == "agents.catalog"


def test_an_answer_has_the_time_that_was_given_and_no_more_than_the_call() -> None:
    endless, short = call("t1/c1"), call("t1/c1")
    endless.deadline, short.deadline = None, NOW + 0.5
    assert made(ask(), of=endless).deadline_ms == TIMEOUT_MS
    assert made(ask(timeout_ms=10), of=endless).deadline_ms == 10
    assert made(ask(timeout_ms=90_000), of=short).deadline_ms == 500
    assert made(ask("list"), of=short).deadline_ms == 500


def names(asked: list[tuple[str, str]], of: Call) -> list[str]:
    asker = Asker()
    frames = []
    for number, (target, text) in enumerate(asked):
        frames.append(made(ask(number=number, target=target, input=text), asker, of))
        asker.open.clear()
    return [frame.event_id or "" for frame in frames]


QUESTIONS = st.lists(st.tuples(st.sampled_from("bc"), st.sampled_from(["x", "y"])), max_size=12)


@given(QUESTIONS, st.randoms())
def test_a_handler_that_runs_again_asks_under_the_same_names_in_any_order(asked: list[Any], rng: Any) -> None:
    again = asked.copy()
    rng.shuffle(again)
    first, second = names(asked, call("t1/c1")), names(again, call("t1/c1"))
    assert len(set(first)) == len(asked)
    assert sorted(zip(first, asked, strict=True)) == sorted(zip(second, again, strict=True))
    assert not set(first) & set(names(asked, call("t1/c2")))


def test_names_are_of_bounded_length_and_told_apart_all_the_same() -> None:
    long = [made(ask(), of=call("c" * 255 + end)).event_id or "" for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) <= 256 for name in long)


def test_so_many_are_asked_in_all() -> None:
    asker = Asker()
    for number in range(MAX_ASKED):
        made(ask("catalog", number), asker)
        asker.open.clear()
    assert refused(ask("catalog", 1), asker) == "E_TOOL_LIMIT"


def test_so_much_is_said_in_all() -> None:
    asker = Asker()
    for number in range(MAX_SAID // MAX_INPUT):
        made(ask("send", number, input="x" * (MAX_INPUT - 8)), asker)
        asker.open.clear()
    assert refused(ask("send", 1, input="x" * MAX_INPUT), asker) == "E_TOOL_LIMIT"
    assert refused(ask("send", 1, input="x" * 10_000), asker) == "E_TOOL_LIMIT"
    assert asker.open == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"target": ""},
        {"target": None},
        {"target": "x" * 257},
        {"instance_key": "k" * 257},
        {"instance_key": "a\x01b"},
        {"event_type": ""},
        {"event_type": "a b"},
        {"event_type": "x" * 129},
        {"event_type": "tool.completed"},
        {"event_type": "operator.call"},
        {"event_type": "agent.response"},
        {"timeout_ms": 0},
        {"timeout_ms": -1},
        {"metadata": Raw(b"\x90")},
        {"op": "send", "asynchronous": True},
        {"op": "spawn", "cwd": "x" * 5000},
    ],
    ids=lambda fields: str(fields)[:30].partition(" object")[0],
)
def test_arguments_that_are_none_are_refused_and_nothing_is_open(fields: dict[str, Any]) -> None:
    asker = Asker()
    assert refused(ask(**{"op": "request", **fields}), asker) == "E_TOOL_INVALID_ARGS"
    assert asker.open == {}


def test_what_is_said_is_bounded_and_fits_a_frame() -> None:
    assert refused(ask(input="x" * MAX_INPUT)) == "E_TOOL_LIMIT"
    assert len(encode(made(ask(input="x" * (MAX_INPUT - 8))))) < MAX_FRAME_BYTES
    assert runtime.MAX_ASK <= MAX_INPUT, "the Python worker refuses first"


@pytest.mark.parametrize(
    "bytes_", [b"\xc4\x01x", b"\xd4\x01x", b"\x81\x01\x01", b"\xa2\xff\xff", b"\x91" * 70 + b"\xc0"]
)
def test_input_that_is_not_json_ends_the_jail(bytes_: bytes) -> None:
    with pytest.raises(Violation):
        made(Ask(call_id="7", ask_id=1, op="request", target="helper", input=Raw(bytes_)))


# --- answers


def answered(**answer: Any) -> Frame:
    event = AgentEvent(id="e", type="agent.response", created_at=AT, answer=Answer(turn_id="t", **answer))
    return Frame("event", payload=to_raw(event))


def test_the_value_of_a_request_is_the_documented_one() -> None:
    question = ask()
    frame = made(question)
    value = from_raw(value_of(question, frame, answered(status="completed", response="yes")), dict)
    assert value == {
        "target": "helper",
        "eventId": frame.event_id,
        "correlationId": correlation(frame.event_id or ""),
        "accepted": True,
        "async": False,
        "response": "yes",
    }


def test_the_value_of_a_send_is_the_documented_one() -> None:
    question = ask("send")
    frame = made(question)
    value = from_raw(value_of(question, frame, Frame("ack")), dict)
    assert value == {"target": "helper", "eventId": frame.event_id, "accepted": True}


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("E_AGENT_TIMEOUT", "E_AGENT_TIMEOUT"),
        ("E_AGENT_SPAWN_FAILED", "E_AGENT_SPAWN_FAILED"),
        ("E_MODEL_FAILED", "E_AGENT_FAILED"),
        ("E_MAX_STEPS", "E_AGENT_FAILED"),
    ],
)
def test_a_failed_turn_is_an_error_of_an_agent(code: str, shown: str) -> None:
    question = ask()
    with refuses(shown) as caught:
        value_of(question, made(question), answered(status="failed", error=error_payload(code, "why")))
    assert "helper" in caught.value.info.message
    assert "why" in caught.value.info.message
    assert shown == code or code in caught.value.info.message


def test_an_answer_is_of_bounded_size() -> None:
    question = ask()
    with refuses("E_TOOL_LIMIT"):
        value_of(question, made(question), answered(status="completed", response="x" * MAX_ANSWER_BYTES))


@pytest.mark.parametrize("frame", [Frame("event", payload=to_raw(AgentEvent(id="e", type="x", created_at=AT)))])
def test_an_answer_without_one_is_a_failure(frame: Frame) -> None:
    question = ask()
    with pytest.raises(GoondanError):
        value_of(question, made(question), frame)
    with pytest.raises(GoondanError):
        value_of(question, made(question), answered(status="failed"))


# --- what is asked of the agent that made the call


def to_caller(op: Any = "tool", number: int = 1, value: Any = None, **fields: Any) -> Ask:
    return Ask(call_id="7", ask_id=number, op=op, value=Raw(msgspec.msgpack.encode(value)), **fields)


def test_a_question_to_the_caller_names_its_call_and_has_no_end_but_the_calls() -> None:
    short = call("t1/c1")
    short.deadline = NOW + 0.5
    frame = made(to_caller(value={"name": "x__y", "args": {}}), of=short)
    assert (frame.type, frame.call_id, frame.deadline_ms, frame.to) == ("tool.ask", "t1/c1", None, None)
    asked = from_raw(frame.payload, ToolAsk)
    assert (asked.ask_id, asked.kind) == (1, "tool")
    assert from_raw(asked.value or Raw(), dict) == {"name": "x__y", "args": {}}


def test_questions_to_the_caller_are_numbered_in_their_call_whatever_the_worker_says() -> None:
    asker = Asker()
    numbers = [from_raw(made(to_caller(op, n), asker).payload, ToolAsk).ask_id for op, n in (("tool", 9), ("tools", 4))]
    assert numbers == [1, 2]


def test_each_kind_of_question_needs_its_permission() -> None:
    every = ("request", "send", "spawn", "list", "catalog", "tool", "tools", "elicit", "sample", "login")
    allowed = {name: [op for op in every if may_ask(op, [name])] for name in ("agents", "tools", "server", "restart")}
    assert allowed == {"agents": list(every[:5]), "tools": ["tool", "tools"], "server": list(every[7:9]), "restart": []}


def test_a_script_has_its_own_number_of_calls_and_bytes() -> None:
    asker = Asker()
    for number in range(MAX_INNER_CALLS):
        made(to_caller(number=number), asker)
        asker.open.clear()
    assert refused(to_caller(number=-1), asker) == "E_TOOL_LIMIT"
    made(to_caller("tools", number=-2), asker)  # it may look for tools still
    full = Asker()
    large = "x" * (MAX_INPUT - 16)
    for number in range(MAX_SAID_TO_TOOLS // MAX_INPUT):
        made(to_caller(number=number, value=large), full)
        full.open.clear()
    assert refused(to_caller(number=-1, value=large), full) == "E_TOOL_LIMIT"
    assert refused(to_caller(value="x" * MAX_INPUT)) == "E_TOOL_LIMIT"


@pytest.mark.parametrize("make", [ask, to_caller])
def test_so_many_are_open_and_no_more(make: Callable[..., Ask]) -> None:
    asker = Asker()
    for number in range(MAX_OPEN):
        made(make(number=number), asker)
    assert refused(make(number=99), asker) == "E_TOOL_LIMIT"
    asker.open.pop(3)
    made(make(number=99), asker)
    with pytest.raises(Violation, match="twice"):
        made(make(number=99), asker)


def test_the_answer_of_the_caller_is_its_value_or_its_error() -> None:
    question = to_caller()
    frame = made(question)

    def told(answer: ToolAnswer) -> Raw:
        return value_of(question, frame, Frame("tool.answer", payload=to_raw(answer)))

    assert from_raw(told(ToolAnswer(1, to_raw({"status": "ok"}))), object) == {"status": "ok"}
    assert from_raw(told(ToolAnswer(1)), object) is None
    with refuses("E_TOOL_NOT_IN_CATALOG"):
        told(ToolAnswer(1, None, error_payload("E_TOOL_NOT_IN_CATALOG", "no")))
    with refuses("E_TOOL_LIMIT"):
        told(ToolAnswer(1, to_raw("x" * MAX_ANSWER_BYTES)))
