"""The turn machine: N calls always have N results, in call order, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.agentproc.machine.messages import Message, UserData, is_presentable
from goondan.agentproc.machine.turn import (
    AskedCall,
    AskModel,
    Begin,
    BeginCall,
    Cancel,
    End,
    EnterStep,
    EnterTurn,
    Input,
    LeaveStep,
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
    TurnEntered,
    TurnLeft,
    Yield,
)
from goondan.agentproc.turn.run import CANCELLED
from goondan.schemas.wire.errors import error_payload
from tests.unit.agentproc.turn_driver import FAILED, OK, Driver, calls
from tests.unit.agentproc.turns import failed


@pytest.mark.parametrize("ids", [("", ""), ("a", "a"), ("a", "a", "a_2"), ("x\ny", "y"), ("z" * 200, "z" * 200)])
def test_every_call_gets_an_id_of_its_own(ids: tuple[str, ...]) -> None:
    driver = Driver()
    driver.give(Begin("go"))
    first = [a.part.tool_call_id for a in driver.give(calls(*ids)) if isinstance(a, RunTool)]
    driver.give(*(ToolFinished(call_id, OK) for call_id in first))
    second = [a.part.tool_call_id for a in driver.give(calls(*ids)) if isinstance(a, RunTool)]
    assert len(set(first + second)) == 2 * len(ids)
    assert all(call_id.isprintable() and 0 < len(call_id) <= 140 for call_id in first + second)


@pytest.mark.requirement("CONTEXT-02")
def test_a_usable_id_stays_as_the_model_wrote_it() -> None:
    driver = Driver()
    driver.give(Begin("go"))
    (run,) = [a for a in driver.give(calls("toolu_01AbC")) if isinstance(a, RunTool)]
    assert run.part.tool_call_id == "toolu_01AbC"


def test_unreadable_arguments_are_said_to_whoever_runs_the_call_even_after_a_crash() -> None:
    driver = Driver()
    driver.give(Begin("go"))
    asked = [AskedCall("a", "x__y", {}, "they are no JSON"), AskedCall("b", "x__y", [1]), AskedCall("c", "x__y", {})]
    runs = [a for a in driver.give(ModelAnswered("", asked)) if isinstance(a, RunTool)]
    assert [run.broken for run in runs] == ["they are no JSON", "they are no JSON object", None]
    assert all(isinstance(run.part.args, dict) for run in runs)
    again = Driver()
    resumed = [a for a in again.give(Resume(sorted(driver.stored.items()))) if isinstance(a, RunTool)]
    assert [run.broken for run in resumed] == [run.broken for run in runs]


def test_too_many_steps_is_a_failed_turn_with_a_valid_history() -> None:
    driver = Driver(max_steps=2)
    driver.give(Begin("go"), calls("a"), ToolFinished("a", OK), calls("b"))
    actions = driver.give(ToolFinished("b", OK))
    (end,) = driver.ends
    assert actions[-1] is end
    assert end.status == "failed"
    assert end.error is not None
    assert (end.error.code, end.finish_reason, end.steps) == ("E_MAX_STEPS", "max_steps", 2)
    assert is_presentable(driver.messages)


def test_pause_yields_at_the_next_boundary_only() -> None:
    driver = Driver()
    driver.give(Begin("go"), calls("a", "b"))
    assert driver.give(Pause()) == []
    assert not any(isinstance(a, Yield) for a in driver.give(ToolFinished("a", OK)))
    assert driver.give(ToolFinished("b", OK))[-1] == Yield()
    assert driver.ends == []


def test_an_operator_call_needs_no_model() -> None:
    driver = Driver()
    actions = driver.give(BeginCall("x__y", {"n": 1}))
    assert [type(a) for a in actions] == [Store, RunTool]
    (run,) = [a for a in actions if isinstance(a, RunTool)]
    assert (run.part.tool_name, run.part.args) == ("x__y", {"n": 1})
    driver.give(ToolFinished(run.part.tool_call_id, FAILED))
    assert driver.ends == [End(status="completed", steps=0, finish_reason="stop", output=FAILED)]
    assert not any(isinstance(a, AskModel) for a in driver.actions)


def test_an_operator_call_resumes_with_the_same_id_and_keeps_its_result() -> None:
    driver = Driver()
    driver.give(BeginCall("x__y", {}))
    before = sorted(driver.stored.items())
    again = Driver()
    (run,) = again.give(Resume(before, operator=True))
    assert isinstance(run, RunTool)
    assert run.again
    again.give(ToolFinished(run.part.tool_call_id, OK))
    assert again.ends[0].output == OK
    last = Driver()
    last.give(Resume([*before, *sorted(again.stored.items())], operator=True))
    assert last.ends[0].output == OK


def test_no_steps_allowed_ends_at_once() -> None:
    driver = Driver(max_steps=0)
    driver.give(Begin("go"))
    assert driver.ends[0].status == "failed"


# --- middleware -----------------------------------------------------------------------------------------------------

BROKEN = error_payload("E_MIDDLEWARE", "it broke")


def test_a_wrapped_turn_goes_through_its_middleware_at_every_edge() -> None:
    driver = Driver(wrapped=True)
    assert [type(a) for a in driver.give(Begin("hi"))] == [Store, EnterTurn]
    assert driver.give(ModelAnswered("too early")) == []
    assert driver.give(TurnEntered()) == [EnterStep(1)]
    assert driver.give(StepEntered()) == [AskModel(1)]
    driver.give(calls("a", "b"), ToolFinished("b", OK))
    (leave,) = [a for a in driver.give(ToolFinished("a", FAILED)) if isinstance(a, LeaveStep)]
    assert (leave.step, leave.should_continue, [r.status for _, r in leave.calls]) == (1, True, ["ok", "error"])
    assert driver.give(StepLeft(should_continue=True)) == [EnterStep(2)]
    driver.give(StepEntered())
    actions = driver.give(ModelAnswered("done", [], "stop"))
    assert actions[-1] == LeaveStep(2, should_continue=False)
    end = End(status="completed", steps=2, response="done", finish_reason="stop")
    assert driver.give(StepLeft()) == [LeaveTurn(end)]
    assert driver.give(TurnLeft()) == [end]
    assert driver.turn.phase == "over"


def test_a_failed_step_may_be_tried_again_but_not_for_ever() -> None:
    driver = Driver(wrapped=True, max_steps=3)
    driver.give(Begin("hi"), TurnEntered())
    for step in (1, 2, 3):
        driver.give(StepEntered(), ModelFailed(error_payload("E_MODEL_FAILED", "503")))
        (action,) = driver.give(StepLeft(should_continue=True))
        assert isinstance(action, EnterStep if step < 3 else LeaveTurn)
    driver.give(TurnLeft())
    failed(driver.ends[0], "E_MAX_STEPS")


def test_a_failed_step_that_is_not_tried_again_fails_the_turn_as_before() -> None:
    driver = Driver(wrapped=True)
    error = error_payload("E_MODEL_FAILED", "503")
    driver.give(Begin("hi"), TurnEntered(), StepEntered())
    assert driver.give(ModelFailed(error)) == [LeaveStep(1, should_continue=False, error=error)]
    driver.give(StepLeft(), TurnLeft())
    assert driver.ends == [End(status="failed", steps=1, finish_reason="error", error=error)]


def test_turn_middleware_that_fails_early_ends_the_turn_without_a_step() -> None:
    driver = Driver(wrapped=True)
    end = End(status="failed", steps=0, finish_reason="error", error=BROKEN)
    driver.give(Begin("hi"))
    assert driver.give(TurnLeft(end)) == [end]
    assert not any(isinstance(a, EnterStep | AskModel) for a in driver.actions)


def test_a_deadline_leaves_a_wrapped_turn_through_its_middleware_and_keeps_what_had_ended() -> None:
    late = error_payload("E_AGENT_TIMEOUT", "late")
    early = Driver(wrapped=True)
    early.give(Begin("hi"))
    assert isinstance(early.give(Cancel(late))[-1], End)
    amid = Driver(wrapped=True)
    amid.give(Begin("hi"), TurnEntered(), StepEntered())
    assert isinstance(amid.give(Cancel(late))[-1], LeaveTurn)
    assert amid.give(StepLeft(error=BROKEN)) == []
    (end,) = amid.give(Cancel(late))
    assert isinstance(end, End)
    done = Driver(wrapped=True)
    done.give(Begin("hi"), TurnEntered(), StepEntered(), ModelAnswered("done"), StepLeft())
    done.give(Cancel(late))
    assert done.ends[0].response == "done"


def test_a_resumed_turn_enters_its_middleware_again_and_the_step_that_was_open() -> None:
    driver = Driver(wrapped=True)
    driver.give(Begin("hi"), TurnEntered(), StepEntered(), calls("a", "b"), ToolFinished("b", OK))
    again = Driver(wrapped=True)
    taken = max(driver.stored) + 5
    assert again.give(Resume(sorted(driver.stored.items()), next_position=taken)) == [EnterTurn()]
    assert again.give(TurnEntered()) == [EnterStep(1, again=True)]
    (run,) = again.give(StepEntered())
    assert isinstance(run, RunTool)
    assert (run.part.tool_call_id, run.again) == ("a", True)
    (_, leave) = again.give(ToolFinished("a", OK))
    assert isinstance(leave, LeaveStep)
    assert {part.tool_call_id for part, _ in leave.calls} == {"a", "b"}
    assert again.turn.take_position() >= taken


# --- properties -----------------------------------------------------------------------------------------------------

_ids = st.sampled_from(["", "a", "b", "c", "call_1_1", "bad\nid"])
_args = st.sampled_from([{}, {"x": 1}, [1], None, "text"])
_asked = st.builds(AskedCall, _ids, st.sampled_from(["x__y", "", "no such"]), _args, st.none() | st.just("broken"))
_answers = st.builds(ModelAnswered, st.sampled_from(["", "text"]), st.lists(_asked, max_size=5), st.none())
_noise: st.SearchStrategy[Input] = st.one_of(
    _answers,
    st.builds(ToolFinished, _ids, st.sampled_from([OK, FAILED])),
    st.just(Begin("again")),
    st.just(BeginCall("x__y", {})),
    st.just(Resume([])),
    st.just(ModelFailed(error_payload("E_MODEL_FAILED", "x"))),
    st.just(Pause()),
    st.just(Cancel(error_payload("E_AGENT_TIMEOUT", "x"))),
    st.sampled_from([TurnEntered(), TurnLeft(), StepEntered(), StepLeft(), StepLeft(True), StepLeft(error=BROKEN)]),
)


def _check(driver: Driver) -> None:
    """What holds after every input."""
    asks = [i for i, a in enumerate(driver.actions) if isinstance(a, AskModel)]
    assert len(driver.ends) <= 1
    if driver.ends or any(isinstance(a, Yield) for a in driver.actions) or driver.turn.phase in ("thinking", "leaving"):
        assert is_presentable(driver.messages)
        assert driver.turn.open_calls == []
    wrapped = any(isinstance(a, EnterStep) for a in driver.actions)
    assert (len(asks) <= driver.turn.steps if wrapped else len(asks) == driver.turn.steps) and driver.turn.steps <= 8
    if driver.ends:
        assert driver.actions[-1] is driver.ends[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_order_of_inputs_keeps_the_invariant(data: st.DataObject) -> None:
    driver = Driver(wrapped=data.draw(st.booleans()))
    starts: list[Input] = [Begin("go"), BeginCall("x__y", {})]
    driver.give(data.draw(st.sampled_from(starts)))
    for _ in range(data.draw(st.integers(0, 25))):
        open_calls = driver.turn.open_calls
        if data.draw(st.booleans()) and open_calls:
            event: Input = ToolFinished(data.draw(st.sampled_from(open_calls)), OK)
        else:
            event = data.draw(_noise)
        driver.give(event)
        _check(driver)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cancel_at_any_point_gives_one_end_and_a_valid_history(data: st.DataObject) -> None:
    """Whatever came before it, and whatever comes after it."""
    wrapped, operator = data.draw(st.booleans()), data.draw(st.booleans())
    driver = Driver(wrapped=wrapped and not operator)
    driver.give(BeginCall("x__y", {}) if operator else Begin("go"))
    for event in data.draw(st.lists(_noise, max_size=20)):
        driver.give(event)
    over = driver.turn.phase == "over"
    before = len(driver.messages)
    driver.give(CANCELLED)
    for event in data.draw(st.lists(_noise, max_size=5)):
        driver.give(event)
    driver.give(CANCELLED)  # also where middleware did not leave the turn
    _check(driver)
    assert is_presentable(driver.messages), "the next turn's model request is valid"
    if not over:
        (end,) = driver.ends
        assert driver.turn.open_calls == []
        if end.error == CANCELLED.error:
            assert (end.status, end.finish_reason) == ("failed", "cancelled")
            texts = [message.data.content for message in driver.messages[before:] if isinstance(message.data, UserData)]
            assert texts == ([] if operator else [CANCELLED.told]), "the model is told once that this is taken back"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_turn_resumed_after_any_crash_ends_like_one_that_never_crashed(data: st.DataObject) -> None:
    """Crashes lose what was not stored; every call is repeated under its id; each call has one result in the end."""
    script = data.draw(st.lists(_answers, min_size=1, max_size=4))

    def model(step: int) -> ModelAnswered:
        return script[step - 1] if step <= len(script) else ModelAnswered("end")

    stored: dict[int, Message] = {}
    seen_calls: list[str] = []
    crashes = data.draw(st.integers(0, 4))
    while True:
        driver = Driver()
        driver.stored = dict(stored)
        actions = driver.give(Resume(sorted(stored.items())) if stored else Begin("go"))
        budget = data.draw(st.integers(0, 8)) if crashes else 100
        while budget and actions and not driver.ends:
            budget -= 1
            ask = next((a for a in actions if isinstance(a, AskModel)), None)
            runs = [a.part.tool_call_id for a in actions if isinstance(a, RunTool)]
            seen_calls += runs
            if ask is not None:
                actions = driver.give(model(ask.step))
            else:
                order: list[str] = list(data.draw(st.permutations(driver.turn.open_calls)))
                actions = []
                for call_id in order[: data.draw(st.integers(1, len(order)))] if order else []:
                    actions += driver.give(ToolFinished(call_id, OK))
                if not actions and not driver.turn.open_calls:
                    break
                if driver.turn.open_calls:
                    actions = actions or [Yield()]
        stored = dict(driver.stored)
        if driver.ends:
            break
        crashes = max(0, crashes - 1)
    assert is_presentable(driver.messages)
    assert len(driver.results()) == len({call_id for call_id, _ in driver.results()})
    assert {call_id for call_id, _ in driver.results()} == set(seen_calls)
