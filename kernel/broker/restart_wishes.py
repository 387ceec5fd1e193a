"""Wishes for a restart, as the broker and the journal hold them; restarts.py decides about them. Pure."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.kernel.broker.entities import Connection
from goondan.kernel.broker.journal.interface import Item, Put, Retire
from goondan.kernel.broker.journal.records import encode

_RESTART: Final = "restart:"
_FRESH: Final = "fresh:"


class RestartWished(Struct, frozen=True, array_like=True, tag="restart/wished"):
    """An agent wishes a restart of the kernel as soon as no process holds this event."""

    #: The event whose turn wishes it.
    event_id: str
    #: Why, in the agent's words.
    reason: str
    #: When (milliseconds since 1970).
    at_ms: int


class FreshStart(Struct, frozen=True, array_like=True, tag="restart/fresh", kw_only=True):
    """The conversations of this agent, or of all agents (with the name ""), have this generation."""

    #: Nothing: it concerns agents.
    concerns: str = ""
    #: The agent; "": all of them.
    agent: str
    #: The generation.
    generation: int


def restart_subject(agent: str, key: str, call_id: str) -> str:
    """The subject of an instance's wish for a restart."""
    return f"{_RESTART}{agent}/{key}/{call_id}"


def wish_written(subject: str, record: RestartWished) -> Item:
    """An agent's wish for a restart."""
    return Item((Put(subject, encode(record)),), refusable=True)


def wish_over(subject: str) -> Item:
    """A wish was fulfilled, or has failed. Its id is kept, so that a repeat is not taken for a new wish."""
    return Item((Retire(subject, b"", "restarted"),))


def fresh_written(agent: str, generation: int) -> Item:
    """Conversations begin again."""
    subject = _FRESH + agent
    return Item((Retire(subject), Put(subject, encode(FreshStart(agent=agent, generation=generation)))))


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
