"""What the broker knows of the exporter: its name, the part of a plan that asks for it, and how it does."""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct

#: The name of the feature and of its part of a plan. The program has it as well: in its token, in `gdn ps`, of its log.
TELEMETRY: Final = "telemetry"

#: `exporting`: what there is has left, or leaves now. `waiting`: the collector does not take it. `idle`: this
#: installation or environment cannot export.
Condition = Literal["exporting", "waiting", "idle"]


class Exporting(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """How the exporter does: the payload of its `runtime.event` to the broker, and its row of `gdn ps`."""

    #: The condition.
    condition: Condition
    #: Since when it waits (milliseconds since 1970); 0: it does not.
    since_ms: int = 0
    #: Why it waits or is idle, in one line without secrets; "": it is not.
    why: str = ""
    #: Spans that the collector has taken since this program began.
    sent: int = 0
    #: Spans that were given up since the position was made: the collector had refused them for good.
    dropped: int = 0
    #: Turns that were given up since then, with all their spans: too old when the collector came back.
    dropped_turns: int = 0
