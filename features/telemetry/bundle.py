"""Whether a kernel exports: its environment names a collector. The plan then has a part for the broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from goondan.features.telemetry.wire import TELEMETRY
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import to_raw

#: Either one names the collector, as the OpenTelemetry specification says.
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: "true" turns everything of OpenTelemetry off.
DISABLED: Final = "OTEL_SDK_DISABLED"


def replan(plan: KernelPlan, env: Mapping[str, str]) -> KernelPlan:
    """The plan of a swarm whose turns are exported, as the environment says."""
    if env.get(DISABLED, "").strip().lower() == "true" or not any(env.get(name, "").strip() for name in ENDPOINTS):
        return plan
    return replace(plan, parts={**plan.parts, TELEMETRY: to_raw(True)})
