"""How long an agent process takes to start, and how much private memory it has.

A socket in this process plays the broker. The time runs from the request for an agent to its hello. The baseline starts
the same agent by exec, as `python -m goondan.agentproc`. The model is the console, or bench/model_server.py behind a
provider: a turn is then one model call over HTTP.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import zmq

from bench.compare import Benchmark, Goal, Metric
from bench.programs import AGENT, plan_of, running
from bench.turn import model_server
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.system.startup import become_subreaper
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.forkserver import WARM, ForkRequest, decode_reply, encode_packet
from goondan.schemas.wire.frames import AgentEvent, Frame, Welcome

#: Agents per run, one after the other.
AGENTS = 12
#: Agents asked for at once.
BURST = 20
#: An agent that has not answered within this time never will (milliseconds).
PATIENCE_MS = 10_000
#: A fork server that is not warm after this time measures a busy machine (seconds).
WARMING_S = 20.0

#: Starts agent number n on an endpoint and returns its pid.
Start = Callable[[int, str], int]


class Broker:
    """The part of a broker that one agent at a time needs."""

    def __init__(self, folder: str, model: ModelSpec) -> None:
        self.endpoint = f"ipc://{folder}/agents.sock"
        self._folder = folder
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._spec = to_raw(msgspec.structs.replace(plan_of(folder, [], []).agents[AGENT], model=model))

    def welcome(self, number: int) -> bytes:
        """Answer the hello of any agent. Returns the agent's routing id."""
        ident, frame = self._receive()
        while frame.type != "hello":
            ident, frame = self._receive()
        workdir = Path(self._folder, f"work-{number}")
        workdir.mkdir()
        body = Welcome(
            version=1,
            principal=f"agent/{AGENT}/{number}",
            broker="bench",
            credit=64,
            max_frame=1 << 20,
            instance_key=str(number),
            workdir=str(workdir),
            epoch=1,
            revision="bench",
            spec=self._spec,
        )
        self._send(ident, Frame("welcome", in_reply_to=frame.id, payload=to_raw(body)))
        return ident

    def turn(self, ident: bytes, number: int) -> None:
        """Hand over one event and wait for its end."""
        event = AgentEvent(id=f"event-{number}", type="user.input", created_at="2026-01-01T00:00:00Z", input="hello")
        self._send(
            ident,
            Frame("event", event_id=event.id, epoch=1, instance_key=str(number), to=AGENT, payload=to_raw(event)),
        )
        while True:
            sender, frame = self._receive()
            if sender == ident and frame.type == "ack" and frame.stage in ("done", "failed"):
                self._send(ident, Frame("ack", in_reply_to=frame.id, stage="accepted", event_id=event.id))
                if frame.stage == "failed":
                    raise SystemExit(f"the turn failed: {bytes(frame.payload)!r}")
                return

    def _receive(self) -> tuple[bytes, Frame]:
        """The next frame, and who has sent it. Each new connection is asked for hello, also that of a waiting agent."""
        while True:
            ident, data = self._socket.recv_multipart()
            if data:
                return ident, decode(data)
            self._send(ident, Frame("error", payload=to_raw(error_payload("E_HELLO_REQUIRED", "say hello first"))))

    def _send(self, ident: bytes, frame: Frame) -> None:
        frame.id = frame.id or f"b.{time.monotonic_ns()}"
        self._socket.send_multipart([ident, encode(frame)])


def private_mib(pid: int) -> float:
    """The memory that a process shares with no other (MiB). NaN for an ordinary user, who cannot read an agent's
    memory.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except PermissionError:
        return math.nan
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def measure(start: Start, folder: str, model: ModelSpec) -> Mapping[str, float]:
    """Start agents one after the other: medians of time, memory when idle, memory after a turn. Then many at once."""
    broker = Broker(folder, model)
    times, turns, idle, after = [], [], [], []
    for number in range(AGENTS + 1):
        before = time.perf_counter()
        pid = start(number, broker.endpoint)
        ident = broker.welcome(number)
        times.append((time.perf_counter() - before) * 1000)
        time.sleep(0.05)  # until it has settled into waiting
        idle.append(private_mib(pid))
        before = time.perf_counter()
        broker.turn(ident, number)
        turns.append((time.perf_counter() - before) * 1000)
        time.sleep(0.05)
        after.append(private_mib(pid))
        kill(pid)
    before = time.perf_counter()
    pids = [start(AGENTS + 1 + number, broker.endpoint) for number in range(BURST)]
    for number in range(BURST):
        broker.welcome(AGENTS + 1 + number)
    burst = (time.perf_counter() - before) * 1000 / BURST
    for pid in pids:
        kill(pid)
    # The first agent does work that all later ones share.
    return {
        "start": statistics.median(times[1:]),
        f"each of {BURST} at once": burst,
        "first turn": statistics.median(turns[1:]),
        "idle": statistics.median(idle[1:]),
        "after a turn": statistics.median(after[1:]),
    }


def kill(pid: int) -> None:
    """End an agent, which is our child, adopted or not."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def by_fork(folder: str, model: ModelSpec) -> Mapping[str, float]:
    """Start agents through `python -m goondan.agentproc.start.forkserver`, as the supervisor does."""
    become_subreaper()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.detach()

    def start(number: int, endpoint: str) -> int:
        request = ForkRequest(
            seq=number + 1,
            agent=AGENT,
            instance_key=str(number),
            endpoint=endpoint,
            token="bench",
            parent_pid=os.getpid(),
        )
        ours.send(encode_packet(request))
        reply = decode_reply(ours.recv(65536))
        if reply.pid is None:
            raise SystemExit(f"no agent: {reply.error}")
        return reply.pid

    with (
        ours,
        running(
            "goondan.agentproc.start.forkserver", "--socket-fd", str(fd), f"--provider={model.provider}", keep=[fd]
        ),
    ):
        ours.send(WARM)
        cold = waiting_agent()
        waiting_agent(cold)  # a fork server that is warm forks it anew
        return measure(start, folder, model)


def waiting_agent(before: int = 0) -> int:
    """The pid of the agent that waits for a request, once there is another than `before`. It is a child of this
    process, which adopts it.
    """
    give_up = time.monotonic() + WARMING_S
    while time.monotonic() < give_up:
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            with suppress(OSError):
                if pid != before and Path(f"/proc/{pid}/comm").read_text() == "gdn-spare\n":
                    return pid
        time.sleep(0.01)
    raise SystemExit("the fork server does not get warm: the machine is too busy to measure")


def by_exec(folder: str, model: ModelSpec) -> Mapping[str, float]:
    """Start a new interpreter for each agent."""
    token = Path(folder, "token")
    token.write_text("bench")

    def start(number: int, endpoint: str) -> int:
        command = [sys.executable, "-I", "-m", "goondan.agentproc", "--endpoint", endpoint, "--token-file", str(token)]
        process = subprocess.Popen(command)
        process.returncode = 0  # measure() reaps it
        return process.pid

    return measure(start, folder, model)


def in_a_process_of_its_own(how: str, provider: str, seconds: float) -> Mapping[str, float]:
    """Measure in a process of its own, so that adopted agents and the subreaper attribute stay out of the benchmark's
    process.
    """
    command = [sys.executable, "-I", "-m", "bench.agent", how, provider]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {name: float(value) for name, value in json.loads(result.stdout).items()}


def main(how: str, provider: str) -> None:
    """Measure one side and print its figures as JSON."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gb", dir="/tmp"))
        model = ModelSpec(provider="embedded")
        if provider != "embedded":
            base = stack.enter_context(model_server())
            endpoint = f"{base}/v1" if provider == "openai" else base
            model = ModelSpec(provider=provider, model="bench", endpoint=endpoint, api_key="k")
        print(json.dumps(by_fork(folder, model) if how == "fork" else by_exec(folder, model)))


BENCHMARK = Benchmark(
    name="agent",
    what="one agent process: request to welcome, its first turn, and private memory before and after that",
    sides={
        "fork server": partial(in_a_process_of_its_own, "fork", "embedded"),
        "exec": partial(in_a_process_of_its_own, "exec", "embedded"),
        "with anthropic": partial(in_a_process_of_its_own, "fork", "anthropic"),
        "with openai": partial(in_a_process_of_its_own, "fork", "openai"),
    },
    metrics=[
        Metric("start", "ms", "lower", Goal(3.5)),
        Metric(f"each of {BURST} at once", "ms", "lower"),
        Metric("first turn", "ms", "lower"),
        Metric("idle", "MiB", "lower", Goal(4.6), native=Goal(4.0)),
        Metric("after a turn", "MiB", "lower", Goal(6.8), native=Goal(6.5)),
    ],
    native=True,
)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
