"""Work of the supervisor that is cancelled in the moment in which what it waits for comes is cancelled all the same.

`asyncio.wait_for` of Python 3.11 returns the result then. And an end in which nothing starts any more.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.supervisor.conductor import BundleReader, Conductor
from goondan.kernel.supervisor.lifecycle import Roster, Spawn
from goondan.kernel.supervisor.processes import Ending
from goondan.kernel.supervisor.reaping import Exit
from goondan.schemas.wire.control import BeginAnew, Principal


async def cancelled(waiting: asyncio.Task[Any]) -> None:
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=1)
    assert waiting.cancelled()


async def test_at_the_end_of_the_processes() -> None:
    class Services:
        def group(self, name: str) -> list[str]:
            return [name]

        def __getattr__(self, name: str) -> Any:
            return lambda *_: True  # every process lives

    class Agents:
        busy, roster = True, Roster()

        def perform(self, actions: list[Any]) -> None: ...

    ending = Ending()
    ending.for_good = True
    services: Any = Services()
    agents: Any = Agents()
    waiting = asyncio.ensure_future(ending.run(services, agents, None))
    await asyncio.sleep(0)
    ending.changed.set()
    await cancelled(waiting)


async def test_of_the_brokers_word() -> None:
    class Kernel:
        def answer(self, message: Any) -> None: ...

    conductor: Any = Conductor.__new__(Conductor)
    conductor._kernel, conductor._answers = Kernel(), {}
    waiting = asyncio.ensure_future(conductor._told("anew", BeginAnew("coder")))
    await asyncio.sleep(0)
    conductor._answers["anew"].set_result(None)
    await cancelled(waiting)
    assert conductor._answers == {}


async def test_of_a_reader_of_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reaper:
        killed = 0

        def watch(self, pid: int, on_exit: Any, *, leads_group: bool) -> Any:
            self.ended = on_exit
            return self

        def kill(self) -> None:
            self.killed += 1

    monkeypatch.setattr("goondan.kernel.supervisor.conductor.start_program", lambda *_, **__: 1)
    reaper: Any = Reaper()
    options: Any = None
    reader = BundleReader(asyncio.get_running_loop(), reaper, options, str(tmp_path / "log"))
    result = os.memfd_create("result")
    try:
        waiting = asyncio.ensure_future(reader._read([], result))
        await asyncio.sleep(0)
        reaper.ended(Exit("exit 0", clean=True))
        await cancelled(waiting)
        assert reaper.killed == 0, "it had ended by itself"
    finally:
        os.close(result)


@pytest.mark.parametrize("one_leaves", [False, True])
async def test_a_kernel_whose_agents_hold_nothing_starts_none_while_it_ends(one_leaves: bool) -> None:
    class Services:
        def group(self, name: str) -> list[str]:
            return []

        def alive(self, role: str) -> bool:
            return False

    class Agents:
        busy, roster = False, Roster()

    roster, agent, ending = Agents.roster, Principal("agent", "main", "default"), Ending()
    roster.fork_server(up=True, now=0.0)
    if one_leaves:
        roster.want([agent], full=False, now=0.0)
        roster.spawned(1, 0.0)
        roster.retire(agent, 1, 0.0, done=True)
    services: Any = Services()
    agents: Any = Agents()
    end = asyncio.create_task(ending.run(services, agents, None))
    await asyncio.sleep(0)
    assert roster.want([agent], full=False, now=0.0) == []
    for launch in [one.launch for one in roster.live.values()]:
        assert not any(isinstance(action, Spawn) for action in roster.exited(launch, "exit 0", 0.0))
    ending.changed.set()
    assert await end == ()
