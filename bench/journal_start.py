"""The start of a broker whose journal knows a million ended events, beside one that knows none."""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import msgspec

from bench.compare import Benchmark, Goal, Metric
from bench.programs import plan_of, running
from goondan.kernel.broker.journal.committer import open_store, wall_ms
from goondan.kernel.broker.state.records import Retire
from goondan.schemas.wire.tokens import SECRET_BYTES

ENDED: Final = 1_000_000
#: Ends of one commit.
BATCH: Final = 10_000


@cache
def state_with(ended: int) -> str:
    """A state directory whose journal knows so many ended events; made once, removed at the end."""
    folder = tempfile.mkdtemp(prefix="gj", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = open_store(folder, "process")
    for first in range(0, ended, BATCH):
        store.commit([Retire(f"event:{n:032x}", b"d" * 16, "done") for n in range(first, first + BATCH)], wall_ms())
    store.close()
    return folder


def side(ended: int) -> Callable[[float], Mapping[str, float]]:
    """A start with so many ended events."""

    def measure(seconds: float) -> Mapping[str, float]:
        folder = state_with(ended)
        plan = msgspec.msgpack.encode(plan_of(folder, [], [], "process"))
        begun = time.perf_counter()
        files = {"--plan-fd": plan, "--secret-fd": secrets.token_bytes(SECRET_BYTES)}
        with running("goondan.kernel.broker", "--run-dir", folder, files=files):
            return {"start": (time.perf_counter() - begun) * 1e3}

    return measure


BENCHMARK = Benchmark(
    name="journal_start",
    what="the start of a broker whose journal knows a million ended events",
    sides={"a million": side(ENDED), "none": side(0)},
    metrics=[Metric("start", "ms", "lower", Goal(1.1, of="none"))],
    rounds=3,
)
