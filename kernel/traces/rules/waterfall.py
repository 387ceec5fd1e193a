"""The waterfall of a tool call: its stages on the way from the agent to the handler and back, with the times that each
process saw. Pure.

All processes of a kernel read one clock (CLOCK_BOOTTIME), so their times can be compared. Where one has not said its
time, its stage is missing, and the next one begins where the last one ended. What a file says is not believed: a time
that lies before the one before it counts as that one.

Source: docs/traces.md; schemas/traces/turn_notes.py; schemas/worker/receipts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from goondan.kernel.traces.rules.turn import ToolCall
from goondan.schemas.worker.receipts import CallReceipt

#: How wide the bar of a whole call is (characters).
WIDTH: Final = 40
#: A bar of a stage that took nearly nothing, and of one that took longer.
_THIN: Final = "▏"
_FULL: Final = "█"
#: What is read ends here (microseconds): no clock of a machine comes so far.
_MOST_US: Final = 1 << 60
#: A call that no jail had.
_UNSEEN: Final = CallReceipt(0.0)


class Stage(Struct, frozen=True):
    """One stage of a call. Times are microseconds since the agent sent the call."""

    #: Who had the call, or who handed it to whom.
    name: str
    #: When it began.
    began_us: int
    #: How long it took.
    took_us: int
    #: It lies within the stage before it.
    inside: bool = False


def stages(call: ToolCall) -> list[Stage]:
    """The stages of a call in their order; none of a call whose way was not kept, or whose time is none."""
    way = call.way
    if way is None or not 0 <= way.sent_us < _MOST_US:
        return []
    seen = _UNSEEN if call.receipt is None else call.receipt.call
    told = len(way.passed_us) == 2
    there, back = way.passed_us if told else (0, 0)
    in_jail_us = _us(seen.wall_ms) if seen.began_us else 0
    # The name of the stage that ends at a time, and the time. 0: nobody has said it.
    ends = [
        ("agent to broker", there),
        ("broker to tool host" if told else "agent to tool host", seen.came_us),
        ("tool host, until the jail has it", seen.began_us),
        ("jail", seen.began_us + in_jail_us),
        ("tool host to broker" if seen.came_us else "broker, until the result", back),
        ("broker to agent" if told else "to the agent", way.got_us),
    ]
    found: list[Stage] = []
    last = way.sent_us
    for name, ended in ends:
        if not 0 < ended < _MOST_US:
            continue
        began, took = last - way.sent_us, max(0, ended - last)
        found.append(Stage(name, began, took))
        if name == "jail" and 0 < _us(seen.handler_ms) <= took:
            found.append(Stage("its handler, as it says", began, _us(seen.handler_ms), True))
        last += took
    return found


def _us(milliseconds: float) -> int:
    """Whole microseconds; 0 for what no process has said."""
    return round(milliseconds * 1000) if 0 <= milliseconds < _MOST_US else 0


def rows(found: list[Stage]) -> Iterator[tuple[str, str, str, str]]:
    """The stages as cells of a table: the name, when it began, how long it took, and its bar."""
    whole = max((stage.began_us + stage.took_us for stage in found), default=0) or 1
    for stage in found:
        left = stage.began_us * WIDTH // whole
        width = stage.took_us * WIDTH // whole
        bar = " " * left + (_FULL * width or _THIN)
        yield ("  " if stage.inside else "") + stage.name, f"+{shown(stage.began_us)}", shown(stage.took_us), bar


def shown(microseconds: int) -> str:
    """A time of a stage, in milliseconds or seconds: `0.12 ms`, `34 ms`, `1.2 s`."""
    if microseconds < 10_000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds / 1000:.0f} ms" if microseconds < 1_000_000 else f"{microseconds / 1_000_000:.1f} s"
