"""Whole turns with middleware around them: over a fake link, a scripted model and a real conversation file."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.agentproc.extensions import stages as stages_module
from goondan.agentproc.extensions.points.pipeline import MiddlewareError
from goondan.agentproc.extensions.points.results import TurnResult
from goondan.agentproc.machine.messages import AssistantData, Message, UserData, is_presentable
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Answer, Frame, ToolCallPayload
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of, failed, settle, until


def put(runner: TurnRunner, kind: str, handler: Any, extension: str = "ext", priority: int = 0) -> None:
    runner.instance.pipeline.register(kind, handler, extension=extension, priority=priority)


def answer_of(link: FakeLink) -> Answer:
    return link.answers()[-1]


def texts(messages: list[Message]) -> list[str]:
    """What user and assistant messages say."""
    found: list[str] = []
    for message in messages:
        if isinstance(message.data, UserData):
            found.append(message.data.content)
        elif isinstance(message.data, AssistantData):
            found.append(message.data.text)
    return found


@pytest.mark.requirement("PIPELINE-01", "PIPELINE-02", "PIPELINE-03", "CALL-09")
async def test_the_three_kinds_nest_and_the_first_registered_is_outermost(make: Make, link: FakeLink) -> None:
    seen: list[str] = []

    def note(kind: str, name: str) -> Any:
        async def layer(ctx: Any) -> Any:
            seen.append(f"+{kind}.{name}")
            result = await ctx.next()
            seen.append(f"-{kind}.{name}")
            return result

        return layer

    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    for name in ("one", "two"):
        for kind in ("turn", "step", "toolCall"):
            put(runner, kind, note(kind, name), name)
    await runner.run(event_frame("e1", "go"))
    step = ["+step.one", "+step.two", "-step.two", "-step.one"]
    call = ["+toolCall.one", "+toolCall.two", "-toolCall.two", "-toolCall.one"]
    assert seen == [
        "+turn.one", "+turn.two", *step[:2], *call, *step[2:], *step, "-turn.two", "-turn.one",
    ]  # fmt: skip
    assert (answer_of(link).status, answer_of(link).response, answer_of(link).steps) == ("completed", "done", 2)


@pytest.mark.requirement("CALL-10", "CALL-11", "CALL-12", "CALL-13", "CALL-16")
async def test_tool_call_middleware_changes_arguments_and_result(make: Make) -> None:
    link = FakeLink(lambda _, args: ok({"ran": args["command"]}))
    model = FakeModel(wants(("a", "bash__exec", {"command": "ls"})), says("done"))
    runner = make(link, model)
    seen: dict[str, Any] = {}

    async def outer(ctx: Any) -> Any:
        ctx.metadata["from outer"] = 1
        ctx.args = {**ctx.args, "command": "pwd"}
        result = await ctx.next()
        seen["outer"] = (ctx.tool_name, ctx.tool_call_id, ctx.step_index, result.output, ctx.turn_id)
        result.output = {**result.output, "seen": True}
        return result

    async def inner(ctx: Any) -> Any:
        seen["inner"] = (dict(ctx.args), ctx.metadata["from outer"])
        return await ctx.next()

    put(runner, "toolCall", outer)
    put(runner, "toolCall", inner)
    await runner.run(event_frame("e1", "go"))
    (frame,) = link.calls
    assert from_raw(from_raw(frame.payload, ToolCallPayload).args, dict) == {"command": "pwd"}
    turn = answer_of(link).turn_id
    assert seen == {
        "outer": ("bash__exec", "a", 0, {"ran": "pwd"}, turn),
        "inner": ({"command": "pwd"}, 1),
    }
    shown = model.requests[-1].messages[-1].data.content[0].result  # type: ignore[union-attr]
    assert from_raw(shown.output, dict) == {"ran": "pwd", "seen": True}  # type: ignore[arg-type]


@pytest.mark.requirement("CALL-14", "PIPELINE-21")
async def test_middleware_that_raises_stops_its_call_alone(make: Make, link: FakeLink) -> None:
    class Denied(Exception):
        code = "E_FORBIDDEN"
        suggestion = "Ask somebody."

    async def guard(ctx: Any) -> Any:
        if ctx.tool_name == "bash__exec":
            raise Denied("Permission denied for tool: " + ctx.tool_name)
        return await ctx.next()

    model = FakeModel(wants(("a", "bash__exec", {"command": "ls"}), ("b", "notes__add", {})), says("done"))
    runner = make(link, model)
    put(runner, "toolCall", guard)
    await runner.run(event_frame("e1", "go"))
    assert [frame.tool for frame in link.calls] == ["notes__add"]
    results = [m.data.content[0].result for m in model.requests[-1].messages if m.source.type == "tool"]  # type: ignore[union-attr]
    error = results[0].error
    assert error is not None
    assert (error.name, error.code, error.message, error.suggestion) == (
        "Denied", "E_FORBIDDEN", "Permission denied for tool: bash__exec", "Ask somebody.",
    )  # fmt: skip
    assert results[1].status == "ok"
    assert answer_of(link).status == "completed"


async def test_an_output_that_middleware_spoils_is_the_calls_error(make: Make) -> None:
    async def spoils(ctx: Any) -> Any:
        result = await ctx.next()
        result.output = [float("nan")]
        return result

    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = make(FakeLink(), model)
    put(runner, "toolCall", spoils)
    await runner.run(event_frame("e1", "go"))
    failed(model.requests[-1].messages[-1].data.content[0].result, "E_TOOL_BAD_OUTPUT")  # type: ignore[union-attr]


@pytest.mark.requirement("CATALOG-05", "CATALOG-07", "PIPELINE-02", "CALL-01", "CALL-02")
async def test_step_middleware_decides_what_the_model_is_shown_and_may_call(make: Make, link: FakeLink) -> None:
    async def first_step_only(ctx: Any) -> Any:
        if ctx.step_index == 0:
            ctx.tool_catalog = [item for item in ctx.tool_catalog if item.name != "bash__exec"]
            ctx.tool_catalog.append({"name": "hidden__run", "description": "now shown"})
        return await ctx.next()

    model = FakeModel(
        wants(("a", "bash__exec", {"command": "ls"}), ("b", "hidden__run", {})),
        wants(("c", "bash__exec", {"command": "ls"}), ("d", "hidden__run", {})),
        says("done"),
    )
    runner = make(link, model, addable=["hidden__run"])
    put(runner, "step", first_step_only)
    await runner.run(event_frame("e1", "go"))
    assert [[item.name for item in request.tools] for request in model.requests[:2]] == [
        ["notes__add", "hidden__run"],
        ["bash__exec", "notes__add"],
    ]
    assert [str(frame.call_id).rpartition("/")[2] for frame in link.calls] == ["b", "c"]


@pytest.mark.requirement("CONTEXT-10")
async def test_message_events_change_what_the_model_sees_and_stay(make: Make, link: FakeLink) -> None:
    model = FakeModel(says("one"), says("two"), says("three"))
    runner = make(link, model)
    states: list[tuple[list[str], int, list[str]]] = []

    async def edit(ctx: Any) -> Any:
        state = ctx.conversation_state
        states.append((texts(state.base_messages), len(state.events), texts(state.next_messages)))
        if texts(state.base_messages) == []:
            ctx.emit_message_event({"type": "append", "message": {"data": {"role": "user", "content": "remember"}}})
        elif len(state.base_messages) > 3:
            ctx.emit_message_event({"type": "truncate"})
            ctx.emit_message_event({"type": "append", "message": {"data": {"role": "system", "content": "summary"}}})
            ctx.emit_message_event({"type": "append", "message": {"data": {"role": "user", "content": "again"}}})
        else:
            ctx.emit_message_event({"type": "remove", "targetId": state.base_messages[1].id})
        return await ctx.next()

    put(runner, "turn", edit, "editor")
    for number, text in enumerate(("first", "second", "third")):
        await runner.run(event_frame(f"e{number}", text))
    assert [texts(request.messages) for request in model.requests] == [
        ["first", "remember"],
        ["first", "one", "second"],
        ["again"],
    ]
    assert states == [
        ([], 1, ["first"]),
        (["first", "remember", "one"], 1, ["first", "remember", "one", "second"]),
        (["first", "one", "second", "two"], 1, ["first", "one", "second", "two", "third"]),
    ]
    kept = runner.instance.store.load_messages()
    assert [m.data.__class__.__name__ for m in kept] == ["SystemData", "UserData", "AssistantData"]
    assert (kept[0].source.type, kept[0].source.name) == ("extension", "editor")


async def test_an_appended_message_with_the_id_of_another_one_takes_its_place(make: Make, link: FakeLink) -> None:
    model = FakeModel(says("one"), says("two"))
    runner = make(link, model)

    async def edit(ctx: Any) -> Any:
        first = ctx.conversation_state.next_messages[0]
        said = {"id": first.id, "data": {"role": "user", "content": "shorter"}}
        ctx.emit_message_event({"type": "append", "message": said})
        return await ctx.next()

    put(runner, "turn", edit, "editor")
    await runner.run(event_frame("e0", "a long message"))
    await runner.run(event_frame("e1", "more"))
    assert [texts(request.messages) for request in model.requests] == [["shorter"], ["shorter", "one", "more"]]
    assert texts(runner.instance.store.load_messages()) == ["shorter", "one", "more", "two"]


async def test_message_events_behind_next_are_part_of_the_turn(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("answer")))
    contexts: list[Any] = []

    async def after(ctx: Any) -> Any:
        contexts.append(ctx)
        result = await ctx.next()
        assert result.response_message is not None
        said = {"role": "assistant", "content": "corrected"}
        event = {"type": "replace", "targetId": result.response_message.id, "message": {"data": said}}
        ctx.emit_message_event(event)
        result.response = "corrected"
        return result

    put(runner, "turn", after)
    await runner.run(event_frame("e1", "go"))
    assert answer_of(link).response == "corrected"
    assert texts(runner.instance.store.load_messages()) == ["go", "corrected"]
    with pytest.raises(MiddlewareError, match="over"):
        contexts[0].emit_message_event({"type": "truncate"})


@pytest.mark.parametrize(
    "event",
    [
        {"type": "nonsense"},
        {"type": "append"},
        {"type": "append", "message": {"data": {"role": "user", "content": 5}}},
        {"type": "append", "message": {"data": {"role": "user", "content": "\ud800"}}},
        {"type": "append", "message": {"data": {"role": "user", "content": "x"}, "metadata": {"a": float("nan")}}},
        {"type": "remove"},
        "text",
        None,
    ],
)
async def test_what_is_no_message_event_is_refused_and_changes_nothing(make: Make, link: FakeLink, event: Any) -> None:
    raised: list[str] = []

    async def wrong(ctx: Any) -> Any:
        try:
            ctx.emit_message_event(event)
        except MiddlewareError as error:
            raised.append(str(error))
        return await ctx.next()

    runner = make(link, FakeModel(says("fine")))
    put(runner, "turn", wrong)
    await runner.run(event_frame("e1", "go"))
    assert len(raised) == 1
    assert raised[0].startswith("no message event")
    assert texts(runner.instance.store.load_messages()) == ["go", "fine"]


async def test_contexts_are_read_only_where_the_specification_says_so(make: Make, link: FakeLink) -> None:
    refused: list[str] = []

    async def meddle(ctx: Any) -> Any:
        for name in ("tool_name", "tool_call_id", "turn_id", "agent_name", "next", "metadata", "anything"):
            try:
                setattr(ctx, name, "x")
            except AttributeError:
                refused.append(name)
        return await ctx.next()

    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    put(runner, "toolCall", meddle)
    await runner.run(event_frame("e1", "go"))
    assert len(refused) == 7
    assert answer_of(link).status == "completed"


async def test_a_deadline_ends_a_turn_whose_middleware_hangs(make: Make, link: FakeLink) -> None:
    cleaned: list[str] = []

    async def hang(ctx: Any) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("yes")
        return await ctx.next()

    runner = make(link, FakeModel(says("never")))
    put(runner, "turn", hang)
    await asyncio.wait_for(runner.run(event_frame("e1", "go", deadline_ms=30)), 5)
    assert code_of(answer_of(link)) == "E_AGENT_TIMEOUT"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert cleaned == ["yes"]


async def test_a_cancelled_turn_is_left_through_its_middleware(make: Make) -> None:
    heard: list[str | None] = []

    async def around_turn(ctx: Any) -> Any:
        result = await ctx.next()
        heard.append(result.error.code if result.error else None)
        return result

    async def around_call(ctx: Any) -> Any:
        try:
            return await ctx.next()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    link = FakeLink(lambda *_: None)
    model = FakeModel(wants(("a", "notes__add", {})), says("next"))
    runner = make(link, model)
    put(runner, "turn", around_turn)
    put(runner, "toolCall", around_call)
    turn = asyncio.create_task(runner.run(event_frame("e1", "go")))
    async with asyncio.timeout(5):
        while not link.open_calls():
            await asyncio.sleep(0)
        runner.cancel(Frame("tool.cancel", event_id="e1", epoch=1))
        await turn
    await settle()
    assert set(heard) == {"E_CANCELLED", "cancelled"}
    assert (code_of(answer_of(link)), link.open_calls()) == ("E_CANCELLED", [])
    await runner.run(event_frame("e2", "on"))
    assert is_presentable(model.requests[-1].messages)


async def test_turn_middleware_has_only_so_long_behind_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "AFTER_TURN_S", 0.02)

    async def slow(ctx: Any) -> Any:
        await ctx.next()
        await asyncio.sleep(60)

    link = FakeLink()
    runner = make(link, FakeModel(says("in time")))
    put(runner, "turn", slow)
    await asyncio.wait_for(runner.run(event_frame("e1", "go")), 5)
    assert answer_of(link).response == "in time"


async def test_a_turn_given_back_and_taken_up_again_does_not_repeat_what_its_middleware_emitted(make: Make) -> None:
    """The first process is abandoned amid a call; the second enters the same middleware and ends the turn."""
    emissions: list[str] = []

    def layers(runner: TurnRunner) -> None:
        async def turn(ctx: Any) -> Any:
            emissions.append("turn")
            ctx.emit_message_event({"type": "append", "message": {"data": {"role": "user", "content": "from turn"}}})
            return await ctx.next()

        async def step(ctx: Any) -> Any:
            emissions.append(f"step {ctx.step_index}")
            said = {"role": "user", "content": f"from step {ctx.step_index}"}
            ctx.emit_message_event({"type": "append", "message": {"data": said}})
            return await ctx.next()

        put(runner, "turn", turn)
        put(runner, "step", step)

    link = FakeLink(lambda *_: None)
    first = make(link, FakeModel(wants(("a", "notes__add", {}))))
    layers(first)
    running = asyncio.ensure_future(first.run(event_frame("e1", "go")))
    await until(link.open_calls)
    first.abandon()
    await running
    await first.close()
    other = FakeLink()
    model = FakeModel(says("done"))
    second = make(other, model)
    layers(second)
    await second.run(event_frame("e1", "go", epoch=2))
    assert emissions == ["turn", "step 0", "turn", "step 0", "step 1"]
    assert [frame.call_id for frame in other.calls] == link.open_calls() or len(other.calls) == 1
    expected = ["go", "from turn", "from step 0", "", "from step 1"]
    assert texts(model.requests[-1].messages) == expected
    assert texts(second.instance.store.load_messages()) == [*expected, "done"]
    assert answer_of(other).response == "done"


async def test_a_pause_gives_a_wrapped_turn_back_and_unwinds_its_middleware(make: Make) -> None:
    unwound: list[str] = []

    async def turn(ctx: Any) -> Any:
        try:
            return await ctx.next()
        finally:
            unwound.append("turn")

    link = FakeLink(lambda *_: None)
    runner = make(link, FakeModel(wants(("a", "notes__add", {}))))
    put(runner, "turn", turn)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(link.open_calls)
    runner.pause()
    link.finish(link.open_calls()[0], ok(1))
    await asyncio.wait_for(running, 5)
    assert [frame.stage for frame in link.posted] == ["release"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert unwound == ["turn"]


async def test_a_turn_result_of_ones_own_is_the_answer(make: Make, link: FakeLink) -> None:
    async def mine(ctx: Any) -> Any:
        await ctx.next()
        return TurnResult(turn_id=ctx.turn_id, response="mine", finish_reason="rewritten")

    runner = make(link, FakeModel(fail("E_MODEL_FAILED", "503")))
    put(runner, "turn", mine)
    await runner.run(event_frame("e1", "go"))
    answer = answer_of(link)
    assert (answer.status, answer.response, answer.finish_reason) == ("completed", "mine", "rewritten")


@pytest.mark.parametrize(
    ("name", "own", "told"),
    [
        ("hidden__run", True, "'hidden__run' or a pattern for it to policy.toolCalls.extensionsMayAdd of Agent/coder"),
        ("hidden__run", False, "Name Tool/hidden in spec.tools of Agent/coder. Bundled extensions add no tools"),
        ("no__such", True, "Register it with api.tools.register before it is added"),
    ],
)
async def test_what_cannot_be_called_is_refused_where_it_is_added(make: Make, name: str, own: bool, told: str) -> None:
    async def outer(ctx: Any) -> Any:
        return await ctx.next()

    async def adds(ctx: Any) -> Any:
        ctx.tool_catalog.append(CatalogItem(name=name))
        return await ctx.next()

    link, model = FakeLink(), FakeModel(says("never"))
    specs = [ExtensionSpec(name="x", entry="/x.py", resource={}, bundled=not own)]
    runner = make(link, model, extensions=specs)
    for extension, layer in (("outer", outer), ("adder", adds), ("inner", outer)):
        put(runner, "step", layer, extension)
    await runner.run(event_frame("e1", "go"))
    error = answer_of(link).error
    assert error is not None
    assert (error.code, "the step middleware of extension adder failed" in error.message) == ("E_MIDDLEWARE", True)
    assert repr(name) in error.message
    assert told in (error.suggestion or "")
    assert model.requests == [], "the model was offered it"
