"""Bundled extensions that change what the model is shown: message-window, message-compaction, message-integrity,
context-message. What is stored stays as it is.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.base.message_compaction.message_compaction import pieces, render
from goondan.agentproc.base.message_integrity.message_integrity import find_faults, repaired
from goondan.agentproc.machine.context_shape import SUMMARY as TITLE
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    is_presentable,
)
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, failed

SOURCE = MessageSource("user")


def message(name: str, data: Any) -> Message:
    return Message(name, data, "2026-01-01T00:00:00.000Z", SOURCE)


def user(name: str, text: str = "x") -> Message:
    return message(name, UserData(text))


def calls(name: str, *ids: str, text: str = "") -> Message:
    return message(name, AssistantData([TextPart(text), *(ToolCallPart(i, "bash__exec", {"command": i}) for i in ids)]))


def result(call: str, output: Any = "done") -> Message:
    part = ToolResultPart(call, "bash__exec", ToolResult(status="ok", output=to_raw(output)))
    return message(f"r-{call}", ToolData([part]))


def names(messages: list[Message]) -> list[str]:
    return [m.id for m in messages]


def said(request: ModelRequest) -> list[str]:
    """What the messages of a request say, each in one line."""
    return [render(m) for m in request.messages]


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Sound ones: turns of a user, with steps of some calls each."""
    made: list[Message] = []
    for turn in range(draw(st.integers(1, 4))):
        made.append(user(f"u{turn}", "y" * draw(st.integers(1, 200))))
        for step in range(draw(st.integers(0, 4))):
            ids = [f"c{turn}.{step}.{number}" for number in range(draw(st.integers(0, 3)))]
            made.append(calls(f"a{turn}.{step}", *ids, text="z" * draw(st.integers(0, 200))))
            made += [result(call, "o" * draw(st.integers(0, 300))) for call in ids]
    return made


# --- message-window -------------------------------------------------------------------------------------------------


async def test_a_window_shortens_what_is_shown_and_not_what_is_stored(make: Make) -> None:
    model = FakeModel(says("one"), says("two"), says("three"))
    runner = make(FakeLink(), model, extensions=[bundled("message-window", {"maxMessages": 2})])
    await runner.load_extensions()
    for number in (1, 2, 3):
        await runner.run(event_frame(f"e{number}", f"say {number}"))
    first, second, third = [said(request) for request in model.requests]
    assert first == ["User: say 1"]
    assert len(second) == len(third) == 1
    assert second[0].startswith("User: (The 2 messages before this are left out here")
    assert second[0].endswith("say 2")
    assert third[0].endswith("say 3")
    assert [request.left_out for request in model.requests] == [0, 2, 4]
    assert len(runner.instance.store.load_messages()) == 6


# --- message-compaction ---------------------------------------------------------------------------------------------


@given(conversations(), st.integers(250, 1200))
def test_what_is_summarised_is_all_of_it_in_pieces_that_fit(messages: list[Message], budget: int) -> None:
    made = list(pieces(messages, budget))
    assert all(len(piece.encode()) <= budget for piece in made)
    text = "\n".join(made)
    assert all(m.data.content in text for m in messages if isinstance(m.data, UserData) and len(m.data.content) < 100)


class Summariser(FakeModel):
    """It says "SUMMARY n" to each question for a summary, which `asked` holds."""

    def __init__(self, *script: ModelAnswer | Exception) -> None:
        super().__init__(*script)
        self.asked: list[ModelRequest] = []

    async def complete(self, request: ModelRequest, *rest: Any) -> ModelAnswer:
        if (request.system or "").startswith("You summarise"):
            self.asked.append(request)
            return says(f"SUMMARY {len(self.asked)}")
        return await super().complete(request, *rest)


def compacting(make: Make, model: FakeModel, **config: Any) -> TurnRunner:
    config = {"maxTokens": 400, "keepTokens": 150, **config}
    return make(FakeLink(lambda tool, args: ok("r" * 600)), model, extensions=[bundled("message-compaction", config)])


async def test_a_long_conversation_is_shown_as_a_summary_and_its_end(make: Make) -> None:
    model = Summariser(says("a" * 800), says("b" * 600), says("three"), says("four"))
    runner = compacting(make, model)
    await runner.load_extensions()
    for number in (1, 2, 3, 4):
        await runner.run(event_frame(f"e{number}", f"say {number}"))
    third, fourth = model.requests[2:]
    assert model.asked
    assert all(asked.tools == [] for asked in model.asked)
    text = "".join(line for asked in model.asked for line in said(asked))
    assert "User: say 1" in text
    assert "Assistant: aaa" in text
    assert "say 3" not in text
    assert said(third) == [f"User: {TITLE}SUMMARY {len(model.asked)}\n\nsay 3"]
    assert said(fourth)[0] == said(third)[0], "the summary stays until the conversation is too long again"
    stored = [render(m) for m in runner.instance.store.load_messages()]
    assert stored[:2] == ["User: say 1", f"Assistant: {'a' * 800}"]
    assert not any("SUMMARY" in line for line in stored)


async def test_the_summary_grows_and_another_process_goes_on_with_it(make: Make) -> None:
    first = Summariser(says("a" * 1300), says("b" * 1300))
    runner = compacting(make, first)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "say 1"))
    await runner.run(event_frame("e2", "say 2"))
    second = Summariser(says("c"))
    other = compacting(make, second)
    await other.load_extensions()
    await other.run(event_frame("e3", "say 3"))
    text = said(second.asked[0])[0]
    assert f"The summary so far:\nSUMMARY {len(first.asked)}" in text
    assert "a" * 50 not in text, "what is in the summary is not summarised again"
    assert said(second.requests[0]) == [f"User: {TITLE}SUMMARY {len(second.asked)}\n\nsay 3"]


async def test_within_a_turn_the_users_message_and_whole_calls_stay(make: Make) -> None:
    model = Summariser(*(wants((f"c{number}", "notes__add", {})) for number in range(4)), says("done"))
    runner = compacting(make, model, keepTokens=350)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "do it all"))
    last = model.requests[-1]
    assert is_presentable(last.messages)
    lines = said(last)
    assert lines[0].startswith(f"User: {TITLE}SUMMARY")
    assert lines[0].endswith("do it all")
    assert lines[-1].startswith("notes__add gave (ok)")


async def test_a_model_that_does_not_summarise_does_not_end_the_turn(
    make: Make, link: FakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    model = FakeModel(says("a" * 1500), fail("E_MODEL_FAILED", "too busy"), says("two"))
    runner = make(link, model, extensions=[bundled("message-compaction", {"maxTokens": 400, "keepTokens": 100})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "say 1"))
    await runner.run(event_frame("e2", "say 2"))
    assert link.answers()[-1].response == "two"
    assert "could not be summarised: too busy" in caplog.text


async def test_a_conversation_that_was_emptied_has_no_summary_any_more(make: Make) -> None:
    model = Summariser(says("a" * 1500), says("two"), says("three"))
    runner = compacting(make, model)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "say 1"))
    await runner.run(event_frame("e2", "say 2"))

    async def empty(ctx: Any) -> Any:
        ctx.emit_message_event({"type": "truncate"})
        ctx.emit_message_event({"type": "append", "message": {"data": {"role": "user", "content": "anew"}}})
        return await ctx.next()

    runner.instance.pipeline.register("turn", empty, extension="ext")
    await runner.run(event_frame("e3", "say 3"))
    assert said(model.requests[-1]) == ["User: anew"]


# --- message-integrity ----------------------------------------------------------------------------------------------


@given(conversations())
def test_a_sound_conversation_has_no_fault_but_empty_answers(messages: list[Message]) -> None:
    assert all("is empty" in fault for fault in find_faults(messages))


def in_call_order(messages: list[Message]) -> list[Message]:
    """The results behind each message in one order. Results are stored in the order in which they come, so their order
    is no fault. The ids of `conversations` sort as the calls do.
    """
    ordered: list[Message] = []
    for is_result, group in groupby(messages, lambda m: isinstance(m.data, ToolData)):
        together = list(group)
        ordered += sorted(together, key=lambda m: m.id) if is_result else together
    return ordered


def test_results_in_another_order_than_their_calls_are_no_fault() -> None:
    messages = [user("u"), calls("a", "c1", "c2"), result("c2"), result("c1")]
    assert find_faults(messages) == []
    assert names(repaired(messages)) == ["u", "a", "a/c1", "a/c2"]


@given(conversations(), st.data())
def test_whatever_is_taken_out_or_moved_is_found_and_repaired(messages: list[Message], data: st.DataObject) -> None:
    kept = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(messages), unique_by=lambda m: m.id))))
    if not is_presentable(in_call_order(kept)):
        assert [fault for fault in find_faults(kept) if "is empty" not in fault]
    mended = repaired(kept)
    assert is_presentable(mended)
    assert find_faults(mended) == []


def test_each_fault_is_named() -> None:
    messages = [user("u"), calls("a", "1", "2"), result("1"), user("empty", " "), result("2"), result("9")]
    assert find_faults(messages) == [
        "the call 2 in message a has no result",
        "message empty is empty",
        "the result 2 in message r-2 stands apart from its call, or twice",
        "the result 9 in message r-9 is no call's",
    ]


@pytest.mark.parametrize("way", ["repair", "fail"])
async def test_a_spoiled_conversation_is_mended_or_ends_the_turn(
    make: Make, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    link, model = FakeLink(), FakeModel(wants(("a", "notes__add", {})), says("one"), says("two"), says("three"))
    runner = make(link, model, extensions=[bundled("message-integrity", {"onFault": way})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))

    async def spoil(ctx: Any) -> Any:
        for old in ctx.conversation_state.base_messages:
            if isinstance(old.data, ToolData):
                ctx.emit_message_event({"type": "remove", "targetId": old.id})
        return await ctx.next()

    runner.instance.pipeline.register("turn", spoil, extension="spoiler")
    await runner.run(event_frame("e2", "again"))
    answer = link.answers()[-1]
    if way == "fail":
        assert re.search(r"the call a in message \S+ has no result", failed(answer, "E_MIDDLEWARE").message)
        return
    assert answer.response == "two"
    await runner.run(event_frame("e3", "again"))
    assert caplog.text.count("the call a in message") == 1, "what stays as it is is told once"


# --- context-message ------------------------------------------------------------------------------------------------


async def test_the_model_is_told_where_it_is_and_nothing_of_it_is_stored(make: Make) -> None:
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    config = {"include": ["agent", "instance", "time", "step", "source"], "text": "Be brief.", "data": {"floor": 3}}
    runner = make(FakeLink(), model, extensions=[bundled("context-message", config)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    first, second = (request.blocks for request in model.requests)
    (block,) = first
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", block.pop("time"))
    told = {"agent": "coder", "instance": "k", "step": 0, "text": "Be brief.", "data": {"floor": 3}}
    assert block == {"type": "context", **told}
    assert second[0]["step"] == 1
    assert len(runner.instance.store.load_messages()) == 4


async def test_an_empty_context_is_no_block(make: Make) -> None:
    model = FakeModel(says("done"))
    runner = make(FakeLink(), model, extensions=[bundled("context-message", {"include": ["swarm"]})])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    assert model.requests[0].blocks == []
