"""How many frames of live news one client gets. Pure."""

from __future__ import annotations

from typing import Final

#: Frames that one client may get at once, and then per second. A turn makes about thirty a second.
LIVE_BURST: Final = 512
LIVE_PER_S: Final = 512.0


class Allowance:
    """A bucket of frames that fills with time. Times are seconds."""

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._at = now
        self._left = float(LIVE_BURST)

    def take(self, now: float) -> bool:
        """Take one frame from the bucket; False when it is empty."""
        if now > self._at:
            self._left = min(float(LIVE_BURST), self._left + (now - self._at) * LIVE_PER_S)
            self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
