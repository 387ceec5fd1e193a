"""Receipts of the calls of one jail: kept encoded, because a warm call takes less time than describing its jail. Pure.

The part about the jail is encoded again only when it has changed; the part about the call is one number. This module
also decides when processor time and memory are looked at: after a call that took long, and otherwise once a second at
most. So quick calls pay nothing for it.

Source: docs/design/sandbox.md section 7.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Raw

from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt
from goondan.toolhost.limits.decide import Used
from goondan.toolhost.policy.launch_plan import LaunchPlan

#: Seconds between two looks: one takes some 150 µs.
LOOK_S: Final = 1.0
#: A call that took this long (seconds) is always followed by a look, which does not make it noticeably longer.
LONG_S: Final = 0.05

_START: Final = b"\x82\xa4jail"
_CALL: Final = b"\xa4call"
_WALL: Final = b"\x81\xa6wallMs\xcb"
_pack_double = struct.Struct(">d").pack


class JailReceipts:
    """What is known of one jail, and its receipts."""

    __slots__ = ("_encoded", "_known", "_looked_at")

    def __init__(self, plan: LaunchPlan) -> None:
        calls: Literal["forked", "alone"] | None = "alone" if plan.alone else None
        if plan.calls is not None:
            calls = "forked"
        self._known = JailReceipt(tier=plan.tier, walls=plan.walls, limits=plan.mechanisms, calls=calls)
        self._encoded: bytes | None = None
        self._looked_at = float("-inf")

    def is_due(self, now: float, call_s: float) -> bool:
        """Whether to look at the jail's processes after a call of that length (seconds)."""
        return now - self._looked_at >= LOOK_S or call_s >= LONG_S

    def look(self, now: float, used: Used) -> None:
        """Note what was seen. Neither value ever gets smaller."""
        self._looked_at = now
        self._change(
            cpu_ms=max(self._known.cpu_ms, used.cpu_ms),
            peak_memory_kb=max(self._known.peak_memory_kb, used.memory_kb),
        )

    def network(self, reached: list[str], denied: list[str]) -> None:
        """Note which hosts the jail has reached and which it was denied."""
        if (reached, denied) != (self._known.reached, self._known.denied):
            self._change(reached=reached, denied=denied)

    def ended(self, cause: str) -> None:
        """The jail has ended, or is being ended, for this reason."""
        self._change(exit=cause)

    def receipt(self, call_s: float, cause: str | None = None, denied: Sequence[str] = ()) -> Raw:
        """The receipt of a call that took `call_s` seconds. `cause`: why its processes ended before it had a result.
        `denied`: where connections could not go meanwhile.
        """
        if self._encoded is None:
            self._encoded = _START + encode_value(self._known) + _CALL
        wall_ms = round(call_s * 1000, 3)
        if cause is not None or denied:
            return Raw(self._encoded + encode_value(CallReceipt(wall_ms=wall_ms, exit=cause, denied=list(denied))))
        return Raw(self._encoded + _WALL + _pack_double(wall_ms))

    def _change(self, **values: object) -> None:
        self._known = msgspec.structs.replace(self._known, **values)
        self._encoded = None
