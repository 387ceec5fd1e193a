"""Calls of one turn that wait for a person.

Rules.
- The broker decides which call waits. Its answer to a call over the bus says so. About a call that runs in this process
  it is asked first.
- When the broker has news of a waiting call, the call is made again under the same callId.
- When every open call of the step waits, the turn is given back (`park`). When a person has decided, the turn goes on
  from what is stored, perhaps in another process.

Source: docs/decisions/069.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Raw

from goondan.agentproc.calls import CallContext, failed_result
from goondan.agentproc.catalog import Allowed, StepCatalog
from goondan.agentproc.instance import Instance
from goondan.agentproc.notes import TurnNotes
from goondan.schemas.approval_rules import concerns, decide
from goondan.schemas.approvals import DENIED, ApprovalAsk, ApprovalState
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import Frame, ToolResult


class Approvals:
    """The calls of the turn `turn_id` that wait for a person. `notes` are the notes of the turn.

    `wake` is called when a call begins to wait. `told` is called with the tool call id of that call. `lost` is called
    when the lease is gone.
    """

    def __init__(
        self,
        instance: Instance,
        turn_id: str,
        notes: TurnNotes,
        *,
        wake: Callable[[], None],
        told: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._notes = notes
        self._link = instance.link
        self._policies = instance.spec.approvals
        self._turn_id = turn_id
        self._wake = wake
        self._told = told
        self._lost = lost
        #: Tool call id -> the function that makes the call again, and the callId of the script that makes the call.
        self._waiting: dict[str, tuple[Callable[[], None], str | None]] = {}
        self._asked: dict[str, tuple[Frame, asyncio.Future[Frame]]] = {}

    def parks(self, open_calls: Iterable[str]) -> bool:
        """True when there are open calls and all of them wait."""
        return bool(self._waiting) and all(tool_call_id in self._waiting for tool_call_id in open_calls)

    def wait(self, tool_call_id: str, again: Callable[[], None], within: str | None) -> None:
        """This call waits for a person. `again` makes it again. `within` is the callId of the script that makes it."""
        self._waiting[tool_call_id] = again, within
        with suppress(GoondanError), self._instance.store.write():  # a turn goes on without a note
            self._notes.waits(tool_call_id, self._instance.clock(), within)
        self._told(tool_call_id)
        self._wake()

    def news(self, call_ids: Iterable[str]) -> None:
        """A person has decided about these calls."""
        decided = {call_id.partition("~")[0] for call_id in call_ids}  # without the number of a repeat
        named = {name: f"{self._turn_id}/{name}" in decided for name in self._waiting}
        # A decision about a call of a script may be one about others of it: the broker knows, so all ask again.
        scripts = {within for name, (_, within) in self._waiting.items() if named[name] and within is not None}
        for tool_call_id, (again, within) in list(self._waiting.items()):
            if named[tool_call_id] or within in scripts:
                del self._waiting[tool_call_id]
                again()

    def admit(
        self,
        catalog: StepCatalog,
        name: str,
        args: Any,
        tool_call_id: str,
        context: CallContext,
        *,
        run: Callable[[], None],
        done: Callable[[ToolResult], None],
        within: str | None = None,
    ) -> None:
        """Handle a call that runs in this process. Calls `run` now or when a person has agreed, or `done` with the
        refusal.
        """
        allowed = catalog.check(name, args) if concerns(self._policies, name) else None
        if not isinstance(allowed, Allowed) or decide(self._policies, name, allowed.args).action == "allow":
            run()  # which finds out what is wrong with the arguments
            return
        frame = Frame("approval.ask", tool=name, call_id=f"{self._turn_id}/{tool_call_id}")
        frame.event_id, frame.epoch, frame.within = context.event_id, context.epoch, within
        limit = allowed.item.error_message_limit

        def refused(error: GoondanError) -> None:
            done(failed_result(tool_error(error.info.code, error.info.message, name="BusError"), limit))

        def answered(future: asyncio.Future[Frame]) -> None:
            if self._asked.pop(tool_call_id, None) is None or future.cancelled():
                return
            error = future.exception()
            if isinstance(error, GoondanError):
                self._lost() if error.info.code == "E_LEASE_LOST" else refused(error)
                return
            state = from_raw(future.result().payload, ApprovalState)
            if state.state == "run":
                run()
            elif state.state == "waits":
                again = partial(
                    self.admit, catalog, name, args, tool_call_id, context, run=run, done=done, within=within
                )
                self.wait(tool_call_id, again, within)
            else:
                text = f"{name}: the call was not approved: {state.reason or 'a person said no'}"
                done(failed_result(tool_error(DENIED, text, name="ApprovalError"), limit))

        try:
            frame.payload = to_raw(ApprovalAsk(args=Raw(encode_value(allowed.args))))
            future = self._link.post(frame)
        except GoondanError as error:
            asyncio.get_running_loop().call_soon(refused, error)
            return
        self._asked[tool_call_id] = frame, future
        future.add_done_callback(answered)

    def drop(self, tool_call_id: str) -> None:
        """Forget this call: its result is not wanted any more."""
        self._waiting.pop(tool_call_id, None)
        asked = self._asked.pop(tool_call_id, None)
        if asked is not None:
            self._link.forget(asked[0].id)

    def close(self) -> None:
        """Forget all calls of the turn."""
        for tool_call_id in [*self._waiting, *self._asked]:
            self.drop(tool_call_id)
