"""How long a layer may take outside its next(), in both spellings, in whole turns."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest

from goondan.agentproc.extensions import engine as patience_module
from goondan.agentproc.extensions.engine import Watch
from goondan.agentproc.extensions.points.pipeline import Layer
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, api_of, settle, the_answer

LAYER = Layer("guard", lambda ctx: ctx, point="step.pre")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "LAYER_S", 0.05)


async def hangs(ctx: Any, *_: Any) -> Any:
    await asyncio.sleep(60)


async def hangs_behind(ctx: Any, *proceed: Any) -> Any:
    await (proceed[0](ctx) if proceed else ctx.next())
    await asyncio.sleep(60)


@pytest.mark.parametrize("handler", [hangs, hangs_behind])
@pytest.mark.parametrize("where", ["turn", "step", "step.llmCall"])
async def test_a_layer_that_hangs_fails_the_turn_with_its_name(make: Make, where: str, handler: Any) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done"), says("done")))
    api = api_of(runner, "slow")
    if "." in where:
        api.pipelines.wrap(where, handler)
    else:
        api.pipeline.register(where, handler)
    await asyncio.wait_for(runner.run(event_frame("e1", "go")), 10)
    answer = the_answer(link)
    assert answer.status == "failed"
    assert "extension slow failed: it took longer than" in str(answer.error)


@pytest.mark.parametrize("point", ["turn.pre", "step.tools", "turn.post"])
async def test_so_does_a_mutator(make: Make, link: FakeLink, point: str) -> None:
    runner = make(link, FakeModel(says("done")))
    api = api_of(runner, "slow")
    api.pipelines.mutate(point, hangs)
    await asyncio.wait_for(runner.run(event_frame("e1", "go")), 10)
    assert f"the {point} handler of extension slow failed: it took longer than" in str(the_answer(link).error)


@pytest.mark.parametrize("where", ["toolCall", "toolCall.exec", "toolCall.pre"])
async def test_around_a_call_it_is_that_calls_error(make: Make, link: FakeLink, where: str) -> None:
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    api = api_of(runner, "slow")
    if where == "toolCall":
        api.pipeline.register(where, hangs)
    elif where == "toolCall.exec":
        api.pipelines.wrap(where, hangs)
    else:
        api.pipelines.mutate(where, hangs)
    await asyncio.wait_for(runner.run(event_frame("e1", "go")), 10)
    assert the_answer(link).status == "completed"


async def test_what_is_inside_and_other_agents_take_no_time_of_a_layer(make: Make, link: FakeLink) -> None:
    class Slow(FakeModel):
        async def complete(self, *given: Any, **options: Any) -> Any:
            await asyncio.sleep(0.12)
            return await super().complete(*given, **options)

    runner = make(link, Slow(says("done")))
    api = api_of(runner, "patient")

    async def layer(ctx: Any) -> Any:
        asking = asyncio.create_task(ctx.agents.send("writer", "x"))
        await ctx.agents.send("writer", "y")
        await asking
        return await ctx.next()

    async def wrap(ctx: Any, proceed: Any) -> Any:
        return await proceed(ctx)

    api.pipeline.register("turn", layer)
    api.pipelines.wrap("step.llmCall", wrap)
    await runner.run(event_frame("e1", "go"))
    assert the_answer(link).status == "completed"


async def test_time_adds_up_over_several_waits() -> None:
    watch, waits = Watch(), 0

    async def layer() -> bool:
        nonlocal waits
        patience = watch.enter(LAYER)
        try:
            while True:
                await asyncio.sleep(0.02)
                waits += 1
                with patience.standing():
                    await asyncio.sleep(0.03)
        except asyncio.CancelledError:
            return patience.is_late()
        finally:
            watch.leave(patience)

    assert await asyncio.create_task(layer())
    assert 1 <= waits <= 4  # 50 ms of waiting outside, in waits of 20 ms
    assert not watch.running


async def test_standing_still_may_overlap() -> None:
    watch = Watch()

    async def layer() -> bool:
        patience = watch.enter(LAYER)

        async def stand(seconds: float) -> None:
            with patience.standing():
                await asyncio.sleep(seconds)

        await asyncio.gather(stand(0.06), stand(0.12))
        assert list(watch.running) == [patience]
        watch.leave(patience)
        return patience.expired

    assert not await asyncio.create_task(layer())


async def test_a_layer_that_somebody_cancels_is_cancelled_and_not_late() -> None:
    watch, late = Watch(), list[bool]()

    async def layer() -> None:
        patience = watch.enter(LAYER)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            late.append(patience.is_late())
            raise

    task = asyncio.create_task(layer())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert late == [False]
    watch.close()


async def test_one_that_is_late_and_cancelled_at_once_is_cancelled() -> None:
    watch, late = Watch(), list[bool]()

    async def layer() -> None:
        patience = watch.enter(LAYER)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            late.append(patience.is_late())
            raise

    task = asyncio.create_task(layer())
    await settle()
    (patience,) = watch.running
    patience.check(monotonic() + 100)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert late == [False]
    watch.close()


async def test_a_layer_that_hangs_is_told_with_its_point_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CHECK_S", 0.02), ("HANGS_S", 0.06), ("LAYER_S", 60.0)):
        monkeypatch.setattr(patience_module, name, seconds)
    watch, told = Watch(), list[tuple[str, str | None, float | None]]()
    watch.told = lambda layer, seconds: told.append((layer.extension, layer.point, seconds))
    patience = watch.enter(LAYER)
    with patience.standing():  # what it waits for has a limit of its own
        await asyncio.sleep(0.15)
    assert told == []
    while len(told) < 2:
        await asyncio.sleep(0.01)
    with patience.standing():
        assert told[-1][2] is None
    watch.leave(patience)
    assert all(row[:2] == ("guard", "step.pre") for row in told)
    assert [row[2] is None for row in told] == [False] * (len(told) - 1) + [True]
    assert (told[0][2] or 0) >= 0.06
    watch.close()


async def test_a_quick_layer_tells_nothing() -> None:
    watch, told = Watch(), list[Any]()
    watch.told = lambda *news: told.append(news)
    watch.leave(watch.enter(LAYER))
    await asyncio.sleep(0)
    watch._check()
    assert told == []
