"""What models have used, for programs that ask a door.

Source: docs/usage.md.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from goondan.features.usage.api import By, Found, day_of, look, report
from goondan.schemas.wire.errors import fail


class UsageOf(Struct, forbid_unknown_fields=True):
    """What is put together."""

    #: What a row is of; a tree is everything that one message set going.
    by: By = "day"
    #: Only what was used on this day (UTC) and later: 2026-11-23, 7d, today. None: everything.
    since: str | None = None


class _Way(Route):
    """A way for everybody whom the door lets in."""

    #: Who may ask.
    role: Final = "look"
    #: What it is.
    operation: Final = {
        "name": "getUsage",
        "summary": "The tokens that models have used, and what they cost.",
        "query": UsageOf,
    }


def routes(swarm: Any) -> list[BaseRoute]:
    """Its one way."""

    async def usage(request: Request) -> Response:
        try:
            asked = msgspec.convert(dict(request.query_params), UsageOf)
        except msgspec.ValidationError as error:
            raise fail("E_USAGE", f"the query is not valid: {error}") from None
        told = await asyncio.to_thread(_report, swarm.state_dir, asked, request.state.caller.may_speak_to)
        return Response(told, media_type="application/json")

    return [_Way("/api/v1/usage", usage, methods=["GET"])]


def _report(state_dir: str, asked: UsageOf, shown: Callable[[str], bool]) -> bytes:
    """The document of `gdn usage --json`, of the agents that are shown to the caller."""
    since = None if asked.since is None else day_of(asked.since, datetime.datetime.now(datetime.UTC).date())
    found = look(state_dir, turns=asked.by == "tree")
    sums = [one for one in found.sums if shown(one.agent)]
    turns = [one for one in found.turns if shown(one.agent)]
    return msgspec.json.encode(report(Found(sums, turns), asked.by, since))
