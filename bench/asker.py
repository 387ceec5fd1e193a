"""Questions from one event loop of asyncio, and their figures. Any Python can run this, also one without the kernel."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: How many are asked at the same time for the rate, each with a number of its own.
ASKED: Final = 64
#: Questions before anything is measured.
WARM_UP: Final = 500
TEXT: Final = "x" * 200

#: Asks the one with this number, and waits for the answer.
Ask = Callable[[int], Awaitable[object]]


async def measure(ask: Ask, seconds: float) -> dict[str, float]:
    """First the rate with a question for each of ASKED under way, then the time of single ones."""

    async def keep_asking(number: int, until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await ask(number)
            done += 1
        return done

    for number in range(WARM_UP):
        await ask(number % ASKED)
    begun, spent = time.perf_counter(), time.process_time()
    until = begun + seconds * 2 / 3
    done = sum(await asyncio.gather(*(keep_asking(number, until) for number in range(ASKED))))
    rate, cpu = done / (time.perf_counter() - begun), (time.process_time() - spent) / done
    times = []
    until = time.perf_counter() + seconds / 3
    while (before := time.perf_counter()) < until:
        await ask(0)
        times.append(time.perf_counter() - before)
    centiles = statistics.quantiles(times, n=100)
    return {"rate": rate, "p50": centiles[49] * 1e6, "p99": centiles[98] * 1e6, "asker's cpu": cpu * 1e6}
