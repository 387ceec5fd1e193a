"""How the end of pending work reaches those who wait for it: polls of `tool-result__get`, events to agents.

The host says what happens to work (`begin`, `end`); here polls are answered and events made. `announce` sends an event
and calls back when the broker has it; `remember` keeps what was promised and not told yet, so that the next tool host
can say of each that its outcome is unknown.

Source: docs/design/tools.md section 6; requirements RESULT-03, RESULT-04; PROTOCOL.md "Pending results".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from msgspec import Raw

from schemas.codec import encode_value
from schemas.errors import tool_error
from schemas.frames import OPERATOR_AGENT, TOOL_COMPLETED, AgentEvent, Completion, Frame, ToolError, ToolResult
from schemas.launch import DEFAULT_ERROR_LIMIT, ToolSpec
from schemas.spans import call_span
from toolhost.calls.pending import MAX_RUNNING, PendingBook, Promise, Work, full_handle
from toolhost.calls.results import error_result
from toolhost.calls.taken import Call
from toolhost.news import rfc3339

#: The bundled tool whose calls are answered here and never in a jail.
POLLING_TOOL: Final = "tool-result"
#: A poll ends this long before its own deadline (seconds), so that it ends with an answer.
POLL_MARGIN_S: Final = 0.25


#: Sends an event until it is accepted, or refused for good, and then calls back.
Announce = Callable[[Frame, Callable[[], None]], None]


def is_polling(tool: ToolSpec) -> bool:
    """Whether calls of this tool are polls."""
    return tool.bundled and tool.name == POLLING_TOOL


class Completions:
    """The pending work of one tool host. `finish` answers an open call."""

    def __init__(
        self,
        *,
        finish: Callable[[Call, Raw], None],
        announce: Announce,
        remember: Callable[[list[Promise]], None],
    ) -> None:
        self._book = PendingBook()
        self._finish = finish
        self._announce = announce
        self._remember = remember
        self._loop = asyncio.get_running_loop()
        self._untold: dict[str, Promise] = {}  # ended, and the event about it is not accepted yet

    def begin(self, call: Call, chosen: str) -> Work | ToolError:
        """A call has been answered with `pending`, by the name that its handler has chosen for the work; or the error
        that answers it instead.
        """
        handle = full_handle(call.tool.name, chosen)
        if handle is None:
            return tool_error("E_TOOL_BAD_OUTPUT", "the handle of the pending work is no name", name="PendingError")
        promise = Promise(
            agent=call.agent,
            instance_key=call.instance_key,
            handle=handle,
            tool=f"{call.tool.name}__{call.export.name}",
            call_id=call.id,
            turn_id=call.turn_id,
            tool_call_id=call.tool_call_id,
            root_event=call.root_event,
            trace_id=call.trace_id,
        )
        work = self._book.begin(promise, self._loop.time())
        if work == "taken":
            message = f"the handle {handle[:100]!r} is in use"
            return tool_error(
                "E_TOOL", message, name="PendingError", suggestion="Give each piece of work its own handle."
            )
        if work == "full":
            return too_much_pending(f"this agent instance, limit {MAX_RUNNING}")
        if work == "no room":
            return too_much_pending("all agents, for so long a handle")
        self._note()
        return work

    def end(self, work: Work, payload: Raw) -> None:
        """The final result: to those who poll for it, or else to the agent as an event."""
        pollers = self._book.end(work, payload, self._loop.time())
        if pollers is None:
            return
        waiting = [call for call in pollers if call.state != "done"]
        for call in waiting:
            self._finish(call, payload)
        if not waiting and work.promise.agent != OPERATOR_AGENT:  # a person asks when it suits them
            promise = self._untold[work.promise.call_id] = work.promise
            self._announce(completion_event(promise, payload), lambda: self._told(promise))
        else:
            self._book.told(work.promise)
        self._note()

    def give_up(self, promises: Iterable[Promise]) -> None:
        """Work of an earlier tool host: its outcome is unknown."""
        for promise in promises:
            work = self._book.begin(promise, self._loop.time(), again=True)
            if isinstance(work, Work):
                message = f"the work behind handle {promise.handle[:200]!r} was lost with the tool host that did it"
                error = tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="ToolHostLost")
                self.end(work, error_result(error, DEFAULT_ERROR_LIMIT))

    def poll(self, call: Call) -> None:
        """Answer a call of `tool-result__get`: now, or when the work ends, within the time that it may wait."""
        asked: dict[str, Any] = msgspec.msgpack.decode(call.args)
        handle, wait_s = str(asked["handle"]), float(asked.get("waitMs", 0)) / 1000
        work = self._book.get(call.owner, handle)
        if work is None:
            message = f"no pending result {handle[:200]!r} is known: it is not yours, was fetched long ago, or was lost"
            hint = "Give the handle as it stands in the pending result: TOOL/NAME."
            error = tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="PendingError", suggestion=hint)
            self._finish(call, error_result(error, call.tool.error_message_limit))
            return
        if work.payload is not None:
            self._finish(call, work.payload)
            return
        if call.deadline is not None:
            wait_s = min(wait_s, call.deadline - self._loop.time() - POLL_MARGIN_S)
        if wait_s <= 0:
            self._finish(call, _still_pending(handle))
            return
        work.pollers.append(call)
        self._loop.call_later(wait_s, self._waited, work, call)

    def handles_of(self, owner: tuple[str, str]) -> list[str]:
        """The handles of the running work of an agent instance."""
        return [work.promise.handle for work in self._book.of(owner)]

    def forget(self, owner: tuple[str, str]) -> None:
        """The instance is deleted: its work ends without a word to anybody, in the next tool host, too."""
        self._book.forget(owner)
        for promise in [promise for promise in self._untold.values() if promise.owner == owner]:
            del self._untold[promise.call_id]
            self._book.told(promise)
        self._note()

    def overdue(self) -> list[Work]:
        """Work that has run for too long; forget results that nobody asks for any more."""
        now = self._loop.time()
        self._book.expire(now)
        return self._book.overdue(now)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to look after."""
        return self._book.empty

    def _told(self, promise: Promise) -> None:
        self._untold.pop(promise.call_id, None)
        self._book.told(promise)
        self._note()

    def _note(self) -> None:
        self._remember([*self._untold.values(), *self._book.running()])

    def _waited(self, work: Work, call: Call) -> None:
        if call in work.pollers:
            work.pollers.remove(call)
            self._finish(call, _still_pending(work.promise.handle))


def too_much_pending(whose: str) -> ToolError:
    """The error of a call whose work may not go on: too much does already. `whose` says where, and how much may."""
    message = f"too much pending work is running for {whose}"
    return tool_error("E_OVERLOADED", message, name="PendingError", suggestion="Call again when some of it has ended.")


def _still_pending(handle: str) -> Raw:
    return Raw(encode_value(ToolResult(status="pending", handle=handle)))


def completion_event(promise: Promise, payload: Raw) -> Frame:
    """The event that tells an agent instance what its work came to; its id is made of the call's."""
    told = Completion(
        handle=promise.handle,
        tool_name=promise.tool,
        tool_call_id=promise.tool_call_id,
        turn_id=promise.turn_id,
        result=payload,
    )
    event_id = f"{promise.call_id}~completed"
    event = AgentEvent(id=event_id, type=TOOL_COMPLETED, created_at=rfc3339(time.time()), input=told)
    return Frame(
        "event",
        to=promise.agent,
        instance_key=promise.instance_key,
        event_id=event_id,
        payload=Raw(encode_value(event)),
        root_event=promise.root_event,
        trace_id=promise.trace_id,
        parent_span_id=call_span(promise.call_id),
    )
