"""Work that goes on after its call was answered with `pending`: which calls wait for it, and its result. Pure.

States of a piece of work: running -> done (its final result is here) -> forgotten.

Rules.
- A handle names one piece of work of one agent instance and one tool. It begins with the tool's name, so no tool can
  take, replace or imitate the handle of another tool. While the work runs, the handle is refused to other work.
- Work ends exactly once: by its worker's second result, by the end of its jail, by PENDING_S, or because the tool host
  that had it is gone; then its outcome is unknown.
- All running work is written down for the next tool host whenever some begins or ends. That is bounded: an instance may
  have at most twice as much as is left free after it.
- A call that polls at that moment is told the result; without one the agent gets an event. The result stays here for
  KEPT_S, for later polls.

Source: docs/design/tools.md section 6; requirements RESULT-03, RESULT-04.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.fair_store import FairStore

#: How long work may go on (seconds).
PENDING_S: Final = 3600.0
#: How long its result is kept for polls (seconds), and how much all kept results may take (bytes).
KEPT_S: Final = 600.0
KEPT_BYTES: Final = 32 << 20
#: Pieces of work that one agent instance may have running.
MAX_RUNNING: Final = 256
#: All promises that are written down (bytes), and how many times the free rest an instance may hold. With the longest
#: names that is room for some hundred promises, with usual names for ten thousand.
MAX_PROMISED_BYTES: Final = 3 << 20
TIMES_LEFT: Final = 2
#: Longest name that a handler may choose (characters): it is kept, shown and sent back.
MAX_HANDLE: Final = 1024


def full_handle(tool: str, chosen: str) -> str | None:
    """The handle `<tool>/<name>` of work that a tool has named so; None for a bad name.

    A name may hold any letters, digits, signs and blanks, but nothing that controls a terminal or ends a line.
    """
    if not 1 <= len(chosen) <= MAX_HANDLE or not chosen.isprintable():
        return None
    return f"{tool}/{chosen}"


#: (agent, instanceKey, handle)
Name = tuple[str, str, str]


class Promise(Struct, frozen=True, rename="camel"):
    """What the next tool host must know of running work, to say that its outcome is unknown."""

    #: The agent whose work it is.
    agent: str
    #: The instance of that agent.
    instance_key: str
    #: The handle of the work.
    handle: str
    #: The tool whose handler began it.
    tool: str
    #: The callId of the call that was answered with `pending`.
    call_id: str
    #: The turn of that call.
    turn_id: str
    #: The model's id of that call.
    tool_call_id: str
    #: The event that all this work began with; None when that is not known.
    root_event: str | None = None
    #: The trace of the call; None without one.
    trace_id: str | None = None

    @property
    def owner(self) -> tuple[str, str]:
        """The agent and the instance key whose work it is."""
        return (self.agent, self.instance_key)

    @property
    def name(self) -> Name:
        """The name of running work; no other running work has it."""
        return (self.agent, self.instance_key, self.handle)


class Work(Struct, eq=False):
    """One piece of work."""

    #: What was promised about it.
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
        """New work, or why it is refused: the handle is taken, the instance has too much, or it cannot be written down.

        `again`: an earlier tool host had promised it.
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
        """Set its final result. Returns the calls that wait for it, or None when it had ended before."""
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
        """Somebody knows the result: it need not be written down any more."""
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
        """Promises that nobody was told of yet: the next tool host has to give them up."""
        return list(self._promised)

    @property
    def empty(self) -> bool:
        """Whether there is no work and no result here."""
        return not self._running and not len(self._done)
