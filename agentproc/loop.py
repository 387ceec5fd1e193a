"""Performs the actions of turn.py: through the model, the tool calls, the conversation file and the link.

Rules.
- One turn at a time. What a turn wants stored is stored, in one transaction, before anything that follows it; results
  that come together are stored together.
- The answer is stored under the event's key before it is sent; a finished event is answered from there again.
- A turn leaves in one of three ways: answered (`done`, `failed`), given back at a step boundary (`release`), or
  abandoned without a word, because its lease is somebody else's now.
- Whatever goes wrong with the file, the model or our own code ends that turn with one error; the process serves on.

Source: delivery.md sections 3 and 5; design sections 3 and 8.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from agentproc.answers import answer_payload, done_frame, failed, input_text, internal_error, turn_id
from agentproc.calls import CallContext, CallLink, ToolCaller
from agentproc.catalog import Catalog, StepCatalog
from agentproc.conversation import Append, Message, ToolData, encode_message, error_result, presentable
from agentproc.live import LiveFeed
from agentproc.providers.base import ModelRequest, Provider, Usage
from agentproc.providers.choose import make_provider
from agentproc.store import ConversationStore, TurnRow
from agentproc.turn import (
    Action,
    AskModel,
    Begin,
    BeginCall,
    Cancel,
    DropCalls,
    End,
    Input,
    ModelAnswered,
    ModelFailed,
    Pause,
    Resume,
    RunTool,
    Store,
    ToolFinished,
    Turn,
    Yield,
)
from schemas.arguments import invalid_arguments
from schemas.codec import check_json, from_raw
from schemas.errors import GoondanError, error_payload, fail
from schemas.frames import (
    OPERATOR_AGENT,
    OPERATOR_CALL,
    AgentEvent,
    ErrorPayload,
    Frame,
    Lease,
    OperatorCall,
    ToolResult,
)
from schemas.launch import AgentSpec
from schemas.results import cut_message
from schemas.traces import CallDetail, ModelDetail, NoteKind, ResultDetail, encode_detail

#: How often a running turn says that it still works (seconds); the broker gives up on a holder much later.
RENEW_S: Final = 10.0
#: How late the tool host may hear that results are stored (seconds); it keeps them until then.
ACK_DELAY_S: Final = 0.05
#: callIds named in one `ack` frame, so that it stays far below the frame limit.
ACK_BATCH: Final = 1000
#: A model's failure as it is shown (characters).
MODEL_ERROR_CHARS: Final = 1000

log = logging.getLogger("agentproc")


class TurnLink(CallLink, Protocol):
    """What is needed of a link (schemas.link.Link)."""

    def post(self, frame: Frame) -> asyncio.Future[Frame]: ...


def now_rfc3339() -> str:
    """The time, RFC 3339 in UTC with milliseconds."""
    now = time.time_ns()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now // 1_000_000_000))}.{now // 1_000_000 % 1000:03d}Z"


class ResultAcks:
    """Tells the tool host which results are stored, in batches."""

    def __init__(self, link: TurnLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._waiting: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call_ids: Sequence[str]) -> None:
        """These results are stored."""
        self._waiting.extend(call_ids)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)

    def flush(self) -> None:
        """Send what waits; what cannot be sent now waits on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            batch = self._waiting[:ACK_BATCH]
            if not self._link.send(Frame("ack", stage="result", calls=batch)):
                self._timer = self._loop.call_later(ACK_DELAY_S, self.flush)
                return
            del self._waiting[:ACK_BATCH]

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


class TurnRunner:
    """Runs the turns of one agent instance, one after another."""

    def __init__(
        self,
        spec: AgentSpec,
        instance_key: str,
        link: TurnLink,
        store: ConversationStore,
        *,
        provider: Provider | None = None,
        clock: Callable[[], str] = now_rfc3339,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.instance_key = instance_key
        self.link = link
        self.store = store
        self.loop = loop
        self.clock = clock
        self.catalog = Catalog.of(spec)
        self.caller = ToolCaller(link, loop)
        self.acks = ResultAcks(link, loop)
        self._provider = provider
        self._run: TurnRun | None = None
        self._lease: Lease | None = None
        self._pausing = False

    @property
    def provider(self) -> Provider:
        """The model, made when it is first needed."""
        if self._provider is None:
            self._provider = make_provider(self.spec.model)
        return self._provider

    def leases(self) -> list[Lease]:
        """What this process holds: asked by the link at every hello."""
        return [self._lease] if self._lease is not None else []

    def holds(self, frame: Frame) -> bool:
        """Whether this very delivery is being worked on."""
        lease = self._lease
        return lease is not None and (lease.event_id, lease.epoch) == (frame.event_id, frame.epoch)

    def pause(self) -> None:
        """Give the running turn back at its next step boundary, and every later one at once."""
        self._pausing = True
        if self._run is not None:
            self._run.push(Pause())

    def abandon(self) -> None:
        """Leave the running turn as it is, without a word about it."""
        if self._run is not None:
            self._run.abandon()

    def progress(self, frame: Frame) -> None:
        """What a tool host says of a call that runs. Raises GoondanError E_FRAME_INVALID."""
        if self._run is not None:
            self._run.progress(frame)

    async def run(self, frame: Frame) -> None:
        """Work on one delivered event until it is answered, given back or abandoned. Raises only cancellation."""
        event_id, epoch = frame.event_id or "", frame.epoch or 0
        self._lease = Lease(event_id, epoch, self.instance_key)
        try:
            answer = await self._answer(frame, event_id, epoch)
            if answer is not None:
                await self._post(answer)
        finally:
            self._lease = None

    async def close(self) -> None:
        """Stop timers, give back the file and the model's connections."""
        self.acks.close()
        self.caller.abandon()
        self.store.close()
        if self._provider is not None:
            await self._provider.close()

    # --- inside

    async def _answer(self, frame: Frame, event_id: str, epoch: int) -> Frame | None:
        """The frame that ends the event for us, or None when the event is no longer ours."""
        turn = turn_id(self.spec.name, self.instance_key, event_id)
        try:
            first = self._first_input(frame)
            self.store.adopt(epoch)
            row = self.store.find_turn(event_id)
            if row is not None and row.answer is not None:
                return done_frame(event_id, epoch, row.status, row.answer)
            if self._pausing:
                return Frame("ack", stage="release", event_id=event_id, epoch=epoch)
            run = self._run = TurnRun(self, frame, first, row)
            turn = run.turn.turn_id
            return await run.go()
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":
                log.warning("event %s: %s", event_id, error.info.message)
                return None
            log.error("event %s: %s", event_id, error)
            info = error.info
        except Exception as error:
            log.exception("event %s", event_id)
            self.store.close()
            info = internal_error(type(error).__name__)
        finally:
            if self._run is not None:
                self._run.release()
                self._run = None
        payload = answer_payload(failed(info), turn, event_id, self.clock())
        return done_frame(event_id, epoch, "failed", payload)

    def _first_input(self, frame: Frame) -> Begin | BeginCall:
        """What the event asks for. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN or E_USAGE."""
        event = from_raw(frame.payload, AgentEvent)
        for name, part in (("input", event.input), ("auth", event.auth), ("metadata", event.metadata)):
            check_json(part, name)
        is_operator = self.spec.name == OPERATOR_AGENT
        if event.type != OPERATOR_CALL:
            if is_operator:
                raise fail("E_USAGE", f"the operator agent takes {OPERATOR_CALL} events, not {event.type}")
            return Begin(input_text(event.input))
        if not is_operator:
            raise fail("E_FORBIDDEN", f"{OPERATOR_CALL} events go to the operator agent only")
        asked = event.input
        if not isinstance(asked, dict) or not isinstance(asked.get("tool"), str):
            raise fail("E_FRAME_INVALID", f"the input of {OPERATOR_CALL} is {{tool, args}}")
        call = OperatorCall(asked["tool"], asked.get("args", {}))
        return BeginCall(call.tool, call.args)

    async def _post(self, frame: Frame) -> None:
        """Send what ends the event, until the broker has it."""
        try:
            await self.link.post(frame)
        except GoondanError as error:
            log.warning("event %s, %s: %s", frame.event_id, frame.stage, error)


class TurnRun:
    """One turn while it runs."""

    def __init__(self, runner: TurnRunner, frame: Frame, first: Begin | BeginCall, row: TurnRow | None) -> None:
        self._runner = runner
        self._loop = runner.loop
        self._event_id = frame.event_id or ""
        self._row = row
        self._first = first
        attempt = 1 if row is None else row.attempt + (row.status == "abandoned")
        self._attempt = attempt
        name = turn_id(runner.spec.name, runner.instance_key, self._event_id, attempt)
        self.turn = Turn(name, max_steps=runner.spec.max_steps_per_turn)
        deadline = None if frame.deadline_ms is None else self._loop.time() + frame.deadline_ms / 1000
        self._context = CallContext(name, self._event_id, frame.epoch, deadline)
        self._epoch = frame.epoch or 0
        self._live = LiveFeed(runner.link, self._loop, frame, again=row is not None)
        self._inputs: list[Input] = []
        self._wake: asyncio.Future[None] | None = None
        self._lost = False
        self._model: asyncio.Task[None] | None = None
        self._catalog: StepCatalog = runner.catalog.for_step()
        self._base: list[Message] | None = None
        self._own: dict[int, Message] = {}
        self._answered: dict[str, str] = {}  # tool call id -> callId under which the tool host gave the result
        self._shown_message = ""
        self._first_sent: dict[str, int] = {}
        self._model_end: ModelDetail | None = None  # of a model call whose end is not stored yet
        self._renewing: Frame | None = None
        self._timers: list[asyncio.TimerHandle] = [self._loop.call_later(RENEW_S, self._renew)]
        if deadline is not None:
            self._timers.append(self._loop.call_at(deadline, self._out_of_time))

    # --- life

    async def go(self) -> Frame | None:
        """Run to the end: the frame that ends the event for us, or None when it was abandoned."""
        actions = self._begin()
        while True:
            ended = self._perform(actions)
            if ended is not None:
                return ended
            if not self._inputs:
                self._wake = self._loop.create_future()
                await self._wake
                self._wake = None
            if self._lost:
                return None
            inputs, self._inputs = self._inputs, []
            at = self._runner.clock()
            actions = [action for event in inputs for action in self.turn.handle(event, at)]

    def push(self, event: Input) -> None:
        """Give the turn an input; it is handled in the next round of the loop."""
        self._inputs.append(event)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def progress(self, frame: Frame) -> None:
        """News of one of the turn's calls, for whoever asked."""
        self._live.progress(frame)

    def abandon(self) -> None:
        """The event is no longer ours: leave its calls to whoever has it now."""
        self._lost = True
        self.push(Pause())

    def release(self) -> None:
        """Stop everything that belongs to the turn."""
        self._live.close()
        for timer in self._timers:
            timer.cancel()
        if self._renewing is not None:
            self._runner.link.forget(self._renewing.id)
        if self._model is not None:
            self._model.cancel()
        if self._lost:
            self._runner.caller.abandon()
        else:
            self._runner.caller.cancel(self._runner.caller.open_call_ids)
        self._runner.acks.flush()

    # --- actions

    def _begin(self) -> list[Action]:
        """The first actions: of a new turn, or of one that an earlier incarnation left."""
        runner, store = self._runner, self._runner.store
        at = runner.clock()
        if self._row is not None and self._row.status == "running":
            stored = store.turn_events(self.turn.turn_id)
            appended = [(s.position, s.event.message, s.stored_ms) for s in stored if isinstance(s.event, Append)]
            self._own = {position: message for position, message, _ in appended}
            calls = [f"{self.turn.turn_id}/{c.tool_call_id}" for m in self._own.values() for c in _results(m)]
            runner.acks.add(calls)  # the incarnation that stored them may not have said so
            self._first_sent = {message.id: sent for _, message, sent in appended}
            operator = isinstance(self._first, BeginCall)
            with store.write():
                store.note(self.turn.turn_id, "turn.resumed", at)
            if appended:
                return self.turn.handle(Resume([(p, m) for p, m, _ in appended], operator), at)
            return self.turn.handle(self._first, at)
        leftover = [row for row in store.running_turns() if row.event_key != self._event_id]
        with store.write():
            for row in leftover:
                self._close_leftover(row, at)
            store.begin_turn(self._event_id, self.turn.turn_id, self._attempt, at)
            store.note(self.turn.turn_id, "turn.started", at)
            actions = self.turn.handle(self._first, at)
            # The first messages go into the transaction that begins the turn.
            for action in actions:
                if isinstance(action, Store):
                    self._append(action)
            self._note_actions(actions, at)
        return [action for action in actions if not isinstance(action, Store)]

    def _close_leftover(self, row: TurnRow, at: str) -> None:
        """An unfinished turn whose event was taken away from us for good: its history is made valid and kept."""
        store = self._runner.store
        stored = [(s.position, s.event.message) for s in store.turn_events(row.turn_id) if isinstance(s.event, Append)]
        turn = Turn(row.turn_id, max_steps=self._runner.spec.max_steps_per_turn)
        turn.handle(Resume(stored, isinstance(self._first, BeginCall)), at)
        for action in turn.handle(Cancel(error_payload("E_CANCELLED", "the turn was left unfinished")), at):
            if isinstance(action, Store):
                store.append(row.turn_id, action.position, Append(action.message))
        store.finish_turn(row.event_key, row.turn_id, "abandoned", at, steps=turn.steps, answer=None)
        log.warning("event %s: its unfinished turn %s was closed", row.event_key, row.turn_id)

    def _perform(self, actions: Sequence[Action]) -> Frame | None:
        """Store first, then act; the frame that ends the event, if the actions end the turn."""
        runner, end = self._runner, None
        stores = [action for action in actions if isinstance(action, Store)]
        for action in actions:
            if isinstance(action, End):
                end = action
        payload = b""
        if stores or end is not None:
            at = runner.clock()
            with runner.store.write(final=end is not None):
                self._note_model(at)
                for store in stores:
                    self._append(store)
                    self._note_result(store, at)
                if end is not None:
                    payload = answer_payload(end, self.turn.turn_id, self._event_id, at)
                    kind: NoteKind = "turn.completed" if end.status == "completed" else "turn.failed"
                    runner.store.note(self.turn.turn_id, kind, at)
                    runner.store.finish_turn(
                        self._event_id, self.turn.turn_id, end.status, at, steps=end.steps, answer=payload
                    )
                self._note_actions(actions, at)
        runner.acks.add([call_id for store in stores for call_id in self._stored_calls(store)])
        self._live.tell(actions)
        for action in actions:
            if isinstance(action, RunTool):
                self._run_tool(action)
            elif isinstance(action, AskModel):
                self._ask_model(action)
            elif isinstance(action, DropCalls):
                runner.caller.cancel([f"{self.turn.turn_id}/{call}" for call in action.tool_call_ids])
            elif isinstance(action, Yield):
                return Frame("ack", stage="release", event_id=self._event_id, epoch=self._epoch)
        if end is None:
            return None
        return done_frame(self._event_id, self._epoch, end.status, payload)

    def _append(self, action: Store) -> None:
        self._own[action.position] = action.message
        self._runner.store.append(self.turn.turn_id, action.position, Append(action.message))

    def _run_tool(self, action: RunTool) -> None:
        part, message, runner = action.part, action.message, self._runner
        if action.broken is not None:
            error = invalid_arguments(part.tool_name, [f"args: {action.broken}"], self._parameters(part.tool_name))
            self.push(ToolFinished(part.tool_call_id, error_result(error)))
            return
        encoded = None
        if message.id != self._shown_message:
            encoded, self._shown_message = encode_message(message), message.id

        def done(result: ToolResult | GoondanError, answered_id: str | None) -> None:
            if isinstance(result, GoondanError):
                log.warning("event %s: %s", self._event_id, result)
                self.abandon()
                return
            if answered_id is not None:
                self._answered[part.tool_call_id] = answered_id
            self.push(ToolFinished(part.tool_call_id, result))

        refused = runner.caller.start(
            self._catalog,
            part.tool_name,
            part.args,
            call_id=f"{self.turn.turn_id}/{part.tool_call_id}",
            context=self._context,
            done=done,
            message_id=message.id,
            message=encoded,
            first_sent_ms=self._first_sent.get(message.id) if action.again else None,
        )
        if refused is not None:
            if encoded is not None:
                self._shown_message = ""  # nobody has seen it yet
            self.push(ToolFinished(part.tool_call_id, refused))

    def _ask_model(self, action: AskModel) -> None:
        runner = self._runner
        self._catalog = runner.catalog.for_step()
        provider = runner.provider
        if self._base is None:
            self._base = runner.store.load_messages() if provider.needs_history else []
        own = [self._own[position] for position in sorted(self._own)]
        deadline = self._context.deadline
        request = ModelRequest(
            agent=runner.spec.name,
            model=runner.spec.model,
            messages=presentable([*self._base, *own]),
            tools=self._catalog.items,
            step=action.step,
            system=runner.spec.system,
            timeout_s=None if deadline is None else max(0.0, deadline - self._loop.time()),
        )
        self._model = self._loop.create_task(self._complete(provider, request))

    async def _complete(self, provider: Provider, request: ModelRequest) -> None:
        try:
            answer = await provider.complete(request, self._live.on_delta)
        except GoondanError as error:
            self._model_end = self._model_detail(request, code=error.info.code)
            self.push(ModelFailed(self._without_secrets(error.info)))
        except Exception as error:
            log.error("model call of event %s: %s", self._event_id, self._redact(traceback.format_exc()))
            info = error_payload("E_MODEL_FAILED", f"{type(error).__name__}: {error}")
            self._model_end = self._model_detail(request, code=info.code)
            self.push(ModelFailed(self._without_secrets(info)))
        else:
            self._model_end = self._model_detail(request, finish_reason=answer.finish_reason, usage=answer.usage)
            self.push(ModelAnswered(answer.text, answer.calls, answer.finish_reason, answer.metadata))

    def _without_secrets(self, info: ErrorPayload) -> ErrorPayload:
        """A model's error as it may be stored and shown: without the key, and of bounded length."""
        message = cut_message(self._redact(info.message), MODEL_ERROR_CHARS)
        return ErrorPayload(info.code, message, info.suggestion, info.help_url, info.retry_after_ms, info.name)

    def _redact(self, text: str) -> str:
        key = self._runner.spec.model.api_key
        return text.replace(key, "***") if key else text

    # --- timers

    def _out_of_time(self) -> None:
        self.push(Cancel(error_payload("E_AGENT_TIMEOUT", "the turn did not finish within its deadline")))

    def _renew(self) -> None:
        """Say that the turn is alive, and hear of it if the lease is gone."""
        self._timers[0] = self._loop.call_later(RENEW_S, self._renew)
        if self._renewing is not None:
            self._runner.link.forget(self._renewing.id)
        frame = self._renewing = Frame("ack", stage="renew", event_id=self._event_id, epoch=self._epoch)
        try:
            self._runner.link.post(frame).add_done_callback(self._renewed)
        except GoondanError as error:
            log.warning("event %s: %s", self._event_id, error)

    def _renewed(self, future: asyncio.Future[Frame]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, GoondanError) and error.info.code == "E_LEASE_LOST":
            log.warning("event %s: %s", self._event_id, error)
            self.abandon()

    # --- notes

    def _note_actions(self, actions: Sequence[Action], at: str) -> None:
        for action in actions:
            if isinstance(action, AskModel):
                self._runner.store.note(self.turn.turn_id, "step.started", at, str(action.step))
            elif isinstance(action, RunTool):
                called = CallDetail(action.part.tool_call_id, action.part.tool_name)
                self._runner.store.note(self.turn.turn_id, "tool.called", at, encode_detail(called))

    def _model_detail(
        self,
        request: ModelRequest,
        *,
        code: str | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> ModelDetail:
        return ModelDetail(
            step=request.step,
            model=f"{request.model.provider}/{request.model.model}".rstrip("/"),
            finish_reason=finish_reason,
            input_tokens=None if usage is None else usage.input_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            code=code,
        )

    def _note_model(self, at: str) -> None:
        ended, self._model_end = self._model_end, None
        if ended is not None:
            kind: NoteKind = "model.failed" if ended.code is not None else "model.answered"
            self._runner.store.note(self.turn.turn_id, kind, at, encode_detail(ended))

    def _note_result(self, action: Store, at: str) -> None:
        for part in _results(action.message):
            code = part.result.error.code if part.result.error is not None else None
            kind: NoteKind = "tool.failed" if part.result.status == "error" else "tool.completed"
            detail = ResultDetail(part.tool_call_id, part.result.status, code)
            self._runner.store.note(self.turn.turn_id, kind, at, encode_detail(detail))

    def _stored_calls(self, action: Store) -> list[str]:
        """callIds of the results in a stored message that came from the tool host."""
        return [
            call_id
            for part in _results(action.message)
            if (call_id := self._answered.pop(part.tool_call_id, None)) is not None
        ]

    def _parameters(self, name: str) -> dict[str, Any] | None:
        item = next((item for item in self._catalog.items if item.name == name), None)
        return None if item is None else item.parameters


def _results(message: Message) -> list[Any]:
    return message.data.content if isinstance(message.data, ToolData) else []
