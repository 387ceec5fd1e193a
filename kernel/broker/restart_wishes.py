"""Wishes for a restart, as the broker holds them; restarts.py decides about them. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kernel.broker.entities import Connection

#: `checking`: the supervisor looks at the bundle. `staged`: on its way into the journal. `wished`: to be carried out.
#: `due`: the supervisor has been told. `done`: a kernel has started since, or the restart came to nothing.
WishState = Literal["checking", "staged", "wished", "due", "done"]


class Wish(Struct):
    """One wish. `at_ms`: when (milliseconds since 1970). `askers`: connection and frame id of who waits for a word."""

    subject: str
    reason: str
    event_id: str
    at_ms: int
    state: WishState
    askers: list[tuple[Connection, str]] = []
