"""What the broker knows of the exporter: its name, the part of a plan that asks for it, and how it does."""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final

from msgspec import Struct

#: The name of the feature and of its part of a plan. The program has it as well: in its token, in `gdn ps`, of its log.
TELEMETRY: Final = "telemetry"


class Exporting(Struct, frozen=True, rename="camel"):
    """How the exporter does: the payload of its `runtime.event` to the broker, and its row of `gdn ps`."""

    #: The same in words, without secrets: `exporting`, `waiting for the collector since …`, `exporting nothing: …`.
    text: str
    #: Spans that the collector has taken since this program began.
    sent: int = 0
    #: Spans that were given up since then: the collector refuses them for good, or they are too old.
    dropped: int = 0
    #: Turns that were given up with all their spans, since there is a position.
    dropped_turns: int = 0
