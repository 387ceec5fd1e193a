"""The open tool calls: whose they are, and which of them wait for a tool host. Pure.

A call is here from the agent's `tool.call` until its result, or until its event ends. The tool host keeps the result
until the agent has stored it, so nothing about the outcome is kept here.

Source: docs/design/delivery.md section 6.
"""

from __future__ import annotations

from msgspec import Struct

from goondan.kernel.broker.blobs import MAX_CALL_BYTES
from goondan.kernel.broker.entities import Connection, Event
from goondan.kernel.broker.shares import Pool, kept_of
from goondan.schemas.bundle.address import SEPARATOR


class Call(Struct, gc=False):
    """One open call. Times are seconds on the broker's clock."""

    #: Its callId.
    id: str
    #: The event whose turn makes it.
    event: Event
    #: The agent's frame, to have it sent again.
    frame_id: str
    #: The full name of the tool.
    tool: str | None
    #: The time that it had when it came (milliseconds). None: no deadline.
    deadline_ms: int | None
    #: When it came.
    began: float
    #: The tool host that has the call; None while it waits for one.
    host: Connection | None = None
    #: The frame to send; kept only while no host has it.
    data: bytes = b""
    #: When it was first sent (CLOCK_BOOTTIME, milliseconds), if that was before this broker began.
    sent_before: int | None = None
    #: Size of its arguments (bytes) if they go by reference; else 0.
    large: int = 0
    #: It has asked its agent something (`tool.ask`).
    asks: bool = False
    #: Of a call that may make others, of an agent whose calls a person may have to decide: its payload; else b"".
    script: bytes = b""
    #: Its tool host has said that it waits for its jail; None: it does not.
    jail_since: float | None = None

    def overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_ms is not None and self.began + self.deadline_ms / 1000 <= now


class Calls:
    """All open calls."""

    def __init__(self) -> None:
        #: Written by ToolCalls, which keeps `event.work.open_calls` in step.
        self.open: dict[str | None, Call] = {}
        self._waiting: dict[str, Call] = {}
        #: Until then, agents may be about to send calls again that are not open here (seconds on the broker's clock).
        self.back_by = 0.0
        #: The names of the tools whose calls may make calls of other tools. Kept by ToolAsks.
        self.makers: frozenset[str] = frozenset()
        #: Size of all arguments by reference of open calls (bytes).
        self.large = Pool(MAX_CALL_BYTES, kept_of(MAX_CALL_BYTES))
        self.get = self.open.get

    def __len__(self) -> int:
        return len(self.open)

    def may_make_calls(self, tool: str | None) -> bool:
        """Whether calls of this tool, by its full name, may make calls of other tools."""
        return (tool or "").partition(SEPARATOR)[0] in self.makers

    def wait(self, call: Call, data: bytes) -> None:
        """Keep the frame until a tool host comes, because none is there."""
        call.data = data
        self._waiting[call.id] = call

    def take_waiting(self) -> list[Call]:
        """The calls that waited for a host, in order."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def expired(self, now: float) -> list[Call]:
        """Calls that have waited for a host past their deadline."""
        return [call for call in self._waiting.values() if call.overdue(now)]

    def remove(self, call: Call) -> None:
        """Close an open call."""
        del self.open[call.id]
        call.event.work.open_calls -= 1
        self.forget_large(call)
        if call.data:
            self._waiting.pop(call.id, None)

    def forget_large(self, call: Call) -> None:
        """Its arguments by reference do not count any more."""
        if call.large:
            self.large.give(call.event.session, call.event.root, call.large)

    def of_host(self, host: Connection) -> list[Call]:
        """The calls a tool host runs."""
        return [call for call in self.open.values() if call.host is host]

    def open_elsewhere(self, host: Connection) -> list[Call]:
        """The calls that were given to an earlier connection of the same tool host."""
        return [
            call
            for call in self.open.values()
            if call.host is not None and call.host is not host and call.host.address == host.address
        ]

    def of_launch(self, address: str, launch: int) -> list[Call]:
        """The calls that were given to a tool host up to its `launch`."""
        return [
            call
            for call in self.open.values()
            if call.host is not None and call.host.address == address and call.host.claims.launch <= launch
        ]
