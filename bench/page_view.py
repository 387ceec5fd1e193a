"""`python -m bench.page_view [--rounds N]`: how long a person waits until the page has drawn, in a real browser.

A workspace is filled by what agents write with: a run of 1,000 spans, one of 50,000, and 100,000 runs in the list.
Each figure is the median of ten. The exit status is 1 when a bound is not kept. Not part of `make bench`: nothing else
should run meanwhile.

Source: docs/decisions/176.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from msgspec import structs

from bench.tab import Tab, tab
from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.paths import state_dir
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
from goondan.schemas.traces.turn_notes import (
    CallDetail,
    ModelDetail,
    ResultDetail,
    TryDetail,
    TurnDetail,
    encode_detail,
    encode_receipt,
)
from goondan.schemas.wire.spans import call_span, trace_id_of
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt

RUNS: Final = 100_000
#: Spans of the two runs.
SMALL: Final = 1000
LARGE: Final = 50_000
#: Turns of one instance in the list: an instance keeps its last 50,000 notes.
OF_INSTANCE: Final = 10_000
#: Steps of a turn of a run with many spans: a step, its model and its call are three spans.
STEPS: Final = 100
BUNDLE: Final = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: lead}
spec: {modelConfig: {modelRef: Model/console}}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: coder}
spec: {modelConfig: {modelRef: Model/console}}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec: {entryAgent: Agent/lead, agents: [{ref: Agent/lead}, {ref: Agent/coder}]}
"""
RECEIPT: Final = encode_receipt(
    Receipt(
        jail=JailReceipt(tier="full", walls=["namespaces"], limits={}, cpu_ms=3, peak_memory_kb=9000),
        call=CallReceipt(wall_ms=30.0),
    )
)


def at(ms: int) -> str:
    """A time on the first days of November 2026."""
    day, rest = divmod(ms, 86_400_000)
    hour, rest = divmod(rest, 3_600_000)
    return f"2026-11-{day + 1:02}T{hour:02}:{rest // 60_000:02}:{rest // 1000 % 60:02}.{rest % 1000:03}Z"


class Writer:
    """Writes turns as agents do."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.index = TraceIndex(state)
        self.clock = 0

    def store(self, agent: str, key: str) -> ConversationStore:
        """The conversation of an instance."""
        folder = instance_dir(self.state, agent, key)
        os.makedirs(folder, 0o700, exist_ok=True)
        store = ConversationStore(folder, durability="process")
        store.adopt(1)
        return store

    def begin(self, store: ConversationStore, agent: str, key: str, name: str, trace: str, parent: str | None) -> str:
        """Begin a turn. Returns its id."""
        turn = f"t-{name}"
        self.index.add(IndexRow(at(self.clock), trace, turn, name, agent, key))
        store.begin_turn(name, turn, 1, at(self.clock), trace_id=trace, parent_span_id=parent, waited_ms=7)
        self.note(store, turn, "turn.started", 2, TurnDetail(trace, 7, False, 2))
        return turn

    def note(self, store: ConversationStore, turn: str, kind: Any, ms: int, detail: Any = None) -> None:
        """Write a note `ms` later than the one before."""
        self.clock += ms
        text = str(detail) if isinstance(detail, int) else None if detail is None else encode_detail(detail)
        store.note(turn, kind, at(self.clock), text)

    def steps(self, store: ConversationStore, turn: str, count: int) -> str:
        """Steps with a model call and a tool call each. Returns the id of the last call."""
        call = ""
        for step in range(1, count + 1):
            call = f"call_{step}"
            tries = [TryDetail("the server said 529", 40)] if step % 20 == 0 else []
            model = ModelDetail(step=step, model="vendor/large", input_tokens=900, output_tokens=70, money=3_000_000)
            args = '{"path":"a.txt","text":"' + "x" * 120 + '"}'
            self.note(store, turn, "step.started", 1, step)
            self.note(store, turn, "model.answered", 200, _with(model, tries))
            self.note(store, turn, "tool.called", 1, CallDetail(call, "files__write", args=args))
            self.note(store, turn, "tool.completed", 45, ResultDetail(call, "ok", receipt=RECEIPT, output=args))
            self.note(store, turn, "step.completed", 1, step)
        return call

    def end(self, store: ConversationStore, name: str, turn: str) -> None:
        """End it."""
        self.note(store, turn, "turn.completed", 1)
        store.finish_turn(name, turn, "completed", at(self.clock), steps=STEPS, answer=None)

    def run(self, name: str, spans: int) -> str:
        """A run of about so many spans: one agent asks another one, turn after turn. Returns its trace."""
        trace, parent = trace_id_of(name), None
        made = number = 0
        while made < spans:
            agent, event = ("lead", "coder")[number % 2], f"{name}-{number}"
            store = self.store(agent, f"{name}-{number // 100}")
            steps = min(STEPS, max(1, (spans - made) // 3))
            with store.write(final=True):
                turn = self.begin(store, agent, f"{name}-{number // 100}", event, trace, parent)
                call = self.steps(store, turn, steps)
                self.end(store, event, turn)
            store.close()
            parent = parent or call_span(f"{turn}/{call}")
            made, number, self.clock = made + 3 * steps + 1, number + 1, self.clock + 90_000
        return trace

    def list(self, count: int) -> None:
        """So many runs of one turn each."""
        for first in range(0, count, OF_INSTANCE):
            key = f"many-{first}"
            store = self.store("lead", key)
            for number in range(first, min(count, first + OF_INSTANCE)):
                name = f"many-{number}"
                with store.write(final=True):
                    turn = self.begin(store, "lead", key, name, trace_id_of(name), None)
                    self.end(store, name, turn)
            store.close()


def _with(model: ModelDetail, tries: list[TryDetail]) -> ModelDetail:
    more = {"attempts": 1 + len(tries), "paused_ms": 40 * len(tries), "currency": "USD"}
    return structs.replace(model, tries=tries, **more)


#: What the scripts share: `drawn` is the time until a thing is in the page and painted (milliseconds).
_TOOLS: Final = """
const frame = () => new Promise((done) => requestAnimationFrame(() => {
  const channel = new MessageChannel(); // behind the paint of this frame
  channel.port1.onmessage = done;
  channel.port2.postMessage(0);
}));
const drawn = async (act, there) => {
  const began = performance.now();
  act();
  while (!there()) await new Promise(requestAnimationFrame);
  await frame();
  return performance.now() - began;
};
const box = () => document.querySelector(".rows");
const go = (hash, selector) => drawn(() => { location.hash = hash; }, () => document.querySelector(selector));
"""
#: When the largest thing of the first view was painted (milliseconds).
_LARGEST: Final = """
return new Promise((done) => new PerformanceObserver((seen) => done(seen.getEntries().at(-1).startTime))
  .observe({ type: "largest-contentful-paint", buffered: true }));
"""
_SCROLL: Final = """
const took = [];
for (let at = 1; at <= 10; at++) {
  took.push(await drawn(() => { box().scrollTop = (box().scrollHeight * at) / 11; }, () => true));
  await new Promise((done) => setTimeout(done, 50));
}
return took;
"""
_FILTER: Final = """
const took = [], input = document.querySelector(".run-tools input");
for (const words of ["529", "coder", "call_77", "step 12", "files xxx", "no such", "write", "x", "large", ""]) {
  const type = () => { input.value = words; input.dispatchEvent(new Event("input", { bubbles: true })); };
  took.push(await drawn(type, () => true));
}
return took;
"""


def measured(page: Tab, small: str, large: str, rounds: int) -> list[tuple[str, list[float], float | None]]:
    """Each figure: its name, its times, and its bound (milliseconds). None: it has none."""

    def does(script: str) -> Any:
        return page.does("evaluate", f"(async () => {{ {_TOOLS} {script} }})()")

    paint, view, first, runs = [], [], [], []
    for _ in range(rounds):
        page.does("shut")
        page.open()
        paint.append(does('return performance.getEntriesByName("first-contentful-paint")[0].startTime'))
        view.append(does(_LARGEST))
        first.append(does(f'return go("#/run/{small}", ".run-span")'))
        runs.append(does('return go("#/runs", ".run-line b")'))
    listed = does(_SCROLL)
    whole = does(f'return go("#/run/{large}", ".run-span")')
    scrolled, filtered = does(_SCROLL), does(_FILTER)
    return [
        ("first paint", paint, 150.0),
        ("its first view, with a code and its requests", view, None),
        (f"a run of {SMALL:,} spans, with its request", first, 400.0),
        (f"{RUNS:,} runs, with their request", runs, None),
        (f"{RUNS:,} runs, a jump in the list", listed, 100.0),
        (f"a run of {LARGE:,} spans, with its request", [whole], None),
        (f"{LARGE:,} spans, a jump in the rows", scrolled, 100.0),
        (f"{LARGE:,} spans, a word is searched", filtered, 100.0),
    ]


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_view", description="How quick the page draws.")
    parser.add_argument("--rounds", type=int, default=10, help="how often each is measured (default: %(default)s)")
    options = parser.parse_args(arguments)
    missed = False
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        os.environ.update(GOONDAN_STATE_ROOT=f"{folder}/state", GOONDAN_TRUST="1")
        bundle = Path(folder, "goondan.yaml")
        bundle.write_text(BUNDLE)
        state = state_dir(str(bundle))
        os.umask(0o077)
        os.makedirs(f"{state}/instances")
        writer = Writer(state)
        writer.list(RUNS)
        small, large = writer.run("small", SMALL), writer.run("large", LARGE)
        with tab(cast(Any, SimpleNamespace(bundle=bundle))) as page:
            if page is None:
                return 1
            for name, times, bound in measured(page, small, large, options.rounds):
                middle = statistics.median(times)
                missed |= bound is not None and middle > bound
                told = f"{middle:8.0f} ms  ({min(times):.0f} to {max(times):.0f})"
                print(f"{name:48}{told}{'' if bound is None else f', at most {bound:.0f}'}", flush=True)
            page.end()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
