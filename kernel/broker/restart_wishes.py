"""Wishes for a restart, as the broker holds them; restarts.py decides about them. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from goondan.kernel.broker.entities import Connection

#: `checking`: the supervisor looks at the bundle. `staged`: on its way into the journal. `wished`: to be carried out.
#: `due`: the supervisor has been told. `done`: a kernel has started since, or the restart came to nothing.
WishState = Literal["checking", "staged", "wished", "due", "done"]


class Wish(Struct):
    """One wish for a restart."""

    #: The subject of its records in the journal.
    subject: str
    #: Why the agent wishes it, in the agent's words.
    reason: str
    #: The event whose turn wishes it.
    event_id: str
    #: When (milliseconds since 1970).
    at_ms: int
    #: How far it has come.
    state: WishState
    #: Connection and frame id of everybody who waits for the answer.
    askers: list[tuple[Connection, str]] = []
