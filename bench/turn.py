"""A whole turn, from the message that a client sends to its answer: model calls over HTTP, tool calls in a jail.

The kernel is `gdn run --detach` on a bundle of its own, with every program of it; the model is bench/model_server.py.
The baseline is a loop of a few lines that asks the same server and runs the tool in its own process: no bus, no jail,
nothing stored.

Durability: with `process` the conversation is in SQLite before each next action, and survives the end of every process.
With `power` the answer also waits for the disk.
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.programs import line, program
from bench.swarm import PATIENCE_S, Swarm, swarm
from goondan_client.client import Client

TOOLS = Path(__file__).parent / "tools"
STEPS, WIDTH = 50, 200
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
#: The processes whose time a step takes. What works in jails has other names.
PROCESSES = {"gdn-agent": "agent", "gdn-toolhost": "host", "gdn-broker": "broker"}

#: Processor time by kind of process (seconds).
Spent = Mapping[str, float]
#: One turn in an instance.
Turn = Callable[[str, str], Awaitable[object]]


@contextmanager
def model_server(*arguments: str) -> Iterator[str]:
    """`python -m bench.model_server` until the block ends; its base URL."""
    with program(sys.executable, "-I", "-m", "bench.model_server", *arguments) as process:
        yield line(process).strip()


@contextmanager
def kernel(provider: str, durability: str, base: str) -> Iterator[Swarm]:
    """A running kernel with the bundle, in a folder of its own; stopped at the end."""
    endpoint = f"{base}/v1" if provider == "openai" else base
    text = BUNDLE.replace("PROVIDER", provider).replace("ENDPOINT", endpoint).replace("DURABILITY", durability)
    with swarm(bundle=text) as made:
        shutil.copytree(TOOLS, made.bundle.parent / "tools")
        made.start()
        yield made


async def measure(turn: Turn, used: Callable[[], Spent]) -> Mapping[str, float]:
    """Short turns in one conversation, long ones each in a new one whose agent and jail are there. `used` says how much
    processor time each kind of process has had.
    """

    async def timed(instance: str, text: str) -> float:
        before = time.perf_counter()
        await turn(instance, text)
        return (time.perf_counter() - before) * 1000

    short = [await timed("short", f"call {CALL}") for _ in range(WARM_UP + TURNS)][WARM_UP:]
    deep, wide = [], []
    spent: dict[str, float] = defaultdict(float)
    for number in range(LONG_TURNS):
        await timed(f"deep-{number}", f"call {CALL}")
        before = used()
        deep.append(await timed(f"deep-{number}", f"steps {STEPS} {CALL}"))
        for name, seconds in used().items():
            spent[name] += seconds - before.get(name, 0.0)
        await timed(f"wide-{number}", f"call {CALL}")
        wide.append(await timed(f"wide-{number}", f"callN {WIDTH} {CALL}"))
    found = {"1 call": statistics.median(short), f"{STEPS} steps": statistics.median(deep)}
    found[f"{WIDTH} calls"] = statistics.median(wide)
    for name, seconds in spent.items():
        found[f"{name}, a step"] = seconds * 1000 / STEPS / LONG_TURNS
    return found


async def one_turn(client: Client, instance: str, text: str) -> None:
    """One turn. Raises SystemExit for an answer that is not the model server's."""
    answer = await client.ask("main", text, instance=instance, deadline=PATIENCE_S)
    if not (answer.text or "").startswith("done after"):
        raise SystemExit(f"{text[:40]}: {answer}")


async def turns(client: Client, count: int, instance: str) -> None:
    """So many turns of an instance, each with one call. Raises SystemExit."""
    for _ in range(count):
        await one_turn(client, instance, f"call {CALL}")


def used_by(made: Swarm) -> Spent:
    """The processor time of each kind of process."""
    found: dict[str, float] = defaultdict(float)
    for name, seconds in made.cpu_by_name().items():
        found[PROCESSES.get(name, "others" if name.startswith("gdn-") else "worker")] += seconds
    return found


async def in_kernel(made: Swarm) -> Mapping[str, float]:
    """By the client for Python."""
    async with made.client() as client:
        return await measure(partial(one_turn, client), partial(used_by, made))


def side(provider: str, durability: str, seconds: float) -> Mapping[str, float]:
    """One kernel, all kinds of turns."""
    with model_server() as base, kernel(provider, durability, base) as made:
        return uvloop.run(in_kernel(made))


class Loop:
    """An agent of a few lines: it asks the model until there is nothing to call. A tool gives its arguments back."""

    def __init__(self, base: str) -> None:
        self._server = http.client.HTTPConnection(urlsplit(base).netloc)
        self._known: dict[str, list[dict[str, Any]]] = {}

    async def turn(self, instance: str, text: str) -> None:
        """One turn of a conversation."""
        messages = self._known.setdefault(instance, [])
        messages.append({"role": "user", "content": text})
        while True:
            calls = self._asked(messages)
            if not calls:
                return
            messages.append({"role": "assistant", "content": calls})
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": call["input"]} for call in calls]
            messages.append({"role": "user", "content": results})

    def _asked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls of the next answer."""
        body = json.dumps({"model": "bench", "messages": messages, "stream": True})
        self._server.request("POST", "/v1/messages", body, {"content-type": "application/json"})
        calls: list[dict[str, Any]] = []
        for said in self._server.getresponse().read().split(b"\n"):
            if said.startswith(b"data: "):
                event = json.loads(said[6:])
                if event.get("content_block", {}).get("type") == "tool_use":
                    calls.append({**event["content_block"], "input": ""})
                elif event.get("delta", {}).get("type") == "input_json_delta":
                    calls[-1]["input"] += event["delta"]["partial_json"]
        return calls


def bare(seconds: float) -> Mapping[str, float]:
    """The same turns without a kernel."""
    with model_server() as base:
        return uvloop.run(measure(Loop(base).turn, dict))


BENCHMARK = Benchmark(
    name="turn",
    what="a message to its answer through a whole kernel: 2 model calls and 1 tool call, and longer turns",
    sides={
        "kernel": partial(side, "anthropic", "process"),
        "bare loop": bare,
        "openai": partial(side, "openai", "process"),
        "power": partial(side, "anthropic", "power"),
    },
    metrics=[
        Metric("1 call", "ms", "lower", Goal(7), against={"b827878": 0.9}),
        Metric(f"{STEPS} steps", "ms", "lower", Goal(250), against={"b827878": 0.8}),
        Metric(f"{WIDTH} calls", "ms", "lower", Goal(60), against={"b827878": 0.8}),
        Metric("agent, a step", "ms", "lower", against={"cacb0f6e": 0.4}),
        Metric("host, a step", "ms", "lower", against={"cacb0f6e": 0.6}),
        Metric("broker, a step", "ms", "lower", against={"cacb0f6e": 0.7}),
        Metric("worker, a step", "ms", "lower", against={"cacb0f6e": 0.7}),
    ],
    native=True,
    by_gdn=True,
    durability="process",
)
