"""Programs for as long as a block lasts: any that speaks in lines, and the kernel's own, started the way its supervisor
starts them.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, KernelPlan, ModelSpec, ToolHostSpec, ToolSpec
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire.tokens import SECRET_BYTES, Claims, TokenClass, mint

#: The only agent of a benchmark's plan, and the instance that is used.
AGENT, INSTANCE = "caller", "bench"
#: A program that is not ready within this time never will be (seconds).
READY_S = 10.0


@dataclass(frozen=True)
class Bus:
    """A running broker."""

    #: The folder of its sockets.
    run_dir: Path
    #: The key that signs its tokens.
    secret: bytes
    #: Its pid.
    pid: int

    def endpoint(self, cls: TokenClass) -> str:
        """The ZeroMQ endpoint of a class."""
        return f"ipc://{self.run_dir}/{SOCKETS[cls]}"

    def token(self, cls: TokenClass) -> str:
        """A token of a class; for agents, that of INSTANCE of AGENT."""
        if cls == "agent":
            return mint(self.secret, Claims("agent", agent=AGENT, instance_key=INSTANCE))
        return mint(self.secret, Claims(cls, operator=cls == "client"))


def plan_of(
    folder: str,
    items: list[CatalogItem],
    tools: list[ToolSpec],
    durability: Literal["power", "process"] = "power",
    **policy: int,
) -> KernelPlan:
    """A plan with one agent whose catalog is `items`. `policy` gives other numbers of KernelPlan than the
    usual ones.
    """
    agent = AgentSpec(
        name=AGENT,
        model=ModelSpec(provider="embedded"),
        registry=items,
        catalog=[item.name for item in items],
        state_dir=folder,
        revision="bench",
        servers=[tool.name for tool in tools if tool.server is not None],
    )
    plan = KernelPlan(
        revision="bench",
        bundle=folder,
        state_dir=folder,
        entry_agent=AGENT,
        agents={AGENT: agent},
        toolhost=ToolHostSpec(tools=tools, state_dir=folder, revision="bench"),
        durability=durability,
    )
    return msgspec.structs.replace(plan, **policy)


@contextmanager
def program(*command: str | Path, reads: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that reads this text, and is killed when the block ends. `options` are those of Popen."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(reads)
            process.stdin.close()
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line a program prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise SystemExit(f"{process.args!r} ended without its line")
    return text


@contextmanager
def running(
    module: str, *arguments: str, files: dict[str, bytes] | None = None, keep: list[int] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module` until the block ends.

    `files`: option -> the data that its descriptor gives. `keep`: descriptors that the program takes over; they are
    closed here.
    """
    with ExitStack() as stack:
        ready_r, ready_w = os.pipe()
        stack.callback(os.close, ready_r)
        command = [sys.executable, "-I", "-m", module, *arguments, "--ready-fd", str(ready_w)]
        passed = [ready_w, *(keep or [])]
        for option, content in (files or {}).items():
            fd = os.memfd_create(option)
            os.write(fd, content)
            os.lseek(fd, 0, os.SEEK_SET)
            command += [option, str(fd)]
            passed.append(fd)
        process = subprocess.Popen(command, pass_fds=passed)
        stack.callback(end, process)
        for fd in passed:
            os.close(fd)
        if not select.select([ready_r], [], [], READY_S)[0] or os.read(ready_r, 1) != b"\n":
            raise SystemExit(f"{module} did not become ready")
        yield process


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a program to end, and make sure that it does."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def broker(
    items: list[CatalogItem],
    tools: list[ToolSpec] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    module: str = "goondan.kernel.broker",
    **policy: int,
) -> Iterator[Bus]:
    """`python -m goondan.kernel.broker` with the plan of `plan_of`, in a folder of its own; or a program like it."""
    secret = secrets.token_bytes(SECRET_BYTES)
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        # Beside each other: a runtime directory is no place for state.
        state, run_dir = Path(folder, "state"), Path(folder, "run")
        for place in (state, run_dir):
            place.mkdir(0o700)
        plan = msgspec.msgpack.encode(plan_of(str(state), items, tools or [], durability, **policy))
        files = {"--plan-fd": plan, "--secret-fd": secret}
        with running(module, "--run-dir", str(run_dir), files=files) as process:
            yield Bus(run_dir, secret, process.pid)


@contextmanager
def tool_host(bus: Bus) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m goondan.toolhost` on that bus."""
    token = bus.token("toolhost").encode()
    with running("goondan.toolhost", "--endpoint", bus.endpoint("toolhost"), files={"--token-fd": token}) as process:
        yield process
