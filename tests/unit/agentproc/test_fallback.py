"""Models that are asked in place of one that gives no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.errors import fail
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says
from tests.unit.agentproc.test_runtime_events import notes
from tests.unit.agentproc.turns import Make, the_answer

FIRST, SECOND = (
    ModelSpec(
        provider="openai", model=name, endpoint=f"https://{name}.test/v1", api_key=f"key-of-{name}", document=name
    )
    for name in ("first", "second")
)


def placed(runner: TurnRunner, **models: FakeModel) -> TurnRunner:
    """The runner with these models in place of the agent's own, by their documents."""
    runner.instance._others.update(models)
    return runner


async def test_the_next_model_answers_when_one_does_not(make: Make, tmp_path: Path) -> None:
    link, own = FakeLink(), FakeModel(fail("E_MODEL_QUOTA", "spent"), says("own again"))
    first, second = FakeModel(fail("E_MODEL_FAILED", "gone")), FakeModel(says("hello"))
    runner = placed(make(link, own, fallback=[FIRST, SECOND]), first=first, second=second)
    await runner.run(event_frame("e1", "go"))
    assert the_answer(link).response == "hello"
    assert [len(model.requests) for model in (own, first, second)] == [1, 1, 1]
    assert second.requests[0].model == SECOND
    assert second.requests[0].messages == own.requests[0].messages
    assert [kind for kind, _, _ in notes(tmp_path)] == [
        *("turn.started", "step.started", "model.failed", "model.failed", "model.answered"),
        *("step.completed", "turn.completed"),
    ]
    await runner.run(event_frame("e2", "again", epoch=2))
    assert link.answers()[-1].response == "own again"  # each step begins with the agent's own


async def test_when_no_model_answers_all_of_them_are_named(make: Make) -> None:
    link, own = FakeLink(), FakeModel(fail("E_MODEL_QUOTA", "spent"))
    first = FakeModel(fail("E_MODEL_FAILED", "gone: key-of-first"))
    await placed(make(link, own, fallback=[FIRST]), first=first).run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None
    assert (error.code, error.message) == ("E_MODEL_QUOTA", "spent; in its place Model/first: gone: ***")


@pytest.mark.parametrize("code", ["E_BUDGET_SPENT", "E_CONTEXT_OVERFLOW", "E_INTERNAL"])
async def test_other_errors_are_no_reason_to_ask_another(make: Make, code: str) -> None:
    link, first = FakeLink(), FakeModel(says("hello"))
    own = FakeModel(fail(code, "no"))
    await placed(make(link, own, fallback=[FIRST]), first=first).run(event_frame("e1", "go"))
    assert the_answer(link).status == "failed"
    assert first.requests == []


async def test_providers_of_other_models_are_closed_with_the_instance(make: Make) -> None:
    first = FakeModel(says("never"))
    runner = placed(make(FakeLink(), FakeModel(), fallback=[FIRST]), first=first)
    assert runner.instance.provider_in_place(FIRST) is first
    await runner.instance.close()
    await asyncio.sleep(0)
    assert first.script == []


async def test_a_model_in_place_of_another_that_cannot_see_reads_words(make: Make) -> None:
    link, own = FakeLink(), FakeModel(fail("E_MODEL_FAILED", "gone"))
    first = FakeModel(fail("E_MODEL_CANNOT_SEE", "blind"), says("I read of it"))
    await placed(make(link, own, fallback=[FIRST]), first=first).run(event_frame("e1", "look"))
    assert the_answer(link).response == "I read of it"
    assert [request.files_as_words for request in first.requests] == [False, True]
