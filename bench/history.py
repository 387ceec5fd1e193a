"""A turn behind 10,000 messages of history, beside one behind 10: with the console, and with a model over HTTP.

The history is sent to a model, but not to the console. The agent reads, measures and writes it once, before the turns
that are measured. Most of a turn's time with a model belongs to the model server, which reads the history each time. So
`model, cpu` is the processor time of the kernel's own processes.
"""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import Swarm, said, swarm
from bench.turn import model_server

LONG, SHORT = 10_000, 10
WARM_UP, TURNS = 3, 15


def lengthen(conversation: Path, messages: int) -> None:
    """Repeat the messages of a closed conversation until it has so many."""
    with closing(sqlite3.connect(conversation)) as db, db:
        known = [msgspec.msgpack.decode(row[0]) for row in db.execute("SELECT message FROM base ORDER BY seq")]
        for at in range(len(known), messages):
            message = {**known[at % len(known)], "id": f"again-{at}"}
            values = (message["id"], msgspec.msgpack.encode(message))
            db.execute("INSERT INTO base (id, message) VALUES (?, ?)", values)


async def turns(made: Swarm) -> tuple[float, float]:
    """The time of a turn, and the processor time of the kernel's processes for it (milliseconds)."""
    with made.session() as opened:
        async with opened as session:
            for _ in range(WARM_UP):
                await said(session, "long", "hello")
            used = made.cpu()
            times = [await said(session, "long", "hello") for _ in range(TURNS)]
            return statistics.median(times) * 1e3, (made.cpu() - used) / TURNS * 1e3


def behind(messages: int, base: str | None) -> tuple[float, float]:
    """One kernel, whose agent's model is at `base`, or is the console."""
    model = None if base is None else f'{{provider: openai, model: m, endpoint: "{base}/v1", apiKey: {{value: k}}}}'
    with swarm(model=model) as made:
        made.start()
        uvloop.run(turns(made))
        conversation = made.state_dir / "instances" / "main" / "long" / "conversation.db"
        made.stop()
        lengthen(conversation, messages)
        made.start()
        return uvloop.run(turns(made))


def side(messages: int, seconds: float) -> Mapping[str, float]:
    """Both kinds of model."""
    with model_server() as base:
        console, _ = behind(messages, None)
        model, model_cpu = behind(messages, base)
    return {"console": console, "model": model, "model, cpu": model_cpu}


BENCHMARK = Benchmark(
    name="history",
    what="a turn behind a long conversation: with the console, and with a model over HTTP",
    sides={f"{LONG:,} messages": partial(side, LONG), f"{SHORT}": partial(side, SHORT)},
    metrics=[
        Metric("console", "ms", "lower", Goal(1.5, of=f"{SHORT}")),
        Metric("model", "ms", "lower", Goal(4, of=f"{SHORT}")),
        Metric("model, cpu", "ms", "lower", Goal(4, of=f"{SHORT}")),
    ],
    durability="power",
)
