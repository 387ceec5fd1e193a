"""Questions of MCP servers to people, in the agent: the items, the answers, and calls whose server was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from goondan.agentproc.calls.asks import ToolAsks
from goondan.agentproc.calls.caller import Answered, CallContext, ToolCaller
from goondan.agentproc.machine.catalog import Catalog
from goondan.features.approvals.agent import Questions, item_name
from goondan.features.approvals.wire import ApprovalAsk, ApprovalState
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail, tool_error
from goondan.schemas.wire.frames import Frame, ToolCallPayload, ToolResult
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk
from goondan.schemas.worker.servers import ServerQuestion
from tests.unit.agentproc.fakes import FakeLink, make_spec, ok

TOOL = "pizza__order"
FORM = {"type": "object", "properties": {"size": {"type": "string"}}}


class Turn:
    """One call that is open at a tool host, and what the agent has for its questions."""

    def __init__(self) -> None:
        self.link = FakeLink(handler=lambda tool, args: None)
        self.link.replies["approval.ask"] = lambda frame: None  # until the test answers
        self.loop = asyncio.get_running_loop()
        self.caller = ToolCaller(self.link, self.loop)
        self.context = CallContext("t1", "e1", 7)
        self.attached = 0
        self.refuses = False
        self.instance = self.calls = self
        self.elicitations = Questions(self)  # type: ignore[arg-type]
        self.asks = ToolAsks(self.link, self.caller.is_open)
        self.asks.handle("elicit", self.elicitations.take)
        spec = make_spec("/s", registry=[CatalogItem(name=TOOL)], catalog=[TOOL])
        self.results: list[ToolResult | GoondanError] = []
        self.caller.start(
            Catalog(spec).for_step(),
            TOOL,
            {},
            call_id="t1/c1",
            context=self.context,
            done=self.ended,
        )

    def ended(self, result: ToolResult | GoondanError, answered: Answered | None) -> None:
        self.results.append(result)
        self.elicitations.over("t1/c1")

    def may_repeat(self, call_id: str) -> None:
        async def attach() -> None:
            self.attached += 1
            if self.refuses:
                raise fail("E_MCP_CONNECT", "it does not start")

        self.caller.may_repeat(call_id, attach)

    def ask(self, question: ServerQuestion, call_id: str = "t1/c1", number: int = 1) -> None:
        payload = to_raw(ToolAsk(number, "elicit", to_raw(question)))
        self.asks.take(Frame("tool.ask", id=f"{call_id}.{number}", call_id=call_id, payload=payload))

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def decide(self, **state: Any) -> None:
        """The broker's answer to the last question."""
        self.link.waiting[-1].set_result(Frame("reply", payload=to_raw(ApprovalState(**state))))
        await self.settle()

    @property
    def answers(self) -> list[Any]:
        told = [from_raw(one.payload, ToolAnswer) for one in self.link.sent if one.type == "tool.answer"]
        return [from_raw(one.value or Raw(b"\xc0"), object) if one.error is None else one.error.code for one in told]

    def asked(self) -> list[tuple[str | None, ApprovalAsk]]:
        return [(frame.call_id, from_raw(frame.payload, ApprovalAsk)) for frame in self.link.posted]


SIZE = ServerQuestion(mode="form", message="How large?", schema=FORM)


@pytest.mark.parametrize(
    ("decision", "answer"),
    [
        ({"state": "answered", "answer": to_raw({"size": "l"})}, {"action": "accept", "content": {"size": "l"}}),
        ({"state": "denied", "reason": "no"}, {"action": "decline"}),
        ({"state": "denied", "expired": True}, {"action": "cancel"}),
    ],
)
async def test_a_person_is_asked_and_the_server_is_answered(decision: Any, answer: Any) -> None:
    turn = Turn()
    turn.ask(SIZE)
    ((name, ask),) = turn.asked()
    frame = turn.link.posted[0]
    assert (name, frame.tool, frame.event_id, frame.epoch) == ("t1/c1?1", TOOL, "e1", 7)
    assert (ask.kind, ask.message) == ("question", "The MCP server of pizza asks: How large?")
    assert ask.schema is not None and from_raw(ask.schema, object) == FORM
    await turn.decide(state="waits")
    assert turn.answers == []
    turn.elicitations.news(["t1/other", "t1/c1?1"])
    assert len(turn.link.posted) == 2
    assert turn.asked()[1] == turn.asked()[0]  # the same question, so the broker has its item
    await turn.decide(**decision)
    assert turn.answers == [answer]
    turn.elicitations.news(["t1/c1?1"])
    assert len(turn.link.posted) == 2


async def test_a_page_that_is_to_be_opened_is_named_and_opened_by_nobody() -> None:
    turn = Turn()
    turn.ask(ServerQuestion(mode="url", message="Log in.", url="https://login.example/x"))
    ((_, ask),) = turn.asked()
    assert ask.message == "The MCP server of pizza wants you to open a page: https://login.example/x\nLog in."
    await turn.decide(state="answered", answer=to_raw({}))
    assert turn.answers == [{"action": "accept"}]


async def test_what_nobody_can_be_asked_is_refused() -> None:
    turn = Turn()
    turn.ask(SIZE)
    turn.link.waiting[0].set_exception(fail("E_TOOL_LIMIT", "too many calls of this work wait for a person"))
    await turn.settle()
    assert turn.answers == ["E_TOOL_LIMIT"]


async def test_a_call_that_ends_withdraws_its_question() -> None:
    turn = Turn()
    turn.ask(SIZE)
    await turn.decide(state="waits")
    turn.link.finish(
        "t1/c1", ToolResult(status="error", error=tool_error("E_MCP_GONE", "it has ended", name="McpError"))
    )
    await turn.settle()
    assert [one.over for _, one in turn.asked()] == [False, True]
    assert turn.asked()[1][0] == "t1/c1?1"
    (result,) = turn.results
    assert isinstance(result, ToolResult) and result.error is not None and result.error.code == "E_MCP_GONE"
    assert turn.attached == 0


@pytest.mark.parametrize("code", ["E_MCP_GONE", "E_TOOL_OUTCOME_UNKNOWN"])
async def test_a_call_that_its_server_had_not_begun_is_made_again_when_the_server_is_lost(code: str) -> None:
    turn = Turn()
    turn.ask(ServerQuestion(mode="form", message="How large?", schema=FORM, again=True))
    await turn.decide(state="waits")
    turn.link.finish("t1/c1", ToolResult(status="error", error=tool_error(code, "it has ended", name="McpError")))
    await turn.settle()
    assert (turn.attached, turn.results) == (1, [])
    assert [frame.call_id for frame in turn.link.calls] == ["t1/c1", "t1/c1~2"]
    payloads = [from_raw(frame.payload, ToolCallPayload).args for frame in turn.link.calls]
    assert payloads[0] == payloads[1]
    turn.ask(SIZE, "t1/c1~2")
    assert [(name, one.over) for name, one in turn.asked()] == [("t1/c1?1", False)] * 2  # the same item
    await turn.decide(state="answered", answer=to_raw({"size": "s"}))
    turn.link.finish("t1/c1~2", ok("eaten"))
    await turn.settle()
    assert [result.status for result in turn.results if isinstance(result, ToolResult)] == ["ok"]


async def test_a_server_that_cannot_be_had_again_ends_the_call() -> None:
    turn = Turn()
    turn.refuses = True
    turn.ask(ServerQuestion(mode="form", message="How large?", schema=FORM, again=True))
    turn.link.finish(
        "t1/c1", ToolResult(status="error", error=tool_error("E_MCP_GONE", "it has ended", name="McpError"))
    )
    await turn.settle()
    assert [frame.call_id for frame in turn.link.calls] == ["t1/c1"]
    (result,) = turn.results
    assert isinstance(result, ToolResult) and result.error is not None and result.error.code == "E_MCP_GONE"
    assert turn.asked()[-1][1].over


async def test_an_ordinary_error_is_the_result_even_of_a_call_that_could_be_made_again() -> None:
    turn = Turn()
    turn.ask(ServerQuestion(mode="form", message="How large?", schema=FORM, again=True))
    turn.link.finish("t1/c1", ToolResult(status="error", error=tool_error("E_TOOL", "no", name="McpError")))
    await turn.settle()
    assert (turn.attached, len(turn.results)) == (0, 1)


def test_the_item_of_a_call_that_is_made_again_is_the_same() -> None:
    assert item_name("t1/c1", 2) == item_name("t1/c1~2", 2) == item_name("t1/c1~13", 2) == "t1/c1?2"
    assert item_name("t1/a~b", 1) == "t1/a~b?1"
