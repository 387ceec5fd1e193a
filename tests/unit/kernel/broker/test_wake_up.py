"""What the broker does in a wake-up that brings one frame: counted in calls of functions, because that is the time of a
busy bus and is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType

import pytest

from goondan.kernel.broker import loop
from goondan.kernel.broker.state.entities import AGENTS, CLASSES, TOOLS
from goondan.schemas.wire.codec import encode, to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.kernel.broker.memory_journal import MemoryJournal
from tests.unit.kernel.broker.swarm import TOOL
from tests.unit.kernel.broker.world import World

#: Calls of functions, without the transport's, for a `tool.call` and for its `tool.result`.
MOST_OF_A_CALL, MOST_OF_A_RESULT = 17, 10


class Scripted:
    """A transport that brings one frame in each wake-up, and then the end."""

    def __init__(self, *frames: tuple[int, bytes, bytes]) -> None:
        self.due = [False] * len(CLASSES)
        self._frames = list(frames)
        self._now: tuple[int, bytes, bytes] | None = None
        self.sent: list[bytes] = []
        self.loop: loop.BrokerLoop | None = None
        #: How many functions of the broker were called in each wake-up.
        self.counts = [0]

    def listen(self, path: str, users: Collection[int], high_water: int) -> None:
        pass

    def wait(self, seconds: float, now: float) -> bool:
        self.counts.append(0)
        if not self._frames:
            assert self.loop is not None
            self.loop._stop = True
            return False
        self._now = self._frames.pop(0)
        self.due[self._now[0]] = True
        return True

    def receive(self, cls: int, quota: int) -> Sequence[tuple[bytes, bytes]]:
        assert self._now is not None and cls == self._now[0]
        self.due[cls] = False
        return [self._now[1:]]

    def send(self, frames: Sequence[tuple[int, bytes, bytes]]) -> Sequence[tuple[int, bytes]]:
        self.sent += [data for _, _, data in frames]
        return ()

    def tick(self, now: float) -> None:
        pass

    def close(self, linger_s: float) -> None:
        pass

    def profile(self, frame: FrameType, what: str, _: object) -> None:
        self.counts[-1] += what == "call" and frame.f_code.co_filename != __file__


def test_a_wake_up_calls_few_functions(world: World, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (instance,) = world.router.bus.mailbox.instances.values()
    (agent,) = world.router.bus.presence.connections[AGENTS]
    (host,) = world.router.bus.presence.connections[TOOLS]
    assert instance.leased is not None
    made = Frame("tool.call", id="f", call_id="a", tool=TOOL, event_id=instance.leased.id, epoch=instance.epoch)
    made.payload = to_raw({"args": {}, "turnId": "t", "toolCallId": "a"})
    result = Frame("tool.result", id="r", call_id="a", payload=to_raw({"status": "ok", "output": 1}))
    scripted = Scripted((AGENTS, agent, encode(made)), (TOOLS, host, encode(result)))
    monkeypatch.setattr(loop, "_transport", lambda *_: scripted)
    monkeypatch.setattr(loop.BrokerLoop, "_make_ready", lambda _: None)  # this process has its own signals and heap
    monkeypatch.setattr(loop.BrokerLoop, "_tick", lambda *_: None)
    scripted.loop = loop.BrokerLoop(world.router, MemoryJournal(), str(short_tmp))
    sys.setprofile(scripted.profile)
    try:
        scripted.loop.run()
    finally:
        sys.setprofile(None)
    assert len(scripted.sent) == 2
    _, call, returned, _ = scripted.counts
    assert (call <= MOST_OF_A_CALL, returned <= MOST_OF_A_RESULT) == (True, True), scripted.counts
