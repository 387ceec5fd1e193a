"""A whole turn, from the message that a client sends to its answer: model calls over HTTP, tool calls in a jail.

The kernel is `gdn run --detach` on a bundle of its own, with every program of it; the model is bench/model_server.py,
whose own time is reported separately. The sides differ only in the model's provider or in the durability.

Durability: with `process` the conversation is in SQLite before each next action, and survives the end of every process.
With `power` the answer also waits for the disk. The broker's journal is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop

from bench.compare import Benchmark, Goal, Metric
from goondan.kernel.cli.attach import Kernel, attach
from goondan.kernel.cli.session import Message, Session
from goondan.kernel.cli.state import locate

ROOT = Path(__file__).resolve().parent.parent
STEPS, WIDTH = 50, 200
#: A turn that takes longer is stuck (seconds).
PATIENCE_S = 60.0
#: How many turns of one call run in one instance before the measurement, and how many are measured.
WARM_UP, TURNS = 3, 12
#: Long turns measured, each in an instance of its own after one short turn.
LONG_TURNS = 3

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: loopback}
spec: {provider: PROVIDER, model: bench, endpoint: "ENDPOINT", apiKey: {value: bench-key}}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: echo}
spec:
  entry: ./tools/echo/echo.py
  exports:
    - name: same
      description: Give the arguments back.
      parameters: {type: object, properties: {text: {type: string}}, required: [text]}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/loopback}
  prompt: {system: Be brief.}
  tools: [Tool/echo, Tool/bash, Tool/file-system]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec:
  entryAgent: Agent/main
  agents: [{ref: Agent/main}]
  policy: {durability: DURABILITY, maxStepsPerTurn: 64}
"""
CALL = f'echo__same {{"text": "{"x" * 100}"}}'


@contextmanager
def model_server(*arguments: str) -> Iterator[str]:
    """`python -m bench.model_server` until the block ends; its base URL."""
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "bench.model_server", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def kernel(provider: str, durability: str, base: str) -> Iterator[Kernel]:
    """A running kernel with the bundle, in a folder of its own; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        endpoint = f"{base}/v1" if provider == "openai" else base
        text = BUNDLE.replace("PROVIDER", provider).replace("ENDPOINT", endpoint).replace("DURABILITY", durability)
        bundle = Path(folder, "goondan.yaml")
        bundle.write_text(text)
        shutil.copytree(ROOT / "bench" / "tools", Path(folder, "tools"))
        runtime = Path(folder, "r")
        runtime.mkdir(mode=0o700)
        os.environ.update(GOONDAN_STATE_ROOT=f"{folder}/state", XDG_RUNTIME_DIR=str(runtime), GOONDAN_TRUST="1")
        gdn = [sys.executable, "-I", "-m", "goondan.kernel.cli"]
        subprocess.run([*gdn, "run", "--detach", "--bundle", str(bundle)], check=True, stdout=subprocess.DEVNULL)
        try:
            running = attach(locate(str(bundle)))
            try:
                yield running
            finally:
                running.finish()
        finally:
            subprocess.run([*gdn, "stop", "--bundle", str(bundle)], check=True, stdout=subprocess.DEVNULL)


class Client:
    """Sends messages and measures: the milliseconds until the answer, and the part of the model server in them."""

    def __init__(self, session: Session, base: str) -> None:
        self._session = session
        self._base = base

    async def turn(self, instance: str, text: str) -> tuple[float, float]:
        """One turn. Returns its time and the model server's part of it, in milliseconds."""
        self._model_ms()
        event_id = self._session.new_id()
        before = time.perf_counter()
        answer = await self._session.ask(Message("main", instance, text, event_id=event_id), timeout_s=PATIENCE_S)
        took = (time.perf_counter() - before) * 1000
        if answer.status != "completed" or not (answer.response or "").startswith("done after"):
            raise SystemExit(f"{text[:40]}: {answer}")
        return took, self._model_ms()

    def _model_ms(self) -> float:
        """How long the model server has worked since the last time it was asked."""
        with urllib.request.urlopen(f"{self._base}/stats") as response:
            return float(json.load(response)["seconds"]) * 1000


async def measure(running: Kernel, base: str) -> Mapping[str, float]:
    """Short turns in one conversation, long ones each in a new one whose agent and jail are there."""
    async with Session(running) as session:
        client = Client(session, base)
        short = [await client.turn("short", f"call {CALL}") for _ in range(WARM_UP + TURNS)][WARM_UP:]
        deep, wide = [], []
        for number in range(LONG_TURNS):
            await client.turn(f"deep-{number}", f"call {CALL}")
            deep.append(await client.turn(f"deep-{number}", f"steps {STEPS} {CALL}"))
            await client.turn(f"wide-{number}", f"call {CALL}")
            wide.append(await client.turn(f"wide-{number}", f"callN {WIDTH} {CALL}"))
    found: dict[str, float] = {}
    for name, turns in (("1 call", short), (f"{STEPS} steps", deep), (f"{WIDTH} calls", wide)):
        found[name] = statistics.median([took for took, _ in turns])
        found[f"{name}, of it model"] = statistics.median([model for _, model in turns])
    return found


def side(provider: str, durability: str, seconds: float) -> Mapping[str, float]:
    """One kernel, all kinds of turns."""
    with model_server() as base, kernel(provider, durability, base) as running:
        return uvloop.run(measure(running, base))


BENCHMARK = Benchmark(
    name="turn",
    what="a message to its answer through a whole kernel: 2 model calls and 1 tool call, and longer turns",
    sides={
        "anthropic": partial(side, "anthropic", "process"),
        "openai": partial(side, "openai", "process"),
        "anthropic, durability power": partial(side, "anthropic", "power"),
    },
    metrics=[
        Metric("1 call", "ms", "lower", Goal(7)),
        Metric("1 call, of it model", "ms", "lower"),
        Metric(f"{STEPS} steps", "ms", "lower", Goal(250)),
        Metric(f"{STEPS} steps, of it model", "ms", "lower"),
        Metric(f"{WIDTH} calls", "ms", "lower", Goal(60)),
        Metric(f"{WIDTH} calls, of it model", "ms", "lower"),
    ],
)

if __name__ == "__main__":
    print(json.dumps(side(sys.argv[1], sys.argv[2], 0)))
