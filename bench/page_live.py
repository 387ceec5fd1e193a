"""`python -m bench.page_live [--seconds N] [--rounds N]`: the page in a browser while the swarm works.

1. TELLERS turns have answers that stream, RATE events a second together, and the page shows one of these runs. For each
   piece of that run's answer: how long after the door has heard of it the browser has drawn it.
2. The processor time of the kernel's processes for a turn, in rounds: nobody looks; the page is open, at Now and at
   Runs; and the same page is open at the door of another swarm, which works beside in all of them. All that a browser
   costs programs that share a machine with it is in the last, and nothing that the page asks of the kernel. The kernel
   and who asks it have the first core, and browser, doors and the other swarm the others: nobody takes a core or its
   cache from the kernel. A machine may be slower for seconds, by a tenth and more. So the time is told in that of the
   client, which has the same to do for each turn, whoever looks, and is slowed alike.

The exit status is 1 when a bound is not kept. Not part of `make bench`: nothing else should run meanwhile.

Source: docs/decisions/176.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final

import uvloop

from bench.swarm import PATIENCE_S, Swarm, processor_time, swarm, tree
from bench.tab import Tab, tab
from bench.turn import CALL, kernel, model_server, one_turn, turns
from goondan.schemas.transport import chosen

#: Events a second that are wanted, and the turns that tell them: an agent tells of its text every 30 ms.
RATE, TELLERS = 1000, 36
PAUSE_S: Final = 0.03
#: How long after the door a piece is drawn at most, of 99 of 100 (milliseconds).
LAG_MS: Final = 100.0
#: What an open page may cost of a turn's processor time.
OPEN: Final = 0.02
#: Turns of one measurement. So many others come before it that what a page asks once is over; and not always as many:
#: pages ask every few seconds, and no round is to see always the same of it.
TURNS: Final = 300
SETTLED: Final = range(60, 200, 20)
#: Rounds in one instance: a conversation makes its turns slower as it grows.
PER_INSTANCE: Final = 2
#: How often the other swarm has a turn (seconds): as much is heard and listed of it as pages show.
OTHERS_S: Final = 0.05
#: The sides of a round: which view is open, if any, and whether it is the page of the other swarm.
SIDES: Final = (("", False), ("#/now", False), ("#/now", True), ("#/runs", False), ("#/runs", True))
CORES: Final = sorted(os.sched_getaffinity(0))

BUNDLE: Final = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: teller}
spec: {provider: openai, model: bench, endpoint: "ENDPOINT", apiKey: {value: bench-key}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec: {modelConfig: {modelRef: Model/teller}}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}], policy: {durability: process, maxLiveAgents: 64}}
"""
#: Notes for each event of the watched run when it came and when it was drawn: its text stands in the page then.
WATCH: Final = """
(async () => {
  const { on } = await import("./live.js");
  const drawn = globalThis.drawn = { lags: [], events: 0, began: Date.now() };
  on((events) => {
    drawn.events += events?.length ?? 0;
    const own = events?.filter((one) => one.kind === "text" && location.hash.endsWith(one.eventId)).at(-1);
    if (own) wait(own, 0);
  });
  const wait = (event, times) => requestAnimationFrame(() => {
    const words = event.text.trim().split(" ").at(-1);
    const shown = [...document.querySelectorAll(".rows .row")].some((row) => row.textContent.includes(words));
    if (!shown && times < 120) return wait(event, times + 1);
    const channel = new MessageChannel(); // behind the paint of this frame
    channel.port1.onmessage = () => drawn.lags.push(shown ? Date.now() - event.at : Infinity);
    channel.port2.postMessage(0);
  });
})()
"""


async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request of a model with words that all differ, until the reader goes."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(one.split(b":")[1]) for one in head.split(b"\r\n") if one.lower().startswith(b"content-length"))
    await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    number = 0
    try:
        while True:
            number += 1
            delta = {"content": f"some words and {number:06d} "}
            chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
    except OSError:
        writer.close()


@contextmanager
def tellers() -> Iterator[str]:
    """A model server whose answers do not end; its base URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(_tell, "127.0.0.1", 0), loop).result()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def lags(beside: Tab, seconds: float) -> tuple[float, list[float]]:
    """Events a second that the page heard of, and the lags of the watched run's pieces (milliseconds)."""
    said = {"text": "tell", "agent": "main", "timeoutS": PATIENCE_S}
    for number in range(TELLERS):
        threading.Thread(target=beside.site.ask, args=("/api/v1/messages", {**said, "instance": f"i{number}"})).start()
    until = time.monotonic() + PATIENCE_S
    while len(turns := beside.site.ask("/api/v1/waits")["turns"]) < TELLERS:
        if time.monotonic() > until:
            raise SystemExit("the turns do not run")
        time.sleep(0.2)
    beside.open(f"#/run/{turns[0]['eventId']}")
    time.sleep(2)
    beside.does("evaluate", WATCH)
    time.sleep(seconds)
    drawn = beside.does("evaluate", "({ ...drawn, lags: drawn.lags.map(String), took: Date.now() - drawn.began })")
    beside.does("shut")
    for turn in turns:
        beside.site.ask(f"/api/v1/messages/{turn['eventId']}/cancel", {})
    return drawn["events"] / drawn["took"] * 1000, [float(one.replace("Infinity", "inf")) for one in drawn["lags"]]


#: Processor time of a side (milliseconds): "kernel" and "client" of a turn, "doors" and "browser" of a second. The
#: kernel's are told together: what an agent that has ended took is its parent's.
Spent = dict[str, float]
#: A view, and whether it was the other swarm's.
Side = tuple[str, bool]


async def cost(made: Swarm, other: Swarm, beside: Tab, there: Any, rounds: int) -> dict[Side, list[Spent]]:
    """What all sides have used, round by round. `there` is the other swarm's site."""
    found: dict[Side, list[Spent]] = defaultdict(list)

    def used() -> Spent:
        browser = sum(map(processor_time, tree(beside.driver)))
        doors = processor_time(beside.door) + processor_time(there.pid)
        told = {"kernel": made.cpu(), "client": time.thread_time(), "doors": doors, "browser": browser}
        return told | {"clock": time.monotonic()}

    async def works() -> None:
        async with other.client() as client:
            for number in count():
                await one_turn(client, f"other-{number // 500}", f"call {CALL}")
                if over.wait(OTHERS_S):
                    return

    over = threading.Event()
    async with made.client() as client:
        working = asyncio.ensure_future(asyncio.to_thread(uvloop.run, works()))
        for number in range(rounds):
            # Each side has its own: they are of one length. Their agents and jails start before all sides.
            instances = {side: f"{number // PER_INSTANCE}-{at}" for at, side in enumerate(SIDES)}
            for instance in instances.values() if number % PER_INSTANCE == 0 else ():
                await turns(client, 3, instance)
            place({*other.processes(), *tree(beside.driver), beside.door, there.pid}, made)
            for side in random.Random(number).sample(SIDES, len(SIDES)):
                (view, is_other), instance = side, instances[side]
                show = partial(beside.open, view, there if is_other else None)
                await asyncio.to_thread(show if view else partial(beside.does, "shut"))
                await turns(client, SETTLED[number % len(SETTLED)], instance)
                before = used()
                await turns(client, TURNS, instance)
                after = used()
                per = dict.fromkeys(after, after["clock"] - before["clock"]) | {"kernel": TURNS, "client": TURNS}
                found[side].append({name: (after[name] - before[name]) * 1000 / per[name] for name in after})
                if working.done():
                    await working  # it has failed
        over.set()
        await working
    return found


def place(others: set[int], made: Swarm) -> None:
    """Give these processes the cores but the first, and that one to the swarm and what this program has started."""
    for pid in {*tree(os.getpid()), *made.processes(), *others}:
        cores = (CORES[1:] or CORES) if pid in others else CORES[:1]
        with suppress(OSError):  # it has just ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cores)


def told(found: dict[Side, list[Spent]]) -> bool:
    """Print it. Whether the bound is kept."""
    for (view, is_other), rounds in found.items():
        told = (statistics.mean(one[name] for one in rounds) for name in ("kernel", "client", "doors", "browser"))
        where = f"{view}{' of the other swarm' * is_other}" if view else "no page"
        print(
            "{}: kernel {:.2f} and client {:.2f} ms of a turn; doors {:.0f} and browser {:.0f} of a second".format(
                where, *told
            )
        )
    kept = True
    for (view, is_other), rounds in found.items():
        for beside, words in (("", False), "no page"), ((view, True), "that of the other swarm"):
            if is_other or not view:
                continue
            pairs = [[at["kernel"] / at["client"] for at in both] for both in zip(rounds, found[beside], strict=True)]
            more = [one / two - 1 for one, two in pairs]
            low, middle, high = statistics.quantiles([*more, *more], n=4)
            # The error of a median, as far as the quartiles are those of a normal distribution.
            error = 0.93 * (high - low) / len(more) ** 0.5
            half = f"half of the rounds {low:+.1%} to {high:+.1%}"
            print(f"{view} against {words}: {middle:+.1%}, known to {error:.1%}; {half}")
            kept &= middle <= OPEN
    return kept


def main(arguments: list[str]) -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_live", description="The page while the swarm works.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the events (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of the turns (default: %(default)s)")
    options = parser.parse_args(arguments)
    bad = False
    with tellers() as base, swarm(live=64, bundle=BUNDLE.replace("ENDPOINT", base)) as made:
        made.start()
        with tab(made) as beside:
            if beside is None:
                return 1
            rate, found = lags(beside, options.seconds)
    if not found:
        raise SystemExit("the page has shown nothing of the run")
    late = sorted(found)[int(0.99 * (len(found) - 1))]
    bad |= late > LAG_MS or rate < RATE
    print(f"{chosen()}: {rate:,.0f} events a second; {len(found):,} pieces drawn, half of them after", end=" ")
    print(f"{statistics.median(found):.0f} ms, 99 of 100 after {late:.0f} ms, all after {max(found):.0f} ms")
    with model_server() as base, ExitStack() as both:
        made = both.enter_context(kernel("anthropic", "process", base))
        beside = both.enter_context(tab(made))
        assert beside is not None
        other = both.enter_context(kernel("anthropic", "process", base))
        there = both.enter_context(beside.beside(other))
        bad |= not told(uvloop.run(cost(made, other, beside, there, options.rounds)))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
