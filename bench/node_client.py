"""What a question costs through the client for Node.js, beside the kernel's own link and the client for Python: as
python_client.py, with an asker in Node.js.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench import python_client
from bench.compare import Benchmark, Goal, Metric
from bench.durable import INPUT_BYTES, RESPONDERS
from bench.programs import AGENT, Bus
from scripts.node_client import install

ASKER = Path(__file__).parent / "node_client.mjs"


def by_node(bus: Bus, seconds: float) -> Mapping[str, float]:
    """With clients/node."""
    install()
    command = ["node", str(ASKER), str(bus.run_dir), str(seconds), AGENT, str(RESPONDERS), "x" * INPUT_BYTES]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {name: float(value) for name, value in json.loads(done.stdout).items()}


BENCHMARK = Benchmark(
    name="node_client",
    what="a question and its answer through the client for Node.js; 64 under way for the rate, one for the times",
    sides={
        "clients/node": python_client.beside(by_node),
        "goondan_client": python_client.side("client"),
        "kernel's link": python_client.side("link"),
    },
    metrics=[
        Metric("rate", "/s", "higher", Goal(0.7, of="kernel's link")),
        Metric("p50", "µs", "lower", Goal(1.5, of="goondan_client")),
        Metric("p99", "µs", "lower"),
        Metric("asker's cpu", "µs", "lower"),
    ],
    durability="process",
)
