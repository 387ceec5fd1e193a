"""The turn machine: N calls always have N results, in call order, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentproc.conversation import Message, ToolData, is_presentable
from agentproc.turn import (
    Action,
    AskedCall,
    AskModel,
    Begin,
    BeginCall,
    Cancel,
    DropCalls,
    End,
    Input,
    ModelAnswered,
    ModelFailed,
    Pause,
    Resume,
    RunTool,
    Store,
    ToolFinished,
    Turn,
    Yield,
)
from schemas.codec import to_raw
from schemas.errors import error_payload, tool_error
from schemas.frames import ToolResult

AT = "2026-01-01T00:00:00.000Z"
OK = ToolResult(status="ok", output=to_raw(1))
FAILED = ToolResult(status="error", error=tool_error("E_TOOL", "no", name="Error"))


class Driver:
    """A turn with what it asked to be stored, and everything it asked for."""

    def __init__(self, turn_id: str = "t1", max_steps: int = 8) -> None:
        self.turn = Turn(turn_id, max_steps=max_steps)
        self.stored: dict[int, Message] = {}
        self.actions: list[Action] = []

    def give(self, *events: Input) -> list[Action]:
        new: list[Action] = []
        for event in events:
            new += self.turn.handle(event, AT)
        for action in new:
            if isinstance(action, Store):
                assert action.position not in self.stored, "a position is written once"
                self.stored[action.position] = action.message
        self.actions += new
        return new

    @property
    def messages(self) -> list[Message]:
        return [self.stored[position] for position in sorted(self.stored)]

    @property
    def ends(self) -> list[End]:
        return [action for action in self.actions if isinstance(action, End)]

    def results(self) -> list[tuple[str, str]]:
        """(tool call id, status) of every result, in the order of the conversation."""
        return [
            (part.tool_call_id, part.result.status)
            for message in self.messages
            if isinstance(message.data, ToolData)
            for part in message.data.content
        ]


def calls(*ids: str) -> ModelAnswered:
    return ModelAnswered("", [AskedCall(call_id, "x__y", {}) for call_id in ids])


def test_a_turn_without_tools_is_one_step() -> None:
    driver = Driver()
    assert [type(a) for a in driver.give(Begin("hi"))] == [Store, AskModel]
    actions = driver.give(ModelAnswered("hello", [], "end_turn"))
    assert actions[-1] == End(status="completed", steps=1, response="hello", finish_reason="end_turn")
    assert [m.data.__class__.__name__ for m in driver.messages] == ["UserData", "AssistantData"]


def test_results_stand_in_call_order_whatever_order_they_come_in() -> None:
    driver = Driver()
    driver.give(Begin("go"))
    actions = driver.give(calls("a", "b", "c"))
    assert [a.part.tool_call_id for a in actions if isinstance(a, RunTool)] == ["a", "b", "c"]
    assert driver.give(ToolFinished("c", OK)) != []
    driver.give(ToolFinished("a", FAILED))
    last = driver.give(ToolFinished("b", OK))
    assert driver.results() == [("a", "error"), ("b", "ok"), ("c", "ok")]
    assert last[-1] == AskModel(2)


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


def test_a_failed_model_call_ends_the_turn() -> None:
    driver = Driver()
    error = error_payload("E_MODEL_FAILED", "503")
    driver.give(Begin("go"), ModelFailed(error))
    assert driver.ends == [End(status="failed", steps=1, finish_reason="error", error=error)]


def test_cancel_gives_every_open_call_a_result() -> None:
    driver = Driver()
    driver.give(Begin("go"), calls("a", "b", "c"), ToolFinished("b", OK))
    actions = driver.give(Cancel(error_payload("E_AGENT_TIMEOUT", "late")))
    assert actions[0] == DropCalls(["a", "c"])
    assert driver.results() == [("a", "error"), ("b", "ok"), ("c", "error")]
    assert driver.ends[0].error is not None
    assert driver.ends[0].error.code == "E_AGENT_TIMEOUT"
    assert driver.give(ToolFinished("a", OK), ModelAnswered("late")) == []


def test_pause_yields_at_the_next_boundary_only() -> None:
    driver = Driver()
    driver.give(Begin("go"), calls("a", "b"))
    assert driver.give(Pause()) == []
    assert not any(isinstance(a, Yield) for a in driver.give(ToolFinished("a", OK)))
    assert driver.give(ToolFinished("b", OK))[-1] == Yield()
    assert driver.ends == []


def test_a_paused_turn_that_ends_is_answered() -> None:
    driver = Driver()
    driver.give(Begin("go"), Pause())
    assert isinstance(driver.give(ModelAnswered("done"))[-1], End)


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
)


def _check(driver: Driver) -> None:
    """What holds after every input."""
    asks = [i for i, a in enumerate(driver.actions) if isinstance(a, AskModel)]
    assert len(driver.ends) <= 1
    if driver.ends or any(isinstance(a, Yield) for a in driver.actions) or driver.turn.phase == "thinking":
        assert is_presentable(driver.messages)
        assert driver.turn.open_calls == []
    assert len(asks) == driver.turn.steps <= 8
    if driver.ends:
        assert driver.actions[-1] is driver.ends[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_order_of_inputs_keeps_the_invariant(data: st.DataObject) -> None:
    driver = Driver()
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
