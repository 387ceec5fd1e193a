"""A picture of 2 MiB beside a message: how much longer the turn takes, from the client's file to the model's server.

The whole path: the client copies the file for the broker, the agent links it, encodes it as base64 and sends it. Each
instance takes a message without a file and one with it, one after the other, and the difference of the two is the
figure. `bare POST` is the same body from a client that has it in memory: what the loopback and the server take.

Durability is `process`: with `power`, the client waits for its disk as well.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import PATIENCE_S, Swarm
from bench.turn import kernel, model_server

SIZE = 2 << 20
#: Instances in which the pair of messages is sent, after WARM_UP others.
PAIRS, WARM_UP = 12, 2


async def measure(made: Swarm, picture: str) -> Mapping[str, float]:
    """Pairs of messages, each in an instance of its own whose agent is there."""
    async with made.client() as client:

        async def turn(instance: str, *paths: str) -> float:
            before = time.perf_counter()
            answer = await client.ask("main", "look", instance=instance, files=paths, deadline=PATIENCE_S)
            took = (time.perf_counter() - before) * 1000
            if not (answer.text or "").startswith("echo"):
                raise SystemExit(f"the turn came to {answer}")
            return took

        pairs: list[tuple[float, float]] = []
        for number in range(WARM_UP + PAIRS):
            name = f"pair-{number}"
            await turn(name)
            pairs.append((await turn(name), await turn(name, picture)))
        pairs = pairs[WARM_UP:]
    return {
        "without": statistics.median([without for without, _ in pairs]),
        "with 2 MiB": statistics.median([having for _, having in pairs]),
        "adds": statistics.median([having - without for without, having in pairs]),
    }


def bare_post(base: str) -> Mapping[str, float]:
    """A request with a body of the same size, from memory."""
    place = urlsplit(base)
    body = b"x" * (4 * ((SIZE + 2) // 3))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    took: list[float] = []
    with socket.create_connection((place.hostname, place.port)) as server:
        for _ in range(PAIRS):
            before = time.perf_counter()
            server.sendall(request)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += server.recv(65536)
            took.append((time.perf_counter() - before) * 1000)
    return {"adds": statistics.median(took)}


def side(provider: str, seconds: float) -> Mapping[str, float]:
    """One kernel and its pairs."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        picture = Path(folder, "picture.png")
        picture.write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(SIZE - 8))
        with model_server() as base, kernel(provider, "process", base) as made:
            return uvloop.run(measure(made, str(picture)))


def bare(seconds: float) -> Mapping[str, float]:
    """Without a kernel."""
    with model_server() as base:
        return bare_post(base)


BENCHMARK = Benchmark(
    name="attachments",
    what="a message with a picture of 2 MiB beside one without, through a whole kernel",
    sides={"kernel": partial(side, "anthropic"), "bare POST": bare, "openai": partial(side, "openai")},
    metrics=[
        Metric("without", "ms", "lower"),
        Metric("with 2 MiB", "ms", "lower"),
        Metric("adds", "ms", "lower", Goal(20)),
    ],
    by_gdn=True,
    durability="process",
)
