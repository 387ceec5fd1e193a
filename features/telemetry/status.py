"""How the exporter does, for `gdn ps`."""

from __future__ import annotations

import time

from goondan.features.telemetry.wire import TELEMETRY
from goondan.kernel.cli.operator_question import Document, Learned
from goondan.kernel.cli.rules.plain import one_line
from goondan.schemas.text.times import age

#: The most of a reason that is shown (characters).
MAX_WHY = 200


def line(row: Document) -> str:
    """One line for the exporter."""
    why = f": {one_line(row['why'], MAX_WHY)}" if row.get("why") else ""
    condition = row.get("condition")
    if not row["connected"] or condition is None:
        text = "the exporter does not run (gdn logs --role telemetry)"
    elif condition == "waiting":
        text = f"waiting for the collector since {age(time.time() - row.get('sinceMs', 0) / 1000)} ago{why}"
    elif condition == "idle":
        text = f"exporting nothing{why}"
    else:
        text = f"exporting, {row.get('sent', 0)} spans sent"
    spans, turns = row.get("dropped", 0), row.get("droppedTurns", 0)
    dropped = f", dropped {spans} spans and {turns} whole turns" if spans or turns else ""
    return f"{TELEMETRY}: {text}{dropped}"


LEARNED = Learned(TELEMETRY, line, limits=False)
