"""One round trip through the broker, beside libzmq's own proxy and beside no middle at all.

The broker does its whole work on the way: token and lease, the agent's declaration, call bookkeeping, re-encoding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.compare import Benchmark, Goal, Metric
from bench.peers import TOOL, hello, open_socket
from bench.programs import AGENT, INSTANCE, broker, line, program
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import encode
from goondan.schemas.wire.frames import Frame


@contextmanager
def peer(role: str, *arguments: str, token: str = "", module: str = "bench.peers") -> Iterator[subprocess.Popen[str]]:
    """One program of `module`, ended when the block ends."""
    with program(sys.executable, "-I", "-m", module, role, *arguments, reads=token + "\n") as process:
        yield process


def figures(process: subprocess.Popen[str], **others: int) -> Mapping[str, float]:
    """The caller's figures, and the processor time that the other processes (`middle`, `echo`: their pids) used for
    each call.

    That time shows the cost of the middle even when other work keeps the machine busy, and whether the ends leave it a
    processor: with two processors a call takes at least half of all three times.
    """
    spent = {name: cpu_seconds(pid) for name, pid in others.items()}
    measured = {name: float(value) for name, value in json.loads(line(process)).items()}
    calls = measured.pop("calls")
    for name, pid in others.items():
        measured[f"{name}'s cpu"] = (cpu_seconds(pid) - spent[name]) / calls * 1e6
    return measured


def cpu_seconds(pid: int) -> float:
    """Processor time of a process with all its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def direct(seconds: float) -> Mapping[str, float]:
    """Caller and echo, joined by one ipc socket: the lower bound, without a middle."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder, ExitStack() as stack:
        endpoint = f"ipc://{folder}/d"
        line(echo := stack.enter_context(peer("echo", endpoint, "--bind")))
        return figures(stack.enter_context(peer("caller", endpoint, str(seconds))), echo=echo.pid)


def proxied(seconds: float) -> Mapping[str, float]:
    """zmq.proxy in a process of its own between them."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder, ExitStack() as stack:
        front, back = f"ipc://{folder}/f", f"ipc://{folder}/b"
        middle = stack.enter_context(peer("proxy", front, back))
        line(middle)
        line(echo := stack.enter_context(peer("echo", back)))
        caller = stack.enter_context(peer("caller", front, str(seconds)))
        return figures(caller, middle=middle.pid, echo=echo.pid)


def brokered(seconds: float) -> Mapping[str, float]:
    """`python -m goondan.kernel.broker` between them. A client's event gives the caller the lease for its calls."""
    with broker([CatalogItem(name=TOOL)]) as bus, ExitStack() as stack:
        line(echo := stack.enter_context(peer("echo", bus.endpoint("toolhost"), token=bus.token("toolhost"))))
        caller = stack.enter_context(peer("caller", bus.endpoint("agent"), str(seconds), token=bus.token("agent")))
        client = open_socket(bus.endpoint("client"), bind=False)
        hello(client, bus.token("client"))
        client.send(encode(Frame("event", id="e.1", event_id="event-1", to=AGENT, instance_key=INSTANCE)))
        try:
            return figures(caller, middle=bus.pid, echo=echo.pid)
        finally:
            client.close()


BENCHMARK = Benchmark(
    name="round_trip",
    what="a 256-byte call to another process and its result back; 64 in flight for the rate, one for the times",
    sides={"broker": brokered, "zmq.proxy": proxied, "direct pair": direct},
    metrics=[
        Metric("rate", "/s", "higher", Goal(0.8, of="zmq.proxy"), native=Goal(1.1, of="zmq.proxy")),
        Metric("p50", "µs", "lower"),
        Metric("p99", "µs", "lower"),
        Metric("middle's cpu", "µs", "lower"),
        Metric("echo's cpu", "µs", "lower"),
        Metric("caller's cpu", "µs", "lower"),
    ],
    native=True,
)
