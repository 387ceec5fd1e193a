"""The turn machine: what exactly it stores, where, and how it goes on."""

from __future__ import annotations

import pytest

from goondan.agentproc.machine.messages import (
    MAX_TOOL_CALL_ID,
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    cancelled,
)
from goondan.agentproc.machine.turn import (
    UNREADABLE,
    AskedCall,
    AskModel,
    Begin,
    BeginCall,
    Cancel,
    DropCalls,
    End,
    EnterStep,
    EnterTurn,
    LeaveTurn,
    ModelAnswered,
    ModelFailed,
    Pause,
    Resume,
    RunTool,
    StepEntered,
    StepLeft,
    Store,
    ToolFinished,
    Turn,
    TurnEntered,
    TurnLeft,
)
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.turn_driver import OK, Driver, calls

BROKEN = error_payload("E_MODEL_FAILED", "no model")
GONE = error_payload("E_CANCELLED", "gone")
PART = ToolCallPart("a", "x__y", {})


def at(number: int) -> str:
    """The time of the n-th input."""
    return f"2026-01-01T00:00:{number:02}.000Z"


def asked(*ids: str) -> list[AskedCall]:
    return [AskedCall(call_id, "x__y", {}) for call_id in ids]


def result(message_id: str, call_id: str, value: ToolResult, when: str) -> Message:
    return Message(message_id, ToolData([ToolResultPart(call_id, "x__y", value)]), when, MessageSource("tool", "x__y"))


def test_every_message_has_its_words_its_source_its_time_and_an_id_of_its_place() -> None:
    turn = Turn("t7", max_steps=4)
    person = MessageSource("user")
    assert turn.handle(Begin("go", person, {"m": 1}), at(1)) == [
        Store(0, Message("t7.0", UserData("go"), at(1), person, {"m": 1})),
        AskModel(1),
    ]
    answer = Message(
        "t7.1",
        AssistantData([TextPart("I look"), ToolCallPart("a", "x__y", {}), ToolCallPart("b", "x__y", {})]),
        at(2),
        MessageSource("assistant"),
        {"usage": 3},
    )
    actions = turn.handle(ModelAnswered("I look", asked("a", "b"), "tool_calls", {"usage": 3}), at(2))
    assert actions == [
        Store(1, answer),
        RunTool(ToolCallPart("a", "x__y", {}), answer),
        RunTool(ToolCallPart("b", "x__y", {}), answer),
    ]
    assert turn.open_calls == ["a", "b"]
    assert turn.handle(ToolFinished("b", OK), at(3)) == [Store(3, result("t7.3", "b", OK, at(3)))]
    assert turn.take_position() == 4, "the places of the two results are taken"
    assert turn.take_position() == 5
    assert turn.handle(ToolFinished("a", OK), at(4)) == [Store(2, result("t7.2", "a", OK, at(4))), AskModel(2)]
    last = Message("t7.6", AssistantData([TextPart("done")]), at(5), MessageSource("assistant"))
    assert turn.handle(ModelAnswered("done"), at(5)) == [
        Store(6, last),
        End(status="completed", steps=2, response="done", finish_reason="stop"),
    ]
    assert turn.handle(Pause(), at(6)) == []


def test_who_speaks_need_not_be_a_person() -> None:
    turn = Turn("t", max_steps=4)
    (stored, _) = turn.handle(Begin("beep", MessageSource("extension", "clock")), at(1))
    assert isinstance(stored, Store)
    assert (stored.message.source, stored.message.metadata) == (MessageSource("extension", "clock"), {})


def test_words_are_stored_if_there_are_any_or_if_there_is_nothing_else() -> None:
    for text, ids, words in (("", ["a"], []), ("", [], [TextPart("")]), ("hm", ["a"], [TextPart("hm")])):
        driver = Driver()
        driver.give(Begin("go"), ModelAnswered(text, asked(*ids)))
        data = driver.messages[1].data
        assert isinstance(data, AssistantData)
        assert [part for part in data.content if isinstance(part, TextPart)] == words
        assert UNREADABLE not in driver.messages[1].metadata


def test_a_receipt_is_not_for_the_model() -> None:
    driver = Driver()
    driver.give(Begin("go"), calls("a"))
    driver.give(ToolFinished("a", ToolResult(status="ok", output=to_raw(1), receipt=to_raw({"ms": 3}))))
    data = driver.messages[-1].data
    assert isinstance(data, ToolData)
    assert data.content[0].result == OK


def test_an_operators_result_keeps_its_receipt_for_the_operator() -> None:
    driver = Driver()
    driver.give(BeginCall("x__y", {}))
    told = ToolResult(status="ok", output=to_raw(1), receipt=to_raw({"ms": 3}))
    (stored, end) = driver.give(ToolFinished("call_1_1", told))
    assert isinstance(stored, Store)
    assert end == End(status="completed", steps=0, finish_reason="stop", output=told)


# --- ids


def test_the_longest_id_and_the_names_of_those_that_get_one_of_ours() -> None:
    longest = "i" * MAX_TOOL_CALL_ID
    driver = Driver()
    driver.give(Begin("go"))
    runs = driver.give(calls(longest, longest + "i", "", "a", "a", "a"))
    ids = [action.part.tool_call_id for action in runs if isinstance(action, RunTool)]
    assert ids == [longest, "call_1_2", "call_1_3", "a", "a_2", "a_3"]
    driver.give(*(ToolFinished(call_id, OK) for call_id in ids))
    runs = driver.give(calls(""))
    assert [action.part.tool_call_id for action in runs if isinstance(action, RunTool)] == ["call_2_1"]


# --- ends


def test_what_a_cancel_leaves_in_the_conversation() -> None:
    turn = Turn("t", max_steps=4)
    turn.handle(Begin("go"), at(1))
    turn.handle(ModelAnswered("", asked("a", "b")), at(2))
    turn.handle(ToolFinished("a", OK), at(3))
    assert turn.handle(Cancel(GONE, "taken back", "It was taken back."), at(4)) == [
        DropCalls(["b"]),
        Store(3, result("t.3", "b", cancelled("taken back"), at(4))),
        Store(4, Message("t.4", UserData("It was taken back."), at(4), MessageSource("system"))),
        End(status="failed", steps=1, finish_reason="cancelled", error=GONE),
    ]


def test_middleware_that_fails_closes_what_is_open_at_that_time_and_says_why() -> None:
    for left, reason in ((TurnLeft(), "the turn ended"), (StepLeft(), "the step ended")):
        turn = Turn("t", max_steps=4, wraps_turn=True, wraps_steps=True)
        turn.handle(Begin("go"), at(1))
        turn.handle(TurnEntered(), at(1))
        turn.handle(StepEntered(), at(1))
        turn.handle(ModelAnswered("", asked("a")), at(2))
        drop, stored, end = turn.handle(left, at(3))
        assert (drop, stored) == (DropCalls(["a"]), Store(2, result("t.2", "a", cancelled(reason), at(3))))
        ended = end.end if isinstance(end, LeaveTurn) else end
        assert isinstance(ended, End)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", "E_MIDDLEWARE")


def test_a_step_that_fails_in_its_middleware_fails_the_turn_with_that_error() -> None:
    for wraps_turn in (True, False):
        turn = Turn("t", max_steps=4, wraps_turn=wraps_turn, wraps_steps=True)
        turn.handle(Begin("go"), at(1))
        turn.handle(TurnEntered(), at(1))
        turn.handle(StepEntered(), at(1))
        (action,) = turn.handle(StepLeft(error=BROKEN), at(2))
        end = action.end if isinstance(action, LeaveTurn) else action
        assert end == End(status="failed", steps=1, finish_reason="error", error=BROKEN)


def test_a_step_whose_middleware_fails_behind_it_fails_the_turn() -> None:
    turn = Turn("t", max_steps=4, wraps_steps=True)
    turn.handle(Begin("go"), at(1))
    turn.handle(StepEntered(), at(1))
    turn.handle(ModelAnswered("done"), at(1))
    assert turn.handle(StepLeft(error=BROKEN), at(2)) == [
        End(status="failed", steps=1, finish_reason="error", error=BROKEN)
    ]


def test_a_turn_whose_core_has_ended_ends_as_its_middleware_says_or_else_as_it_had() -> None:
    own = End(status="completed", steps=9, response="mine")
    for said, expected in ((own, own), (None, End(status="completed", steps=1, response="hi", finish_reason="stop"))):
        turn = Turn("t", max_steps=4, wraps_turn=True)
        assert turn.handle(Begin("go"), at(1))[-1] == EnterTurn()
        turn.handle(TurnEntered(), at(1))
        assert isinstance(turn.handle(ModelAnswered("hi"), at(1))[-1], LeaveTurn)
        assert turn.handle(TurnLeft(said), at(2)) == [expected]
        assert turn.phase == "over"


# --- something came that the model is to read


def test_what_came_gives_the_turn_one_more_step() -> None:
    turn = Turn("t", max_steps=4)
    turn.handle(Begin("go"), at(1))
    turn.hear()
    assert turn.handle(ModelAnswered("first"), at(1))[-1] == AskModel(2)
    assert turn.handle(ModelAnswered("second"), at(1))[-1] == End(
        status="completed", steps=2, response="second", finish_reason="stop"
    )


def test_what_came_gives_no_step_beyond_the_limit_after_a_failure_or_while_the_turn_is_given_back() -> None:
    turn = Turn("t", max_steps=1)
    turn.handle(Begin("go"), at(1))
    turn.hear()
    assert turn.handle(ModelAnswered("only"), at(1))[-1] == End(
        status="completed", steps=1, response="only", finish_reason="stop"
    )
    turn = Turn("t", max_steps=4)
    turn.handle(Begin("go"), at(1))
    turn.hear()
    assert turn.handle(ModelFailed(BROKEN), at(1)) == [
        End(status="failed", steps=1, finish_reason="error", error=BROKEN)
    ]
    turn = Turn("t", max_steps=4)
    turn.handle(Begin("go"), at(1))
    turn.hear()
    turn.handle(Pause(), at(1))
    assert isinstance(turn.handle(ModelAnswered("last"), at(1))[-1], End)


# --- what an earlier incarnation had stored


def stored(*messages: tuple[int, Message]) -> list[tuple[int, Message]]:
    return [(0, Message("t.0", UserData("go"), at(1), MessageSource("user"))), *messages]


def answer(position: int, *parts: TextPart | ToolCallPart, **metadata: object) -> tuple[int, Message]:
    data = AssistantData(list(parts))
    return position, Message(f"t.{position}", data, at(1), MessageSource("assistant"), metadata)


def test_a_turn_that_had_its_last_answer_ends_with_it() -> None:
    turn = Turn("t", max_steps=4)
    assert turn.handle(Resume(stored(answer(1, TextPart("all done")))), at(2)) == [
        End(status="completed", steps=1, response="all done", finish_reason="stop")
    ]


def test_a_turn_that_had_its_last_answer_and_something_new_to_read_goes_on() -> None:
    turn = Turn("t", max_steps=4)
    assert turn.handle(Resume(stored(answer(1, TextPart("so far"))), told=True), at(2)) == [AskModel(2)]


def test_open_calls_are_made_again_with_their_message_and_the_reason_that_was_stored() -> None:
    other = ToolCallPart("b", "x__y", {})
    place, message = answer(1, PART, other, **{UNREADABLE: {"b": "cut off"}})
    turn = Turn("t", max_steps=4)
    assert turn.handle(Resume(stored((place, message))), at(2)) == [
        RunTool(PART, message, None, again=True),
        RunTool(other, message, "cut off", again=True),
    ]
    assert turn.take_position() == 4
    turn = Turn("t", max_steps=4, wraps_steps=True)
    assert turn.handle(Resume(stored((place, message))), at(2)) == [EnterStep(1, again=True)]
    assert turn.handle(StepEntered(), at(2)) == [
        RunTool(PART, message, None, again=True),
        RunTool(other, message, "cut off", again=True),
    ]


def test_positions_go_on_behind_what_is_stored_and_what_others_took() -> None:
    done = (2, result("t.2", "a", OK, at(1)))
    turn = Turn("t", max_steps=9)
    turn.handle(Resume(stored(answer(1, PART), done)), at(2))
    assert turn.take_position() == 3
    turn = Turn("t", max_steps=9)
    turn.handle(Resume(stored(answer(1, PART), done), next_position=7), at(2))
    assert turn.take_position() == 7
    turn = Turn("t", max_steps=9)
    turn.handle(Resume([], next_position=0), at(2))
    assert turn.take_position() == 0
    turn = Turn("t", max_steps=9)
    turn.handle(Resume(stored()), at(2))
    assert turn.take_position() == 1


def test_each_stored_answer_was_a_step() -> None:
    second = ToolCallPart("b", "x__y", {})
    messages = [answer(1, PART), (2, result("t.2", "a", OK, at(1))), answer(3, second)]
    messages.append((4, result("t.4", "b", OK, at(1))))
    turn = Turn("t", max_steps=9)
    assert turn.handle(Resume(stored(*messages)), at(2)) == [AskModel(3)]


@pytest.mark.parametrize("left", ["turn", "step"])
def test_a_resumed_step_that_its_middleware_ends_has_the_words_that_were_stored(left: str) -> None:
    place, message = answer(1, TextPart("on it"), PART)
    turn = Turn("t", max_steps=4, wraps_turn=left == "turn", wraps_steps=True)
    actions = turn.handle(Resume(stored((place, message))), at(2))
    assert actions == ([EnterTurn()] if left == "turn" else [EnterStep(1, again=True)])
    turn.handle(TurnEntered(), at(2))
    turn.handle(StepEntered(), at(2))
    turn.handle(ToolFinished("a", OK), at(3))
    (action,) = turn.handle(StepLeft(should_continue=False), at(3))
    end = action.end if isinstance(action, LeaveTurn) else action
    assert end == End(status="completed", steps=1, response="on it", finish_reason="stop")
