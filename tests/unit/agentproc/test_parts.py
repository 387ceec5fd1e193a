"""Features in an agent's process: which have a part of a turn, since when, in which order, and what their hooks do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from goondan.agentproc.calls.asks import Asked
from goondan.agentproc.machine.answers import answer_payload, done_frame
from goondan.agentproc.machine.turn import End
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.turn.parts import (
    CALL_WAITS,
    AgentFeature,
    AnswerEvent,
    Ask,
    Call,
    Done,
    OnNews,
    Start,
    TakeFrame,
    TurnCore,
    TurnPart,
    kinds,
)
from goondan.agentproc.turn.runner import TurnRunner
from goondan.kernel.bundle.rules.kinds import api_members
from goondan.schemas.bundle.effective_config import LiveChanges
from goondan.schemas.bundle.extensions import API_MEMBERS
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire import errors
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import AgentEvent, Frame, ToolResult
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk
from tests.python_calls import python_calls
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, Runners, api_of, code_of, settle, the_answer

LS = ("c1", "bash__exec", {"command": "ls"})


def told_by(runner: TurnRunner, **parts: Any) -> None:
    """The broker says what the features have of the specification from now on."""
    spec = msgspec.structs.replace(runner.instance.spec, parts={name: to_raw(part) for name, part in parts.items()})
    runner.take(Frame("config.changed", payload=to_raw(LiveChanges(spec=Raw(to_raw(spec))))))


# --- a feature that refuses tools ---------------------------------------------------------------------------------


class RulesOfTurn(TurnPart):
    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn

    def call(self, call: Call, done: Done, start: Start) -> None:
        if call.tool in from_raw(self._turn.spec.parts["rules"], list):
            done(ToolResult(status="ok", output=to_raw("refused")))
            return
        start(call, done)


class Rules(AgentFeature):
    """Its part of a specification has the names of the tools that it refuses."""

    name = "rules"

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        return self.name in spec.parts

    def begin(self, turn: TurnCore) -> TurnPart:
        return RulesOfTurn(turn)


async def test_a_rule_that_comes_in_the_middle_of_a_turn_holds_from_the_next_step_on(make: Make) -> None:
    model = FakeModel(wants(LS), wants(("c2", "bash__exec", {"command": "ls"})), says("done"))
    link = FakeLink(lambda tool, args: None)
    runner = make(link, model, [Rules])
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    told_by(runner, rules=["bash__exec"])
    link.finish(link.open_calls()[0], ok(1))  # the step began without the rule
    await running
    assert [frame.call_id for frame in link.calls] == [link.calls[0].call_id]
    assert the_answer(link).status == "completed"


async def test_a_rule_that_goes_in_the_middle_of_a_turn_is_asked_for_the_next_step(make: Make) -> None:
    """Its part stays, and reads the specification of the step."""
    model = FakeModel(wants(LS), wants(("c2", "notes__add", {})), says("done"))
    link = FakeLink(lambda tool, args: None)
    runner = make(link, model, [Rules], parts={"rules": to_raw(["bash__exec", "notes__add"])})

    async def relax(ctx: Any) -> Any:
        told_by(runner, rules=["bash__exec"])
        return ctx

    api_of(runner).pipelines.mutate("step.pre", relax)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    assert [frame.tool for frame in link.calls] == ["notes__add"]
    link.finish(link.open_calls()[0], ok(1))
    await running


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_part_that_no_feature_claims_lets_no_turn_begin(make: Make, loaded: bool) -> None:
    link, model = FakeLink(), FakeModel(says("hi"))
    runner = make(link, model, [], parts={"rules": to_raw(["bash__exec"])})
    if loaded:
        await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert code_of(answer) == "E_FEATURE_MISSING"
    assert answer.error is not None and "rules" in answer.error.message
    assert model.requests == []
    assert link.posted[-1].cause is not None, "the broker keeps the message for a person"


async def test_a_part_that_no_feature_claims_ends_the_turn_at_the_next_step(make: Make) -> None:
    model = FakeModel(wants(LS), says("done"))
    link = FakeLink(lambda tool, args: None)
    runner = make(link, model, [])
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    told_by(runner, rules=[])
    link.finish(link.open_calls()[0], ok(1))
    await running
    assert code_of(the_answer(link)) == "E_FEATURE_MISSING"
    assert len(model.requests) == 1


async def test_a_feature_that_cannot_begin_fails_the_turn(make: Make) -> None:
    class Broken(Rules):
        def begin(self, turn: TurnCore) -> TurnPart:
            raise fail("E_STATE", "no")

    link, model = FakeLink(), FakeModel(says("hi"))
    await make(link, model, [Broken], parts={"rules": to_raw([])}).run(event_frame("e1", "go"))
    assert code_of(the_answer(link)) == "E_STATE"
    assert model.requests == []


# --- the order ----------------------------------------------------------------------------------------------------


class Noting(TurnPart):
    """Notes in which order its hooks are called."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    async def model(self, request: ModelRequest, on_news: OnNews, ask: Ask) -> ModelAnswer:
        self.noted.append(f"model {self.name}")
        answer = await ask(request, on_news)
        self.noted.append(f"answer {self.name}")
        return answer

    def call(self, call: Call, done: Done, start: Start) -> None:
        def ended(result: ToolResult) -> None:
            self.noted.append(f"result {self.name}")
            done(result)

        self.noted.append(f"call {self.name}")
        start(call, ended)

    def storing(self, end: End | None) -> None:
        if end is not None:
            self.noted.append(f"end {self.name}")

    def close(self) -> None:
        self.noted.append(f"close {self.name}")


def noting(name: str, noted: list[str]) -> type[AgentFeature]:
    """A feature that applies when its part is there."""

    class Feature(Rules):
        def begin(self, turn: TurnCore) -> TurnPart:
            return Noting(name, noted)

    Feature.name = name
    return Feature


NAMES = ("one", "two", "three", "four")
NUMBERS = count(1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.sets(st.sampled_from(NAMES)), later=st.sets(st.sampled_from(NAMES)))
async def test_parts_wrap_each_other_in_the_order_of_the_table_whenever_they_have_begun(
    make: Make, first: set[str], later: set[str]
) -> None:
    noted: list[str] = []
    link = FakeLink(lambda tool, args: None)
    model = FakeModel(wants(LS), wants(("c2", *LS[1:])), says("done"))
    parts = {name: to_raw(None) for name in first}
    runner = make(link, model, [noting(name, noted) for name in NAMES], parts=parts)
    running = asyncio.ensure_future(runner.run(event_frame(f"e{next(NUMBERS)}", "go")))
    await settle()
    told_by(runner, **dict.fromkeys(first | later))
    for _ in range(2):
        link.finish(link.open_calls()[0], ok(1))
        await settle()
    await running
    await runner.close()

    def step(there: Sequence[str]) -> list[str]:
        down, up = list(there), list(reversed(there))
        asked = [f"model {name}" for name in down] + [f"answer {name}" for name in up]
        return asked + [f"call {name}" for name in down] + [f"result {name}" for name in up]

    before, after = ([name for name in NAMES if name in there] for there in (first, first | later))
    last = [line for line in step(after) if line.startswith(("model", "answer"))]
    ends = [f"end {name}" for name in after] + [f"close {name}" for name in reversed(after)]
    assert noted == step(before) + step(after) + last + ends


async def test_layers_of_extensions_are_outside_of_all_parts(make: Make, link: FakeLink) -> None:
    noted: list[str] = []
    model = FakeModel(wants(LS), says("done"))
    runner = make(link, model, [noting("one", noted)], parts={"one": to_raw(None)})

    async def layer(ctx: Any) -> Any:
        noted.append("before")
        result = await ctx.next()
        noted.append("after")
        return result

    api_of(runner).pipeline.register("toolCall", layer)
    await runner.run(event_frame("e1", "go"))
    assert [line for line in noted if "model" not in line and "answer" not in line][:4] == [
        "before",
        "call one",
        "result one",
        "after",
    ]


# --- what costs nothing -------------------------------------------------------------------------------------------


async def calls_of_a_turn(state_dir: Path, features: Sequence[type[AgentFeature]], *answers: ModelAnswer) -> int:
    """How many functions of the agent's process a turn calls, when others like it came before it. The least of some
    turns: on a busy machine one may last until a timer calls something beside it.
    """
    runners, counts = Runners(state_dir), []
    runner = runners.build(FakeLink(), FakeModel(*answers * 6), features)
    for number in range(6):
        with python_calls(lambda code: "goondan/agentproc/" in code.co_filename) as called:
            await runner.run(event_frame(f"e{number}", "go"))
        counts.append(len(called))
    await runners.close()
    return min(counts[3:])


@pytest.mark.parametrize("answers", [(says("done"),), (wants(LS, ("c2", *LS[1:])), says("done"))])
async def test_a_feature_that_does_not_apply_makes_no_object_and_costs_a_step_and_a_call_nothing(
    tmp_path: Path, answers: tuple[ModelAnswer, ...]
) -> None:
    begun: list[str] = []

    class Unused(Rules):
        def begin(self, turn: TurnCore) -> TurnPart:
            begun.append("begun")
            return super().begin(turn)

    without = await calls_of_a_turn(tmp_path / "without", (), *answers)
    assert await calls_of_a_turn(tmp_path / "with", (Unused,), *answers) == without
    assert begun == []


def test_the_features_of_the_table_have_the_names_of_their_folders() -> None:
    assert [kind.name for kind in kinds()] == [kind.__module__.split(".")[2] for kind in kinds()]


# --- what else a part has -----------------------------------------------------------------------------------------


class Waiter(TurnPart):
    """Hears of calls that wait, of frames, of questions; parks the turn when all calls wait."""

    def __init__(self, turn: TurnCore, noted: list[Any]) -> None:
        self._turn, self._noted = turn, noted
        self._again: dict[str, Callable[[], None]] = {}
        self.takes = {"wait.over": self._heard}
        self.asks = {"weather": self._asked}

    def waits(self, tool_call_id: str, within: str | None, again: Callable[[], None]) -> None:
        self._noted.append(("waits", tool_call_id, within))
        self._again[tool_call_id] = again
        self._turn.rouse()

    def parks(self, open_calls: Collection[str]) -> bool:
        return bool(open_calls) and set(open_calls) <= self._again.keys() and "park" in self._turn.spec.parts

    def drop(self, tool_call_id: str) -> None:
        self._noted.append(("drop", tool_call_id))

    def _heard(self, frame: Frame) -> None:
        self._noted.append(("news", frame.calls))
        for again in self._again.values():
            again()

    def _asked(self, asked: Asked) -> None:
        asked.answer("sunny")


def waiting(noted: list[Any], begins_at: Collection[str], *, named: str = "park") -> type[AgentFeature]:
    class Feature(AgentFeature):
        name = named

        def applies(self, spec: AgentSpec, event: Frame) -> bool:
            return self.name in spec.parts

        def begin(self, turn: TurnCore) -> TurnPart:
            noted.append("begun")
            return Waiter(turn, noted)

    Feature.begins_at = begins_at
    return Feature


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> GoondanError:
    """The answer of the broker to a call that waits: its code is that of a feature."""
    monkeypatch.setitem(errors._OF_FEATURES, "E_TEST_WAITS", errors.ErrorCode("", waits=True))
    return GoondanError(error_payload("E_TEST_WAITS", "it waits"))


async def test_a_call_that_the_broker_lets_wait_is_known_to_the_part_that_makes_it_again(
    make: Make, waits: GoondanError
) -> None:
    """The feature did not apply: the broker knew of a rule before the agent did."""
    noted: list[Any] = []
    link = FakeLink(lambda tool, args: waits if tool == "bash__exec" else None)
    model = FakeModel(wants(LS, ("c2", "notes__add", {})), says("done"))
    runner = make(link, model, [waiting(noted, {CALL_WAITS})])
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    assert noted == ["begun", ("waits", "c1", None)]
    link.handler = lambda tool, args: ok("done")
    runner.take(Frame("wait.over", event_id="e1", epoch=1, calls=["c1"]))
    await settle()
    assert noted[2:] == [("news", ["c1"])]
    assert [frame.tool for frame in link.calls] == ["bash__exec", "notes__add", "bash__exec"]
    assert link.calls[0].call_id == link.calls[2].call_id
    runner.cancel(Frame("tool.cancel", event_id="e1", epoch=1))
    await running


async def test_a_frame_begins_the_part_that_needs_it_and_one_of_another_delivery_does_not(make: Make) -> None:
    noted: list[Any] = []
    link = FakeLink(lambda tool, args: None)
    runner = make(link, FakeModel(wants(LS), says("done")), [waiting(noted, {"wait.over"})])
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    runner.take(Frame("wait.over", event_id="e1", epoch=2, calls=["c1"]))
    runner.take(Frame("wait.never", event_id="e1", epoch=1, calls=["c1"]))
    assert noted == []
    runner.take(Frame("wait.over", event_id="e1", epoch=1, calls=["c1"]))
    assert noted == ["begun", ("news", ["c1"])]
    link.finish(link.open_calls()[0], ok(1))
    await running


async def test_a_turn_is_given_back_when_a_part_parks_it(make: Make, waits: GoondanError) -> None:
    noted: list[Any] = []
    link = FakeLink(lambda tool, args: waits)
    runner = make(link, FakeModel(wants(LS)), [waiting(noted, ())], parts={"park": to_raw(None)})
    await runner.run(event_frame("e1", "go"))
    assert [frame.stage for frame in link.posted if frame.stage != "renew"] == ["park"]


async def test_a_part_hears_of_calls_that_are_given_up_and_answers_what_calls_ask(make: Make) -> None:
    noted: list[Any] = []
    link = FakeLink(lambda tool, args: None)
    runner = make(link, FakeModel(wants(LS)), [waiting(noted, ())], parts={"park": to_raw(None)})
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    ask = Frame("tool.ask", id="a1", event_id="e1", epoch=1, call_id=link.open_calls()[0])
    ask.payload = to_raw(ToolAsk(1, "weather"))
    runner.take(ask)
    answer = from_raw(next(frame for frame in link.sent if frame.type == "tool.answer").payload, ToolAnswer)
    assert answer.value is not None and from_raw(answer.value, str) == "sunny"
    runner.cancel(Frame("tool.cancel", event_id="e1", epoch=1))
    await running
    assert noted == ["begun", ("drop", "c1")]


async def test_a_feature_takes_frames_and_answers_events_without_a_turn_and_is_closed(make: Make) -> None:
    noted: list[str] = []

    class Feature(AgentFeature):
        name = "any"

        @property
        def takes(self) -> dict[str, TakeFrame]:
            return {"any.news": lambda frame: noted.append(frame.type)}

        @property
        def events(self) -> dict[str, AnswerEvent]:
            return {"operator.undo": self._answer}

        def _answer(self, frame: Frame, event: AgentEvent) -> Frame:
            noted.append(event.type)
            return done_frame(
                frame.event_id or "", 1, "completed", answer_payload(End(status="completed", steps=0), "t", "e1", "")
            )

        def close(self) -> None:
            noted.append("closed")

    link = FakeLink()
    runner = make(link, FakeModel(), [Feature])
    runner.take(Frame("any.news"))
    await runner.run(event_frame("e1", None, kind="operator.undo"))
    await runner.run(event_frame("e2", None, kind="operator.reset"))
    await runner.close()
    assert noted == ["any.news", "operator.undo", "closed"]
    assert [frame.stage for frame in link.posted if frame.stage != "renew"] == ["done", "failed"]
    assert code_of(link.answers()[-1]) == "E_FEATURE_MISSING"


async def test_extensions_have_the_members_that_bundles_may_name(make: Make) -> None:
    runner = make(FakeLink(), FakeModel())
    brought = runner.instance.extensions.brought
    assert brought.keys() == api_members().keys() - API_MEMBERS.keys()
    for name, make_member in brought.items():
        assert {one for one in dir(make_member("guard")) if not one.startswith("_")} == set(api_members()[name] or ())
    assert not hasattr(api_of(runner), "nothing")
