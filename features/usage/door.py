"""What models have used, for programs that ask a door.

Source: docs/usage.md.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable

import msgspec
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


async def usage(asked: Asked[Swarm]) -> msgspec.Raw:
    """What was used."""
    return await asyncio.to_thread(_report, asked.swarm.state_dir, asked.query, asked.caller.may_speak_to)


def _report(state_dir: str, asked: UsageOf, shown: Callable[[str], bool]) -> msgspec.Raw:
    """The document of `gdn usage --json`, of the agents that are shown to the caller."""
    since = None if asked.since is None else day_of(asked.since, datetime.datetime.now(datetime.UTC).date())
    found = look(state_dir, turns=asked.by == "tree")
    sums = [one for one in found.sums if shown(one.agent)]
    turns = [one for one in found.turns if shown(one.agent)]
    return msgspec.Raw(msgspec.json.encode(report(Found(sums, turns), asked.by, since)))
