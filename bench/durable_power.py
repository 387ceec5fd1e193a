"""The requests of `durable`, with and without a sync before every acknowledgement."""

from __future__ import annotations

from bench.compare import Benchmark, Goal, Metric
from bench.durable import side

BENCHMARK = Benchmark(
    name="durable_power",
    what="a request to one of 64 agents and its answer, both synced to the disk, beside only written; fsync: one sync",
    sides={"power": side("power"), "process": side("process")},
    metrics=[
        Metric("rate", "/s", "higher", Goal(0.5, of="process")),
        Metric("p50", "µs", "lower"),
        Metric("p99", "µs", "lower"),
        Metric("fsync", "µs", "lower"),
        Metric("broker's cpu", "µs", "lower"),
    ],
    durability="power",
)
