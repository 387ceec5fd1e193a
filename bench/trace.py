"""`gdn trace` beside many instances: the whole command, from its start to its last line.

The workspace holds one trace of four turns by four agents, and dormant instances. Each of these has a conversation of
one turn and its line in the index. Their files are hard links to one file, as many as a file may have.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from bench.compare import Benchmark, Goal, Metric
from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.paths import state_dir
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
from goondan.schemas.traces.turn_notes import CallDetail, ResultDetail, TurnDetail, encode_detail
from goondan.schemas.wire.spans import call_span, trace_id_of

#: How many links one file may have on every file system here.
LINKS = 1000
RUNS = 7
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec: {modelConfig: {modelRef: Model/console}}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: bench}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""


def at(ms: int) -> str:
    """A time on the first of January."""
    return f"2026-01-01T{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}.{ms % 1000:03}Z"


def put(
    index: TraceIndex, state: str, agent: str, key: str, event: str, start: int, trace: str, parent: str | None
) -> str:
    """Store a turn with one call. Returns the path of its file."""
    name = f"t{event}"
    store = ConversationStore(instance_dir(state, agent, key), durability="process")
    store.adopt(1)
    index.add(IndexRow(at(start), trace, name, event, agent, key))
    with store.write():
        store.begin_turn(event, name, 1, at(start), trace_id=trace, parent_span_id=parent, waited_ms=1)
        store.note(name, "turn.started", at(start), encode_detail(TurnDetail(trace, 1)))
        store.note(name, "tool.called", at(start + 1), encode_detail(CallDetail("a", "agents__request")))
        store.note(name, "tool.completed", at(start + 90), encode_detail(ResultDetail("a", "ok")))
        store.note(name, "turn.completed", at(start + 99))
        store.finish_turn(event, name, "completed", at(start + 99), steps=1, answer=None)
    store.close()
    return str(store.path)


def fill(state: str, instances: int) -> str:
    """Fill a workspace with so many dormant instances, and one trace among them. Returns the id of the trace."""
    file, index = "", TraceIndex(state)
    for number in range(instances):
        key = f"dormant-{number}"
        if number % LINKS == 0:
            file = put(index, state, "main", key, f"d{number}", number, trace_id_of(key), None)
            continue
        folder = instance_dir(state, "main", key)
        os.mkdir(folder, 0o700)
        os.link(file, f"{folder}/conversation.db")
        index.add(IndexRow(at(number), trace_id_of(key), f"td{number}", f"d{number}", "main", key))
    trace, parent = trace_id_of("the trace"), None
    for number, agent in enumerate(("lead", "coder", "reviewer", "tester")):
        put(index, state, agent, "default", f"x{number}", 5_000_000 + number, trace, parent)
        parent = call_span(f"tx{number}/a")
    return trace


@cache
def workspace(instances: int) -> tuple[tempfile.TemporaryDirectory[str], str]:
    """A folder with a bundle and its filled state, made once for all rounds, and the trace in it."""
    folder = tempfile.TemporaryDirectory(prefix="gt")
    bundle = Path(folder.name, "goondan.yaml")
    bundle.write_text(BUNDLE)
    os.environ["GOONDAN_STATE_ROOT"] = f"{folder.name}/state"
    state = state_dir(str(bundle))
    os.makedirs(f"{state}/instances/main", 0o700)
    return folder, fill(state, instances)


def side(instances: int, seconds: float) -> Mapping[str, float]:
    """The median of some runs of the command, each in a process of its own (milliseconds)."""
    folder, trace = workspace(instances)
    os.environ.update(GOONDAN_STATE_ROOT=f"{folder.name}/state", GOONDAN_TRUST="1")
    gdn = [
        sys.executable,
        "-I",
        "-m",
        "goondan.kernel.cli",
        "trace",
        "--bundle",
        f"{folder.name}/goondan.yaml",
        "--json",
    ]
    found: dict[str, float] = {}
    subprocess.run(gdn, capture_output=True)  # the first command closes the state to others
    for name, given, turns in (
        ("by trace", [trace], 4),
        ("by turn", ["tx0"], 4),
        ("by event", ["x3"], 1),
        ("the last", [], 4),
        ("unknown", ["t0"], 0),
    ):
        took = []
        used = _processor_ms()
        for _ in range(RUNS):
            before = time.perf_counter()
            result = subprocess.run([*gdn, *given], capture_output=True, text=True)
            took.append((time.perf_counter() - before) * 1000)
            if json.dumps(json.loads(result.stdout)).count('"turnId"') != turns:
                raise SystemExit(f"{name}: {result.stdout[:500]}{result.stderr[:500]}")
        found[name] = statistics.median(took)
        found[f"{name}, of it processor"] = (_processor_ms() - used) / RUNS
    return found


def _processor_ms() -> float:
    """The processor time of all commands so far (milliseconds)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1000


BENCHMARK = Benchmark(
    name="trace",
    what="gdn trace, the whole command, beside instances that rest",
    sides={"100,000 instances": partial(side, 100_000), "10 instances": partial(side, 10)},
    metrics=[
        metric
        for name in ("by trace", "by turn", "by event", "the last", "unknown")
        for metric in (
            Metric(name, "ms", "lower", Goal(200) if name != "unknown" else None),
            Metric(f"{name}, of it processor", "ms", "lower"),
        )
    ],
    rounds=3,
)

if __name__ == "__main__":
    print(json.dumps(side(int(sys.argv[1]), 0)))
