"""`python -m bench.page_live [--seconds N] [--rounds N]`: the page in a browser while the swarm works.

1. TELLERS turns have answers that stream, RATE events a second together, and the page shows one of these runs. For each
   piece of that run's answer: how long after the door has heard of it the browser has drawn it.
2. A swarm whose turns are asked by a client, in rounds: nobody looks, and the page is open at Now and at Runs. What is
   printed is the processor time of the kernel's processes for a turn; the door's apart.

The exit status is 1 when a bound is not kept. Not part of `make bench`: nothing else should run meanwhile.

Source: docs/decisions/176.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvloop

from bench.swarm import PATIENCE_S, Swarm, processor_time, swarm
from bench.tab import Tab, tab
from bench.turn import kernel, model_server, turns
from goondan.schemas.transport import chosen

#: Events a second that are wanted, and the turns that tell them: an agent tells of its text every 30 ms.
RATE, TELLERS = 1000, 36
PAUSE_S: Final = 0.03
#: How long after the door a piece is drawn at most, of 99 of 100 (milliseconds).
LAG_MS: Final = 100.0
#: What an open page may cost of a turn's processor time.
OPEN: Final = 0.02
#: How long after it was opened or left a page is measured (seconds).
SETTLED_S: Final = 1.0
#: Turns of one measurement, and rounds in one instance: a conversation makes its turns slower as it grows.
TURNS: Final = 30
PER_INSTANCE: Final = 3
#: The sides of a round: where the page is.
SIDES: Final = ("", "#/now", "#/runs")

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


async def cost(made: Swarm, beside: Tab, rounds: int) -> dict[tuple[str, str], list[float]]:
    """The processor time of each kind of process for a turn (milliseconds), for each side, round by round."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with made.client() as client:
        for number in range(rounds):
            instance = f"round-{number // PER_INSTANCE}"
            if number % PER_INSTANCE == 0:
                await turns(client, 3, instance)  # its agent and its jail start
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                await asyncio.to_thread(beside.open, side) if side else await asyncio.to_thread(beside.does, "shut")
                await turns(client, 2, instance)
                await asyncio.sleep(SETTLED_S)  # what a page asks once is over
                before = {**made.cpu_by_name(), "door": processor_time(beside.door)}
                await turns(client, TURNS, instance)
                for name, seconds in {**made.cpu_by_name(), "door": processor_time(beside.door)}.items():
                    found[side, name].append((seconds - before.get(name, 0.0)) / TURNS * 1000)
    return found


def main(arguments: list[str]) -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_live", description="The page while the swarm works.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the events (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of the turns (default: %(default)s)")
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
    with model_server() as base, kernel("anthropic", "process", base) as made, tab(made) as beside:
        assert beside is not None
        spent = uvloop.run(cost(made, beside, options.rounds))
    nobody = 0.0
    for side in SIDES:
        means = {name: statistics.mean(figures) for (of, name), figures in spent.items() if of == side}
        door = means.pop("door")
        nobody = nobody or sum(means.values())
        more = (sum(means.values()) - nobody) / nobody
        bad |= more > OPEN
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(means.items()) if ms >= 0.005)
        whole = sum(means.values())
        print(f"{side or 'no page'}: {whole:.2f} ms of a turn ({more:+.1%}; {parts}), and of the door {door:.2f} ms")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
