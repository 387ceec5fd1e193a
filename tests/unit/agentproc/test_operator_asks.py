"""What an operator asks of an ordinary agent: a call through its own catalog and middleware, or a list of its tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import UserData, is_presentable
from goondan.agentproc.machine.turn import (
    AskModel,
    BeginCall,
    BeginList,
    Cancel,
    DropCalls,
    End,
    EnterStep,
    EnterTurn,
    LeaveStep,
    LeaveTurn,
    Listed,
    ListTools,
    Resume,
    RunTool,
    StepEntered,
    StepLeft,
    Store,
    ToolFinished,
    TurnEntered,
    TurnLeft,
)
from goondan.agentproc.turn.run import MAX_KNOWN, note_work, operators_work
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import TOOL_COMPLETED, Completion, OperatorTool, Source, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says
from tests.unit.agentproc.turn_driver import OK, Driver
from tests.unit.agentproc.turns import Make, api_of, failed, the_answer, until

CALL = BeginCall("x__y", {"n": 1}, "(An operator calls x__y.)")
OFF = Cancel(error_payload("E_CANCELLED", "enough"))


def ran(link: FakeLink) -> ToolResult:
    return from_raw(the_answer(link).output or b"", ToolResult)


def asks(tool: str, args: Any, event_id: str = "e1", **header: Any) -> Any:
    return event_frame(event_id, {"tool": tool, "args": args}, kind="operator.call", **header)


# --- the machine


def test_a_call_goes_through_the_middleware_of_turn_and_step() -> None:
    driver = Driver(wrapped=True)
    assert [type(a) for a in driver.give(CALL)] == [Store, EnterTurn]
    assert driver.give(TurnEntered()) == [EnterStep(1)]
    assert [type(a) for a in driver.give(StepEntered())] == [Store, RunTool]
    (_, leave) = driver.give(ToolFinished(driver.turn.open_calls[0], OK))
    assert isinstance(leave, LeaveStep)
    (leave_turn,) = driver.give(StepLeft(should_continue=True))
    assert isinstance(leave_turn, LeaveTurn)
    assert driver.give(TurnLeft()) == [End(status="completed", steps=1, finish_reason="stop", output=OK)]
    assert not any(isinstance(a, AskModel) for a in driver.actions)
    assert is_presentable(driver.messages)


def test_no_middleware_makes_a_second_step_of_it() -> None:
    for wish in (True, False):
        driver = Driver(wrapped=True)
        driver.give(CALL, TurnEntered(), StepEntered())
        driver.give(ToolFinished(driver.turn.open_calls[0], OK), StepLeft(should_continue=wish), TurnLeft())
        assert [end.output for end in driver.ends] == [OK]


def test_a_list_calls_nothing_and_stores_nothing() -> None:
    for wrapped in (True, False):
        driver = Driver(wrapped=wrapped)
        driver.give(BeginList(), TurnEntered(), StepEntered())
        assert driver.turn.phase == "listing"
        driver.give(Listed(OK), StepLeft(should_continue=True), TurnLeft())
        assert [end.output for end in driver.ends] == [OK]
        assert sum(isinstance(a, ListTools) for a in driver.actions) == 1
        assert driver.messages == []
        assert not any(isinstance(a, AskModel | RunTool) for a in driver.actions)


def test_a_call_is_made_once_wherever_its_process_has_died() -> None:
    whole = Driver(wrapped=True)
    whole.give(CALL)
    begun = sorted(whole.stored.items())
    whole.give(TurnEntered(), StepEntered())
    called = sorted(whole.stored.items())
    call_id = whole.turn.open_calls[0]
    whole.give(ToolFinished(call_id, OK))
    for stored, again in ((begun, False), (called, True)):
        driver = Driver(wrapped=True)
        driver.stored = dict(stored)
        place = 1 + stored[-1][0] + again
        driver.give(Resume(stored, operator=True, asked=CALL, next_position=place), TurnEntered())
        (run,) = (a for a in driver.give(StepEntered()) if isinstance(a, RunTool))
        assert (run.part.tool_call_id, run.again) == (call_id, again)
        driver.give(ToolFinished(call_id, OK), StepLeft(), TurnLeft())
        assert [end.output for end in driver.ends] == [OK]
    done = Driver(wrapped=True)
    done.give(
        Resume(sorted(whole.stored.items()), operator=True, asked=CALL, next_position=9), TurnEntered(), TurnLeft()
    )
    assert [end.output for end in done.ends] == [OK]
    assert not any(isinstance(a, RunTool) for a in done.actions)


@pytest.mark.parametrize("begin", [CALL, BeginList()])
def test_it_can_be_cancelled_at_any_time(begin: BeginCall | BeginList) -> None:
    for inputs in ((), (TurnEntered(),), (TurnEntered(), StepEntered())):
        driver = Driver(wrapped=True)
        driver.give(begin, *inputs)
        driver.give(OFF, TurnLeft())
        assert [end.status for end in driver.ends] == ["failed"]
        assert is_presentable(driver.messages)
        assert not driver.turn.open_calls
        was_out = len(inputs) == 2 and isinstance(begin, BeginCall)
        assert any(isinstance(a, DropCalls) for a in driver.actions) is was_out


# --- an agent


async def test_an_operator_calls_a_tool_of_an_ordinary_agent(make: Make) -> None:
    link, model = FakeLink(), FakeModel(says("hello"))
    runner = make(link, model)
    await runner.run(asks("bash__exec", {"command": "ls"}))
    assert (the_answer(link).status, ran(link).status) == ("completed", "ok")
    assert len(link.calls) == 1
    await runner.run(event_frame("e2", "hi"))
    (request,) = model.requests
    first = request.messages[0].data
    assert isinstance(first, UserData)
    assert first.content == "(An operator calls bash__exec.)"
    assert is_presentable(request.messages)


async def test_only_its_own_tools_can_be_called(make: Make, link: FakeLink) -> None:
    await make(link, FakeModel()).run(asks("other__tool", {}))
    result = ran(link)
    failed(result, "E_TOOL_NOT_IN_CATALOG")
    assert link.calls == []


@pytest.mark.parametrize(
    "source", [None, Source("client", "client"), Source("agent", "other", "k"), Source("tool", "host")]
)
@pytest.mark.parametrize("kind", ["operator.call", "operator.tools"])
@pytest.mark.parametrize("name", ["coder", "_operator"])
async def test_nobody_but_an_operator_may(make: Make, source: Source | None, kind: str, name: str) -> None:
    link = FakeLink()
    frame = event_frame("e1", {"tool": "bash__exec", "args": {"command": "ls"}}, kind=kind)
    frame.source = source
    await make(link, FakeModel(), name=name).run(frame)
    error = the_answer(link).error
    assert error is not None
    assert error.code == "E_FORBIDDEN"
    assert link.calls == []


async def test_the_agents_middleware_is_around_the_call(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel())
    passed: list[str] = []

    async def turn(ctx: Any) -> Any:
        passed.append("turn")
        return await ctx.next()

    async def step(ctx: Any) -> Any:
        passed.append("step")
        ctx.tool_catalog = [item for item in ctx.tool_catalog if item.name != "notes__add"]
        return await ctx.next()

    async def call(ctx: Any) -> Any:
        passed.append(f"call {ctx.tool_name}")
        ctx.args = {"command": "safe"}
        return await ctx.next()

    api = api_of(runner)
    for surface, handler in (("turn", turn), ("step", step), ("toolCall", call)):
        api.pipeline.register(surface, handler)
    await runner.run(asks("bash__exec", {"command": "ls"}))
    assert passed == ["turn", "step", "call bash__exec"]
    assert from_raw(link.calls[0].payload, dict)["args"] == {"command": "safe"}
    await runner.run(event_frame("e2", None, kind="operator.tools"))
    listed = from_raw(link.answers()[-1].output or b"", ToolResult).output
    assert [tool.name for tool in from_raw(listed or b"", list[OperatorTool])] == ["bash__exec"]
    await runner.run(asks("notes__add", {}, "e3"))
    assert len(link.calls) == 1  # what the step's catalog does not have cannot be called either


async def test_a_listed_tool_says_what_a_model_is_told(make: Make, link: FakeLink) -> None:
    await make(link, FakeModel()).run(event_frame("e1", None, kind="operator.tools"))
    tools = from_raw(ran(link).output or b"", list[OperatorTool])
    assert [tool.name for tool in tools] == ["bash__exec", "notes__add"]
    assert tools[0].parameters is not None


async def test_a_turn_middleware_that_changes_the_answer_keeps_the_result(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel())

    async def turn(ctx: Any) -> Any:
        result = await ctx.next()
        result.response = "changed"
        return result

    api_of(runner).pipeline.register("turn", turn)
    await runner.run(asks("bash__exec", {"command": "ls"}))
    assert (the_answer(link).response, ran(link).status) == ("changed", "ok")


async def test_a_call_goes_on_in_the_next_process(make: Make) -> None:
    before = FakeLink(lambda *_: None)
    runner = make(before, FakeModel())
    task = asyncio.create_task(runner.run(asks("notes__add", {"n": 1})))
    await until(lambda: before.calls)
    runner.abandon()
    await task
    after = FakeLink()
    await make(after, FakeModel()).run(asks("notes__add", {"n": 1}, epoch=2))
    assert [f.call_id for f in after.calls] == [f.call_id for f in before.calls]
    assert ran(after).status == "ok"


async def test_the_end_of_work_that_an_operator_began_wakes_no_model(make: Make) -> None:
    link, model = FakeLink(lambda *_: ToolResult(status="pending", handle="job")), FakeModel(says("woken"))
    runner = make(link, model)
    await runner.run(asks("notes__add", {}))
    assert ran(link).status == "pending"
    for turn, asked in ((the_answer(link).turn_id, 0), ("another", 1)):
        told = Completion(handle="job", tool_name="notes__add", tool_call_id="c", turn_id=turn, result=to_raw(OK))
        frame = event_frame(f"{turn}/c~completed", told, kind=TOOL_COMPLETED, source=Source("tool", "host"))
        await runner.run(frame)
        assert link.answers()[-1].status == "completed"
        assert len(model.requests) == asked


def test_the_last_pieces_of_work_are_known(tmp_path: Path) -> None:
    store = ConversationStore(str(tmp_path), durability="process")
    try:
        for number in range(MAX_KNOWN + 3):
            with store.write():
                note_work(store, f"t{number}")
        with store.write():
            note_work(store, "t10")
        known = operators_work(store)
        assert len(known) == MAX_KNOWN
        assert (known[0], known[-1]) == ("t3", "t10")
    finally:
        store.close()
