"""Calls of one turn that wait for a person, and questions of running calls to a person.

Rules.
- The broker decides which call waits. Its answer to a call over the bus says so. About a call that runs in this process
  it is asked first.
- When the broker has news of a waiting call, the call is made again under the same callId.
- When every open call of the step waits, the turn is given back (`parks`). When a person has decided, the turn goes on
  from what is stored, perhaps in another process.

Source: docs/decisions/069.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Raw

from goondan.agentproc.calls.caller import failed_result
from goondan.agentproc.machine.catalog import Allowed
from goondan.agentproc.turn.parts import CALL_WAITS, AgentFeature, Call, Done, Start, TurnCore, TurnPart
from goondan.features.approvals import wire
from goondan.features.approvals.agent.questions import Questions
from goondan.features.approvals.wire import FEATURE as NAME
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import Frame, ToolResult
from goondan.schemas.wire.questions import ELICIT


class Approvals(AgentFeature):
    """Calls that wait, of all turns."""

    name = NAME
    begins_at = ("approval.news", CALL_WAITS)

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether there are rules, or servers that may ask a person. In a replay nobody is asked."""
        return (NAME in spec.parts or bool(spec.servers)) and not spec.confined

    def begin(self, turn: TurnCore) -> TurnPart:
        """The calls of one turn."""
        return WaitingCalls(turn)


class WaitingCalls(TurnPart):
    """The calls of one turn that wait for a person."""

    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn
        self._written: Raw | None = None  # what `_policies` were read from
        self._policies: list[wire.Policy] = []
        #: Tool call id -> the function that makes the call again, and the callId of the script that makes the call.
        self._waiting: dict[str, tuple[Callable[[], None], str | None]] = {}
        self._asked: dict[str, tuple[Frame, asyncio.Future[Frame]]] = {}
        self._questions = Questions(turn)
        self.asks = {ELICIT: self._questions.take}
        self.takes = {"approval.news": self.news}

    def call(self, call: Call, done: Done, start: Start) -> None:
        """Start a call. About one that runs here a person may be asked first. The broker asks about all others."""
        policies = self._rules()
        ended = partial(self._ended, call, done)
        allowed = None
        if call.here and wire.concerns(policies, call.tool):
            allowed = self._turn.calls.catalog.check(call.tool, call.args)
        if not isinstance(allowed, Allowed) or wire.decide(policies, call.tool, allowed.args).action == "allow":
            start(call, ended)  # which finds out what is wrong with the arguments
        else:
            self._ask(call, allowed, ended, lambda: start(call, ended), partial(self.call, call, done, start))

    def waits(self, tool_call_id: str, within: str | None, again: Callable[[], None]) -> None:
        """This call waits for a person."""
        self._waiting[tool_call_id] = again, within
        turn = self._turn
        with suppress(GoondanError), turn.instance.store.write():  # a turn goes on without a note
            turn.notes.waits(tool_call_id, turn.instance.clock(), within)
        turn.live.waits(tool_call_id)
        turn.rouse()

    def parks(self, open_calls: Collection[str]) -> bool:
        """True when there are open calls and all of them wait."""
        return bool(self._waiting) and all(tool_call_id in self._waiting for tool_call_id in open_calls)

    def news(self, frame: Frame) -> None:
        """A person has decided about these calls and questions."""
        call_ids = frame.calls or []
        decided = {call_id.partition("~")[0] for call_id in call_ids}  # without the number of a repeat
        named = {name: f"{self._turn.turn_id}/{name}" in decided for name in self._waiting}
        # A decision about a call of a script may be one about others of it: the broker knows, so all ask again.
        scripts = {within for name, (_, within) in self._waiting.items() if named[name] and within is not None}
        for tool_call_id, (again, within) in list(self._waiting.items()):
            if named[tool_call_id] or within in scripts:
                del self._waiting[tool_call_id]
                again()
        self._questions.news(call_ids)

    def drop(self, tool_call_id: str) -> None:
        """Forget this call: its result is not wanted any more."""
        self._waiting.pop(tool_call_id, None)
        asked = self._asked.pop(tool_call_id, None)
        if asked is not None:
            self._turn.instance.link.forget(asked[0].id)
        self._questions.over(f"{self._turn.turn_id}/{tool_call_id}")

    def close(self) -> None:
        """Forget all calls and questions of the turn. The broker's items stand as long as its event does."""
        self._questions.close()
        for tool_call_id in [*self._waiting, *self._asked]:
            self.drop(tool_call_id)

    def _rules(self) -> list[wire.Policy]:
        """The policies that hold for the step."""
        parts = self._turn.spec.parts
        if parts.get(NAME) is not self._written:
            self._written, self._policies = parts.get(NAME), wire.policies_of(parts)
        return self._policies

    def _ask(
        self, call: Call, allowed: Allowed, done: Done, run: Callable[[], None], again: Callable[[], None]
    ) -> None:
        """Ask the broker whether a call may run here. `again` asks once more when a person has decided."""
        turn, context = self._turn, self._turn.calls.context
        frame = Frame("approval.ask", tool=call.tool, call_id=f"{turn.turn_id}/{call.id}")
        frame.event_id, frame.epoch = context.event_id, context.epoch
        frame.within = None if call.action.within is None else f"{turn.turn_id}/{call.action.within}"
        limit = allowed.item.error_message_limit

        def refused(error: GoondanError) -> None:
            done(failed_result(tool_error(error.info.code, error.info.message, name="BusError"), limit))

        def answered(future: asyncio.Future[Frame]) -> None:
            if self._asked.pop(call.id, None) is None or future.cancelled():
                return
            error = future.exception()
            if isinstance(error, GoondanError):
                turn.abandon() if error.info.code == "E_LEASE_LOST" else refused(error)
                return
            state = from_raw(future.result().payload, wire.ApprovalState)
            if state.state == "run":
                run()
            elif state.state == "waits":
                self.waits(call.id, frame.within, again)
            else:
                text = f"{call.tool}: the call was not approved: {state.reason or 'a person said no'}"
                done(failed_result(tool_error(wire.DENIED, text, name="ApprovalError"), limit))

        try:
            frame.payload = to_raw(wire.ApprovalAsk(args=Raw(encode_value(allowed.args))))
            future = turn.instance.link.post(frame)
        except GoondanError as error:
            asyncio.get_running_loop().call_soon(refused, error)
            return
        self._asked[call.id] = frame, future
        future.add_done_callback(answered)

    def _ended(self, call: Call, done: Done, result: ToolResult) -> None:
        """A call has its result: note who has refused it, and what would allow it. Its questions have no asker now."""
        self._questions.over(f"{self._turn.turn_id}/{call.id}")
        code = None if result.error is None else result.error.code
        if code == wire.DENIED:
            self._turn.notes.refused(call.id, *who_refused(self._rules(), call.tool, call.args))
        done(result)


def who_refused(policies: list[wire.Policy], tool: str, args: object) -> tuple[str, str]:
    """Who has refused this call, a rule or a person, and the line that would allow it."""
    decision = wire.decide(policies, tool, wire.UNREADABLE if args is None else args)
    policy, _, number = decision.rule.rpartition("/")
    place = f"before number {number}" if number.isdecimal() else "as the last one"
    rule = f'Extension/{policy or "approval"}: a rule {place}: {{tools: ["{tool}"], action: allow}}'
    if decision.action == "deny":
        return "rule", rule
    return "person", f"answer yes when it is asked again (gdn approve), or {rule}"


FEATURE: Final = Approvals
