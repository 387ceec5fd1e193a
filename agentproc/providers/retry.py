"""When to ask a model again, and after how long. Pure: the clock and the dice are arguments.

Source: docs/design/turns.md section 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

from agentproc.providers.vendor import Fault, FaultKind

#: How often a try is repeated, by the fault of the last one. Asking a server again that is busy or out of reach costs
#: nothing. Half an answer was paid for. A silent try has already taken minutes.
RETRIES: Final[Mapping[FaultKind, int]] = {"busy": 4, "broken": 2, "silent": 1, "final": 0}
#: The first wait (seconds). It doubles with every try. A short overload is over within it.
FIRST_WAIT_S: Final = 0.5
#: The longest wait that we choose (seconds).
MAX_WAIT_S: Final = 8.0
#: The random part of a wait, so that agents that were refused together do not come back together.
JITTER: Final = 0.5
#: The longest wait that a vendor may ask for (seconds). A longer one means a used-up quota, and a person should know
#: it.
MAX_RETRY_AFTER_S: Final = 60.0

#: Statuses below 500 after which the same request may succeed: timeout, conflict with another, too early, too many.
_PASSING: Final = frozenset((408, 409, 425, 429))


def wait_before_retry(fault: Fault, tries: int, chance: float, left_s: float | None = None) -> float | None:
    """Seconds to wait before the next try, None to give up.

    `tries` is the number of tries so far (from 1). `chance` is in [0, 1). `left_s` is the time that the turn has left,
    None when there is no limit. A wait that a vendor asked for is never shortened.
    """
    if tries > RETRIES[fault.kind]:
        return None
    own = min(FIRST_WAIT_S * 2 ** (tries - 1), MAX_WAIT_S)
    asked = fault.retry_after_s
    if asked is None:
        wait = own * (1 - JITTER * chance)
    elif asked > MAX_RETRY_AFTER_S:
        return None
    else:
        wait = asked + own * JITTER * chance
    return None if left_s is not None and wait >= left_s else wait


def status_kind(status: int, headers: Mapping[str, str]) -> FaultKind:
    """Whether a refused request may be sent again. With `x-should-retry` both vendors overrule the status."""
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        return "busy" if wish == "true" else "final"
    return "busy" if status in _PASSING or status >= 500 else "final"


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """The wait that a server asks for (seconds). None when it asks for none, or in a form that cannot be read.

    `now` is Unix time, for servers that send a date.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None
