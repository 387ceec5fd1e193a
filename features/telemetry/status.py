"""How the exporter does, for `gdn ps`."""

from __future__ import annotations

from goondan.features.telemetry.wire import TELEMETRY
from goondan.kernel.cli.operator_question import Document, Learned
from goondan.kernel.cli.rules.plain import one_line


def line(row: Document) -> str:
    """One line for the exporter."""
    dropped = f", {row['dropped']} spans and {row['droppedTurns']} turns dropped"
    counts = f"{row['sent']} spans sent{dropped if row['dropped'] or row['droppedTurns'] else ''}"
    return f"{TELEMETRY}: {one_line(row['text'], 300)}, {counts}"


LEARNED = Learned(TELEMETRY, line, limits=False)
