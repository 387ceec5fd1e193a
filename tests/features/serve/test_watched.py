"""Turns that another door has begun, over one observation, whatever their number."""

from __future__ import annotations

import asyncio
from typing import Any

from goondan.features.serve.api.swarm import Turn, _Watched
from goondan.kernel.cli.observing import Missed, Seen
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent


class Observed:
    """A session and its one observation."""

    over = False

    def __init__(self) -> None:
        self.begun = self.closed = self.last = 0
        self.listener: Any = None

    async def observe(self, wish: Any, listener: Any) -> Observed:
        await asyncio.sleep(0)
        self.begun += 1
        self.listener = listener
        return self

    def read(self, number: int) -> None:
        self.last = number

    def close(self) -> None:
        self.closed += 1

    def tell(self, number: int, event_id: str, event: RuntimeEvent) -> None:
        self.listener(Seen(number, Frame("observed", event_id=event_id), event))


async def test_one_observation_is_for_all_turns() -> None:
    session: Any = Observed()
    watched = _Watched()
    turns = [Turn(f"e{number}", "main", f"i{number}") for number in range(300)]
    ends = [watched.add(turn) for turn in turns]
    await asyncio.gather(*(watched.observe(session) for _ in turns))
    assert session.begun == 1

    session.tell(1, "e7", RuntimeEvent(kind="turn.started"))
    session.tell(2, "e7", RuntimeEvent(kind="text", step=1, text="seven"))
    session.tell(3, "of somebody else", RuntimeEvent(kind="text", step=1, text="no"))
    session.tell(4, "e9", RuntimeEvent(kind="event.ended", state="done"))
    assert [turn.event_id for turn in turns if turn.progress.characters] == ["e7"]
    assert [turn.event_id for turn, end in zip(turns, ends, strict=True) if end.is_set()] == ["e9"]
    assert session.last == 4

    session.listener(Missed(5, 9))
    assert all(turn.progress.wants_file for turn in turns)
    assert session.last == 9

    for turn in turns[1:]:
        watched.remove(turn)
    assert not session.closed
    watched.remove(turns[0])
    assert session.closed == 1


async def test_the_next_session_is_observed_anew() -> None:
    first: Any = Observed()
    second: Any = Observed()
    watched = _Watched()
    turn = Turn("e", "main", "i")
    watched.add(turn)
    await watched.observe(first)
    await watched.observe(first)
    await watched.observe(second)
    assert (first.begun, second.begun) == (1, 1)
    second.over = True
    watched.remove(turn)
    assert not second.closed, "a session that is over has no observations"
