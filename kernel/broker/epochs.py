"""The numbers by which a holder of an instance is told from the holders before it: one counter for all. Pure.

An epoch must never be used twice and never go back, whatever was lost: conversation files refuse writes under an older
one. So the counter begins above everything that the journal has reserved and above the wall clock's milliseconds,
because files of older kernels hold epochs that were made from that clock. A file may hold a higher one still, when the
clock was set back and the journal was lost: then an agent names it, and the counter goes above it.

Source: docs/design/delivery.md section 3.
"""

from __future__ import annotations

from typing import Final

#: The largest integer that every language reads exactly; an epoch above it is nonsense.
MAX_EPOCH: Final = (1 << 53) - 1


class Epochs:
    """The counter. `reserved` is the highest epoch that the journal has reserved."""

    def __init__(self, reserved: int, wall_ms: int) -> None:
        self.last = max(reserved, wall_ms)
        self.reserved = reserved

    def next(self) -> int:
        """A new epoch, higher than all before."""
        self.last += 1
        return self.last

    def raise_above(self, epoch: int) -> bool:
        """Somebody has seen this epoch: later ones are higher. False for one that no counter can have come to."""
        if epoch > MAX_EPOCH // 2:
            return False
        self.last = max(self.last, epoch)
        return True

    def to_reserve(self, block: int) -> int | None:
        """What must be reserved before more epochs are used; None while there are enough."""
        if self.last + block // 2 <= self.reserved:
            return None
        self.reserved = self.last + block
        return self.reserved
