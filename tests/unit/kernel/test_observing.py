"""What a command that observes asks the broker, and what it has not asked any more."""

from __future__ import annotations

import asyncio
from typing import Any

from goondan.kernel.cli.observing import Missed, Observation, Seen
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import Gap, Observe, RuntimeEvent

WISH = Observe(events=4, bytes=1 << 20)


class Link:
    """A link, and what it asks until there is an answer."""

    def __init__(self) -> None:
        self.ready = True
        self.count = 0
        self.asks: dict[str, asyncio.Future[Frame]] = {}
        self.sent: list[Any] = []

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        self.count += 1
        frame.id = f"c.{self.count}"
        self.sent.append(from_raw(frame.payload, dict)["op"])
        self.asks[frame.id] = asyncio.get_running_loop().create_future()
        return self.asks[frame.id]

    def send(self, frame: Frame) -> bool:
        self.sent.append(frame.position)
        return self.ready

    def forget(self, frame_id: str) -> None:
        if (waiting := self.asks.pop(frame_id, None)) is not None:
            waiting.cancel()

    def answers(self) -> None:
        for waiting in self.asks.values():
            waiting.set_result(Frame("reply"))
        self.asks.clear()


def observation(link: Any) -> tuple[Observation, list[Seen | Missed], dict[str, Observation]]:
    heard: list[Seen | Missed] = []
    among: dict[str, Observation] = {}
    made = Observation(WISH, heard.append, among)
    made.begin(link)
    return made, heard, among


async def test_what_is_closed_before_it_was_answered_is_asked_no_more() -> None:
    """Else the next broker would fill a window for nobody."""
    link = Link()
    made, _, among = observation(link)
    link.ready = False
    made.close()
    assert (link.asks, among) == ({}, {})


async def test_what_is_closed_and_may_have_been_heard_is_ended() -> None:
    link = Link()
    made, _, among = observation(link)
    made.close()
    made.close()
    assert (link.sent, [*link.asks], among) == (["observe", "unobserve"], ["c.2"], {})


async def test_numbers_go_on_over_connections_and_what_was_read_before_is_not_told_to_the_next() -> None:
    link = Link()
    made, heard, among = observation(link)
    link.answers()
    told = to_raw(RuntimeEvent(kind="turn.started"))
    for number in (1, 2):
        made.hear(Frame("observed", position=number, payload=told))
    made.begin_again(link)  # type: ignore[arg-type]
    made.begin_again(link)  # type: ignore[arg-type]
    assert (link.sent, [*among]) == (["observe", "observe"], ["c.2"])
    made.read(2)
    await asyncio.sleep(0.05)
    made.hear(Frame("observed", position=1, payload=told))
    made.hear(Frame("observed", stage="gap", position=5, payload=to_raw(Gap(2, 5))))
    made.read(7)
    await asyncio.sleep(0.05)
    assert link.sent[2:] == [5]
    assert [one.number if isinstance(one, Seen) else one for one in heard] == [1, 2, Missed(3, None), 3, Missed(4, 7)]
