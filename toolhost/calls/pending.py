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

from toolhost.calls.shelf import Shelf
from toolhost.calls.taken import Call

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


class Work:
    """One piece of work. `payload` is its final ToolResult; `pollers` are open calls of `tool-result__get`."""

    __slots__ = ("at", "payload", "pollers", "promise")

    def __init__(self, promise: Promise, at: float) -> None:
        self.promise = promise
        self.at = at  # when it began; once done, when it ended
        self.payload: Raw | None = None
        self.pollers: list[Call] = []

    @property
    def done(self) -> bool:
        """Whether its final result is here."""
        return self.payload is not None


Refusal = Literal["taken", "full", "no room"]


class PendingBook:
    """All of them. Times are seconds on any one clock."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = kept_bytes
        self._work: dict[tuple[str, str, str], Work] = {}
        self._done: dict[tuple[str, str, str], Work] = {}  # oldest first
        self._shelf: Shelf[tuple[str, str, str]] = Shelf()
        #: What has to be written down, by callId.
        self._promised: Shelf[str] = Shelf()

    def begin(self, promise: Promise, now: float, *, again: bool = False) -> Work | Refusal:
        """New work, or why not: the handle is taken, the instance has too much of it running, or there is no room to
        write it down. `again`: it was promised by an earlier tool host.
        """
        name = (*promise.owner, promise.handle)
        if name in self._work:
            return "taken"
        if sum(1 for key in self._work if key[:2] == promise.owner) >= MAX_RUNNING:
            return "full"
        size = len(msgspec.json.encode(promise))
        left = MAX_PROMISED_BYTES - self._promised.total - size
        if not again and (left < 0 or self._promised.held_by(promise.owner) > TIMES_LEFT * left):
            return "no room"
        self._promised.put(promise.call_id, promise.owner, size)
        self._drop(name)
        work = self._work[name] = Work(promise, now)
        return work

    def end(self, work: Work, payload: Raw, now: float) -> list[Call] | None:
        """Its final result; the calls that wait for it, or None when it had ended before."""
        name = (*work.promise.owner, work.promise.handle)
        if work.done or self._work.pop(name, None) is not work:
            return None
        work.payload, work.at = payload, now
        self._done[name] = work
        self._shelf.put(name, work.promise.owner, len(bytes(payload)))
        while self._shelf.total > self._max_bytes and len(self._shelf) > 1:
            self._drop(self._shelf.first_to_go())
        pollers, work.pollers = work.pollers, []
        return pollers

    def told(self, promise: Promise) -> None:
        """Somebody knows what it came to: it need not be written down any more."""
        self._promised.take(promise.call_id)

    def get(self, owner: tuple[str, str], handle: str) -> Work | None:
        """The work of a handle, running or done."""
        name = (*owner, handle)
        return self._work.get(name) or self._done.get(name)

    def overdue(self, now: float) -> list[Work]:
        """Work that has run for too long."""
        return [work for work in self._work.values() if now - work.at >= PENDING_S]

    def expire(self, now: float) -> None:
        """Forget results that were kept for long enough. Call now and then."""
        for name in [name for name, work in self._done.items() if now - work.at >= KEPT_S]:
            self._drop(name)

    def of(self, owner: tuple[str, str]) -> list[Work]:
        """The running work of an agent instance."""
        return [work for work in self._work.values() if work.promise.owner == owner]

    def forget(self, owner: tuple[str, str]) -> None:
        """The instance is deleted: nobody is told of its work any more."""
        for name in [name for name in self._work if name[:2] == owner]:
            self.told(self._work.pop(name).promise)
        for name in [name for name in self._done if name[:2] == owner]:
            self._drop(name)

    def running(self) -> list[Promise]:
        """What would have to be given up if this tool host ended now."""
        return [work.promise for work in self._work.values()]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to look after."""
        return not self._work and not self._done

    def _drop(self, name: tuple[str, str, str]) -> None:
        self._done.pop(name, None)
        self._shelf.take(name)
