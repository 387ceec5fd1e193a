"""`python -m bench.soak [--minutes N]`: a swarm under mixed load and kills for half an hour, then three times too much.

First its capacity: LANES ask one after the other for a while. Then messages come at SHARE of that rate, whatever the
answers do: turns, many calls, requests between agents, MCP, pending work and pictures, through an agent with an
extension around each step and call; a hundred kills in half an hour. In the first third all kinds of processes are
killed, then only agents and workers: what must be flat is judged there, since a program that is killed every two
minutes cannot show that it keeps something. All the while the page is open in a browser, where one can be had, and goes
from view to view; its memory must be flat, too. Then three times the capacity for a fifteenth of the time. What it came
to is judged (bench/steady.py): the exit status is 1 when a bound is not kept. `--record` keeps it in results.json for
the page and its plot.

A conversation has GENERATION messages and is followed by another, so that turns do not get longer for their history.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import page, records, steady
from bench.agent import private_mib
from bench.compare import machine
from bench.swarm import Swarm, swarm
from bench.tab import Tab, tab
from bench.turn import CALL, TOOLS, model_server
from goondan.schemas.transport import chosen
from goondan_client.client import Client
from goondan_client.errors import GoondanError
from goondan_client.frames import AgentEvent, Frame, opened
from goondan_client.machine import Effect, Machine

#: Who asks at the same time while the capacity is measured, and the part of it that the load is.
LANES, SHARE, TOO_MUCH = 12, 0.7, 3.0
#: Messages of one conversation.
GENERATION: Final = 20
#: Kills of a whole soak, and its length (minutes).
KILLS, MINUTES = 100, 30.0
#: How long the capacity is measured, after a time that does not count (seconds).
CAPACITY_S, WARM_S = 15.0, 5.0
#: The part of a soak in which everything is killed.
KILLS_OF_ALL: Final = 1 / 3
#: How often processes are looked at (seconds), and how many windows the times are in.
LOOK_S, WINDOWS = 4.0, 30
#: How long the page shows a view before its memory is looked at (seconds), and the views.
VIEW_S, VIEWS = 15.0, ("#/runs", "#/cost", "#/inbox", "#/talk")
#: The messages that may be open in the kernel, and how many this program has waiting at most.
OPEN, WAITING = 512, 4096
#: An answer that takes longer is none (seconds).
PATIENCE_S: Final = 120.0
#: What is killed, in turns: first all of these, then the first two. Anything in a jail has another name.
KILLED: Final = ("gdn-agent", "worker", "gdn-toolhost", "gdn-agent", "gdn-broker", "worker", "gdn-forksrv")
LATER: Final = KILLED[:2]
PICTURE_BYTES: Final = 64 << 10

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: loopback}
spec: {provider: anthropic, model: bench, endpoint: "ENDPOINT", apiKey: {value: bench-key}}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: echo}
spec:
  entry: ./tools/echo/echo.py
  exports:
    - {name: same, description: Give the arguments back., parameters: {type: object}, idempotent: true}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: slow}
spec:
  entry: ./tools/slow/slow.py
  exports:
    - {name: later, description: Takes a while., parameters: {type: object}}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: layers}
spec: {entry: ./layers.py}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-server}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {type: stdio, command: [PYTHON, "-I", ./mcp/mcp_server.py]}
    attach: {mode: stateful, scope: instance}
    expose: {tools: true}
    sandbox: {filesystem: {read: [READ]}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/loopback}
  prompt: {system: Be brief.}
  tools: [Tool/echo, Tool/slow, Tool/agents]
  extensions: [Extension/layers]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: server}
spec:
  modelConfig: {modelRef: Model/loopback}
  extensions: [Extension/layers, Extension/mcp-server]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: soak}
spec:
  entryAgent: Agent/main
  agents: [{ref: Agent/main}, {ref: Agent/server}]
  policy: {durability: process, maxLiveAgents: 48, agentIdleSeconds: 10, maxOpenEvents: OPEN}
"""
SLOW = """\
import asyncio
from goondan_tool import Pending

async def later(ctx, input):
    async def work():
        await asyncio.sleep(0.2)
        return "later"
    return Pending(f"job-{ctx.tool_call_id}".replace("_", "-").lower()[:60], work())

handlers = {"later": later}
"""
LAYERS = """\
def register(api):
    async def layer(ctx):
        return await ctx.next()

    api.pipeline.register("step", layer)
    api.pipeline.register("toolCall", layer)
"""


@dataclass(frozen=True)
class Kind:
    """One kind of work: the agent that is asked, and what."""

    agent: str
    text: str
    #: How often it comes among the others.
    weight: int
    picture: bool = False
    #: Conversations at a time, and messages of each. A server of MCP is a program for one conversation.
    lanes: int = 4
    generation: int = GENERATION


ASK: Final = json.dumps({"target": "main", "instanceKey": "asked", "input": "x"})
KINDS: Final = {
    "turn": Kind("main", f"call {CALL}", 6, lanes=8),
    "calls": Kind("main", f"callN 8 {CALL}", 2),
    "request": Kind("main", f"call agents__request {ASK}", 2),
    "mcp": Kind("server", 'call server__same {"text": "x"}', 2, generation=20 * GENERATION),
    "pending": Kind("main", "call slow__later {}", 1),
    "picture": Kind("main", "look", 1, picture=True),
}


class Seen(Machine):
    """A client's machine that notes what the broker says of events."""

    def __init__(self) -> None:
        super().__init__(os.urandom(6).hex(), os.getpid())
        self.phase = "closed"
        self.accepted: set[str] = set()
        #: The turns that answered an event.
        self.turns: dict[str, set[str]] = defaultdict(set)
        self.overloaded = 0

    def receive(self, frame: Frame, now: float) -> Effect | None:
        """See Machine."""
        entry = self._outbox.get(frame.in_reply_to or "")
        if frame.type == "error" and b"E_OVERLOADED" in bytes(frame.payload):
            self.overloaded += 1
        elif frame.type == "ack" and entry is not None and entry.frame["type"] == "event":
            self.accepted.add(entry.frame["eventId"])
        effect = super().receive(frame, now)
        if frame.type == "event" and frame.event_id:
            event = opened(frame.payload, AgentEvent)
            if event.answer is not None:
                self.turns[frame.event_id.removesuffix(":answer")].add(event.answer.turn_id)
        return effect


@dataclass
class Load:
    """Messages, and what came of them."""

    client: Client
    seen: Seen
    picture: Path
    #: When each answer came that went well (seconds since the start), and how long it took (milliseconds).
    times: list[tuple[float, float]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    begun: float = field(default_factory=time.perf_counter)
    _counts: Counter[str] = field(default_factory=Counter)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def kinds(self, chance: random.Random) -> Iterator[str]:
        """Kinds of work, for ever."""
        names = [name for name, kind in KINDS.items() for _ in range(kind.weight)]
        while True:
            chance.shuffle(names)
            yield from names

    async def one(self, name: str, lane: int, event_id: str | None = None) -> None:
        """One message and its answer."""
        kind = KINDS[name]
        lane %= kind.lanes
        self._counts[f"{name}-{lane}"] += 1
        instance = f"{name}-{lane}-{self._counts[f'{name}-{lane}'] // kind.generation}"
        text = kind.text.replace('"asked"', f'"asked-{lane}-{self._counts["request-" + str(lane)] // GENERATION}"')
        files = [self.picture] if kind.picture else []
        at = time.perf_counter()
        try:
            await self.client.ask(
                kind.agent, text, instance=instance, files=files, deadline=PATIENCE_S, event_id=event_id or self.name()
            )
            now = time.perf_counter()
            self.times.append((now - self.begun, (now - at) * 1000))
        except GoondanError as error:
            self.failed[error.code] += 1

    def name(self) -> str:
        """The id of the next message."""
        return f"soak-{next(self._ids)}"

    @property
    def open(self) -> int:
        """Accepted, and not answered yet."""
        return len(self.seen.accepted) - sum(event in self.seen.accepted for event in self.seen.turns)


async def capacity(load: Load) -> float:
    """Answers a second when LANES ask one after the other."""
    for name, kind in KINDS.items():  # its agents, jails and servers are there then
        await asyncio.gather(*(load.one(name, lane) for lane in range(kind.lanes)))
    kinds, begun = load.kinds(random.Random(1)), time.perf_counter()
    until = begun + WARM_S + CAPACITY_S

    async def keep_asking(lane: int) -> None:
        while time.perf_counter() < until:
            await load.one(next(kinds), lane)

    await asyncio.gather(*(keep_asking(lane) for lane in range(LANES)))
    first = begun - load.begun + WARM_S
    return sum(first <= at <= first + CAPACITY_S for at, _ in load.times) / CAPACITY_S


async def offered(
    load: Load, rate: float, seconds: float
) -> tuple[set[asyncio.Task[None]], dict[asyncio.Task[None], str]]:
    """Messages at this rate for so long. Returns the tasks that are not done yet, and the event of each."""
    kinds, lanes = load.kinds(random.Random(2)), itertools.cycle(range(LANES))
    tasks: set[asyncio.Task[None]] = set()
    events: dict[asyncio.Task[None], str] = {}
    begun = time.perf_counter()
    for number in itertools.count():
        due = number / rate
        if due >= seconds:
            return tasks, events
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        if len(tasks) < WAITING:
            event = load.name()
            task = asyncio.ensure_future(load.one(next(kinds), next(lanes), event))
            tasks.add(task)
            events[task] = event
            task.add_done_callback(tasks.discard)
    raise AssertionError


@dataclass
class Watch:
    """What the kernel's processes have, over time."""

    made: Swarm
    begun: float
    minutes: list[float] = field(default_factory=list)
    memory: dict[str, list[float | None]] = field(default_factory=dict)
    descriptors: dict[str, list[float | None]] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)

    async def looking(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """One look: of each kind of process, the one that has most."""
        memory: dict[str, float] = defaultdict(float)
        descriptors: dict[str, float] = defaultdict(float)
        for pid, name in self.made.processes().items():
            kind = kind_of(name)
            with suppress(OSError):
                descriptors[kind] = max(descriptors[kind], len(os.listdir(f"/proc/{pid}/fd")))
                memory[kind] = max(memory[kind], private_mib(pid))
        for known, found in ((self.memory, memory), (self.descriptors, descriptors)):
            for kind in sorted({*known, *found}):
                values = known.setdefault(kind, [None] * len(self.minutes))
                values.append(round(found[kind], 1) if found.get(kind) else None)
        self.minutes.append(round((time.perf_counter() - self.begun) / 60, 3))

    async def killing(self, count: int, seconds: float) -> None:
        """So many kills, each of another kind of process, at equal times."""
        chance = random.Random(3)
        for number in range(count):
            await asyncio.sleep(seconds / (count + 1))
            kinds = KILLED if number < count * KILLS_OF_ALL else LATER
            wanted = kinds[number % len(kinds)]
            pids = [pid for pid, name in self.made.processes().items() if kind_of(name) == wanted]
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    self.kills.append(round((time.perf_counter() - self.begun) / 60, 3))


async def viewing(beside: Tab, memory: dict[str, list[float | None]]) -> None:
    """Go from view to view until cancelled, and note the memory of the page at the first one, and of its door (MiB)."""
    await asyncio.to_thread(beside.open)
    for view in itertools.cycle(VIEWS):
        await asyncio.to_thread(beside.does, "go", view)
        await asyncio.sleep(VIEW_S)
        await asyncio.to_thread(beside.does, "go", "#/now")
        memory["the page in a browser"].append(await asyncio.to_thread(beside.does, "heap"))
        memory["its door"].append(private_mib(beside.door))


def kind_of(name: str) -> str:
    """The kind of a process with that name."""
    return name if name.startswith("gdn-") else "worker"


@contextmanager
def laid_out(base: str) -> Iterator[Swarm]:
    """The swarm with its files; not started yet."""
    read = ", ".join(json.dumps(str(place)) for place in sorted({sys.prefix, sys.base_prefix}))
    text = BUNDLE.replace("ENDPOINT", base).replace("PYTHON", json.dumps(sys.executable)).replace("READ", read)
    with swarm(bundle=text.replace("OPEN", str(OPEN))) as made:
        folder = made.bundle.parent
        shutil.copytree(TOOLS, folder / "tools")
        for name in ("mcp", "tools/slow"):
            (folder / name).mkdir()
        shutil.copy(Path(__file__).with_name("mcp_server.py"), folder / "mcp")
        (folder / "tools/slow/slow.py").write_text(SLOW)
        (folder / "layers.py").write_text(LAYERS)
        yield made


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> Any:
    """Something that goes on within the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def soaked(made: Swarm, beside: Tab | None, minutes: float, folder: Path) -> dict[str, Any]:
    """All of it; what results.json keeps."""
    seen_by_page: dict[str, list[float | None]] = defaultdict(list)
    picture = folder / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(PICTURE_BYTES))
    client, seen = made.client(), Seen()
    client._link.machine = seen  # the rules of a client, watched
    async with client:
        load = Load(client, seen, picture)
        most = await capacity(load)
        print(f"capacity {most:.0f} messages a second", flush=True)
        load.times.clear()
        load.failed.clear()
        load.begun = time.perf_counter()
        watch = Watch(made, load.begun)
        seconds = minutes * 60
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(background(watch.looking()))
            if beside is not None:
                await stack.enter_async_context(background(viewing(beside, seen_by_page)))
            async with background(watch.killing(max(4, round(KILLS * minutes / MINUTES)), seconds)):
                left, _ = await offered(load, SHARE * most, seconds)
                await asyncio.gather(*left)
            steady_times, failed, overloaded = list(load.times), Counter(load.failed), seen.overloaded
            looks = len(watch.minutes)
            print(f"{len(steady_times):,} answers under load, {len(watch.kills)} kills", flush=True)
            begun = time.perf_counter() - load.begun
            peak, took = await too_much(load, TOO_MUCH * most, seconds / 15)
            await asyncio.sleep(LOOK_S)
        span = [round(begun / 60, 3), round((begun + seconds / 15) / 60, 3)]
        p99 = windows(load.times, watch.minutes[-1])
        calm = windows(steady_times, minutes, max(9, min(WINDOWS, len(steady_times) // 100)))
    judged = slice(round(looks * KILLS_OF_ALL), looks)
    memory, descriptors = (
        {kind: values[judged] for kind, values in known.items()} for known in (watch.memory, watch.descriptors)
    )
    verdicts = [
        *steady.all_flat("memory", "MiB", {**memory, **seen_by_page}, steady.MEMORY_MARGIN),
        *steady.all_flat("descriptors", "", descriptors, steady.DESCRIPTORS_MARGIN),
        steady.stable(calm[round(len(calm) * KILLS_OF_ALL) :]),
        steady.few_failed(failed, len(steady_times)),
        steady.once(seen.accepted, seen.turns),
        steady.refused(seen.overloaded - overloaded),
        steady.bounded(peak, OPEN),
        steady.back(took),
    ]
    at = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"at": at, "machine": machine(), "transport": chosen(), "minutes": minutes, "capacity": round(most, 1)}
    curves = {"minutes": watch.minutes, "memory": watch.memory, "descriptors": watch.descriptors}
    plot = {**curves, "p99": p99, "kills": watch.kills, "overload": span}
    return {**facts, "kills": len(watch.kills), "verdicts": [asdict(each) for each in verdicts], "plot": plot}


async def too_much(load: Load, rate: float, seconds: float) -> tuple[int, float]:
    """Offer more than there is room for. Returns the most messages that were open, and how long after the last was
    offered all accepted ones were answered (seconds). What was not accepted by then is given up.
    """
    peak = 0

    async def counting() -> None:
        nonlocal peak
        while True:
            peak = max(peak, load.open)
            await asyncio.sleep(0.5)

    async with background(counting()):
        left, events = await offered(load, rate, seconds)
        ended = time.perf_counter()
        for task in list(left):
            if events[task] not in load.seen.accepted:
                task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        while load.open and time.perf_counter() - ended < PATIENCE_S:
            await asyncio.sleep(0.1)
        await load.one("turn", 0)
    return peak, time.perf_counter() - ended


def windows(times: list[tuple[float, float]], minutes: float, count: int = WINDOWS) -> list[float | None]:
    """The p99 of each window (milliseconds); None where there are too few answers for one."""
    parts: list[list[float]] = [[] for _ in range(count)]
    for at, took in times:
        parts[min(count - 1, int(at / 60 / minutes * count))].append(took)
    return [round(statistics.quantiles(part, n=100)[98], 1) if len(part) >= 20 else None for part in parts]


def main(arguments: list[str]) -> int:
    """Run, say what it came to, and keep it if that is wanted. Returns 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="A swarm under load and kills.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the mixed load (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="also write what it came to into this file")
    parser.add_argument("--record", action="store_true", help="keep it in bench/results.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder, model_server() as base, laid_out(base) as made:
        made.start()
        with tab(made) as beside:
            found = uvloop.run(soaked(made, beside, options.minutes, Path(folder)))
    for each in found["verdicts"]:
        print(f"{'kept  ' if each['kept'] else 'BROKEN'} {each['what']}: {each['measured']} ({each['bound']})")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
    if options.record:
        records.write({**records.read(), "soak": found})
        page.main([])
    return 0 if all(each["kept"] for each in found["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
