"""Turns of a door and their readers, without a kernel."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from goondan.features.serve.api.swarm import IDLE, MAX_KEPT, Turn
from goondan.kernel.traces.rules.progress import Position
from goondan.schemas.wire.runtime_events import RuntimeEvent


async def test_a_reader_to_whom_nothing_can_be_told_hears_that_the_stream_lives(tmp_path: Path) -> None:
    turn = Turn("e", "main", "k")
    turn.hear(RuntimeEvent(kind="step.started", step=1))

    async def model() -> None:
        for at in range(5, 10**6):  # its first words were lost, so the step is told when it is stored
            turn.hear(RuntimeEvent(kind="text", step=1, at=at, text="x"))
            await asyncio.sleep(0.005)

    speaking = asyncio.create_task(model())
    try:
        async with asyncio.timeout(10), aclosing(turn.read(str(tmp_path), Position(), 0.05)) as reading:
            async for news in reading:
                if news is IDLE:
                    break
    finally:
        speaking.cancel()


def test_text_that_nobody_reads_is_not_kept_without_end() -> None:
    async def heard() -> int:
        turn = Turn("e", "main", "k")
        for step in range(1, 41):
            turn.hear(RuntimeEvent(kind="step.started", step=step))
            turn.hear(RuntimeEvent(kind="text", step=step, text="x" * 100_000))
        return turn.progress.characters

    assert asyncio.run(heard()) <= MAX_KEPT
