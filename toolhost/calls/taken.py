"""The calls that this host has taken on, by callId: pure, with the time as an argument.

States of a callId: unknown -> open (waiting or running) -> kept (finished, its result here) -> unknown again once the
agent has stored the result, or forgotten (finished, its result dropped).

Rules.
- A callId runs at most once: a repeat of an open one attaches to it, of a kept one gets the same result again, of a
  forgotten one is told that its outcome is unknown.
- Kept results are bounded in bytes and in time; the oldest of whoever has most go first (shelf.py). What is dropped
  stays known by its id alone.
- A callId belongs to the agent instance that used it first; from another one it is refused.

Source: docs/design/delivery.md section 6.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import chain, count
from typing import Final, Literal

from msgspec import Raw

from schemas.launch import ExportSpec, ToolSpec
from toolhost.calls.shelf import Shelf

#: Results that no agent has acknowledged yet, in all (bytes): one of the largest, twenty of the default outputMb.
KEPT_BYTES: Final = 80 << 20
#: How long a result waits for its acknowledgement (seconds). An agent that is restarted asks again within seconds; ten
#: minutes cover an operator who restarts a whole machine's services by hand.
KEPT_S: Final = 600.0
#: Ids of calls whose results were dropped; each takes some hundred bytes.
FORGOTTEN: Final = 16384
#: Of a hello frame (bytes); the rest of a frame is room for its header.
HELLO_BYTES: Final = 768 << 10
#: A kept result costs at least this much, so that many tiny ones are bounded, too (bytes).
_KEPT_OVERHEAD: Final = 512

#: Finished calls whose deadlines may stay in the queue: most calls finish long before theirs, and would pile up.
_STALE: Final = 256

State = Literal["waiting", "running", "done"]


class Call:
    """One call. `deadline` is on the loop's clock (seconds), None without one; `allowed_ms` is what it was given.
    `generation` tells a tool from what the same name stood for in an earlier bundle. `root_event`, `trace_id` and
    `workdir_base` are the frame's.

    `key` says which jail it belongs to, `session` is the number of the session that runs it, `jail_id` its name there,
    `started` when its jail got it (on the same clock).
    """

    __slots__ = (
        "agent", "allowed_ms", "args", "attempts", "deadline", "denied_before", "export", "generation", "id",
        "instance_key", "jail_id", "key", "left", "message_id", "progress_at", "root_event", "session", "started",
        "state", "tool", "tool_call_id", "trace_id", "turn_id", "workdir", "workdir_base",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: str,
        agent: str,
        instance_key: str,
        tool: ToolSpec,
        export: ExportSpec,
        args: Raw,
        turn_id: str,
        tool_call_id: str,
        message_id: str | None,
        workdir: str | None,
        workdir_base: str | None = None,
        deadline: float | None,
        allowed_ms: int = 0,
        generation: str = "",
        root_event: str | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.id = id
        self.agent = agent
        self.instance_key = instance_key
        self.tool = tool
        self.export = export
        self.args = args
        self.turn_id = turn_id
        self.tool_call_id = tool_call_id
        self.message_id = message_id
        self.workdir = workdir
        self.workdir_base = workdir_base
        self.deadline = deadline
        self.allowed_ms = allowed_ms
        self.generation = generation
        self.root_event = root_event
        self.trace_id = trace_id
        #: What it has left (seconds), while its time stands still.
        self.left: float | None = None
        self.state: State = "waiting"
        self.session = 0  # the number of the session that runs it
        self.key: tuple[str, ...] = ()
        self.jail_id = ""
        self.attempts = 0
        self.denied_before = 0  # connections of its jail that had been denied when it began
        self.progress_at = 0.0
        self.started = 0.0  # when its jail got it

    @property
    def owner(self) -> tuple[str, str]:
        """Whose call it is."""
        return (self.agent, self.instance_key)


class Kept:
    """The result of a finished call, for repeats; `payload` is None once it was dropped."""

    __slots__ = ("agent", "at", "id", "instance_key", "payload")

    def __init__(self, call: Call, payload: Raw | None, at: float) -> None:
        self.id = call.id
        self.agent = call.agent
        self.instance_key = call.instance_key
        self.payload = payload
        self.at = at

    @property
    def owner(self) -> tuple[str, str]:
        """Whose call it was."""
        return (self.agent, self.instance_key)


class CallBook:
    """All of them."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES, kept_s: float = KEPT_S, forgotten: int = FORGOTTEN) -> None:
        self._max_bytes = kept_bytes
        self._max_s = kept_s
        self._max_forgotten = forgotten
        self._open: dict[str, Call] = {}
        self._kept: dict[str, Kept] = {}  # oldest first
        self._forgotten: dict[str, Kept] = {}
        self._kept_shelf: Shelf[str] = Shelf()
        self._forgotten_shelf: Shelf[str] = Shelf()
        self._deadlines: list[tuple[float, int, Call]] = []
        self._order = count()

    def get(self, call_id: str) -> Call | Kept | None:
        """What is known of a callId."""
        return self._open.get(call_id) or self._kept.get(call_id) or self._forgotten.get(call_id)

    def open(self, call: Call) -> None:
        """Take on a new call."""
        self._open[call.id] = call
        if call.deadline is not None:
            heapq.heappush(self._deadlines, (call.deadline, next(self._order), call))
            if len(self._deadlines) > 2 * len(self._open) + _STALE:
                self._deadlines = [item for item in self._deadlines if _is_due_then(item)]
                heapq.heapify(self._deadlines)

    def hold(self, call: Call, now: float) -> None:
        """A person is asked about something that this call waits for: its time stands still."""
        if call.deadline is not None:
            call.left, call.deadline = call.deadline - now, None

    def go_on(self, call: Call, now: float) -> None:
        """Its time goes on."""
        if call.left is not None:
            call.deadline, call.left = now + call.left, None
            heapq.heappush(self._deadlines, (call.deadline, next(self._order), call))

    def close(self, call: Call, payload: Raw, now: float) -> bool:
        """The call's one result is here; False when it had one already (then this one counts for nothing)."""
        if call.state == "done":
            return False
        call.state = "done"
        del self._open[call.id]
        self._kept[call.id] = Kept(call, payload, now)
        self._kept_shelf.put(call.id, call.owner, _size(payload))
        while self._kept_shelf.total > self._max_bytes:
            self._forget(self._kept_shelf.first_to_go())
        return True

    def open_of(self, owner: tuple[str, str]) -> list[Call]:
        """The open calls of an agent instance."""
        return [call for call in self._open.values() if call.owner == owner]

    def acknowledge(self, call_ids: Iterable[str]) -> None:
        """The agents have stored these results."""
        for call_id in call_ids:
            self._kept.pop(call_id, None)
            self._kept_shelf.take(call_id)
            self._forgotten.pop(call_id, None)
            self._forgotten_shelf.take(call_id)

    def expire(self, now: float) -> None:
        """Drop results that have waited too long. Call now and then."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if now - oldest.at < self._max_s:
                return
            self._forget(oldest.id)

    def _forget(self, call_id: str) -> None:
        kept = self._kept.pop(call_id)
        self._kept_shelf.take(call_id)
        kept.payload = None
        self._forgotten[call_id] = kept
        self._forgotten_shelf.put(call_id, kept.owner, 1)
        if len(self._forgotten) > self._max_forgotten:
            oldest = self._forgotten_shelf.first_to_go()
            self._forgotten_shelf.take(oldest)
            del self._forgotten[oldest]

    # --- deadlines

    def next_deadline(self) -> float | None:
        """When the next open call is due."""
        heap = self._deadlines
        while heap and not _is_due_then(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[Call]:
        """Open calls whose deadline has passed, earliest first. Each is reported once."""
        heap = self._deadlines
        found = []
        while heap and heap[0][0] <= now:
            item = heapq.heappop(heap)
            if _is_due_then(item):
                found.append(item[2])
        return found

    # --- views

    def known_ids(self, max_bytes: int = HELLO_BYTES) -> list[str]:
        """CallIds that this host answers for, open ones first, then the newest results: what `hello` names.

        As many as fit `max_bytes`; hello is one frame.
        """
        found: list[str] = []
        for call_id in chain(self._open, reversed(self._kept)):
            max_bytes -= len(call_id) * 4 + 8  # a character of UTF-8 has four bytes at most
            if max_bytes < 0:
                break
            found.append(call_id)
        return found

    def kept(self) -> list[Kept]:
        """Results that nobody has acknowledged, oldest first: sent again after a reconnect."""
        return list(self._kept.values())

    @property
    def empty(self) -> bool:
        """Whether nothing is open or kept."""
        return not self._open and not self._kept

    @property
    def open_count(self) -> int:
        """Calls without a result."""
        return len(self._open)

    @property
    def kept_bytes(self) -> int:
        """What the kept results take."""
        return self._kept_shelf.total


def _is_due_then(item: tuple[float, int, Call]) -> bool:
    """Whether an entry of the queue still counts: the call is open, and its deadline has not moved."""
    moment, _, call = item
    return call.state != "done" and call.deadline == moment


def _size(payload: Raw) -> int:
    return len(bytes(payload)) + _KEPT_OVERHEAD
