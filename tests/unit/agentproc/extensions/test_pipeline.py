"""The engine alone: order, exactly one next(), and what failing layers mean for those around them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.extensions.engine import Watch, run
from goondan.agentproc.extensions.points.pipeline import Layer, MiddlewareError, Pipeline
from goondan.schemas.wire.errors import GoondanError


def chain(*handlers: Any, core: Any = None) -> str:
    """Run a chain of texts: the context of a layer is its next(), a failed layer gives `!name:error`."""

    async def inside(_: Any) -> str:
        return "core" if core is None else str(await core())

    def accept(value: Any) -> str:
        if not isinstance(value, str):
            raise MiddlewareError(f"it returned {type(value).__name__}")
        return value

    result: str = asyncio.run(
        run(
            [Layer(f"e{number}", handler) for number, handler in enumerate(handlers)],
            lambda _, proceed: proceed,
            inside,
            Watch(),
            accept=accept,
            failed=lambda layer, error: f"!{layer.extension}:{error}",
        )
    )
    return result


def around(name: str) -> Any:
    async def layer(proceed: Any) -> str:
        return f"{name}({await proceed()})"

    return layer


@pytest.mark.requirement("PIPELINE-14", "CALL-09", "CALL-13")
def test_the_first_layer_is_outermost() -> None:
    assert chain(around("a"), around("b"), around("c")) == "a(b(c(core)))"
    assert chain() == "core"


def test_a_plain_function_may_hand_next_on() -> None:
    assert chain(lambda proceed: proceed(), around("b")) == "b(core)"


async def _never(proceed: Any) -> str:
    return "mine"


async def _twice(proceed: Any) -> str:
    await proceed()
    return str(await proceed())


async def _unawaited(proceed: Any) -> str:
    proceed().close()
    return "mine"


async def _nothing(proceed: Any) -> None:
    await proceed()


async def _raises(proceed: Any) -> str:
    raise ValueError("no")


async def _exits(proceed: Any) -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (_never, "next() was not called"),
        (_twice, "next() was called twice"),
        (_unawaited, "next() was called and not awaited"),
        (_nothing, "it returned NoneType"),
        (_raises, "no"),
        (_exits, "3"),
        (lambda: None, "takes 0 positional arguments but 1 was given"),
    ],
)
def test_a_layer_that_breaks_the_rules_has_failed_and_those_around_it_go_on(broken: Any, says: str) -> None:
    result = chain(around("a"), broken, around("c"))
    assert result.startswith("a(!e1:")
    assert says in result


def test_next_is_over_when_its_layer_has_returned() -> None:
    kept: list[Any] = []

    async def keeps(proceed: Any) -> str:
        kept.append(proceed)
        return str(await proceed())

    assert chain(keeps) == "core"
    with pytest.raises(MiddlewareError, match="had returned"):
        kept[0]()


def test_the_core_runs_once_however_often_next_is_called() -> None:
    runs: list[int] = []

    async def core() -> str:
        runs.append(1)
        return "core"

    assert chain(_twice, around("b"), core=core).startswith("!e0")
    assert runs == [1]


def test_cancellation_passes_through_every_layer() -> None:
    seen: list[str] = []

    async def cleans(proceed: Any) -> str:
        try:
            return str(await proceed())
        finally:
            seen.append("cleaned")

    async def core(_: Any) -> str:
        await asyncio.sleep(60)
        return "core"

    async def main() -> None:
        task = asyncio.ensure_future(
            run([Layer("a", cleans), Layer("b", cleans)], lambda _, proceed: proceed, core, Watch(), accept=str)
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cleaned", "cleaned"]


@pytest.mark.requirement("PIPELINE-15", "PIPELINE-16")
@given(st.lists(st.integers(-3, 3), max_size=12))
def test_priority_sorts_and_registration_order_stays(priorities: list[int]) -> None:
    pipeline = Pipeline()
    for number, priority in enumerate(priorities):
        pipeline.register("step", print, extension=str(number), priority=priority)
    got = [(layer.priority, int(layer.extension)) for layer in pipeline.at("step")]
    assert got == sorted((priority, number) for number, priority in enumerate(priorities))
    assert not pipeline.has("turn")


@pytest.mark.parametrize(
    ("kind", "handler", "priority"), [("tool", print, 0), ("step", 3, 0), ("turn", print, "1"), ("turn", print, True)]
)
def test_what_cannot_be_registered_is_said(kind: str, handler: Any, priority: Any) -> None:
    with pytest.raises(GoondanError) as raised:
        Pipeline().register(kind, handler, extension="x", priority=priority)
    assert raised.value.info.code == "E_USAGE"
