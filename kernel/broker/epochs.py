"""Epochs: the numbers that tell a holder of an instance from the holders before it. One counter for all. Pure.

An epoch must never be used twice, and epochs must never decrease, whatever was lost: conversation files refuse writes
under an older epoch. So the counter begins above all epochs that the journal has reserved. It also begins above the
wall clock's milliseconds, because files of older kernels hold epochs that were made from that clock. A file can hold an
even higher epoch when the clock was set back and the journal was lost. Then an agent names this epoch, and the counter
goes above it.

Source: docs/design/delivery.md section 3.
"""

from __future__ import annotations

from typing import Final

#: The largest integer that every language reads exactly. A higher epoch cannot be right.
MAX_EPOCH: Final = (1 << 53) - 1


class Epochs:
    """The counter of epochs. `reserved` is the highest epoch that the journal has reserved."""

    def __init__(self, reserved: int, wall_ms: int) -> None:
        self.last = max(reserved, wall_ms)
        self.reserved = reserved

    def next(self) -> int:
        """A new epoch, higher than all earlier ones."""
        self.last += 1
        return self.last

    def raise_above(self, epoch: int) -> bool:
        """Make later epochs higher than this one, which somebody has seen. False when it is impossibly high."""
        if epoch > MAX_EPOCH // 2:
            return False
        self.last = max(self.last, epoch)
        return True

    def to_reserve(self, block: int) -> int | None:
        """The epoch up to which the journal must reserve now; None while enough epochs are reserved."""
        if self.last + block // 2 <= self.reserved:
            return None
        self.reserved = self.last + block
        return self.reserved
