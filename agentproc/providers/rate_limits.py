"""What a server says in the headers of its answers about its limits. Pure.

OpenAI and those who copy it write `x-ratelimit-remaining-requests: 59` and `x-ratelimit-reset-requests: 1m2.5s`,
Anthropic `anthropic-ratelimit-requests-remaining: 49` and `anthropic-ratelimit-requests-reset: <RFC 3339>`. Numbers
that cannot be read are as if they were not there.

Source: docs/design/turns.md section 13; the vendors' pages about rate limits.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from datetime import datetime

from goondan.schemas.models.rate_limits import MAX_NAMED, RateLimits

#: What is left counts as little at this share of the limit.
LOW_SHARE = 0.05
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|s|m|h|d)")
_UNITS_MS = {"us": 0.001, "µs": 0.001, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}


def rate_limits(headers: Mapping[str, str], now: float | None = None) -> RateLimits | None:
    """What the headers say; None when they say nothing. `now` is Unix time, for servers that send a date."""
    requests, tokens = _left(headers, "requests"), _left(headers, "tokens")
    if requests is None and tokens is None:
        return None
    now = time.time() if now is None else now
    return RateLimits(requests, _reset_ms(headers, "requests", now), tokens, _reset_ms(headers, "tokens", now))


def exhausted_wait(headers: Mapping[str, str], now: float) -> float | None:
    """How long a server that refuses has nothing left, by its headers (seconds); None: they do not say."""
    limits = rate_limits(headers, now)
    if limits is None:
        return None
    resets = ((limits.requests_left, limits.requests_reset_ms), (limits.tokens_left, limits.tokens_reset_ms))
    waits = [reset_ms for left, reset_ms in resets if left == 0 and reset_ms is not None]
    return max(waits) / 1000 if waits else None


def is_low(headers: Mapping[str, str]) -> bool:
    """Whether little is left of a limit that the headers name."""
    for what in ("requests", "tokens"):
        left, limit = _left(headers, what), _number(_header(headers, "limit", what))
        if left is not None and (left <= 1 or (limit is not None and left <= LOW_SHARE * limit)):
            return True
    return False


def _header(headers: Mapping[str, str], which: str, what: str) -> str | None:
    return headers.get(f"x-ratelimit-{which}-{what}") or headers.get(f"anthropic-ratelimit-{what}-{which}")


def _left(headers: Mapping[str, str], what: str) -> int | None:
    return _number(_header(headers, "remaining", what))


def _number(text: str | None) -> int | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return min(int(value), MAX_NAMED) if math.isfinite(value) and value >= 0 else None


def _reset_ms(headers: Mapping[str, str], what: str, now: float) -> int | None:
    """Milliseconds until the limit is full again: `1m2.5s`, `250ms`, seconds, or a date."""
    text = (_header(headers, "reset", what) or "").strip()[:64]
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        total = sum(float(number) * _UNITS_MS[unit] for number, unit in parts)
    else:
        try:
            total = float(text) * 1000
        except ValueError:
            try:
                total = (datetime.fromisoformat(text).timestamp() - now) * 1000
            except (ValueError, OverflowError, OSError):
                return None
    return min(max(0, math.ceil(total)), MAX_NAMED) if math.isfinite(total) else None
