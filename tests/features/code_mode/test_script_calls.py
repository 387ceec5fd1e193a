"""Calls that scripts ask for: made like the model's own, answered to the script, and noted below it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from msgspec import Raw

from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.code_mode.agent import ScriptLog, has_code_mode, identifiers
from goondan.features.code_mode.agent.scripts import MAX_UNHEARD, Record
from goondan.features.code_mode.wire import CODE_TOOL, EXTENSION, FoundTools
from goondan.schemas.bundle.launch import CatalogItem, ToolSource
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import PASSED_ON, Frame, ToolCallPayload, ToolError, ToolResult
from goondan.schemas.wire.questions import MAX_OPEN, ToolAnswer, ToolAsk
from goondan.schemas.wire.spans import call_span
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import NOTE, FakeLink, FakeModel, echo, event_frame, make_spec, ok, says, wants
from tests.unit.agentproc.test_runtime_events import details, notes
from tests.unit.agentproc.turns import Make, settle

CODE = CatalogItem(name=CODE_TOOL, description="Run a script.", source=ToolSource("extension", EXTENSION))
NOTES = CatalogItem(
    name="notes__add",
    description="Keep a note.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
DASHED = CatalogItem(name="json-query__count", description="Count things.")


def told(model: FakeModel) -> Any:
    """The error in the last message that a model was shown."""
    data: Any = model.requests[-1].messages[-1].data
    (part,) = data.content
    return part.result.error


class Script:
    """A turn whose model has called `code__run`. The tool host is the test: it asks in the name of that call."""

    def __init__(self, make: Make, **changes: Any) -> None:
        self.link = FakeLink(lambda tool, args: None if tool == CODE_TOOL else echo(tool, args))
        self.model = FakeModel(wants(("c1", CODE_TOOL, {"language": "python", "code": "…"})), says("done"))
        self.runner: TurnRunner = make(
            self.link,
            self.model,
            **{
                "registry": [CODE, NOTES, DASHED],
                "catalog": ["notes__add", "json-query__count"],
                "addable": [CODE_TOOL],
                "extensions": [bundled(EXTENSION)],
                **changes,
            },
        )
        self.frame = event_frame("e1", "go")
        self.asked = 0

    async def __aenter__(self) -> Self:
        await self.runner.load_extensions()
        self.task = asyncio.ensure_future(self.runner.run(self.frame))
        await settle()
        (self.call_id,) = [frame.call_id or "" for frame in self.link.calls if frame.tool == CODE_TOOL]
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.task.done():
            self.end(ok({"printed": ""}))
        await self.task

    def end(self, result: ToolResult) -> None:
        """The script ends."""
        self.link.finish(self.call_id, result)

    def ask(self, kind: str, value: Any, *, call_id: str | None = None, frame_id: str | None = None) -> str:
        """The script asks something; the id of the question."""
        self.asked += 1
        frame = Frame("tool.ask", id=frame_id or f"h.{self.asked}", call_id=call_id or self.call_id)
        frame.event_id, frame.epoch = self.frame.event_id, self.frame.epoch
        frame.payload = to_raw(ToolAsk(self.asked, kind, to_raw(value)))
        self.runner.asked(frame)
        return frame.id

    def call(self, name: str, args: Any) -> str:
        return self.ask("tool", {"name": name, "args": args})

    def answers(self) -> dict[str, Any]:
        """What was answered, by question: the value, or the code of the error."""
        found = {}
        for frame in self.link.sent:
            if frame.type == "tool.answer":
                answer = from_raw(frame.payload, ToolAnswer)
                value = from_raw(answer.value or Raw(b"\xc0"), object)
                found[frame.in_reply_to or ""] = value if answer.error is None else answer.error.code
        return found

    def result(self) -> Any:
        """The error that the model was told as the script's result."""
        return told(self.model)

    def inner(self) -> list[Frame]:
        return [frame for frame in self.link.calls if frame.tool != CODE_TOOL]


async def test_a_call_of_a_script_is_a_call_of_the_step_and_its_result_the_answer(make: Make, tmp_path: Path) -> None:
    async with Script(make) as script:
        question = script.call("notes__add", {"text": "hi"})
        await settle()
        (frame,) = script.inner()
        assert (frame.tool, frame.call_id, frame.within) == ("notes__add", f"{script.call_id}>1", script.call_id)
        assert (frame.event_id, frame.epoch) == (script.frame.event_id, script.frame.epoch)
        assert frame.parent_span_id == call_span(script.call_id)
        payload = from_raw(frame.payload, ToolCallPayload)
        assert (payload.tool_call_id, from_raw(payload.args, object)) == ("c1>1", {"text": "hi"})
        assert script.answers()[question] == {
            "status": "ok",
            "output": {"tool": "notes__add", "args": {"text": "hi"}},
        }
        log = ScriptLog(script.runner.instance.place.instance_dir)
        assert [record.outcome for record in log.read(script.call_id)] == ["began", "ok"]
    assert log.read(script.call_id) == [], "what is written down for a crash goes with the script"
    data: Any = script.model.requests[1].messages[-1].data
    assert [part.tool_call_id for part in data.content] == ["c1"], "one result, the script's"
    assert len(script.model.requests[1].messages) == 3
    noted = [(kind, parent) for kind, span, parent in notes(tmp_path) if span == call_span(f"{script.call_id}>1")]
    assert noted == [("tool.called", call_span(script.call_id)), ("tool.completed", call_span(script.call_id))]
    assert [detail.get("args") for detail in details(tmp_path, "tool.called")] == [None, '{"text":"hi"}']
    assert details(tmp_path, "tool.completed")[0]["output"] == '{"tool":"notes__add","args":{"text":"hi"}}'


async def test_what_the_tool_host_has_passed_on_is_noted_and_not_answered_again(make: Make, tmp_path: Path) -> None:
    async with Script(make) as script:
        script.link.handler = lambda tool, args: None
        passed_on, repeated, failed = (script.call("notes__add", {"text": text}) for text in "abc")
        calls = [(frame.call_id or "", frame.in_reply_to) for frame in script.inner()]
        assert [question for _, question in calls] == [passed_on, repeated, failed]
        script.link.finish(calls[0][0], ok(1), PASSED_ON)
        script.link.finish(calls[1][0], ok(2))  # as after a reconnect: it is not known whether the script has it
        script.link.finish(
            calls[2][0], ToolResult(status="error", error=ToolError(message="no", name="Error", code="E_TOOL"))
        )
        assert script.answers() == {repeated: {"status": "ok", "output": 2}, failed: "E_TOOL"}
        log = ScriptLog(script.runner.instance.place.instance_dir)
        assert [record.outcome for record in log.read(script.call_id)] == [*["began"] * 3, "ok", "ok", "error"]
        script.ask("tool", {"name": "notes__add", "args": {"text": "a"}}, frame_id=passed_on)
        assert len(script.inner()) == 3, "the question was handled"
    assert [detail.get("output") for detail in details(tmp_path, "tool.completed")][:2] == ["1", "2"]


async def test_the_catalog_and_the_schema_hold_for_scripts(make: Make) -> None:
    async with Script(make) as script:
        unknown = script.call("bash__exec", {})
        wrong = script.call("notes__add", {"text": 7})
        none = script.call("notes__add", None)
        odd = script.call("notes__add", [1])
        nested = script.call(CODE_TOOL, {"language": "python", "code": "1"})
        await settle()
        assert [script.answers()[one] for one in (unknown, wrong, none, odd, nested)] == [
            "E_TOOL_NOT_IN_CATALOG",
            "E_TOOL_INVALID_ARGS",
            "E_TOOL_INVALID_ARGS",
            "E_TOOL_INVALID_ARGS",
            "E_FORBIDDEN",
        ]
        assert script.inner() == []


async def test_a_tool_whose_name_is_no_identifier_is_called_by_what_a_script_can_write(make: Make) -> None:
    async with Script(make) as script:
        script.call("json_query__count", {})
        await settle()
        assert [frame.tool for frame in script.inner()] == ["json-query__count"]


def test_an_identifier_that_two_tools_could_have_is_nobodys() -> None:
    items = [CatalogItem(name=name) for name in ("a-b__c", "a.b__c", "d-e__f", "g__h")]
    assert identifiers(items) == {"d_e__f": "d-e__f"}


async def test_the_model_sees_one_tool_and_a_search_finds_the_others(make: Make) -> None:
    async with Script(make) as script:
        (item,) = script.model.requests[0].tools
        assert item.name == CODE_TOOL
        assert (item.description or "").endswith("There are 2 tools to call: json-query__* (1), notes__* (1).")
        found = script.ask("tools", {"query": "count"})
        described = script.ask("tools", {"names": ["json_query__count", "notes__add", CODE_TOOL]})
        some = script.ask("tools", {"query": "count note", "limit": 1})
        await settle()
        answers = {name: msgspec.convert(value, FoundTools) for name, value in script.answers().items()}
        assert [tool.name for tool in answers[found].tools] == ["json-query__count"]
        assert [tool.name for tool in answers[described].tools] == ["notes__add", "json-query__count"]
        assert answers[described].tools[0].parameters == NOTES.parameters
        assert (len(answers[some].tools), answers[some].total) == (1, 2)


async def test_two_hundred_tools_are_a_twentieth_of_what_their_schemas_cost(make: Make) -> None:
    """The bench counts the tokens of a whole task on the requests that leave (bench/code_mode.py)."""
    schema = {"type": "object", "properties": {name: {"type": "string", "description": "x" * 60} for name in "abcdef"}}
    many = [CatalogItem(name=f"hub-{n // 10}__e{n}", description="y" * 150, parameters=schema) for n in range(200)]
    async with Script(make, registry=[CODE, *many], catalog=[item.name for item in many]) as script:
        shown = len(msgspec.json.encode(script.model.requests[0].tools))
        assert shown < 0.05 * len(msgspec.json.encode(many))


async def test_middleware_is_around_the_calls_of_scripts_too(make: Make) -> None:
    async with Script(make) as script:
        seen: list[tuple[str, Any]] = []

        async def layer(ctx: Any) -> Any:
            seen.append((ctx.tool_call_id, dict(ctx.args)))
            ctx.args["text"] = "changed"
            return await ctx.next()

        script.runner.instance.pipeline.register("toolCall", layer, extension="ext")
        script.call("notes__add", {"text": "hi"})
        await settle()
        assert script.inner()[0].in_reply_to is None, "the tool host does not answer with what a layer may change"
        assert seen == [("c1>1", {"text": "hi"})]
        payload = from_raw(script.inner()[0].payload, ToolCallPayload)
        assert from_raw(payload.args, object) == {"text": "changed"}


async def test_a_pending_result_is_a_handle_and_a_failed_one_an_error(make: Make) -> None:
    async with Script(make) as script:
        script.link.handler = lambda tool, args: ToolResult(status="pending", handle="notes/7")
        pending = script.call("notes__add", {"text": "hi"})
        await settle()
        assert script.answers()[pending] == {"status": "pending", "handle": "notes/7"}


async def test_results_go_to_the_script_as_the_model_would_get_them_and_are_acknowledged(make: Make) -> None:
    async with Script(make) as script:
        script.runner.instance.secrets.add("hunter2-hunter2")
        error = {"message": "no entry with hunter2-hunter2", "code": "E_TOOL"}
        script.link.handler = lambda tool, args: msgspec.convert({"status": "error", "error": error}, ToolResult)
        script.call("notes__add", {"text": "x"})
        await settle()
        (answer,) = [from_raw(frame.payload, ToolAnswer) for frame in script.link.sent if frame.type == "tool.answer"]
        assert answer.error is not None
        assert (answer.error.code, answer.error.message) == ("E_TOOL", "no entry with ***")
        script.runner.instance.acks.flush()
        assert script.link.acked() == [f"{script.call_id}>1"], "nobody stores it, so the host need not keep it"


# --- what a hostile script tries


async def test_only_a_running_script_asks(make: Make) -> None:
    async with Script(make) as script:
        other = script.ask("tool", {"name": "notes__add", "args": {"text": "x"}}, call_id="t9/c9")
        inner = script.call("notes__add", {"text": "x"})
        script.link.handler = lambda tool, args: None
        waits = script.call("notes__add", {"text": "y"})
        in_inner = script.ask("tool", {"name": "notes__add", "args": {"text": "x"}}, call_id=f"{script.call_id}>2")
        await settle()
        answers = script.answers()
        assert answers[other] == "E_CALL_ENDED"
        assert answers[in_inner] == "E_CALL_ENDED", "a call of a script is no script"
        assert isinstance(answers[inner], dict)
        assert waits not in answers


async def test_without_the_extension_no_call_of_that_name_is_a_script(make: Make) -> None:
    async with Script(make, extensions=[], catalog=[CODE_TOOL, "notes__add"]) as script:
        question = script.call("notes__add", {"text": "x"})
        await settle()
        assert script.answers()[question] == "E_FORBIDDEN"
        assert script.inner() == []


async def test_the_bundled_extension_has_code_mode_under_a_name_of_the_bundles_own(make: Make) -> None:
    mine = msgspec.structs.replace(bundled(EXTENSION), name="mine")
    code = msgspec.structs.replace(CODE, source=ToolSource("extension", "mine"))
    async with Script(make, extensions=[mine], registry=[code, NOTES, DASHED]) as script:
        question = script.call("notes__add", {"text": "x"})
        await settle()
        assert script.answers()[question]["status"] == "ok"


@pytest.mark.parametrize("changes", [{"bundled": False}, {"entry": "/goondan/features/other/base/other/other.py"}])
def test_another_extension_of_that_name_has_no_code_mode(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = msgspec.structs.replace(bundled(EXTENSION), **changes)
    assert not has_code_mode(make_spec(str(tmp_path), extensions=[other]))


async def test_a_flood_is_refused_and_the_script_goes_on(make: Make) -> None:
    async with Script(make) as script:
        script.link.handler = lambda tool, args: None
        questions = [script.call("notes__add", {"text": str(number)}) for number in range(MAX_UNHEARD + 50)]
        await settle()
        codes = [script.answers().get(question) for question in questions]
        assert codes == [None] * MAX_UNHEARD + ["E_TOOL_LIMIT"] * 50
        assert len(script.inner()) == MAX_UNHEARD
        script.link.finish(f"{script.call_id}>1", ok(1))
        again = script.call("notes__add", {"text": "more"})
        assert again not in script.answers()
        assert len(script.inner()) == MAX_UNHEARD + 1


async def test_calls_that_come_before_the_results_of_others_that_were_passed_on_are_made(make: Make) -> None:
    """The broker was lost with the results, and the script goes on: it has the outputs."""
    async with Script(make) as script:
        script.link.handler = lambda tool, args: None
        lost = [script.call("notes__add", {"text": str(number)}) for number in range(MAX_OPEN)]
        later = [script.call("notes__add", {"text": str(number)}) for number in range(MAX_OPEN)]
        await settle()
        assert [call.in_reply_to for call in script.inner()] == lost + later
        assert script.answers() == {}


async def test_a_repeated_question_makes_no_second_call(make: Make) -> None:
    async with Script(make) as script:
        for _ in range(3):
            script.ask("tool", {"name": "notes__add", "args": {"text": "x"}}, frame_id="h.same")
        await settle()
        assert len(script.inner()) == 1


@pytest.mark.parametrize("value", [None, 7, [], {"name": 7}, {"args": {}}, {"name": "x", "args": {}, "more": [1]}])
async def test_a_question_of_another_shape_is_one_error(make: Make, value: Any) -> None:
    async with Script(make) as script:
        question = script.ask("tool", value)
        await settle()
        assert script.answers()[question] in ("E_FRAME_INVALID", "E_TOOL_NOT_IN_CATALOG")


async def test_with_its_script_a_call_ends(make: Make, tmp_path: Path) -> None:
    async with Script(make) as script:
        script.link.handler = lambda tool, args: None
        question = script.call("notes__add", {"text": "x"})
        await settle()
        script.end(ok({"printed": ""}))  # at once, and not with the turn
        cancelled = [frame.call_id for frame in script.link.sent if frame.type == "tool.cancel"]
        assert cancelled == [f"{script.call_id}>1"]
        await settle()
        assert question not in script.answers()
        after = script.call("notes__add", {"text": "y"})
        assert script.answers().get(after) in ("E_CALL_ENDED", None)
    assert len(script.inner()) == 1
    ended = [kind for kind, span, _ in notes(tmp_path) if span == call_span(f"{script.call_id}>1")]
    assert ended == ["tool.called", "tool.failed"]


async def test_a_failed_script_says_what_it_had_done(make: Make) -> None:
    async with Script(make) as script:
        script.call("notes__add", {"text": "x"})
        await settle()
        script.link.handler = lambda tool, args: None
        script.call("notes__add", {"text": "y"})
        await settle()
        error = {"message": "the tool host ended", "code": "E_TOOL_OUTCOME_UNKNOWN"}
        script.end(msgspec.convert({"status": "error", "error": error}, ToolResult))
        await script.task
        assert script.result().code == "E_TOOL_OUTCOME_UNKNOWN"
        assert 'finished: notes__add {"text":"x"}.' in script.result().message
        assert 'not known: notes__add {"text":"y"}.' in script.result().message


async def test_after_the_end_of_its_process_a_script_is_unknown_and_its_calls_are_listed(make: Make) -> None:
    script = Script(make)
    async with script:
        script.call("notes__add", {"text": "x"})
        await settle()
        script.link.handler = lambda tool, args: None
        script.call("notes__add", {"text": "y"})
        await settle()
        script.runner.abandon()  # as if it had been killed
        await script.task
    link = FakeLink(lambda tool, args: None)
    model = FakeModel(says("I see"))
    spec = script.runner.instance.spec
    again = make(
        link,
        model,
        registry=spec.registry,
        catalog=spec.catalog,
        addable=spec.addable,
        extensions=spec.extensions,
    )
    await again.load_extensions()
    await again.run(script.frame)
    assert link.calls == [], "the script is not run again, and not waited for"
    cancelled = [frame.call_id for frame in link.sent if frame.type == "tool.cancel"]
    assert cancelled == [script.call_id, f"{script.call_id}>2"]
    assert told(model).code == "E_TOOL_OUTCOME_UNKNOWN"
    assert 'finished: notes__add {"text":"x"}.' in told(model).message
    assert 'not known: notes__add {"text":"y"}.' in told(model).message
    place = again.instance.place.instance_dir
    assert ScriptLog(place).read(script.call_id) == []


async def test_what_was_written_of_an_earlier_turn_is_no_matter_of_this_one(make: Make) -> None:
    async with Script(make) as script:
        ScriptLog(script.runner.instance.place.instance_dir).add("t0/c1", Record(1, "began", "bash__exec", "{}"))
        script.end(msgspec.convert({"status": "error", "error": {"message": "broken"}}, ToolResult))
        await script.task
        assert script.result().message == "broken"


async def test_a_model_does_not_make_its_call_one_of_a_script(make: Make) -> None:
    link = FakeLink(lambda tool_, args: None if tool_ == CODE_TOOL else echo(tool_, args))
    script = ("s", CODE_TOOL, {"language": "python", "code": "…"})
    model = FakeModel(wants(script, ("s>51", "notes__add", {}), ("s>1", "notes__add", {})), says("done"))
    parts: dict[str, Any] = {"registry": [CODE, NOTE], "catalog": ["notes__add"], "addable": [CODE_TOOL]}
    runner = make(link, model, extensions=[bundled(EXTENSION)], **parts)
    await runner.load_extensions()
    turn = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    assert [frame.within for frame in link.calls] == [None] * 3
    assert [(frame.call_id or "").partition("/")[2] for frame in link.calls] == ["s", "call_1_2", "call_1_3"]
    link.finish(link.calls[0].call_id or "", ok({"printed": ""}))
    await turn
