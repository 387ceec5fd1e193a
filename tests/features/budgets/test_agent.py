"""A turn that is charged to budgets: what it reserves, what it says of it later, and how it ends when one is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from goondan.agentproc.machine.estimate import FIRST_SURELY
from goondan.agentproc.providers.base import (
    ModelAnswer,
    ModelNews,
    ModelRequest,
    TextDelta,
    Usage,
    limited_output,
    output_limit,
)
from goondan.features.budgets.agent import BYTES_PER_TOKEN
from goondan.features.budgets.wire import BudgetGranted, BudgetLeft, BudgetReserve, BudgetSettle
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.test_runtime_events import details
from tests.unit.agentproc.turns import Make, api_of, code_of, settle, the_answer

VENDOR = ModelSpec(provider="anthropic", model="m", api_key="k", params={"max_tokens": 1000})


class Broker(FakeLink):
    """A link whose broker grants what the test says, in order; None: it waits."""

    def __init__(self, *grants: BudgetGranted | GoondanError | None) -> None:
        super().__init__()
        self.grants = list(grants)
        self.replies["budget.reserve"] = self._grant

    def _grant(self, frame: Frame) -> BudgetGranted | GoondanError | None:
        return self.grants.pop(0) if self.grants else BudgetGranted()

    def reserved(self) -> list[BudgetReserve]:
        return [from_raw(frame.payload, BudgetReserve) for frame in self.posted if frame.type == "budget.reserve"]

    def settled(self) -> list[BudgetSettle]:
        return [from_raw(frame.payload, BudgetSettle) for frame in self.posted if frame.type == "budget.settle"]


def used(answer: ModelAnswer, *usage: int) -> ModelAnswer:
    return structs.replace(answer, usage=Usage(*usage))


def spent() -> GoondanError:
    return fail("E_BUDGET_SPENT", "the budget of agent 'lead' is spent: 5 of 5 calls (coder 5)")


async def test_a_turn_without_a_budget_says_nothing_of_one(make: Make) -> None:
    link = Broker()
    await make(link, FakeModel(says("done"))).run(event_frame("e1", "go"))
    assert link.reserved() == []
    assert link.settled() == []


async def test_a_model_call_is_reserved_made_within_what_was_granted_and_settled(make: Make) -> None:
    link, model = Broker(BudgetGranted(output_tokens=300, left_ms=5_000)), FakeModel(used(says("done"), 4_000, 9, 8, 7))
    runner = make(link, model, model=VENDOR)
    await runner.run(event_frame("e1", "word " * 3_000, budget=True, epoch=3))
    (asked,) = link.reserved()
    assert (asked.kind, asked.output_tokens) == ("model", 1000)
    assert 15_000 // BYTES_PER_TOKEN <= asked.input_tokens < 17_000 // BYTES_PER_TOKEN
    (frame,) = [frame for frame in link.posted if frame.type == "budget.reserve"]
    assert (frame.event_id, frame.epoch) == ("e1", 3)
    assert model.requests[0].model.params == {"max_tokens": 300}
    assert model.requests[0].timeout_s == 5.0
    expected = BudgetSettle(
        asked.id, input_tokens=4_000, output_tokens=9, cached_tokens=8, cache_write_tokens=7, known=True, unused=False
    )
    assert link.settled() == [expected]
    order = [frame.type for frame in link.posted if frame.type == "budget.settle" or frame.stage == "done"]
    assert order == ["budget.settle", "ack"], "settled before the event ends"


async def test_every_step_is_a_call_of_its_own(make: Make) -> None:
    link = Broker()
    model = FakeModel(wants(("a", "bash__exec", {"command": "ls"})), says("done"))
    await make(link, model, model=VENDOR).run(event_frame("e1", "go", budget=True))
    assert len({asked.id for asked in link.reserved()}) == 2
    assert [said.known for said in link.settled()] == [False, False], "this model does not say what it took"


async def test_a_turn_whose_call_is_refused_ends_with_the_whole_story(make: Make) -> None:
    link, model = Broker(spent()), FakeModel(says("never"))
    await make(link, model, model=VENDOR).run(event_frame("e1", "go", budget=True))
    answer = the_answer(link)
    assert (answer.status, answer.finish_reason, code_of(answer)) == ("failed", "budget", "E_BUDGET_SPENT")
    assert answer.error is not None
    assert answer.error.message == "the budget of agent 'lead' is spent: 5 of 5 calls (coder 5)"
    assert model.requests == []
    assert link.settled() == []


async def test_a_refusal_is_in_the_trace(make: Make, tmp_path: Path) -> None:
    link = Broker(spent())
    runner = make(link, FakeModel(), model=VENDOR)
    await runner.run(event_frame("e1", "go", budget=True))
    assert [detail["code"] for detail in details(tmp_path, "model.failed")] == ["E_BUDGET_SPENT"]


async def test_a_call_that_is_given_up_while_it_waits_is_given_back(make: Make) -> None:
    link = Broker(None)
    runner = make(link, FakeModel(says("never")), model=VENDOR)
    turn = asyncio.create_task(runner.run(event_frame("e1", "go", budget=True)))
    await settle()
    assert link.waiting
    runner.cancel(event_frame("e1", "go"))
    await turn
    await settle()
    assert code_of(the_answer(link)) == "E_CANCELLED"
    assert link.settled() == [BudgetSettle(link.reserved()[0].id, unused=True)]
    assert link.forgotten


class Breaking:
    """A model that fails, after a word or before; or that hangs."""

    needs_history = True

    def __init__(self, *, speaks: bool, hangs: bool = False) -> None:
        self.speaks, self.hangs = speaks, hangs

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        if on_news is not None:
            on_news("asking")
            if self.speaks:
                on_news("content")
        await asyncio.sleep(3600 if self.hangs else 0)
        raise fail("E_MODEL_FAILED", "it broke off")

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(("speaks", "known"), [(False, True), (True, False)])
async def test_what_a_model_that_breaks_off_took_is_unknown_once_it_has_spoken(
    make: Make, speaks: bool, known: bool
) -> None:
    link = Broker()
    await make(link, Breaking(speaks=speaks), model=VENDOR).run(event_frame("e1", "go", budget=True))
    assert [(said.known, said.unused, said.input_tokens) for said in link.settled()] == [(known, False, 0)]


async def test_a_call_that_is_cancelled_while_the_model_works_counts_as_it_was_reserved(make: Make) -> None:
    link = Broker()
    runner = make(link, Breaking(speaks=True, hangs=True), model=VENDOR)
    turn = asyncio.create_task(runner.run(event_frame("e1", "go", budget=True)))
    await settle()
    runner.cancel(event_frame("e1", "go"))
    await turn
    await settle()
    assert [(said.known, said.unused) for said in link.settled()] == [(False, False)]


async def test_a_call_that_has_no_time_left_ends_as_a_budget_that_is_spent(make: Make) -> None:
    left = [BudgetLeft("lead", "wallSeconds", 0.0, 60.0)]
    link = Broker(BudgetGranted(left_ms=0, left=left))
    await make(link, Breaking(speaks=False), model=VENDOR).run(event_frame("e1", "go", budget=True))
    answer = the_answer(link)
    assert code_of(answer) == "E_BUDGET_SPENT"
    assert answer.error is not None
    assert "agent 'lead' is spent: 60 of 60 seconds" in answer.error.message


async def test_a_call_that_runs_in_the_agent_is_counted_under_its_id_and_refused_like_any_other(make: Make) -> None:
    ran: list[Any] = []
    link = Broker(BudgetGranted(), BudgetGranted(), BudgetGranted(), spent(), BudgetGranted())
    model = FakeModel(
        wants(("a", "own__add", {"n": 1})), wants(("b", "own__add", {"n": 2})), wants(("c", "own__add", [])), says("ok")
    )
    runner = make(link, model, model=VENDOR)
    api_of(runner).tools.register({"name": "own__add", "parameters": {"type": "object"}}, lambda ctx, n: ran.append(n))
    await runner.run(event_frame("e1", "go", budget=True))
    assert the_answer(link).status == "completed"
    assert ran == [{"n": 1}]
    counted = [asked.id for asked in link.reserved() if asked.kind == "tool"]
    assert [name.rpartition("/")[2] for name in counted] == ["a", "b"], "what is refused for its arguments is no call"
    assert "E_BUDGET_SPENT" in str(model.requests[-1].messages)


async def test_a_budget_counts_what_a_request_and_its_answer_surely_have(make: Make) -> None:
    asked, told = "word " * 3_000, "answer " * 1_000
    answer = structs.replace(says(told), usage=Usage(0, 0))
    link = Broker()
    await make(link, FakeModel(answer), model=VENDOR).run(event_frame("e1", asked, budget=True))
    (settled,) = link.settled()
    assert len(asked) * FIRST_SURELY <= settled.input_tokens <= 2 * len(asked) * FIRST_SURELY
    assert len(told) * FIRST_SURELY <= settled.output_tokens <= 2 * len(told) * FIRST_SURELY


async def test_a_server_that_counts_more_is_believed(make: Make) -> None:
    link = Broker()
    answer = structs.replace(says("done"), usage=Usage(9_000, 70))
    await make(link, FakeModel(answer), model=VENDOR).run(event_frame("e1", "go", budget=True))
    (settled,) = link.settled()
    assert (settled.input_tokens, settled.output_tokens) == (9_000, 70)


async def test_the_model_is_told_when_little_is_left(make: Make) -> None:
    plenty = BudgetGranted(left=[BudgetLeft("coder", "calls", 9.0, 10.0)])
    little = BudgetGranted(left=[BudgetLeft("coder", "calls", 1.0, 10.0), BudgetLeft("lead", "money", 0.05, 2.5)])
    link = Broker(plenty, little)
    model = FakeModel(wants(("a", "bash__exec", {})), wants(("b", "bash__exec", {})), says("done"), says("done"))
    config = {"limits": {"calls": 10}, "warnAt": 0.2}
    runner = make(link, model, model=VENDOR, extensions=[bundled("budget", config)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go", budget=True))
    text = "Little of the budget is left: 1 of 10 calls; 0.05 of 2.5 money. "
    blocks = [str(request.blocks) for request in model.requests]
    assert [text in block for block in blocks] == [False, False, True]
    await runner.run(event_frame("e2", "go", budget=True))
    assert model.requests[-1].blocks == [], "another message, another budget"


def test_a_limit_of_output_is_said_as_its_vendor_wants_it() -> None:
    own = ModelSpec(provider="openai", model="m")
    assert output_limit(own) == output_limit(ModelSpec(provider="anthropic", model="m")) == 8192
    assert limited_output(own, 9).params == {"max_completion_tokens": 9}
    other = ModelSpec(provider="openai", model="m", endpoint="http://127.0.0.1/v1", params={"top_p": 1})
    assert limited_output(other, 9).params == {"top_p": 1, "max_tokens": 9}
    assert limited_output(ModelSpec(provider="openai", params={"max_tokens": 50}), 9).params == {"max_tokens": 9}
    assert output_limit(ModelSpec(provider="embedded", params={"max_tokens": 50})) == 0
    assert output_limit(ModelSpec(provider="anthropic", params={"max_tokens": "many"})) == 8192
