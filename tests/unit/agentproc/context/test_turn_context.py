"""Turns whose conversation is longer than the context of their model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from goondan.agentproc.machine import context_shape as shape
from goondan.agentproc.machine.estimate import message_size
from goondan.agentproc.machine.messages import AssistantData, Message, ToolData, UserData, is_presentable
from goondan.agentproc.providers.base import (
    ContextOverflow,
    ModelAnswer,
    ModelNews,
    ModelRequest,
    Overflow,
    TextDelta,
    Usage,
)
from goondan.agentproc.providers.history import result_text
from goondan.schemas.bundle.launch import ModelSpec
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of, failed

SPEC = ModelSpec(provider="openai", model="m", endpoint="http://127.0.0.1:1/v1")


class Narrow(FakeModel):
    """A model with a context of `window` tokens, of which a byte has `ratio`. It refuses what is longer."""

    def __init__(self, window: int, *script: ModelAnswer | Exception, ratio: float = 0.25, says_numbers: bool = True):
        super().__init__(*script)
        self.window_tokens = window
        self.ratio = ratio
        self.says_numbers = says_numbers
        self.refused: list[int] = []
        self.read: list[int] = []

    def count(self, request: ModelRequest) -> int:
        size = sum(map(message_size, request.messages)) + len(request.system or "")
        return int((size + sum(len(json.dumps(item.parameters)) + 60 for item in request.tools)) * self.ratio)

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        assert is_presentable(request.messages)
        tokens = self.count(request)
        if tokens > self.window_tokens:
            self.refused.append(tokens)
            told = Overflow(tokens, self.window_tokens) if self.says_numbers else Overflow()
            raise ContextOverflow(f"{tokens} are too many", told)
        self.read.append(tokens)
        answer = await super().complete(request, on_delta, on_news)
        return ModelAnswer(
            text=answer.text, calls=answer.calls, finish_reason=answer.finish_reason, usage=Usage(tokens, 5)
        )


def text_of(message: Message) -> str:
    data = message.data
    if isinstance(data, ToolData):
        return result_text(data.content[0].result)
    return data.text if isinstance(data, AssistantData) else data.content


async def talk(
    make: Make, script: FakeModel, texts: list[str], link: FakeLink | None = None, **changes: Any
) -> FakeLink:
    link = link or FakeLink()
    runner = make(link, script, **{"model": SPEC, **changes})
    await runner.load_extensions()
    for number, text in enumerate(texts):
        await runner.run(event_frame(f"e{number}.{text[:20]}", text))
    return link


@pytest.mark.parametrize("says_numbers", [True, False])
async def test_a_long_conversation_is_refused_once_and_goes_on(make: Make, says_numbers: bool) -> None:
    model = Narrow(4096, *[says("y" * 900) for _ in range(60)], says_numbers=says_numbers)
    link = await talk(make, model, [f"{number} {'word ' * 200}" for number in range(60)])
    assert [answer.status for answer in link.answers()] == ["completed"] * 60
    assert len(model.refused) <= (1 if says_numbers else 3)
    assert max(model.read) > 2500, "the context is used"
    last = model.requests[-1]
    assert text_of(last.messages[0]).startswith("(The ")
    assert last.left_out > 60
    assert last.max_tokens is not None
    assert last.max_tokens + model.read[-1] <= 4096 * 1.1


async def test_it_is_cut_in_jumps_so_requests_begin_as_the_one_before(make: Make) -> None:
    model = Narrow(4096, *[says("y" * 300) for _ in range(80)])
    model.listed = 4096
    await talk(make, model, [f"{number} {'word ' * 60}" for number in range(80)])
    assert model.refused == []
    jumps = [
        after
        for before, after in zip(model.requests, model.requests[1:], strict=False)
        if [m.id for m in after.messages[: len(before.messages)]] != [m.id for m in before.messages]
    ]
    assert 2 <= len(jumps) <= 9
    same = [
        before.messages[0].data == after.messages[0].data
        for before, after in zip(model.requests, model.requests[1:], strict=False)
        if after not in jumps
    ]
    assert all(same)


@pytest.mark.parametrize("turns", [5, 9, 10, 11, 12])
async def test_another_process_shows_the_same(make: Make, turns: int) -> None:
    texts = [f"{number} {'word ' * 200}" for number in range(turns)]
    first, second = (Narrow(4096, *[says("y" * 900) for _ in range(turns + 1)]) for _ in range(2))
    await talk(make, first, [*texts, "on"])
    await talk(make, second, texts, name="other")
    await talk(make, second, ["on"], name="other")
    shown = [[text_of(m) for m in model.requests[-1].messages] for model in (first, second)]
    assert shown[0] == shown[1]
    assert len(second.refused) == len(first.refused)


async def test_a_long_result_is_shown_shortened_is_stored_whole_and_can_be_read(make: Make) -> None:
    numbers = "\n".join(str(number) for number in range(40_000))
    model = Narrow(4096, wants(("a", "notes__add", {})), says("one"), says("two"))
    model.listed = 4096
    link = FakeLink(lambda tool, args: ok(numbers))
    runner = make(link, model, model=SPEC)
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    shown = text_of(model.requests[1].messages[-1])
    assert shown.startswith("0\n1\n2\n")
    assert shown.endswith("39998\n39999")
    assert len(shown) < 4096
    assert model.requests[1].shortened == 1
    stored = runner.instance.store.load_messages()
    assert text_of(stored[2]) == numbers
    offered = [[item.name for item in request.tools] for request in model.whole]
    assert all(names[0] == shape.NAME for names in offered), "from the first step"
    at = shown.index("\n[… ")
    model.script = [wants(("r", shape.NAME, {"id": stored[2].id, "from": at})), says("read"), says("never")]
    await runner.run(event_frame("e2", "read on"))
    read = text_of(model.requests[-1].messages[-1])
    line, _, piece = read.partition("\n")
    assert line == f"[characters {at} to {at + len(piece)} of {len(numbers)}]"
    assert piece
    assert numbers[at:].startswith(piece)
    assert link.answers()[-1].status == "completed"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"id": "nobody"}, "E_TOOL_INVALID_ARGS"),
        ({}, "E_TOOL_INVALID_ARGS"),
        ({"id": "x", "from": -1}, "E_TOOL_INVALID_ARGS"),
    ],
)
async def test_a_part_that_is_not_there_is_an_error_that_the_model_reads(make: Make, args: Any, code: str) -> None:
    model = FakeModel(wants(("r", shape.NAME, args)), says("done"))
    link = await talk(make, model, ["go"])
    result = model.requests[-1].messages[-1].data
    assert isinstance(result, ToolData)
    assert code_of(result.content[0].result) == code
    assert link.answers()[0].status == "completed"


async def test_an_agent_without_tools_is_not_offered_the_reading(make: Make) -> None:
    model = FakeModel(says("done"))
    await talk(make, model, ["go"], catalog=[])
    assert model.whole[0].tools == []


async def test_one_long_turn_keeps_the_users_message_and_its_last_calls(make: Make) -> None:
    steps = [wants((f"c{number}", "notes__add", {})) for number in range(40)]
    model = Narrow(4096, *steps, says("done"))
    link = FakeLink(lambda tool, args: ok("r" * 2500))
    await talk(make, model, ["do it all"], link, max_steps_per_turn=60)
    assert link.answers()[0].status == "completed"
    assert len(model.refused) <= 1
    first = model.requests[-1].messages[0].data
    assert isinstance(first, UserData)
    assert first.content.endswith("do it all")


async def test_many_results_of_one_step_share_the_context(make: Make) -> None:
    calls: list[tuple[str, str, Any]] = [(f"c{number}", "notes__add", {}) for number in range(12)]
    model = Narrow(4096, wants(*calls), says("done"))
    link = await talk(make, model, ["go"], FakeLink(lambda tool, args: ok("r" * 50_000)))
    assert link.answers()[0].status == "completed"
    assert len(model.refused) <= 1
    assert len(model.requests[-1].messages) == 14


async def test_a_message_that_cannot_fit_fails_with_numbers_and_the_next_one_goes_on(make: Make) -> None:
    model = Narrow(4096, says("one"), says("three"))
    link = await talk(make, model, ["first", "x" * 100_000, "hi"])
    first, second, third = link.answers()
    assert first.status == third.status == "completed"
    words = ("of the 4096 tokens of the context", "of the messages that cannot be left out")
    assert (failed(second, "E_CONTEXT_OVERFLOW", *words).suggestion or "").startswith("Send a shorter message")
    assert third.response == "three"


async def test_a_window_that_the_bundle_names_is_kept_without_a_refusal(make: Make) -> None:
    model = Narrow(10**6, *[says("y" * 900) for _ in range(30)])
    spec = ModelSpec(provider="openai", model="m", endpoint="http://127.0.0.1:1/v1", context_tokens=2048)
    await talk(make, model, ["word " * 200 for _ in range(30)], model=spec)
    assert max(model.read) <= 2048


async def test_an_answer_that_does_not_fit_is_asked_for_shorter(make: Make) -> None:
    class Strict(Narrow):
        async def complete(self, request: ModelRequest, *rest: Any) -> ModelAnswer:
            tokens = self.count(request)
            if tokens + (request.max_tokens or 8192) > 4096:
                self.refused.append(tokens)
                raise ContextOverflow("too many", Overflow(tokens, 4096))
            return await super().complete(request, *rest)

    model = Strict(4096, says("one"), says("two"))
    link = await talk(make, model, ["hello", "again"])
    assert [answer.response for answer in link.answers()] == ["one", "two"]
    assert len(model.refused) == 1
    assert len(model.requests[1].messages) == 3, "nothing is left out"


async def test_bytes_that_turn_out_dense_are_cut_again(make: Make) -> None:
    """A server that counts three tokens for each byte of an answer, and a fifth elsewhere."""

    class Uneven(Narrow):
        def count(self, request: ModelRequest) -> int:
            return 40 + sum(
                message_size(m) * 3 if isinstance(m.data, AssistantData) else message_size(m) // 5
                for m in request.messages
            )

    model = Uneven(4096, *[says("ÿ" * (40 + 13 * number)) for number in range(30)])
    link = await talk(make, model, [f"{number} {'word ' * 80}" for number in range(30)], catalog=[])
    assert [answer.status for answer in link.answers()] == ["completed"] * 30


async def test_a_server_that_always_refuses_is_not_asked_for_ever(make: Make) -> None:
    class No(FakeModel):
        async def complete(self, request: ModelRequest, *rest: Any) -> ModelAnswer:
            self.requests.append(request)
            raise ContextOverflow("no", Overflow())

    model = No()
    link = await talk(make, model, ["word " * 5000])
    assert code_of(link.answers()[0]) == "E_CONTEXT_OVERFLOW"
    assert len(model.requests) <= 5


async def test_a_refusal_of_a_model_in_place_of_the_steps_teaches_nothing_of_that_one(make: Make) -> None:
    class Other(FakeModel):
        """The step's model has no answer twice, and the model in its place has a smaller context."""

        refusals = 2

        async def complete(self, request: ModelRequest, *rest: Any) -> ModelAnswer:
            size = sum(map(message_size, request.messages))
            if len(self.requests) >= 8 and self.refusals and size > 3000:
                self.refusals -= 1
                small = ModelSpec(provider="openai", model="small", endpoint="http://127.0.0.1:2/v1")
                raise ContextOverflow("too long for small", Overflow(size // 4, 1000), small)
            return await super().complete(request, *rest)

    model = Other(*[says("y" * 900) for _ in range(30)])
    link = await talk(make, model, [f"{number} {'word ' * 80}" for number in range(12)])
    assert [answer.status for answer in link.answers()] == ["completed"] * 12
    assert model.refusals < 2
    assert all(request.max_tokens is None for request in model.requests), "nothing was learned of the window"


@pytest.mark.parametrize(("listed", "asked"), [(None, 3), (100_000, 1)])
async def test_a_server_that_does_not_say_its_window_is_asked_three_times(
    make: Make, listed: int | None, asked: int
) -> None:
    class Asked(FakeModel):
        questions = 0

        async def window(self, request: ModelRequest) -> int | None:
            self.questions += 1
            return listed

    model = Asked(*[says("y" * 6000) for _ in range(6)])
    await talk(make, model, [f"say {number}" for number in range(6)])
    assert model.questions == asked


async def test_a_refusal_with_a_wrong_number_does_not_end_the_conversation(make: Make) -> None:
    class Wrong(FakeModel):
        refused = False

        async def complete(self, request: ModelRequest, *rest: Any) -> ModelAnswer:
            if not self.refused:
                self.refused = True
                raise ContextOverflow("no", Overflow(5000, 64))
            answer = await super().complete(request, *rest)
            return ModelAnswer(text=answer.text, finish_reason="stop", usage=Usage(200, 5))

    model = Wrong(*[says("y" * 100) for _ in range(4)])
    link = await talk(make, model, ["one", "two", "three", "four"])
    assert [answer.status for answer in link.answers()] == ["failed", "completed", "completed", "completed"]
    assert model.requests[-1].max_tokens is None, "what it told is forgotten"
