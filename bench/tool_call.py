"""A tool call from an agent to a jailed handler and back, beside the same call through the official MCP SDK, and beside
two programs without a middle and without a tool.

The caller is an agent without a model: the agent's own link, catalog, argument check and call bookkeeping, in this
process. Broker, tool host and jail are the real programs. Nothing is written to a conversation.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.programs import AGENT, INSTANCE, Bus, broker, tool_host
from bench.round_trip import direct
from goondan.agentproc.calls.caller import Answered, CallContext, ToolCaller
from goondan.agentproc.machine.catalog import Catalog, StepCatalog
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ExportSpec, ToolSpec
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame, Lease, ToolResult

TOOLS = Path(__file__).parent / "tools"
#: Calls in flight while the rate is measured.
WINDOW = 64
#: Calls before anything is measured.
WARM_UP = 300
#: Stored results are acknowledged in batches of this size, as agents do.
ACK_EVERY = 64
#: The name of the side with the MCP SDK.
SDK = "MCP SDK"
ARGUMENTS = {"text": "x" * 100}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def tool(name: str) -> tuple[CatalogItem, ToolSpec]:
    """The echo tool under a name of its own, in the agent's form and in the host's form."""
    root = TOOLS / "echo"
    item = CatalogItem(name=f"{name}__same", parameters=SCHEMA)
    spec = ToolSpec(
        name=name, entry=str(root / "echo.py"), root=str(root), exports=[ExportSpec(name="same", parameters=SCHEMA)]
    )
    return item, spec


@dataclass
class BareAgent:
    """An agent's calling side, with the lease of one event."""

    caller: ToolCaller
    catalog: StepCatalog
    context: CallContext
    link: Link
    made: int = 0

    def next_id(self) -> str:
        """The next call's id. Every ACK_EVERY calls the finished ones are acknowledged to the host."""
        self.made += 1
        if self.made > ACK_EVERY and self.made % ACK_EVERY == 0:
            done = [f"bench/{number}" for number in range(self.made - 2 * ACK_EVERY, self.made - ACK_EVERY)]
            self.link.send(Frame("ack", stage="result", calls=done))
        return f"bench/{self.made}"

    async def call(self, name: str) -> ToolResult:
        """One call, whose result must be ok."""
        ended = asyncio.get_running_loop().create_future()

        def done(result: ToolResult | GoondanError, answered: Answered | None) -> None:
            ended.set_result(result)

        call_id = self.next_id()
        refused = self.caller.start(self.catalog, name, ARGUMENTS, call_id=call_id, context=self.context, done=done)
        result = refused or await ended
        if not isinstance(result, ToolResult) or result.status != "ok":
            raise SystemExit(f"{name}: {result}")
        return result

    async def flood(self, name: str, until: float) -> float:
        """Keep WINDOW calls in flight until the time `until`. Returns the calls per second."""
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        count, out = 0, 0

        def start() -> None:
            nonlocal out
            out += 1
            refused = self.caller.start(
                self.catalog, name, ARGUMENTS, call_id=self.next_id(), context=self.context, done=done
            )
            if refused is not None:
                finished.set_exception(SystemExit(f"{name}: {refused.error}"))

        def done(result: ToolResult | GoondanError, answered: Answered | None) -> None:
            nonlocal count, out
            out -= 1
            count += 1
            if isinstance(result, GoondanError) or result.status != "ok":
                if not finished.done():
                    finished.set_exception(SystemExit(f"{name}: {result}"))
            elif time.perf_counter() < until:
                start()
            elif out == 0 and not finished.done():
                finished.set_result(None)

        begun = time.perf_counter()
        for _ in range(WINDOW):
            start()
        await finished
        return count / (time.perf_counter() - begun)


@asynccontextmanager
async def bare_agent(bus: Bus) -> AsyncIterator[BareAgent]:
    """Connect as the plan's agent and take the lease of an event that a client sends."""
    loop = asyncio.get_running_loop()
    given: asyncio.Future[Frame] = loop.create_future()
    leases: list[Lease] = []

    def on_frame(frame: Frame) -> None:
        if frame.type == "event" and not given.done():
            leases.append(Lease(frame.event_id or "", frame.epoch or 0, INSTANCE))
            given.set_result(frame)

    link = Link(bus.endpoint("agent"), bus.token("agent"), on_frame=on_frame, held=lambda: {"leases": leases})
    client = Link(bus.endpoint("client"), bus.token("client"), on_frame=lambda frame: None)
    try:
        welcome = await link.start()
        await client.start()
        await client.post(Frame("event", event_id="event-1", to=AGENT, instance_key=INSTANCE))
        event = await given
        spec = from_raw(welcome.spec, AgentSpec)
        context = CallContext(turn_id="bench", event_id=event.event_id, epoch=event.epoch)
        yield BareAgent(ToolCaller(link, loop), Catalog(spec).for_step(), context, link)
    finally:
        await client.close(0)
        await link.close(0)


async def measure(bus: Bus, name: str, seconds: float) -> Mapping[str, float]:
    """Times of single calls, then the rate with WINDOW in flight."""
    async with bare_agent(bus) as agent:
        for _ in range(WARM_UP):
            await agent.call(name)
        times = []
        end = time.perf_counter() + seconds / 2
        while (before := time.perf_counter()) < end:
            await agent.call(name)
            times.append(time.perf_counter() - before)
        rate = await agent.flood(name, time.perf_counter() + seconds / 2)
        centiles = statistics.quantiles(times, n=100)
        return {"p50": centiles[49] * 1e6, "p99": centiles[98] * 1e6, "rate": rate}


def warm(seconds: float) -> Mapping[str, float]:
    """A jail that is already there."""
    item, spec = tool("echo")
    with broker([item], [spec]) as bus, tool_host(bus):
        return uvloop.run(measure(bus, item.name, seconds))


async def of_the_sdk(seconds: float) -> Mapping[str, float]:
    """The same call through the official Python MCP SDK: its own client and server with their defaults, one process
    behind two pipes. No sandbox, no bus.
    """
    from mcp import Client, StdioServerParameters

    command = ["-I", "-m", "bench.mcp_server"]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ), cwd=os.getcwd())
    async with Client(parameters) as client:

        async def call() -> None:
            result = await client.call_tool("same", ARGUMENTS)
            if result.is_error or result.structured_content != ARGUMENTS:
                raise SystemExit(f"the MCP server: {result}")

        async def caller(until: float) -> int:
            made = 0
            while time.perf_counter() < until:
                await call()
                made += 1
            return made

        for _ in range(WARM_UP):
            await call()
        times = []
        end = time.perf_counter() + seconds / 2
        while (before := time.perf_counter()) < end:
            await call()
            times.append(time.perf_counter() - before)
        before = time.perf_counter()
        made = await asyncio.gather(*(caller(before + seconds / 2) for _ in range(WINDOW)))
        rate = sum(made) / (time.perf_counter() - before)
        centiles = statistics.quantiles(times, n=100)
        return {"p50": centiles[49] * 1e6, "p99": centiles[98] * 1e6, "rate": rate}


def sdk(seconds: float) -> Mapping[str, float]:
    """See of_the_sdk."""
    return uvloop.run(of_the_sdk(seconds))


BENCHMARK = Benchmark(
    name="tool_call",
    what="agent, broker, tool host, jailed handler and back; single calls, then 64 in flight",
    sides={"warm jail": warm, SDK: sdk, "direct pair": direct},
    metrics=[
        Metric("p50", "µs", "lower", Goal(0.26, of=SDK), native=Goal(0.20, of=SDK)),
        Metric("p99", "µs", "lower"),
        Metric("rate", "/s", "higher", Goal(3, of=SDK), against={"cacb0f6e": 1.2}),
    ],
    native=True,
)
