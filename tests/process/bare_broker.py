"""A real broker with a plan of its own and no other process: for tests that speak the wire themselves."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from goondan.kernel.spawn import memory_file
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, KernelPlan, ModelSpec, ToolHostSpec
from goondan.schemas.transport import SOCKETS
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame, Hello
from goondan.schemas.wire.tokens import Claims, TokenClass, mint

TOOL = "bash__exec"
READY_S = 30.0
ANSWER_MS = 20_000


def plan(state_dir: str) -> KernelPlan:
    """Agents `coder` and `reviewer`, both with the one tool."""
    agents = {
        name: AgentSpec(
            name=name,
            model=ModelSpec(provider="embedded"),
            registry=[CatalogItem(name=TOOL), CatalogItem(name="secret__tool")],
            catalog=[TOOL],
            state_dir=state_dir,
            revision="r",
        )
        for name in ("coder", "reviewer")
    }
    host = ToolHostSpec(tools=[], state_dir=state_dir, revision="r")
    return KernelPlan(
        revision="r", bundle="/bundle", state_dir=state_dir, entry_agent="coder", agents=agents, toolhost=host
    )


def call_tool(link: Link, frame: Frame) -> asyncio.Future[Frame]:
    """`Link.start_call` with a future for its result."""
    waiter: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def done(answer: Frame | None, error: GoondanError | None) -> None:
        if error is not None:
            waiter.set_exception(error)
        elif answer is not None:
            waiter.set_result(answer)

    link.start_call(frame, done)
    return waiter


class Raw:
    """A DEALER socket without any of the link's manners."""

    def __init__(self, path: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.socket.connect(f"ipc://{path}")

    def send(self, frame: Frame) -> None:
        self.socket.send(encode(frame))

    def receive(self) -> Frame:
        """The next frame that is no ping."""
        while True:
            frame = decode(self.socket.recv())
            if frame.type != "ping":
                return frame

    def ask(self, frame: Frame) -> Frame:
        self.send(frame)
        return self.receive()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Broker:
    """The process, and ways to speak to it."""

    def __init__(self, run_dir: Path, make: Callable[[str], KernelPlan]) -> None:
        self.run_dir = run_dir
        self.secret = os.urandom(32)
        self.plan = make(str(run_dir / "state"))
        self.peers: list[Raw] = []
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        plan_fd = memory_file("plan", msgspec.msgpack.encode(self.plan))
        secret_fd = memory_file("secret", self.secret)
        ready_r, ready_w = os.pipe()
        arguments = ["--run-dir", str(self.run_dir), "--plan-fd", str(plan_fd), "--secret-fd", str(secret_fd)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "goondan.kernel.broker", *arguments, "--ready-fd", str(ready_w)],
                pass_fds=[plan_fd, secret_fd, ready_w],
            )
            os.close(ready_w)
            ready_w = -1
            assert select.select([ready_r], [], [], READY_S)[0], "the broker was not ready in time"
            assert os.read(ready_r, 1) == b"\n", "the broker ended before it was ready"
            return process
        finally:
            for fd in (plan_fd, secret_fd, ready_r, ready_w):
                if fd >= 0:
                    os.close(fd)

    def restart(self) -> None:
        """kill -9, and another one in its place."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def endpoint(self, cls: TokenClass) -> str:
        return f"ipc://{self.run_dir}/{SOCKETS[cls]}"

    def token(self, cls: TokenClass, **claims: object) -> str:
        return mint(self.secret, Claims(cls, **claims))  # type: ignore[arg-type]

    def raw(self, cls: TokenClass) -> Raw:
        """A connection that has not said hello."""
        peer = Raw(str(self.run_dir / SOCKETS[cls]))
        self.peers.append(peer)
        return peer

    def hello(self, cls: TokenClass, **claims: object) -> Raw:
        """A welcomed connection; an earlier one of the same principal that was closed may take a moment to go."""
        peer = self.raw(cls)
        hello = Frame("hello", id="h", payload=to_raw(Hello(self.token(cls, **claims), os.urandom(4).hex())))
        until = time.monotonic() + READY_S
        while (welcome := peer.ask(hello)).type == "error" and b"E_PRINCIPAL_BUSY" in bytes(welcome.payload):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert welcome.type == "welcome", bytes(welcome.payload)
        return peer

    def memory(self) -> int:
        """Resident bytes of the broker."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * resource.getpagesize()

    def stop(self) -> int:
        for peer in self.peers:
            peer.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


@contextmanager
def bare_broker(make: Callable[[str], KernelPlan] = plan) -> Iterator[Broker]:
    """A broker that must end cleanly and leave no socket behind. `make` gives its plan for a state directory."""
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        broker = Broker(Path(folder), make)
        try:
            yield broker
            assert broker.process.poll() is None, "the broker died"
        finally:
            status = broker.stop()
        assert status == 0
        assert not list(Path(folder).glob("*.sock"))
