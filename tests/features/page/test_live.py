"""What readers of the live stream hear: each its agents, a slow one a gap, and a few of them at once."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.features.page.door import live
from goondan.features.page.door.live import MAX_WAITING, Live, Reader, Wish, encoded
from goondan.features.serve.api.rules.callers import Caller
from goondan.kernel.cli.observing import Missed, Observer, Seen
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent

MAIN, ALL = Caller("one", "look", ("main",)), Caller("all", "look", ("*",))


def seen(number: int, agent: str = "main", **fields: Any) -> Seen:
    frame = Frame("observed", from_=agent, instance_key="i", event_id="e-1", trace_id="7" * 32, span_id="8" * 16)
    return Seen(number, frame, RuntimeEvent(**{"kind": "text", "text": "<b>", "at": 5, **fields}))


class Happening:
    """What a test says to all who look on."""

    def __init__(self) -> None:
        self.listeners: dict[Observer, bool] = {}

    async def add(self, listener: Observer, closely: bool) -> None:
        self.listeners[listener] = closely

    def remove(self, listener: Observer) -> None:
        del self.listeners[listener]

    def tell(self, heard: Seen | Missed) -> None:
        for listener in self.listeners:
            listener(heard)


def events(data: bytes) -> list[Any]:
    """The events in what a stream has said: lists of batches, and the word gap."""
    found: list[Any] = []
    for part in filter(None, data.decode().split("\n\n")):
        kind, _, told = part.partition("\n")
        found += json.loads(told.removeprefix("data: ")) if kind == "event: batch" else [kind.removeprefix("event: ")]
    return found


async def reading(door: Live, caller: Caller, closely: bool = True) -> AsyncGenerator[bytes, None]:
    answer: Any = await door.stream(SimpleNamespace(caller=caller, query=Wish(closely)))  # type: ignore[arg-type]
    assert answer.media_type == "text/event-stream"
    return answer.body_iterator  # type: ignore[no-any-return]


def test_an_event_says_whose_it_is_and_where_its_text_stands() -> None:
    told = json.loads(encoded(seen(3, step=2), 1700))
    assert told == {
        "n": 3, "at": 1700, "agent": "main", "instance": "i", "eventId": "e-1", "rootEvent": None, "traceId": "7" * 32,
        "spanId": "8" * 16, "kind": "text", "step": 2, "text": "<b>", "place": 5,
    }  # fmt: skip


async def test_readers_hear_of_their_agents_alone() -> None:
    happening = Happening()
    door = Live(happening)  # type: ignore[arg-type]
    one, every = await reading(door, MAIN), await reading(door, ALL, closely=False)
    assert [*happening.listeners.values()] == [True, False]
    happening.tell(seen(1))
    happening.tell(seen(2, "other", text="a secret"))
    happening.tell(Seen(3, seen(3).frame, None))
    happening.tell(seen(4))
    assert [event["n"] for event in events(await anext(one))] == [1, 4]
    told = events(await anext(every))
    assert [event["agent"] for event in told] == ["main", "other", "main"] and told[0]["at"] > 1e12
    await one.aclose()
    await every.aclose()
    assert not happening.listeners, "nobody reads any more"


async def test_who_has_missed_something_is_told_and_goes_on() -> None:
    happening = Happening()
    one = await reading(Live(happening), ALL)  # type: ignore[arg-type]
    happening.tell(seen(1))
    happening.tell(Missed(2, 40))
    happening.tell(seen(41))
    told = events(await anext(one))
    assert [told[0], told[1]["n"]] == ["gap", 41] and len(told) == 2
    await one.aclose()


async def test_what_is_written_at_once_comes_at_once() -> None:
    happening = Happening()
    one = await reading(Live(happening), MAIN)  # type: ignore[arg-type]
    for number in range(1, 101):
        happening.tell(seen(number))
    assert len(events(await anext(one))) == 100
    await one.aclose()


def test_a_reader_that_does_not_read_costs_no_more_than_its_bound() -> None:
    heard = seen(1, text="x" * 1000)
    data = encoded(heard, 0)
    reader = Reader(MAIN.may_speak_to, lambda _: data)
    for number in range(20_000):
        reader.hear(heard)
        assert sum(map(len, reader._waiting)) <= MAX_WAITING, number
    told = reader.take()
    assert told.startswith(b"event: gap\n") and len(told) < MAX_WAITING + 4096
    reader.hear(heard)
    assert [event["n"] for event in events(reader.take())] == [1], "it goes on"


async def test_a_token_opens_no_more_streams_than_there_are_browsers() -> None:
    door = Live(Happening())  # type: ignore[arg-type]
    every = [await reading(door, MAIN) for _ in range(live.MAX_OF_ONE)]
    with pytest.raises(GoondanError, match="pages look on"):
        await reading(door, MAIN)
    others = [await reading(door, ALL) for _ in range(live.MAX_READERS - live.MAX_OF_ONE)]
    with pytest.raises(GoondanError, match="pages look on"):
        await reading(door, Caller("third", "look", ("main",)))
    await others.pop().aclose()
    await every.pop().aclose()
    every.append(await reading(door, MAIN))
    for one in (*every, *others):
        await one.aclose()
