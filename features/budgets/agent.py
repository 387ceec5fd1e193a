"""Turns that are charged to budgets. Their model calls, and the tool calls that run in the agent, are reserved first.

The broker counts (broker/). Turns of events without budgets have no part of this feature.

Rules.
- A model call is made when the broker has granted it. The grant limits the tokens that the model writes and the time.
  Afterwards the agent reports the real usage, and the turn does not wait for the broker's confirmation.
- How much a model will read is not known before the call. It is guessed from the bytes of the request, rather too high.
- A call that failed before the model said anything has used nothing. The usage of a call that broke off later is not
  known.

Source: docs/decisions/070; PROTOCOL-AGENTS.md "Budgets".
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

import msgspec

from goondan.agentproc.calls.caller import OpenCalls, until_answered
from goondan.agentproc.extensions.points.results import tool_error_of
from goondan.agentproc.machine import catalog, estimate, messages
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, limited_output, output_limit
from goondan.agentproc.turn.parts import AgentFeature, Ask, Call, Done, OnNews, Start, TurnCore, TurnPart
from goondan.features.budgets.wire import FEATURE as NAME
from goondan.features.budgets.wire import MAX_TOKENS_NAMED, BudgetGranted, BudgetReserve, BudgetSettle
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame

#: Bytes of a request for one token that the model reads. Vendors' own rules of thumb say four characters of English. A
#: guess that is too high is given back when the call is settled. After a guess that is too low, the refusal comes too
#: late.
BYTES_PER_TOKEN: Final = 3
#: The event that extensions get when a model call was granted: how much is left.
BUDGET_LEFT: Final = "budget.left"

log = logging.getLogger("agentproc")


class Budgets(AgentFeature):
    """The feature in the process of an agent instance. The broker says with an event whether a budget counts it."""

    name = NAME

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether the work of this event is charged to budgets."""
        return event.budget

    def begin(self, turn: TurnCore) -> TurnPart:
        """See AgentFeature."""
        return TurnBudget(turn)


class TurnBudget(OpenCalls, TurnPart):
    """The budgets of one turn. Open are the calls that are counted just now."""

    def __init__(self, turn: TurnCore) -> None:
        self._turn = turn
        self._link = turn.instance.link
        self._notices = turn.instance.events
        self._event_id = turn.event.event_id or ""
        self._epoch = turn.event.epoch or 0
        super().__init__()

    # --- model calls

    async def model(self, request: ModelRequest, on_news: OnNews, ask: Ask) -> ModelAnswer:
        """Reserve a model call, make it, and report its usage. Raises GoondanError: E_BUDGET_SPENT, any other refusal
        of the broker, or what `ask` raises.
        """
        name = os.urandom(12).hex()
        on_news("waiting")
        size = 0 if output_limit(request.model) == 0 else _size(request)
        granted = await self._reserve(name, request, size)
        began, spoke = self._loop.time(), False

        def heard(news: ModelNews) -> None:
            nonlocal spoke
            spoke = spoke or news == "content"
            on_news(news)

        try:
            answer = await ask(_within(request, granted), heard)
        except GoondanError:
            self._settle(BudgetSettle(name, known=not spoke))
            if granted.left_ms is not None and self._loop.time() >= began + granted.left_ms / 1000:
                raise _out_of_time(granted) from None
            raise
        except BaseException:
            self._settle(BudgetSettle(name, known=False))
            raise
        self._settle(_came_to(name, request, answer, size))
        return answer

    async def _reserve(self, name: str, request: ModelRequest, size: int) -> BudgetGranted:
        output = output_limit(request.model)
        read = 0 if size == 0 else min(MAX_TOKENS_NAMED, size // BYTES_PER_TOKEN + 1)
        frame = self._frame("budget.reserve", BudgetReserve(name, "model", read, output, request.model.document))
        try:
            reply = await until_answered(self._link, frame, self._link.post(frame))
        except asyncio.CancelledError:
            self._settle(BudgetSettle(name, unused=True))  # it may have been granted meanwhile
            raise
        granted = from_raw(reply.payload, BudgetGranted)
        if granted.left and self._notices.wants(BUDGET_LEFT):
            self._notices.emit(BUDGET_LEFT, {"left": msgspec.to_builtins(granted.left)}, emitter="the kernel")
        return granted

    def _settle(self, said: BudgetSettle) -> None:
        try:
            self._link.post(self._frame("budget.settle", said)).add_done_callback(_settled)
        except GoondanError as error:
            log.warning("event %s: a model call could not be settled: %s", self._event_id, error)

    # --- tool calls that run here

    def call(self, call: Call, done: Done, start: Start) -> None:
        """Count a call that runs in this process, before it starts. A call that was counted under this id before is
        the same call and is not counted twice. The broker counts those that go to a tool host.
        """
        if not call.runs_here() or not isinstance(
            self._turn.calls.catalog.check(call.tool, call.args), catalog.Allowed
        ):
            start(call, done)
            return
        tool_call_id, call_id = call.id, f"{self._turn.turn_id}/{call.id}"

        async def counted() -> None:
            frame = self._frame("budget.reserve", BudgetReserve(call_id, "tool"))
            try:
                await until_answered(self._link, frame, self._link.post(frame))
            except GoondanError as error:
                self.open.pop(tool_call_id, None)
                if error.info.code != "E_LEASE_LOST":  # else it is somebody else's call now
                    done(messages.error_result(tool_error_of(error, "E_BUDGET_SPENT")))
            else:
                self.open.pop(tool_call_id, None)
                start(call, done)

        self.open[tool_call_id] = self._loop.create_task(counted())

    # --- inside

    def _frame(self, kind: str, payload: BudgetReserve | BudgetSettle) -> Frame:
        return Frame(kind, event_id=self._event_id, epoch=self._epoch, payload=to_raw(payload))


def _size(request: ModelRequest) -> int:
    """The approximate size of a request (bytes)."""
    tools = [(item.name, item.description, item.parameters) for item in request.tools]
    return len(encode_value([request.system, request.messages, request.blocks, tools]))


def _within(request: ModelRequest, granted: BudgetGranted) -> ModelRequest:
    """The request with the limits of the grant."""
    model, timeout_s = request.model, request.timeout_s
    if granted.output_tokens is not None and granted.output_tokens < output_limit(model):
        model = limited_output(model, granted.output_tokens)
    if granted.left_ms is not None:
        left_s = granted.left_ms / 1000
        timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
    return msgspec.structs.replace(request, model=model, timeout_s=timeout_s)


def _came_to(name: str, request: ModelRequest, answer: ModelAnswer, size: int) -> BudgetSettle:
    """What is counted: what the server says, but no less than a request of `size` bytes and its answer surely have."""
    usage = answer.usage
    if usage is None or size == 0:
        return BudgetSettle(name, known=size == 0)
    wrote = encode_value([answer.text, answer.reasoning, [(call.name, call.args) for call in answer.calls]])
    return BudgetSettle(
        name,
        input_tokens=_count(max(usage.input_tokens, int(size * estimate.FIRST_SURELY))),
        output_tokens=_count(max(usage.output_tokens, int(len(wrote) * estimate.FIRST_SURELY))),
        cached_tokens=_count(usage.cached_tokens),
        cache_write_tokens=_count(usage.cache_write_tokens),
        model=request.model.document,
    )


def _count(tokens: int) -> int:
    """The number that a vendor reported, made valid."""
    return max(0, min(tokens, MAX_TOKENS_NAMED))


def _out_of_time(granted: BudgetGranted) -> GoondanError:
    """The error of a model call that had not ended when the time of a budget was over."""
    rows = [row for row in granted.left if row.dimension == "wallSeconds"]
    row = min(rows, key=lambda row: row.left, default=None)
    whose = "a budget" if row is None else f"the budget of agent {row.whose!r}"
    limit = "" if row is None else f": {row.limit:g} of {row.limit:g} seconds"
    return fail("E_BUDGET_SPENT", f"{whose} is spent{limit}; the model call that was under way was ended")


def _settled(future: asyncio.Future[Frame]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("a model call could not be settled: %s", error)


FEATURE: Final = Budgets
