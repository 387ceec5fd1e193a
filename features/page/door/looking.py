"""What the page looks at: runs, one row for each trace; what a few of them say; lines of logs.

Rows come from the index of turns alone, which may have some hundred thousand.

Source: docs/decisions/159; docs/decisions/176; docs/design/commands.md section 8.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from functools import lru_cache
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, structs

from goondan.features.serve.api import Caller
from goondan.features.serve.api.routing import Asked
from goondan.kernel.traces import logs
from goondan.kernel.traces.rules.turn import Trace
from goondan.kernel.traces.search import first_turns
from goondan.schemas.system import trace_index

#: Lines of a log in which those of some time are looked for, and that are told.
MAX_LOOKED: Final = 20_000
MAX_LINES: Final = 200
_LISTING: Final = threading.Lock()


class Runs(Struct, forbid_unknown_fields=True):
    """Which runs."""

    #: Those with a turn of this agent; its first one is told. None: of all.
    agent: str | None = None
    #: Those before this number, which the page before has named.
    before: Annotated[int, Meta(ge=0, lt=1 << 62)] = (1 << 62) - 1
    #: How many.
    limit: Annotated[int, Meta(ge=1, le=5000)] = 200


class Details(Struct, forbid_unknown_fields=True):
    """Of which turns."""

    #: Their ids.
    turns: Annotated[list[str], Meta(max_length=100)]
    #: With what each has used itself, and not its whole run.
    alone: bool = False


class Lines(Struct, forbid_unknown_fields=True, rename={"since": "from", "until": "to"}):
    """Which lines of logs."""

    #: Of this agent.
    agent: str
    #: Of the tools of this instance.
    instance: str
    #: From this time on (milliseconds since 1970).
    since: float
    #: Until this one.
    until: float


@lru_cache(4)
def _firsts(state_dir: str, patterns: tuple[str, ...], agent: str | None) -> trace_index.Firsts:
    caller = Caller("", "look", patterns)
    return trace_index.Firsts(lru_cache(lambda name: agent in (None, name) and caller.may_speak_to(name)))


def runs(asked: Asked) -> dict[str, Any]:
    """A page of runs, the last begun first: rows as arrays."""
    state_dir, wanted, caller = asked.swarm.state_dir, asked.query, asked.caller
    with _LISTING:
        numbers = _firsts(state_dir, tuple(caller.agents), wanted.agent).numbers(state_dir)
    end = bisect_left(numbers, wanted.before)
    page = numbers[max(0, end - wanted.limit) : end]
    rows = [row for row in trace_index.numbered(state_dir, page) if caller.may_speak_to(row.agent)]
    told = [(row.seq, *structs.astuple(row)[:-1]) for row in rows]
    return {"rows": told, "before": page[0] if end > wanted.limit else None, "total": len(numbers)}


def swarm(asked: Asked) -> dict[str, str]:
    """Which swarm it is: the path of its bundle. Who sees some agents only has its last two parts."""
    path: str = asked.swarm.place.bundle
    return {"bundle": path if "*" in asked.caller.agents else "/".join(path.split("/")[-2:])}


def details(asked: Asked) -> dict[str, list[Trace]]:
    """Turns without their steps, with what has been used."""
    state_dir, body = asked.swarm.state_dir, asked.body
    return {"turns": first_turns(state_dir, body.turns, asked.caller.may_speak_to, alone=body.alone)}


def lines(asked: Asked) -> list[dict[str, Any]]:
    """What the agent's process has written in some time, and the tools of one of its instances."""
    wanted = asked.query
    own = logs.of_instance(f"{asked.swarm.state_dir}/logs", asked.agent, wanted.instance, MAX_LOOKED)
    read = [line for line in own if wanted.since <= line.time * 1000 <= wanted.until][:MAX_LINES]
    return [{"at": line.time * 1000, "role": line.role, "level": line.level, "text": line.text} for line in read]
