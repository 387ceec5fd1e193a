"""`/metrics`: numbers of the swarm for Prometheus, at most a second old. A look costs the broker two questions, however
many ask. An agent is shown to those who may speak to it.

Source: docs/decisions/175; PROTOCOL-OPERATORS.md; the exposition format of Prometheus.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

from starlette.responses import Response

from goondan.kernel.cli.operations import Asked, Operation, Swarm
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.supervisor_client import ask_supervisor, memory_of
from goondan.kernel.traces.used import UsedSoFar
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.usage import NANO

#: How long an answer is given again, and how long a supervisor may take (seconds).
FRESH_S: Final = 1.0
ANSWER_S: Final = 2.0
#: Series of one metric; the rest is one more, called REST, which is no name of an agent. Characters of a label.
MAX_SERIES: Final = 500
REST: Final = "(other)"
MAX_LABEL: Final = 100
#: Each metric: what it counts, and its labels. Those that end in `_total` only grow.
METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    "up": ("Whether the kernel answers.",),
    "broker_events_total": ("What the broker has counted since it started.", "name"),
    "broker_size": ("What the broker holds now.", "name"),
    "connections": ("Programs that are connected.", "class"),
    "places": ("Places for turns.", "state"),
    "waits": ("Turns and messages that wait.", "kind"),
    "process_memory_bytes": ("Resident memory of processes.", "role", "agent"),
    "process_restarts_total": ("Restarts of processes.", "role", "agent"),
    "model_calls_total": ("Model calls that have ended.", "agent", "model"),
    "model_tokens_total": ("Tokens that models have used.", "agent", "model", "kind"),
    "model_cost_total": ("What models have cost.", "agent", "model", "currency"),
}
#: What `stats` has beside its tables.
SIZES: Final = {"instances", "events", "mailboxBytes", "openCalls", "openEvents"}
#: A metric, the labels of one of its series, and what is added to it.
Row = tuple[str, tuple[str, ...], float]


def routes(swarm: Swarm) -> list[Operation]:
    """Its one way."""
    return [Operation("getMetrics", "GET", "", "look", "Numbers.", _Numbers(swarm).tell, prefix="/metrics")]


class _Numbers:
    """What was seen last."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm, self._used, self._looking = swarm, UsedSoFar(swarm.state_dir), asyncio.Lock()
        self._seen: dict[str, dict[tuple[str, ...], float]] = {}
        self._at = -FRESH_S

    async def tell(self, asked: Asked[Swarm]) -> Response:
        """Answer a scrape. Raises GoondanError E_USAGE without the package."""
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, core, generate_latest
        except ImportError:
            raise fail("E_USAGE", "this needs a package", suggestion="Install goondan-kernel[telemetry].") from None
        async with self._looking:
            if time.monotonic() - self._at >= FRESH_S:
                await self._look()
        found = [*ProcessCollector(registry=None).collect()]
        for name, (text, *labels) in METRICS.items():
            kind = core.CounterMetricFamily if name.endswith("_total") else core.GaugeMetricFamily
            family = kind(f"goondan_{name}", text, labels=labels)
            at = labels.index("agent") if "agent" in labels else -1
            for series, value in self._seen.get(name, {}).items():
                if at < 0 or series[at] in ("", REST) or asked.caller.may_speak_to(series[at]):
                    family.add_metric(series, value)
            found.append(family)
        everything: Any = SimpleNamespace(collect=lambda: found)
        return Response(generate_latest(everything), media_type=CONTENT_TYPE_LATEST)

    async def _look(self) -> None:
        asked: dict[str, Any] = {}
        for op in ("stats", "why"):
            with suppress(GoondanError):  # there is no kernel, or it has no such question
                asked |= await self._swarm.admin({"op": op})
        rows = [*_of_broker(asked), *await asyncio.to_thread(lambda: [*self._of_files()])]
        self._seen = {name: {} for name in METRICS}
        for name, labels, value in rows:
            series, known = tuple(one_line(label, MAX_LABEL) for label in labels), self._seen[name]
            series = series if series in known or len(known) < MAX_SERIES else (REST,) * len(labels)
            known[series] = known.get(series, 0.0) + value
        self._at = time.monotonic()

    def _of_files(self) -> Iterator[Row]:
        """What is asked of no broker: processes, and what models have used."""
        with suppress(GoondanError):
            reply = ask_supervisor(self._swarm.state_dir, "ps", ANSWER_S)
            for row in (reply and reply.processes) or []:
                whose = (row.role, row.name if row.role == "agent" else "")
                yield "process_restarts_total", whose, row.restarts
                if (memory := memory_of(row.pid)) is not None:
                    yield "process_memory_bytes", whose, memory
        for agent, part, used in self._used.look():
            yield "model_calls_total", (agent, part.model), used.model_calls
            for kind in ("input", "output", "cached", "reasoning"):
                yield "model_tokens_total", (agent, part.model, kind), getattr(used, f"{kind}_tokens")
            yield "model_cost_total", (agent, part.model, part.currency or ""), used.money / NANO


def _of_broker(asked: Mapping[str, Any]) -> Iterator[Row]:
    """What the broker has answered."""
    yield "up", (), "broker" in asked
    for name, of in (("broker_events_total", "counters"), ("connections", "connections"), ("places", "places")):
        yield from ((name, (key,), value) for key, value in asked.get(of, {}).items())
    yield from (("broker_size", (key,), asked[key]) for key in SIZES & asked.keys())
    yield from (("waits", (wait["kind"],), 1) for wait in asked.get("waits", ()))
