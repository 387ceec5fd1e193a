"""The scenarios and rules of a client: the sequences of schemas/vectors, and those of scenarios.yaml.

Source: docs/certify.md; schemas/vectors/README.md.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from goondan.kernel.certify.client.playing import Stage
from goondan.kernel.certify.client.rules import JUDGES
from goondan.kernel.certify.scenarios import read, scenario
from goondan.kernel.certify.trace import Rule, Scenario


def scenarios() -> tuple[list[Scenario], list[Rule]]:
    """All of them. The first one is what every client has to be able to."""
    import yaml

    ours, rules = read(
        yaml.safe_load(files("goondan.kernel.certify.client").joinpath("scenarios.yaml").read_bytes()), JUDGES
    )
    recorded = json.loads(files("goondan.schemas").joinpath("vectors/sequences.json").read_bytes())["sequences"]
    return [ours[0], *(scenario(one) for one in recorded if playable(one["steps"])), *ours[1:]], rules


def playable(steps: list[dict[str, Any]]) -> bool:
    """Whether a program can be told what is to be done: it can give up what it has asked, and nothing else."""
    asked = {step["eventId"] for step in steps if step.get("do") == "ask"}
    cancelled = {step["eventId"] for step in steps if step.get("do") == "cancel"}
    waits = {step["told"]["eventId"] for step in steps if "response" in step.get("told", {})}
    known = all(any(hasattr(Stage, f"step_{name}") for name in step) for step in steps)
    return known and cancelled <= asked and not cancelled & waits
