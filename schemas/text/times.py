"""Times as texts: RFC 3339 in UTC. The one place that writes them. Pure: whoever calls says what time it is."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache


def rfc3339(seconds: float) -> str:
    """A time in seconds since 1970, with milliseconds: 2026-01-02T03:04:05.678Z.

    Raises OverflowError, ValueError or OSError for a time that has no date.
    """
    second, microseconds = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{_second(second)}.{microseconds // 1000:03d}Z"


def rfc3339_seconds(seconds: float) -> str:
    """The same in whole seconds, for a person: 2026-01-02T03:04:05Z."""
    return f"{_second(int(seconds))}Z"


@lru_cache(maxsize=1)
def _second(at: int) -> str:
    """A turn asks for the time every few hundred microseconds."""
    return datetime.fromtimestamp(at, UTC).replace(tzinfo=None).isoformat()
