"""How much each source may write to a log at once: a bucket for each source, and one for each group of sources (pure).

A source that writes more than its bucket holds is stopped until the bucket fills again. A line before its next one says
how many of its lines were suppressed. Sources of one group share a bucket as well, so that an agent gets no more by
having many instances; a source that has written little is still let through.

Source: docs/decisions/158.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

#: How much a source may write at once (bytes), and how much later (bytes a second). The first is the output of a turn.
#: The second is fifty lines a second, more than anybody reads. A log keeps 16 MiB of older lines at least, so a source
#: that writes without end needs more than an hour to push out what others wrote.
SOURCE_BURST: Final = 1 << 20
SOURCE_RATE: Final = 4 << 10
#: The same for all sources of a group together.
GROUP_BURST: Final = 4 << 20
GROUP_RATE: Final = 16 << 10
#: A source whose bucket is as full as this has written little.
QUIET: Final = 0.75
#: A source that was stopped goes on when its bucket is as full as this: so the log says seldom how much is missing.
RESUMED: Final = 0.125
#: Sources and groups that are remembered; the ones that wrote last. A forgotten one begins with a full bucket.
MAX_KNOWN: Final = 4096


class Suppressed(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A line of a log that stands for others. The other fields are as in the tool host's lines."""

    #: When (seconds since 1970).
    time: float | None
    #: The level of the line.
    level: str = "warn"
    #: The text of the line.
    message: str
    #: The tool whose lines they were.
    tool: str | None = None
    #: The agent whose lines they were.
    agent: str | None = None
    #: The instance whose lines they were.
    instance_key: str | None = None
    #: For how many lines it stands. 0: they were not counted.
    suppressed: int = 0


def suppressed_lines(count: int, time: float | None, **whose: str | None) -> Suppressed:
    """The line that says how many lines of a source are not in the log. `whose`: tool, agent, instance_key."""
    lines = "1 line" if count == 1 else f"{count} lines"
    message = f"{lines} suppressed: too many at once"
    return replace(Suppressed(time=time, message=message, suppressed=count), **whose)


def suppressed_bytes(count: int) -> bytes:
    """The line that says how many bytes of a log are not here, without its end."""
    return msgspec.json.encode(Suppressed(time=None, message=f"{count} bytes suppressed: too many at once"))


S = TypeVar("S")


class _Bucket(Struct):
    #: What is in it.
    level: float
    #: When that was so (seconds).
    at: float


class Admission(Generic[S]):
    """The buckets of one log. `S` is what names a source."""

    def __init__(self) -> None:
        self._sources: OrderedDict[S, _Bucket] = OrderedDict()
        self._groups: OrderedDict[str, _Bucket] = OrderedDict()
        self._suppressed: dict[S, int] = {}

    def admit(self, group: str, source: S, size: int, now: float) -> bool:
        """Whether a line of `size` bytes may be written at `now` (seconds); one that may not is counted."""
        own = _filled(self._sources, source, now, SOURCE_BURST, SOURCE_RATE)
        shared = _filled(self._groups, group, now, GROUP_BURST, GROUP_RATE)
        quiet = own.level >= QUIET * SOURCE_BURST
        waits = source in self._suppressed and own.level < RESUMED * SOURCE_BURST
        if waits or own.level < size or (shared.level < size and not quiet):
            if source in self._suppressed or len(self._suppressed) < MAX_KNOWN:
                self._suppressed[source] = self._suppressed.get(source, 0) + 1
            return False
        own.level -= size
        shared.level = max(0.0, shared.level - size)
        return True

    def take_suppressed(self, source: S) -> int:
        """How many lines of a source were suppressed since this was asked last."""
        return self._suppressed.pop(source, 0)

    def take_all_suppressed(self) -> dict[S, int]:
        """The same for every source that has any."""
        found, self._suppressed = self._suppressed, {}
        return found


K = TypeVar("K")


def _filled(buckets: OrderedDict[K, _Bucket], key: K, now: float, burst: int, rate: int) -> _Bucket:
    """The bucket of `key`, filled up to `now`."""
    bucket = buckets.get(key)
    if bucket is None:
        bucket = buckets[key] = _Bucket(burst, now)
        if len(buckets) > MAX_KNOWN:
            buckets.popitem(last=False)
    else:
        bucket.level = min(float(burst), bucket.level + max(0.0, now - bucket.at) * rate)
        bucket.at = now
        buckets.move_to_end(key)
    return bucket
