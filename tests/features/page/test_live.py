"""What readers of the live stream hear: one observation for all, each its agents, and a slow one a gap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.features.page.door import live
from goondan.features.page.door.live import MAX_WAITING, Live, Reader, Wish, encoded
from goondan.features.serve.api.rules.callers import Caller
from goondan.kernel.cli.observing import Missed, Observer, Seen
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import Observe, RuntimeEvent

MAIN, ALL = Caller("one", "look", ("main",)), Caller("all", "look", ("*",))


def seen(number: int, agent: str = "main", **fields: Any) -> Seen:
    frame = Frame("observed", from_=agent, instance_key="i", event_id="e-1", trace_id="7" * 32, span_id="8" * 16)
    return Seen(number, frame, RuntimeEvent(**{"kind": "text", "text": "<b>", "at": 5, **fields}))


class Kernel:
    """A swarm with a session that a test gives news, and ends."""

    def __init__(self) -> None:
        self.callers: list[Any] = []
        self.there = True
        self.failure: Exception = fail("E_KERNEL_NOT_RUNNING", "none")
        self.over = False
        self.read_to = 0
        self.wishes: list[Observe] = []
        self.open: list[Observer] = []

    async def session(self) -> Kernel:
        if not self.there:
            raise self.failure
        self.over = False
        return self

    async def observe(self, wish: Observe, listener: Observer) -> Any:
        self.wishes.append(wish)
        self.open.append(listener)

        def read(number: int) -> None:
            self.read_to = number

        def close() -> None:
            self.open = [one for one in self.open if one is not listener]

        return SimpleNamespace(read=read, close=close)

    def tell(self, heard: Seen | Missed) -> None:
        (listener,) = self.open
        listener(heard)

    def end(self) -> None:
        self.over, self.there = True, False
        self.open.clear()


def events(data: bytes) -> list[Any]:
    """The events in what a stream has said: lists of batches, and the word gap."""
    found: list[Any] = []
    for part in filter(None, data.decode().split("\n\n")):
        kind, _, told = part.partition("\n")
        found += json.loads(told.removeprefix("data: ")) if kind == "event: batch" else [kind.removeprefix("event: ")]
    return found


async def reading(door: Live, caller: Caller, closely: bool = True) -> AsyncIterator[bytes]:
    answer: Any = await door.stream(SimpleNamespace(caller=caller, query=Wish(closely)))  # type: ignore[arg-type]
    assert answer.media_type == "text/event-stream"
    return answer.body_iterator  # type: ignore[no-any-return]


def tries(monkeypatch: pytest.MonkeyPatch, steps: Callable[[Kernel, Live], Any]) -> None:
    for name in ("LOOK_S", "CALM_S", "BATCH_S"):
        monkeypatch.setattr(live, name, 0.001)

    async def run() -> None:
        async with asyncio.timeout(20):
            kernel: Any = Kernel()
            await steps(kernel, Live(kernel))

    asyncio.run(run())


def test_an_event_says_whose_it_is_and_where_its_text_stands() -> None:
    told = json.loads(encoded(seen(3, step=2), 1700))
    assert told == {
        "n": 3, "at": 1700, "agent": "main", "instance": "i", "eventId": "e-1", "rootEvent": None, "traceId": "7" * 32,
        "spanId": "8" * 16, "kind": "text", "step": 2, "text": "<b>", "place": 5,
    }  # fmt: skip


def test_readers_share_one_observation_and_hear_of_their_agents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        one, every = await reading(door, MAIN), await reading(door, ALL)
        assert len(kernel.open) == 1
        kernel.tell(seen(1))
        kernel.tell(seen(2, "other", text="a secret"))
        kernel.tell(seen(3))
        assert kernel.read_to == 3
        assert [event["n"] for event in events(await anext(one))] == [1, 3]
        assert [event["agent"] for event in events(await anext(every))] == ["main", "other", "main"]
        await one.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        assert len(kernel.open) == 1
        await every.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        assert not kernel.open, "nobody reads any more"
        again = await reading(door, ALL)
        kernel.tell(seen(4))
        assert [event["n"] for event in events(await anext(again))] == [4], "it was no gap that nobody read before"

    tries(monkeypatch, steps)


def test_who_does_not_look_closely_hears_a_few_events_of_each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        calm = await reading(door, ALL, closely=False)
        kernel.tell(seen(1))
        assert kernel.read_to == 0, "it is said to be read with the next look"
        assert [event["n"] for event in events(await anext(calm))] == [1]
        while not kernel.read_to:
            await asyncio.sleep(0.001)
        close = await reading(door, ALL)
        assert events(await anext(calm)) == events(await anext(close)) == ["gap"], "observed anew"
        assert len(kernel.open) == 1
        kernel.read_to = 0
        kernel.tell(seen(1))
        assert kernel.read_to == 1
        assert [event["n"] for event in events(await anext(calm))] == [1]
        await close.aclose()  # type: ignore[attr-defined]
        assert events(await anext(calm)) == ["gap"]
        assert [wish.events for wish in kernel.wishes] == [16, 4096, 16]

    tries(monkeypatch, steps)


def test_what_is_written_at_once_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        one = await reading(door, MAIN)
        for number in range(1, 101):
            kernel.tell(seen(number))
        assert len(events(await anext(one))) == 100

    tries(monkeypatch, steps)


def test_a_kernel_that_goes_and_one_that_comes_are_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        one = await reading(door, MAIN)
        kernel.tell(seen(1))
        assert [event["n"] for event in events(await anext(one))] == [1]
        kernel.end()
        assert events(await anext(one)) == ["gap"]
        kernel.there = True
        assert events(await anext(one)) == ["gap"]
        kernel.tell(seen(1))
        assert [event["n"] for event in events(await anext(one))] == [1]
        kernel.tell(Missed(2, 40))
        assert kernel.read_to == 40 and events(await anext(one)) == ["gap"]

    tries(monkeypatch, steps)


def test_without_a_kernel_a_reader_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        kernel.there = False
        one = await reading(door, MAIN)
        kernel.there = True
        assert events(await anext(one)) == ["gap"]

    tries(monkeypatch, steps)


def test_a_reader_that_does_not_read_costs_no_more_than_its_bound() -> None:
    reader = Reader(MAIN.may_speak_to)
    data = encoded(seen(1, text="x" * 1000), 0)
    for number in range(20_000):
        reader.add(data)
        assert sum(map(len, reader._waiting)) <= MAX_WAITING, number
    told = reader.take()
    assert told.startswith(b"event: gap\n") and len(told) < MAX_WAITING + 4096
    reader.add(data)
    assert [event["n"] for event in events(reader.take())] == [1], "it goes on"


def test_a_token_opens_no_more_streams_than_there_are_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        every = [await reading(door, MAIN) for _ in range(live.MAX_OF_ONE)]
        with pytest.raises(GoondanError, match="pages look on"):
            await reading(door, MAIN)
        others = [await reading(door, ALL) for _ in range(live.MAX_READERS - live.MAX_OF_ONE)]
        with pytest.raises(GoondanError, match="pages look on"):
            await reading(door, Caller("third", "look", ("main",)))
        await others.pop().aclose()  # type: ignore[attr-defined]
        await every.pop().aclose()  # type: ignore[attr-defined]
        every.append(await reading(door, MAIN))

    tries(monkeypatch, steps)


def test_one_that_was_refused_observes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        refused: list[GoondanError] = [fail("E_OVERLOADED", "too many")]
        observe = kernel.observe

        async def refuses(wish: Any, listener: Observer) -> Any:
            if refused:
                raise refused.pop()
            return await observe(wish, listener)

        monkeypatch.setattr(kernel, "observe", refuses)
        one = await reading(door, MAIN)
        assert events(await anext(one)) == ["gap"]
        kernel.tell(seen(1))
        assert [event["n"] for event in events(await anext(one))] == [1]

    tries(monkeypatch, steps)


def test_when_the_door_has_no_file_left_it_observes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(kernel: Kernel, door: Live) -> None:
        kernel.there, kernel.failure = False, OSError(24, "Too many open files")
        reader = await reading(door, ALL)
        kernel.there = True
        assert events(await anext(reader)) == ["gap"]

    tries(monkeypatch, steps)
