"""The cost of checking arguments and shaping results in a tool call: the agent's check, the host's check, and the
result's form.

The arguments and outputs are the examples of the bundled tools' manifests, each as often as any other. No handler runs
and no frame is sent. The time covers exactly the work between an agent's call and the handler, and between the
handler's value and the bus. The baseline validates the same arguments once with the jsonschema package.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
from msgspec import Raw

from bench.compare import Benchmark, Goal, Metric
from goondan.agentproc.machine.catalog import Allowed, Catalog, StepCatalog
from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import catalog_items, tool_spec
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec, ToolHostSpec
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker.worker_frames import Result
from goondan.toolhost.calls.call_inputs import Exports, arguments
from goondan.toolhost.calls.results import shape

#: How many calls are timed together. So the clock's own cost and resolution do not matter.
BATCH = 50
RECEIPT = Raw(encode_value({"jail": "j", "call": {"wallMs": 1.0}}))
#: The output for examples without one.
OUTPUT = {"stdout": "42\n", "stderr": "", "exitCode": 0, "durationMs": 3}

Step = Callable[[], object]


def ours_steps() -> Iterator[Step]:
    """A call of every example: checked by the agent, checked by the host, its result shaped."""
    tools = base_tools().values()
    items = [item for tool in tools for item in catalog_items(tool)]
    names, model = [item.name for item in items], ModelSpec(provider="embedded")
    agent = AgentSpec(name="bench", model=model, registry=items, catalog=names, state_dir="", revision="1")
    catalog = Catalog(agent).for_step()
    specs = {tool.name: tool_spec(tool) for tool in tools}
    host = Exports(ToolHostSpec(tools=list(specs.values()), state_dir="", revision="1"), dict.fromkeys(specs, "1"))
    for tool in tools:
        for export, item in zip(tool.body.exports, catalog_items(tool), strict=True):
            for example in export.examples:
                output = Raw(encode_value(example.output if example.output is not None else OUTPUT))
                result = Result(call_id="1", status="ok", output=output)
                yield one_call(catalog, host, item.name, example.input, result)


def one_call(catalog: StepCatalog, host: Exports, name: str, args: dict[str, Any], result: Result) -> Step:
    """The work of one call without the wire and the handler."""
    sent = Raw(encode_value(args))

    def call() -> object:
        allowed = catalog.check(name, args)
        entry = host.find(name, "agent")
        if entry is None or not isinstance(allowed, Allowed):
            raise SystemExit(f"{name}: {allowed}")
        arguments(entry, name, sent)
        return shape(result, RECEIPT, entry.tool)

    return call


def package_steps() -> Iterator[Step]:
    """The same arguments, validated once by the jsonschema package."""
    for tool in base_tools().values():
        for export in tool.body.exports:
            validator = jsonschema.Draft202012Validator(export.parameters or {})
            for example in export.examples:
                yield lambda validator=validator, args=example.input: validator.is_valid(args)  # type: ignore[misc]


def timed(steps: list[Step], seconds: float) -> Mapping[str, float]:
    """Microseconds of processor time a call: the median batch of each example, of these the mean and the worst."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()  # compiles
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for number, step in enumerate(steps):
            began = time.process_time()
            for _ in range(BATCH):
                step()
            times[number].append((time.process_time() - began) / BATCH)
    each = [statistics.median(one) * 1e6 for one in times]
    return {"call": statistics.fmean(each), "worst example": max(each)}


def ours(seconds: float) -> Mapping[str, float]:
    """Both checks and the shaping."""
    return timed(list(ours_steps()), seconds)


def package(seconds: float) -> Mapping[str, float]:
    """One validation by the jsonschema package."""
    return timed(list(package_steps()), seconds)


BENCHMARK = Benchmark(
    name="arguments",
    what="both argument checks of a call and the shaping of its result, without the rest; beside jsonschema, one check",
    sides={"ours": ours, "jsonschema": package},
    metrics=[Metric("call", "µs", "lower", Goal(20)), Metric("worst example", "µs", "lower")],
)
