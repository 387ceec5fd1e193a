"""What models have used, for programs that ask a door.

Source: docs/usage.md.
"""

from __future__ import annotations

import datetime
from typing import Any

from msgspec import Struct

from goondan.features.usage.api import By, Found, day_of, look, report
from goondan.kernel.cli.operations import Asked, Operation, Swarm


class UsageOf(Struct, forbid_unknown_fields=True):
    """What is put together."""

    #: What a row is of; a tree is everything that one message set going.
    by: By = "day"
    #: Only what was used on this day (UTC) and later: 2026-11-23, 7d, today. None: everything.
    since: str | None = None


def routes(_: Swarm) -> list[Operation]:
    """Its one way."""
    summary = "The tokens that models have used, and what they cost."
    return [Operation("getUsage", "GET", "/usage", "look", summary, usage, query=UsageOf)]


def usage(asked: Asked[Swarm]) -> dict[str, Any]:
    """The document of `gdn usage --json`, of the agents that are shown to the caller."""
    wanted, shown = asked.query, asked.caller.may_speak_to
    since = None if wanted.since is None else day_of(wanted.since, datetime.datetime.now(datetime.UTC).date())
    found = look(asked.swarm.state_dir, turns=wanted.by == "tree")
    sums = [one for one in found.sums if shown(one.agent)]
    turns = [one for one in found.turns if shown(one.agent)]
    return report(Found(sums, turns), wanted.by, since)
