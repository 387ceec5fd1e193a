"""Times as texts: RFC 3339 in UTC, and time spans for a person. Pure: whoever calls says what time it is."""

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


def age(seconds: float) -> str:
    """A time span in the largest unit of which it has at least one: `7s`, `3m`, `5h`, `2d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(max(0, seconds))}s"


@lru_cache(maxsize=1)
def _second(at: int) -> str:
    """A turn asks for the time every few hundred microseconds."""
    return datetime.fromtimestamp(at, UTC).replace(tzinfo=None).isoformat()
