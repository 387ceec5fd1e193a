"""Turns that another door has begun, over one observation, whatever their number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.features.serve.api import swarm as swarms
from goondan.features.serve.api.swarm import Swarm, Turn
from goondan.kernel.cli.observing import Missed, Seen
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.traces import stored_turns
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent


class Observed:
    """A session, its one observation, and the instances that have work."""

    over = False

    def __init__(self) -> None:
        self.begun = self.closed = self.last = self.asked = 0
        self.listener: Any = None

    async def observe(self, wish: Any, listener: Any) -> Observed:
        await asyncio.sleep(0)
        self.begun += 1
        self.listener = listener
        return self

    async def admin(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        return {"events": [{"eventId": f"e{request['instanceKey']}"}], "more": 0}

    def read(self, number: int) -> None:
        self.last = number

    def close(self) -> None:
        self.closed += 1

    def tell(self, number: int, event_id: str, event: RuntimeEvent) -> None:
        self.listener(Seen(number, Frame("observed", event_id=event_id), event))


async def test_one_observation_is_for_all_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarms, "POLL_S", 600.0)
    session: Any = Observed()
    swarm = Swarm(BundleTarget("/no/bundle", str(tmp_path)))

    async def joined() -> Any:
        return session

    swarm._joined = SimpleNamespace(session=joined, at_hand=lambda: session)  # type: ignore[assignment]
    turns = [Turn(f"e{number}", "main", str(number)) for number in range(300)]
    watching = [asyncio.ensure_future(swarm._watch(turn)) for turn in turns]
    looked: list[str] = []
    read = stored_turns.read_turn

    def counted(state_dir: str, agent: str, instance: str, event_id: str) -> Any:
        looked.append(event_id)
        return read(state_dir, agent, instance, event_id)

    while session.asked < len(turns):
        await asyncio.sleep(0.01)
    monkeypatch.setattr(stored_turns, "read_turn", counted)
    assert session.begun == 1

    session.tell(1, "e7", RuntimeEvent(kind="turn.started"))
    session.tell(2, "e7", RuntimeEvent(kind="text", step=1, text="seven"))
    session.tell(3, "of somebody else", RuntimeEvent(kind="text", step=1, text="no"))
    assert [turn.event_id for turn in turns if turn.progress.characters] == ["e7"]
    session.tell(4, "e9", RuntimeEvent(kind="event.ended", state="done"))
    assert session.last == 4
    while not looked:
        await asyncio.sleep(0.01)
    assert set(looked) == {"e9"}, "its answer is looked for"

    session.listener(Missed(5, 9))
    assert all(turn.progress.wants_file for turn in turns)
    assert session.last == 9

    for task in watching[1:]:
        task.cancel()
    await asyncio.wait(watching[1:])
    assert not session.closed
    watching[0].cancel()
    await asyncio.wait(watching[:1])
    await asyncio.sleep(0)
    assert session.closed == 1
