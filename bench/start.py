"""`gdn run --detach` on the quickstart, until it returns: the kernel is ready then.

`first` begins with an empty home directory: the workspace's state is made, and the modules of the bundle's tools are
inspected in a jail. `again` is each later start. `processor` is the processor time of all programs until then: on a
busy machine it is more reliable than the clock.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.compare import Benchmark, Metric
from bench.swarm import Swarm, swarm

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"


def start(made: Swarm) -> tuple[float, float]:
    """Start and stop a kernel. Returns the milliseconds until it was ready, and of processor time."""
    before = commands_s()
    took = made.start()
    processor = commands_s() - before + made.cpu()
    made.stop()
    return took * 1e3, processor * 1e3


def commands_s() -> float:
    """The processor time of all commands that have ended (seconds)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def side(again: bool, seconds: float) -> Mapping[str, float]:
    """One start."""
    with swarm(bundle=(QUICKSTART / "goondan.yaml").read_text(encoding="utf-8")) as made:
        folder = made.bundle.parent
        shutil.copytree(QUICKSTART / "tools", folder / "tools")
        os.environ["GOONDAN_PROVIDER"] = "embedded"
        if again:
            start(made)
        ready, processor = start(made)
        return {"ready": ready, "processor": processor}


BENCHMARK = Benchmark(
    name="start",
    what="`gdn run --detach` on the quickstart, until the kernel is ready",
    sides={"first": partial(side, False), "again": partial(side, True)},
    metrics=[Metric("ready", "ms", "lower"), Metric("processor", "ms", "lower", against={"cacb0f6e": 0.5})],
    by_gdn=True,
)
