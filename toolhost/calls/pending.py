"""Work that goes on after its call was answered with `pending`: who waits for it, and what it came to. Pure.

States of a piece of work: running -> done (its final result is here) -> forgotten.

Rules.
- A handle names one piece of work of one agent instance and one tool: the tool's name stands before what the handler
  has chosen, so that no tool can take, replace or imitate the handle of another. While the work runs, the same handle
  is refused to a second one.
- It ends exactly once: by its worker's second result, by the end of its jail, by PENDING_S, or because the tool host
  that had it is gone; then its outcome is unknown.
- All of it is written down for the next tool host, whenever some begins or ends. That is bounded: an instance may have
  at most twice as much as is left then.
- What it came to is told to whoever polls for it; if nobody does at that moment, the agent is sent an event. It stays
  here for KEPT_S, for those who ask later.

Source: docs/design/tools.md section 6; requirements RESULT-03, RESULT-04.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from toolhost.calls.call_registry import Call
from toolhost.calls.fair_store import FairStore

#: How long work may go on (seconds).
PENDING_S: Final = 3600.0
#: How long its result is kept for those who poll (seconds), and how much of all of them (bytes).
KEPT_S: Final = 600.0
KEPT_BYTES: Final = 32 << 20
#: Pieces of work that one agent instance may have running.
MAX_RUNNING: Final = 256
#: All promises that are written down (bytes), and how many times what it leaves an instance may hold: with the longest
#: names it is room for some hundred, with usual ones for ten thousand.
MAX_PROMISED_BYTES: Final = 3 << 20
TIMES_LEFT: Final = 2
#: What a handler may choose (characters): it is an identifier, which is kept, shown and sent back.
MAX_HANDLE: Final = 1024


def full_handle(tool: str, chosen: str) -> str | None:
    """The handle of work that a tool has named so: `<tool>/<name>`; None for a name that is none.

    It may hold any letters, digits, signs and blanks, but nothing that steers a terminal or makes a line.
    """
    if not 1 <= len(chosen) <= MAX_HANDLE or not chosen.isprintable():
        return None
    return f"{tool}/{chosen}"


#: (agent, instanceKey, handle)
Name = tuple[str, str, str]


class Promise(Struct, frozen=True, rename="camel"):
    """What is remembered of running work when the tool host ends: enough to say that its outcome is unknown."""

    agent: str
    instance_key: str
    handle: str
    tool: str
    call_id: str
    turn_id: str
    tool_call_id: str
    root_event: str | None = None
    trace_id: str | None = None

    @property
    def owner(self) -> tuple[str, str]:
        """Whose work it is."""
        return (self.agent, self.instance_key)

    @property
    def name(self) -> Name:
        """What tells running work from all other running work."""
        return (self.agent, self.instance_key, self.handle)


class Work(Struct, eq=False):
    """One piece of work."""

    promise: Promise
    #: When it began; once it is done, when it ended (seconds).
    at: float
    #: Its final ToolResult, None while it runs.
    payload: Raw | None = None
    #: Open calls of `tool-result__get` that wait for it.
    pollers: list[Call] = []

    @property
    def done(self) -> bool:
        """Whether its final result is here."""
        return self.payload is not None


Refusal = Literal["taken", "full", "no room"]


class PendingRegistry:
    """All pending work of one tool host. Times are seconds on any one clock."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = kept_bytes
        self._running: dict[Name, Work] = {}
        self._done: FairStore[Name, Work] = FairStore()
        #: What has to be written down, by callId.
        self._promised: FairStore[str, Promise] = FairStore()

    def begin(self, promise: Promise, now: float, *, again: bool = False) -> Work | Refusal:
        """New work, or why not: the handle is taken, the instance has too much of it running, or there is no room to
        write it down. `again`: it was promised by an earlier tool host.
        """
        if promise.name in self._running:
            return "taken"
        if len(self.of(promise.owner)) >= MAX_RUNNING:
            return "full"
        size = len(msgspec.json.encode(promise))
        left = MAX_PROMISED_BYTES - self._promised.total - size
        if not again and (left < 0 or self._promised.held_by(promise.owner) > TIMES_LEFT * left):
            return "no room"
        self._promised.put(promise.call_id, promise.owner, size, promise)
        self._done.take(promise.name)
        work = self._running[promise.name] = Work(promise, now)
        return work

    def end(self, work: Work, payload: Raw, now: float) -> list[Call] | None:
        """Its final result; the calls that wait for it, or None when it had ended before."""
        promise = work.promise
        if work.done or self._running.pop(promise.name, None) is not work:
            return None
        work.payload, work.at = payload, now
        self._done.put(promise.name, promise.owner, len(bytes(payload)), work)
        while self._done.total > self._max_bytes and len(self._done) > 1:
            self._done.take(self._done.first_to_go())
        pollers, work.pollers = work.pollers, []
        return pollers

    def told(self, promise: Promise) -> None:
        """Somebody knows what it came to: it need not be written down any more."""
        self._promised.take(promise.call_id)

    def get(self, owner: tuple[str, str], handle: str) -> Work | None:
        """The work of a handle, running or done."""
        name = (*owner, handle)
        return self._running.get(name) or self._done.get(name)

    def overdue(self, now: float) -> list[Work]:
        """Work that has run for too long."""
        return [work for work in self._running.values() if now - work.at >= PENDING_S]

    def expire(self, now: float) -> None:
        """Forget results that were kept for long enough. Call now and then."""
        for work in [work for work in self._done if now - work.at >= KEPT_S]:
            self._done.take(work.promise.name)

    def of(self, owner: tuple[str, str]) -> list[Work]:
        """The running work of an agent instance."""
        return [work for work in self._running.values() if work.promise.owner == owner]

    def forget(self, owner: tuple[str, str]) -> None:
        """The instance is deleted: nobody is told of its work any more."""
        for work in self.of(owner):
            del self._running[work.promise.name]
        for work in [work for work in self._done if work.promise.owner == owner]:
            self._done.take(work.promise.name)
        for promise in [promise for promise in self._promised if promise.owner == owner]:
            self.told(promise)

    def promised(self) -> list[Promise]:
        """What was promised and nobody was told of yet: what the next tool host has to give up."""
        return list(self._promised)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to look after."""
        return not self._running and not len(self._done)
