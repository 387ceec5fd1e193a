"""When to ask a model again, and after how long. Pure: the clock and the dice are arguments.

Source: docs/design/turns.md section 6.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

from goondan.agentproc.providers.vendor import Fault, FaultKind
from goondan.schemas.models.model_providers import ModelRetry

#: How often a try is repeated at most, by its fault; a fault that is not named is repeated as long as the patience
#: lasts. Asking a server again that is busy or out of reach costs nothing. Half an answer was paid for. A silent try
#: has already taken minutes.
REPEATS: Final[Mapping[FaultKind, int]] = {"broken": 2, "silent": 1, "quota": 0, "final": 0}
#: The first wait (seconds). It doubles with every try. A short overload is over within it.
FIRST_WAIT_S: Final = 0.5
#: The longest wait that we choose (seconds).
MAX_WAIT_S: Final = 8.0
#: The random part of a wait, so that agents that were refused together do not come back together.
JITTER: Final = 0.5


class Retries:
    """The tries of one model call. `retry` is the patience with the model."""

    def __init__(self, retry: ModelRetry) -> None:
        self._retry = retry
        self._faults: Counter[FaultKind] = Counter()
        self._waited_s = 0.0

    @property
    def count(self) -> int:
        """How many tries have failed."""
        return self._faults.total()

    def patience_s(self, kind: FaultKind) -> float:
        """How long the model is asked again after faults of this kind (seconds)."""
        return self._retry.loading_s if kind == "loading" else self._retry.busy_s

    def asks_too_long(self, fault: Fault) -> bool:
        """Whether the server asks for a wait that is longer than the patience."""
        return fault.retry_after_s is not None and fault.retry_after_s > self.patience_s(fault.kind)

    def next_wait(self, fault: Fault, chance: float, spent_s: float, left_s: float | None = None) -> float | None:
        """Count a try that failed. Returns the seconds until the next one, None to give up.

        `chance` is in [0, 1). `spent_s` is the time since the first fault. `left_s` is the time that the turn has left,
        None when there is no limit. A wait that a vendor asked for is never shortened.
        """
        kind = fault.kind
        self._faults[kind] += 1
        repeats = REPEATS.get(kind)
        if (repeats is not None and self._faults[kind] > repeats) or self.asks_too_long(fault):
            return None
        own = min(FIRST_WAIT_S * 2.0 ** min(self.count - 1, 10), MAX_WAIT_S)
        asked = fault.retry_after_s
        wait = own * (1 - JITTER * chance) if asked is None else asked + own * JITTER * chance
        spent_s = max(spent_s, self._waited_s)
        if spent_s + (wait if asked is None else asked) > self.patience_s(kind) or (
            left_s is not None and wait >= left_s
        ):
            return None
        self._waited_s += wait
        return wait


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
