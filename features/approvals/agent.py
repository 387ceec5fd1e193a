"""Calls of one turn that wait for a person, and questions of running calls to a person.

Rules.
- The broker decides which call waits. Its answer to a call over the bus says so. About a call that runs in this process
  it is asked first.
- When the broker has news of a waiting call, the call is made again under the same callId.
- When every open call of the step waits, the turn is given back (`parks`). When a person has decided, the turn goes on
  from what is stored, perhaps in another process.

Questions. What a server asks within a call is an item that an operator answers (`gdn approve answer`).
- The broker keeps the item, checks the answer against the question's schema, and stops the clocks meanwhile. The item
  is named after the call and the number of the question, so a process that takes the turn up asks the same again and
  gets the answer that is there.
- `decline` is a person's no, `cancel` that nobody has answered in time.
- A call that ends without its answer withdraws the item. But a call whose server has not begun with it
  (ServerQuestion.again) is made anew when its server or tool host is lost: it asks the same again, and the item stands.

Source: docs/decisions/069; docs/mcp.md; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Raw, structs

from goondan.agentproc.calls import asks, caller
from goondan.agentproc.machine.catalog import Allowed
from goondan.agentproc.turn.parts import CALL_WAITS, AgentFeature, Call, Done, Start, TurnCore, TurnPart
from goondan.features.approvals import wire
from goondan.features.approvals.wire import FEATURE as NAME
from goondan.features.approvals.wire import MAX_MESSAGE, ApprovalAsk, ApprovalState
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, tool_error
from goondan.schemas.wire.frames import Frame, ToolResult
from goondan.schemas.wire.questions import ELICIT
from goondan.schemas.worker.servers import ServerAnswer, ServerQuestion


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
        if call.runs_here() and wire.concerns(policies, call.tool):
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
            done(caller.failed_result(tool_error(error.info.code, error.info.message, name="BusError"), limit))

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
                done(caller.failed_result(tool_error(wire.DENIED, text, name="ApprovalError"), limit))

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
    """Who has refused this call, a rule or a person, and the line that would allow it. No person is asked about
    arguments that are too large to be shown: the rule that would ask has refused them.
    """
    decision = wire.decide(policies, tool, wire.UNREADABLE if args is None else args)
    policy, _, number = decision.rule.partition(" ")[0].rpartition("/")
    place = f"before number {number}" if number.isdecimal() else "as the last one"
    rule = f'Extension/{policy or "approval"}: a rule {place}: {{tools: ["{tool}"], action: allow}}'
    if decision.action == "deny" or len(encode_value(args)) > wire.MAX_ARGS_BYTES:
        return "rule", rule
    return "person", f"answer yes when it is asked again (gdn approve), or {rule}"


FEATURE: Final = Approvals


# --- questions to a person --------------------------------------------------------------------------------------------


#: What a call that was made again has behind its id (agentproc/calls/caller.py).
_AGAIN: Final = re.compile(r"~[0-9]+\Z")
#: Any answer to a question that only wants to know whether something is done.
_NOTHING: Final = {"type": "object", "maxProperties": 0}


class Questions:
    """The questions of the calls of one turn."""

    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn
        #: The id of the item -> the question, and what was asked for it.
        self._open: dict[str, tuple[asks.Asked, ApprovalAsk, str]] = {}

    def take(self, asked: asks.Asked) -> None:
        """A server asks. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN."""
        question: ServerQuestion = asked.read(ServerQuestion)
        tool = self._turn.instance.caller.tool_of(asked.call_id)
        if tool is None:
            raise GoondanError(error_payload("E_CALL_ENDED", "the call has ended"))
        if question.again:
            self._turn.calls.may_repeat(asked.call_id)
        name = item_name(asked.call_id, asked.number)
        self._open[name] = (asked, ask_of(tool, question), tool)
        self._ask(name)

    def news(self, call_ids: Iterable[str]) -> None:
        """A person has decided about these items."""
        for name in call_ids:
            if name in self._open:
                self._ask(name)

    def over(self, call_id: str) -> None:
        """A call has ended: its questions have no asker any more."""
        for name in [name for name in self._open if name.rpartition("?")[0] == call_id]:
            _, ask, tool = self._open.pop(name)
            with suppress(GoondanError):  # the end of the event withdraws it in any case
                self._post(name, structs.replace(ask, over=True), tool).add_done_callback(_heard)

    def close(self) -> None:
        """Forget all questions: the turn is left. Their items stand as long as its event does."""
        self._open.clear()

    # --- inside

    def _ask(self, name: str) -> None:
        asked, ask, tool = self._open[name]
        try:
            future = self._post(name, ask, tool)
        except GoondanError as error:
            self._refuse(name, error)
            return
        future.add_done_callback(partial(self._answered, name, asked))

    def _post(self, name: str, ask: ApprovalAsk, tool: str) -> asyncio.Future[Frame]:
        context = self._turn.calls.context
        frame = Frame("approval.ask", tool=tool, call_id=name, event_id=context.event_id, epoch=context.epoch)
        frame.payload = to_raw(ask)
        return self._turn.instance.link.post(frame)

    def _answered(self, name: str, asked: asks.Asked, future: asyncio.Future[Frame]) -> None:
        known = self._open.get(name)
        if known is None or known[0] is not asked or future.cancelled():
            return
        error = future.exception()
        if isinstance(error, GoondanError):
            self._refuse(name, error)
            return
        state = from_raw(future.result().payload, ApprovalState)
        if state.state == "waits":
            return
        del self._open[name]
        asked.answer(to_raw(elicited(state)))

    def _refuse(self, name: str, error: GoondanError) -> None:
        asked, _, _ = self._open.pop(name)
        asked.refuse(error.info)


def _heard(future: asyncio.Future[Frame]) -> None:
    if not future.cancelled():
        future.exception()  # the lease may be gone, and the item with it


def item_name(call_id: str, number: int) -> str:
    """The id of the item of a question: the same for a call that is made again."""
    return f"{_AGAIN.sub('', call_id)}?{number}"


def ask_of(tool: str, question: ServerQuestion) -> ApprovalAsk:
    """The question as a person is asked it."""
    server = tool.partition("__")[0]
    if question.mode == "url":
        text = f"The MCP server of {server} wants you to open a page: {question.url}\n{question.message}"
        return ApprovalAsk(kind="question", args=to_raw({}), message=text[:MAX_MESSAGE], schema=to_raw(_NOTHING))
    text = f"The MCP server of {server} asks: {question.message}"
    schema = question.schema or {"type": "object"}
    return ApprovalAsk(kind="question", args=to_raw({}), message=text[:MAX_MESSAGE], schema=to_raw(schema))


def elicited(state: ApprovalState) -> ServerAnswer:
    """The answer to the server."""
    if state.state != "answered":
        return ServerAnswer(action="cancel" if state.expired else "decline")
    content = None if state.answer is None else from_raw(state.answer, dict)
    return ServerAnswer(action="accept", content=content or None)
