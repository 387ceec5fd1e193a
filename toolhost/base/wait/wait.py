"""The bundled tool `wait`: nothing happens for a while.

Source: docs/design/tools.md section 9; recorded parity `wait__*`.
"""

from __future__ import annotations

from time import monotonic, sleep

from goondan_base.arguments import InvalidInput
from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

_INFINITY = float("inf")
#: The longest wait (seconds), as recorded. The manifest's wallSeconds leaves room for it.
MAX_SECONDS = 300
#: How often a waiting call checks whether it was cancelled (seconds).
LOOK_S = 0.1


def seconds(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`wait__seconds`: return after that time."""
    asked = input.get("seconds")
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not -_INFINITY < asked < _INFINITY:
        raise InvalidInput("'seconds' must be a finite number")
    if asked < 0:
        raise InvalidInput("'seconds' must be greater than or equal to 0")
    if asked > MAX_SECONDS:
        raise InvalidInput(f"'seconds' must be less than or equal to {MAX_SECONDS}")
    milliseconds = int(asked * 1000 + 0.5)
    remaining = ctx.remaining_ms
    if remaining is not None and milliseconds > remaining:
        # At the deadline the host would end this process with the call. So it fails now, with a clear error.
        raise ToolError(
            f"cannot wait for {milliseconds} ms: the call has {remaining} ms left",
            code="E_TOOL_TIMEOUT",
            suggestion="Wait for less time, and again if need be.",
        )
    pause(ctx, milliseconds / 1000)
    return {"waitedSeconds": asked, "waitedMs": milliseconds}


def pause(ctx: ToolContext, duration: float) -> None:
    """Sleep for `duration` seconds. Raises ToolError E_CANCELLED soon after the caller gave up."""
    end = monotonic() + duration
    while (left := end - monotonic()) > 0:
        if ctx.cancelled:
            raise ToolError("the wait was cancelled", code="E_CANCELLED")
        sleep(min(left, LOOK_S))


handlers = {"seconds": seconds}
