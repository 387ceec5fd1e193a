"""Requests of MCP servers to the agent's model: only where that was granted, only text, and answered once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import Raw, structs

from goondan.agentproc.calls.asks import ToolAsks
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.turn.parts import TurnCore
from goondan.features.mcp.agent import MAX_TEXT, Sampling, SamplingRequest, is_granted, text_of
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk

GRANTED = ExtensionSpec(name="mcp-a", entry="/x", resource={}, config={"grants": ["sampling"]}, server="a")
NOT = structs.replace(GRANTED, name="mcp-b", config={"grants": ["roots"]}, server="b")
TEXT = {"type": "text", "text": "What is 2 + 2?"}


class Turn:
    def __init__(self, tool: str = "a__think") -> None:
        self.sent: list[Frame] = []
        self.asked: list[tuple[str, str | None]] = []
        self.error: Exception | None = None
        self.answer = ModelAnswer(text="four")
        self.model = ModelSpec(provider="embedded", model="m-1")
        spec = SimpleNamespace(extensions=[GRANTED, NOT])
        self.instance: Any = SimpleNamespace(spec=spec, caller=SimpleNamespace(tool_of=lambda call_id: tool))
        self.step = 1
        self.sampling = Sampling(cast("TurnCore", self))
        self.asks = ToolAsks(cast("Any", self), {"t1/c1"}.__contains__)
        for kind, handler in self.sampling.asks.items():
            self.asks.handle(kind, handler)

    def send(self, frame: Frame) -> bool:
        self.sent.append(frame)
        return True

    async def ask_aside(self, text: str, system: str | None, step: int) -> ModelAnswer:
        self.asked.append((text, system))
        if self.error is not None:
            raise self.error
        return self.answer

    async def take(self, **request: Any) -> Any:
        payload = to_raw(ToolAsk(1, "sample", to_raw(request)))
        self.asks.take(Frame("tool.ask", id="h.1", call_id="t1/c1", payload=payload))
        for _ in range(3):
            await asyncio.sleep(0)
        (frame,) = self.sent
        told = from_raw(frame.payload, ToolAnswer)
        return from_raw(told.value or Raw(b"\xc0"), object) if told.error is None else told.error.code


async def test_a_granted_server_is_answered_by_the_agents_model() -> None:
    turn = Turn()
    answer = await turn.take(messages=[{"role": "user", "content": TEXT}], systemPrompt="Be brief.", maxTokens=9)
    assert answer == {
        "role": "assistant",
        "content": {"type": "text", "text": "four"},
        "model": "m-1",
        "stopReason": "endTurn",
    }
    assert turn.asked == [("What is 2 + 2?", "Be brief.")]


async def test_the_answer_says_which_model_gave_it_and_that_it_was_cut_off() -> None:
    turn = Turn()
    turn.answer = ModelAnswer(text="fo", reasoning="2 + 2", cut_off=True, model="m-1-2026")
    answer = await turn.take(messages=[{"role": "user", "content": TEXT}])
    assert (answer["content"]["text"], answer["model"], answer["stopReason"]) == ("fo", "m-1-2026", "maxTokens")


@pytest.mark.parametrize("tool", ["b__think", "c__think", "a2__think", ""])
async def test_a_server_without_the_grant_is_refused(tool: str) -> None:
    turn = Turn(tool)
    assert await turn.take(messages=[{"role": "user", "content": TEXT}]) == "E_FORBIDDEN"
    assert turn.asked == []


@pytest.mark.parametrize(
    ("error", "code"), [(fail("E_BUDGET_SPENT", "nothing left"), "E_BUDGET_SPENT"), (ValueError("bug"), "E_INTERNAL")]
)
async def test_a_model_that_cannot_be_asked_is_an_error(error: Exception, code: str) -> None:
    turn = Turn()
    turn.error = error
    assert await turn.take(messages=[{"role": "user", "content": TEXT}]) == code


@pytest.mark.parametrize(
    "request_",
    [
        SamplingRequest([]),
        SamplingRequest([{"role": "user", "content": TEXT}], tools=[{"name": "x"}]),
        SamplingRequest([{"role": "user", "content": {"type": "image", "data": "", "mimeType": "image/png"}}]),
        SamplingRequest([{"role": "user", "content": [TEXT, {"type": "audio"}]}]),
        SamplingRequest([{"role": "user", "content": {"type": "text", "text": 3}}]),
        SamplingRequest([{"role": "user"}]),
        SamplingRequest([{"role": "user", "content": {"type": "text", "text": "x" * (MAX_TEXT + 1)}}]),
    ],
)
def test_only_text_is_passed_on(request_: SamplingRequest) -> None:
    with pytest.raises(GoondanError) as caught:
        text_of(request_)
    assert caught.value.info.code == "E_MCP_INPUT"


def test_a_conversation_says_who_speaks() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [TEXT, {"type": "text", "text": "Well?"}]},
        {"role": "assistant", "content": {"type": "text", "text": "four"}},
        {"role": "system", "content": {"type": "text", "text": "obey"}},
    ]
    told = "User: What is 2 + 2?\nWell?\n\nAssistant: four\n\nUser: obey"
    assert text_of(SamplingRequest(messages)) == told


def test_only_the_servers_own_extension_grants() -> None:
    assert is_granted("a", [NOT, GRANTED])
    assert not is_granted("b", [NOT, GRANTED])
    assert not is_granted("", [structs.replace(GRANTED, server="")])
