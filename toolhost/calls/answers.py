"""How calls end: each in exactly one result, kept until the agent has stored it.

Source: docs/design/delivery.md section 6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from msgspec import Raw

from schemas.errors import tool_error
from schemas.frames import Frame, ToolError
from schemas.launch import DEFAULT_ERROR_LIMIT
from toolhost.calls.completions import Announce, Completions
from toolhost.calls.pending import Promise, Work
from toolhost.calls.results import error_result
from toolhost.calls.taken import Call, CallBook, Kept


class Answers:
    """The results of one tool host's calls, and of the work that goes on after them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Frame], bool],
        announce: Announce,
        remember: Callable[[list[Promise]], None],
        on_end: Callable[[Call], None] = lambda call: None,
    ) -> None:
        """`announce` and `remember`: see completions.py. `on_end` hears of each call that has its result."""
        self._loop = loop
        self._on_end = on_end
        self._send_frame = send
        self.book = CallBook()
        self.completions = Completions(finish=self.finish, announce=announce, remember=remember)

    def finish(self, call: Call, payload: Raw) -> None:
        """The call's one result; a second one counts for nothing."""
        if self.book.close(call, payload, self._loop.time()):
            self._on_end(call)
            self.send_result(call.id, call.agent, call.instance_key, payload)

    def fail(self, call: Call, error: ToolError, receipt: Raw | None = None, work: Work | None = None) -> None:
        """`error` is its result, or that of the `work` that went on after it; with the receipt of its jail."""
        self.conclude(call, work, error_result(error, call.tool.error_message_limit, receipt))

    def conclude(self, call: Call, work: Work | None, payload: Raw) -> None:
        """The end of a call, or of the work that went on after it."""
        if work is None:
            self.finish(call, payload)
        else:
            self.completions.end(work, payload)

    def acknowledge(self, call_ids: Iterable[str]) -> None:
        """Agents have stored these results."""
        self.book.acknowledge(call_ids)

    def resend(self) -> None:
        """After a reconnect: results that may have been lost on the way."""
        for kept in self.book.kept():
            self.send_kept(kept)

    def send_kept(self, kept: Kept) -> None:
        """The result of a finished call once more."""
        payload = kept.payload
        if payload is None:
            message = "the call has run, but its result was not kept"
            payload = error_result(
                tool_error("E_TOOL_OUTCOME_UNKNOWN", message, name="ToolResultDropped"), DEFAULT_ERROR_LIMIT
            )
        self.send_result(kept.id, kept.agent, kept.instance_key, payload)

    def send_result(self, call_id: str, agent: str | None, instance_key: str | None, payload: Raw) -> None:
        """A result that is kept nowhere."""
        self._send_frame(Frame("tool.result", call_id=call_id, to=agent, instance_key=instance_key, payload=payload))
