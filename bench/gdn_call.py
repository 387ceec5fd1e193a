"""`gdn call bash__exec`, the whole command: from nothing, which starts a kernel and leaves none behind, and with a
kernel that runs. Beside it, an interpreter that imports what the programs need.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import swarm

RUNS = 5
BARE = "bare imports"
FROM_NOTHING, RUNNING = "from nothing", "kernel runs"
#: What a kernel's programs import, and what a command does.
IMPORTS = {FROM_NOTHING: "asyncio, uvloop, msgspec, yaml, jsonschema_rs", RUNNING: "msgspec, click"}
ARGUMENTS = json.dumps({"command": "true"})


def median_ms(*command: str) -> float:
    """The median of RUNS runs of a command that must succeed (milliseconds)."""
    times = []
    for _ in range(RUNS):
        before = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - before) * 1000)
    return statistics.median(times)


def called(seconds: float) -> Mapping[str, float]:
    """The command, without a kernel and then with one."""
    with swarm() as made:
        call = (*made.gdn(), "call", "bash__exec", ARGUMENTS, "--bundle", str(made.bundle))
        median_ms(*call)  # the workspace's state is made, and what is remembered of the machine
        found = {FROM_NOTHING: median_ms(*call)}
        made.start()
        return {**found, RUNNING: median_ms(*call)}


def bare(seconds: float) -> Mapping[str, float]:
    """Interpreters that import and end."""
    return {name: median_ms(sys.executable, "-I", "-c", f"import {modules}") for name, modules in IMPORTS.items()}


BENCHMARK = Benchmark(
    name="gdn_call",
    what="`gdn call bash__exec`, the whole command, beside an interpreter that imports what it takes",
    sides={"gdn": called, BARE: bare},
    metrics=[
        Metric(FROM_NOTHING, "ms", "lower", Goal(3, of=BARE)),
        Metric(RUNNING, "ms", "lower", Goal(1.5, of=BARE)),
    ],
    by_gdn=True,
)
