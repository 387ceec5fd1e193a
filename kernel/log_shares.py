"""The old log lines that are kept when there is no room for all: a fair share for each source (pure).

A source is who wrote a line: an instance of an agent, or a tool that worked for it; what a process says for itself is
one, too. Room is shared among agents first, then among the sources of each. A source that wrote little keeps all its
lines, so that nobody can push others' lines out by writing much. A source with too many lines keeps the oldest and the
newest, and a line in the middle says how many are gone.

Source: docs/decisions/043.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from goondan.kernel.logs import AGENT, parse
from goondan.schemas.system.log_admission import Suppressed, suppressed_lines

#: What a line that says how many went takes (bytes), about.
_NOTE_BYTES: Final = 256
#: `main/default` behind the time and the level of an agent's line.
_INSTANCE: Final = re.compile(rb"\S+ \S+ [A-Z]+ ([^/\s]+)/(\S+) ")


class Source(NamedTuple):
    """The writer of a line."""

    #: The writers that share the room with it: an agent, or a tool that works for none.
    group: str = ""
    #: The tool.
    tool: str | None = None
    #: The agent.
    agent: str | None = None
    #: The instance.
    instance_key: str | None = None


class _Line(Struct, rename="camel"):
    """The parts of a tool host's line that tell its source."""

    #: When it was written (seconds since 1970).
    time: float | None = None
    #: The tool that wrote it. None: the tool host itself.
    tool: str | None = None
    #: The agent that it was written for.
    agent: str | None = None
    #: The key of the agent's instance.
    instance_key: str | None = None
    #: How many suppressed lines this line stands for.
    suppressed: int = 0


def suppressed_line(source: Source, count: int, time: float | None) -> bytes:
    """The line that says how many lines of a source are not here, without its end."""
    said = suppressed_lines(count, time, tool=source.tool, agent=source.agent, instance_key=source.instance_key)
    return msgspec.json.encode(said)


def cut_line(count: int) -> bytes:
    """The line that says how many bytes of a log are not here, without its end."""
    return msgspec.json.encode(Suppressed(time=None, message=f"{count} bytes suppressed: too many at once"))


def allot(sizes: Mapping[Source | str, int], room: int) -> dict[Source | str, int]:
    """How much each may keep: all if there is room for all; else those who ask for little get it, and the others share
    the rest evenly.
    """
    found: dict[Source | str, int] = {}
    left = room
    for number, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        found[name] = min(size, left // (len(sizes) - number))
        left -= found[name]
    return found


def thin(role: str, lines: Sequence[bytes], room: int) -> list[bytes]:
    """The lines of a role's log that are kept in `room` bytes, in their order; `lines` have no ends."""
    sources = sources_of(role, lines)
    sizes: dict[Source, int] = defaultdict(int)
    for source, line in zip(sources, lines, strict=True):
        sizes[source] += len(line) + 1
    if sum(sizes.values()) <= room:
        return list(lines)
    groups: dict[Source | str, int] = defaultdict(int)
    for source, size in sizes.items():
        groups[source.group] += size
    kept: dict[Source | str, int] = {}
    for group, share in allot(groups, room).items():
        kept |= allot({source: size for source, size in sizes.items() if source.group == group}, share)
    places: dict[Source, list[int]] = defaultdict(list)
    for number, source in enumerate(sources):
        places[source].append(number)
    result: list[bytes | None] = list(lines)
    for source, numbers in places.items():
        if kept[source] < sizes[source]:
            _thin(source, numbers, kept[source], result)
    return [line for line in result if line is not None]


def sources_of(role: str, lines: Sequence[bytes]) -> list[Source]:
    """The source of each line. One without a time belongs to the line before it: a traceback, what a library prints."""
    found: list[Source] = []
    last = Source()
    for line in lines:
        last = _source(role, line, last)
        found.append(last)
    return found


def _source(role: str, line: bytes, before: Source) -> Source:
    if line.startswith(b"{"):
        said = _said(line)
        if said is not None:
            group = said.agent or said.tool or ""
            return Source(group, said.tool, said.agent, said.instance_key)
    if parse(line)[0] is None:
        return before
    match = _INSTANCE.match(line) if role.startswith(f"{AGENT}-") else None
    if match is None:
        return Source()
    agent, key = (part.decode("utf-8", "replace") for part in match.groups())
    return Source(agent, None, agent, key)


def _said(line: bytes) -> _Line | None:
    try:
        return msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _thin(source: Source, numbers: list[int], room: int, lines: list[bytes | None]) -> None:
    """Take lines of one source out of their middle: half of the room is for the oldest, half for the newest."""
    sizes = [len(lines[number] or b"") + 1 for number in numbers]
    half = max(0, room - _NOTE_BYTES) // 2
    first, taken = 0, 0
    while first < len(numbers) and taken + sizes[first] <= half:
        taken += sizes[first]
        first += 1
    last, taken = len(numbers), 0
    while last > first and taken + sizes[last - 1] <= half:
        taken += sizes[last - 1]
        last -= 1
    gone = [lines[number] or b"" for number in numbers[first:last]]
    if not gone:
        return
    count, time = 0, None
    for line in gone:
        said = _said(line) if line.startswith(b"{") else None
        count += said.suppressed if said is not None and said.suppressed > 0 else 1
        when = parse(line)[0]
        time = when if when is not None else time
    for number in numbers[first:last]:
        lines[number] = None
    if room >= _NOTE_BYTES:
        lines[numbers[first]] = suppressed_line(source, count, time)
