"""One turn while it runs: performs the actions of turn.py through the model, the tool calls and the conversation file.

Rules.
- The messages of a turn's actions are stored in one transaction, before the actions that follow them. Results that come
  together are stored together.
- A turn leaves in one of four ways. It is answered (`done`, `failed`). It is given back at a step boundary (`release`),
  or because a person is asked about every open call (`park`). Or it is abandoned without a frame, because another
  process has its lease now.
- The turn machine decides. Middleware runs around it as tasks (extensions/stages.py), and their progress becomes its
  inputs.

Source: docs/design/turns.md section 2; docs/design/delivery.md sections 2 and 6.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import structs

from goondan.agentproc.calls import caller, of_turn
from goondan.agentproc.conversation.store import ConversationStore, TurnRow
from goondan.agentproc.conversation.transcript import Transcript, resumption
from goondan.agentproc.extensions.points import contexts, pipeline
from goondan.agentproc.extensions.stages import Stages, apply_views
from goondan.agentproc.machine import turn as machine
from goondan.agentproc.machine.answers import TurnUsage, answer_payload, done_frame, failed, told_event, turn_id
from goondan.agentproc.machine.catalog import StepCatalog
from goondan.agentproc.machine.messages import Append, Message, ToolData, ToolResultPart
from goondan.agentproc.machine.questions import Ended, end_of
from goondan.agentproc.model.calls import ModelCalls
from goondan.agentproc.model.context import TurnContext
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.turn import configuration, live, notes, parts
from goondan.agentproc.turn.instance import Instance
from goondan.schemas.bundle import launch
from goondan.schemas.system.trace_index import IndexRow
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import OPERATOR_AGENT, ErrorPayload, Frame, ToolResult
from goondan.schemas.wire.spans import is_trace_id, trace_id_of

#: How often a running turn says that it still works (seconds). The broker gives up on a silent holder much later.
RENEW_S: Final = 10.0
#: How late the trace may have the begin or end of a step with middleware (seconds), unless something else is stored
#: before. A transaction for it alone would take a third of the step's time.
NOTES_S: Final = 0.05

#: The cancellation by an operator; below, that of a turn whose event has ended elsewhere.
CANCELLED: Final = machine.Cancel(
    error_payload("E_CANCELLED", "it was cancelled before it was finished"),
    "the turn was cancelled",
    "(This request was cancelled before it was finished. Nothing of it is wanted any more.)",
)
_LEFT: Final = machine.Cancel(
    error_payload("E_CANCELLED", "the turn was left unfinished"),
    "the turn was left unfinished",
    "(This request was left unfinished, and was ended.)",
)

log = logging.getLogger("agentproc")


class TurnRun:
    """One turn while it runs. `features` may have parts in it."""

    def __init__(
        self,
        instance: Instance,
        frame: Frame,
        first: machine.First,
        row: TurnRow | None,
        features: parts.Features,
    ) -> None:
        #: TurnCore (parts.py) says what these are.
        self.instance = instance
        self.event = frame
        self.first = first
        self._loop = instance.loop
        self._event_id = frame.event_id or ""
        self._row = row
        attempt = 1 if row is None else row.attempt + (row.status == "abandoned")
        self._attempt = attempt
        name = turn_id(instance.spec.name, instance.instance_key, self._event_id, attempt)
        # The next step can have another configuration of an extension, so each step has to be entered.
        self._wraps_steps = instance.pipeline.has("step") or bool(instance.spec.extensions)
        known = frame.trace_id is not None and is_trace_id(frame.trace_id)
        self._trace_id = frame.trace_id if known and frame.trace_id else trace_id_of(name)
        self.turn = machine.Turn(
            name,
            max_steps=instance.config.current.max_steps,
            wraps_turn=instance.pipeline.has("turn"),
            wraps_steps=self._wraps_steps,
            judge=instance.judge,
        )
        self._transcript = Transcript(instance.store, name, self.turn.take_position, instance.clock)
        texts = instance.redact, lambda: instance.spec
        self.notes = notes.TurnNotes(
            instance.store, name, self._trace_id, frame.parent_span_id, *texts, live=frame.live
        )
        self.workdir = instance.workdir_of(frame)
        deadline = None if frame.deadline_ms is None else self._loop.time() + frame.deadline_ms / 1000
        self._epoch = frame.epoch or 0
        self.live = live.LiveFeed(
            instance.link, self._loop, frame, name, again=row is not None, redact=instance.redact_said
        )
        shown = TurnContext(instance.context, self._transcript)
        self.parts = parts.TurnParts(features, self)
        context = caller.CallContext(name, self._event_id, frame.epoch, deadline)
        #: The calls of the turn.
        self.calls = calls = of_turn.TurnCalls(self, self.turn, context, shown, self.parts, self._end_of)
        self._config = configuration.TurnConfig(instance.config, instance.catalog, instance.store, name)
        self._models = ModelCalls(self, shown, self.parts)
        instance.watch.told = self._layer_told
        #: The function that performs each action, after the messages of the actions were stored.
        self._performs: dict[type[machine.Action], Callable[[Any], None]] = {
            machine.AskModel: self._ask_model,
            machine.RunTool: calls.make_call,
            machine.ListTools: calls.list_tools,
            machine.DropCalls: calls.drop,
        }
        self._stages: Stages | None = None
        self._followed: configuration.InForce | None = None  # the configuration that features were asked about last
        if self._wraps_steps or not instance.pipeline.empty:
            stages = self._stages = calls.stages = Stages(
                instance.extensions,
                instance.watch,
                self._config.in_force,
                instance.catalog,
                self._transcript,
                contexts.Execution(instance.spec.name, instance.instance_key, name, self._trace_id),
                told_event(frame),
                calls.asking,
                push=self.push,
                use=self._use,
                lost=self.abandon,
                ask_aside=self.ask_aside,
            )
            self._performs |= {
                machine.EnterTurn: lambda _: stages.enter_turn(),
                machine.LeaveTurn: partial(self._leave_turn, stages),
                machine.EnterStep: partial(self._enter_step, stages),
                machine.LeaveStep: stages.leave_step,
            }
        self._parked = False
        self._inputs: list[machine.Input] = []
        self._over: asyncio.Future[Frame | None] = self._loop.create_future()
        self._context = copy_context()
        self._roused = False  # the inputs are handled in the next round of the loop
        self._lost = False
        self._hangs = False  # a layer of an extension, as the notes say
        self._completed: dict[str, Ended] = {}  # pending work that has ended since the last model call
        self._renewing: Frame | None = None
        self._messages = 0  # of the turn, that are stored
        self._position: int | None = None  # the same, once this incarnation has stored one
        self._left: list[Message] | None = None  # the conversation after the turn, as far as it is known
        self._own_code = False  # an extension of the bundle's own, which might change a message in place
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._notes_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = [self._loop.call_later(RENEW_S, self._renew)]
        self._set_deadline(deadline)

    def ask_aside(self, text: str, system: str | None, step: int) -> Awaitable[ModelAnswer]:
        """Ask the agent's model outside of the conversation, in this step (from 1)."""
        return self._models.ask_aside(text, system, step)

    @property
    def turn_id(self) -> str:
        """The id of the turn."""
        return self.turn.turn_id

    @property
    def step(self) -> int:
        """The number of the step that runs, or of the first one."""
        return max(1, self.turn.steps)

    @property
    def model(self) -> launch.ModelSpec:
        """The model of that step."""
        return self._config.in_force.model

    @property
    def spec(self) -> launch.AgentSpec:
        """The agent's specification, as the step that runs has it."""
        return self._config.in_force.spec

    # --- life

    async def go(self) -> Frame | None:
        """Run to the end. Returns the frame that ends the event, or None when the turn was abandoned."""
        at = self.instance.clock()
        try:
            self._act(self._begin(at), at)
        except Exception:
            self._index(at)  # it is stored that the turn has failed
            raise
        self._loop.call_soon(self._index, at)  # it is a hint: what goes out first need not wait for it
        return await self._over

    def push(self, event: machine.Input) -> None:
        """Give the turn an input. It is handled in the next round of the loop, with the others that come until then."""
        self._inputs.append(event)
        if not self._roused:
            self.rouse()

    def rouse(self) -> None:
        """Let the turn look again whether there is something to do, or whether it parks."""
        if not self._roused:
            self._roused = True
            self._loop.call_soon(self._go_on, context=self._context)

    def _go_on(self) -> None:
        """Handle what has come: a callback, because a task would enter each of its coroutines anew."""
        self._roused, over = False, self._over
        if over.done():
            return
        if self._lost:
            over.set_result(None)
            return
        try:
            inputs, self._inputs = self._inputs, []
            at = self.instance.clock()
            self.turn.max_steps = self.instance.config.current.max_steps
            actions: list[machine.Action] = []
            for event in inputs:
                if isinstance(event, machine.Cancel):
                    self._models.give_up(event.error.code)
                actions += self.turn.handle(event, at)
            self._act(actions, at)
        except BaseException as error:  # whoever waits for the turn gets it, as if it had run there
            over.set_exception(error)

    def _act(self, actions: Sequence[machine.Action], at: str) -> None:
        """Perform the actions. If they end the event, the turn is over."""
        try:
            ended = self._perform(actions, at)
        except GoondanError as error:
            if error.info.code != "E_STORE_FULL":
                raise
            log.warning("event %s: %s", self._event_id, error)
            ended = self._end_with(error.info, "the conversation is full")
        if ended is None and not self._inputs:
            for parks in self.parts.hooks.parks:
                if parks(self.turn.open_calls):
                    self._parked = True
                    ended = Frame("ack", stage="park", event_id=self._event_id, epoch=self._epoch)
                    break
        if ended is not None:
            self._over.set_result(ended)
        elif self._inputs:
            self.rouse()

    def set_clock(self, frame: Frame) -> None:
        """Stop the turn's clock because a person is asked, or start it again with the time that the frame gives."""
        left_ms = None if frame.stage == "held" else frame.deadline_ms
        self._set_deadline(None if left_ms is None else self._loop.time() + left_ms / 1000)

    def abandon(self) -> None:
        """The event is no longer ours: leave its calls to the process that has it now."""
        self._lost = True
        self.push(machine.Pause())

    def cancel(self) -> None:
        """End the turn, its model call and its tool calls. The event is answered as failed. At the second call,
        middleware that still leaves the turn is not waited for.
        """
        self.push(CANCELLED)

    def release(self) -> None:
        """Stop every part of the turn. It handles no input any more."""
        self._over.cancel()
        self.live.close()
        self.instance.watch.told = None
        self._config.close()
        self._store_notes()
        for timer in (*self._timers, self._deadline_timer, self._notes_timer):
            if timer is not None:
                timer.cancel()
        self._models.close()
        self.instance.end_turn(self._left)
        if self._renewing is not None:
            self.instance.link.forget(self._renewing.id)
        self._transcript.closed = True
        if self._stages is not None:
            self._stages.close()
        for part in reversed(self.parts.there):
            part.close()
        self.calls.close()
        if self._lost or self._parked:
            self.instance.caller.abandon()
        else:
            self.instance.caller.cancel(self.instance.caller.open_call_ids)

    def listen(self, wanted: bool) -> None:
        """Somebody wants to hear of the turn from now on, or nobody does any more."""
        self.notes.live = wanted
        self.live.listen(wanted, self.turn.steps)

    # --- actions

    def _begin(self, at: str) -> list[machine.Action]:
        """The first actions: of a new turn, or of a turn that an earlier incarnation left. Raises GoondanError as the
        parts of features do.
        """
        instance, store, event = self.instance, self.instance.store, self.event
        if self._row is not None and self._row.status == "running":
            stored = store.turn_events(self.turn.turn_id)
            self._transcript.restore(stored)
            self._config.resume()
            self.calls.catalog = instance.catalog.for_step()
            asked = self.first if isinstance(self.first, machine.BeginCall) else None
            resume = resumption(stored, asked is not None, asked)
            own = [message for _, message in resume.stored]
            self._messages = len(own)
            results = [part for one in own if isinstance(one.data, ToolData) for part in one.data.content]
            calls = [f"{self.turn.turn_id}/{part.tool_call_id}" for part in results]
            instance.acks.add(calls)  # the incarnation that stored them may not have said so
            sent = {event.position: event.stored_ms for event in stored}
            self.calls.first_sent = {message.id: sent[position] for position, message in resume.stored}
            with store.write():
                self.notes.resumed(at)
            self._follow(self._config.in_force)
            return self.turn.handle(resume if resume.stored else self.first, at)
        leftover = [row for row in store.running_turns() if row.event_key != self._event_id]
        with store.write():
            for row in leftover:
                self._close_leftover(row, at)
            store.begin_turn(
                self._event_id,
                self.turn.turn_id,
                self._attempt,
                at,
                trace_id=self._trace_id,
                parent_span_id=event.parent_span_id,
                waited_ms=event.waited_ms,
            )
            self._config.begin_turn()
            self.notes.begun(at, event.waited_ms, event.place_ms or 0, awaited=bool(event.chain))
            actions = self.turn.handle(self.first, at)
            # The first messages go into the transaction that begins the turn.
            for action in actions:
                if isinstance(action, machine.Store):
                    self._transcript.append(action.position, action.message)
                    self._messages += 1
            self.notes.actions(actions, at, self.calls.catalog)
        self._follow(self._config.in_force)
        return [action for action in actions if not isinstance(action, machine.Store)]

    def _index(self, at: str) -> None:
        """Record where the turn of a trace is found. One that is resumed may have been cut off before. When that fails,
        the turn goes on.
        """
        agent, key = self.instance.spec.name, self.instance.instance_key
        try:
            self.instance.index.add(IndexRow(at, self._trace_id, self.turn.turn_id, self._event_id, agent, key))
        except (OSError, sqlite3.Error, UnicodeEncodeError) as error:
            log.warning("the index of traces could not be written: %s", error)

    def _follow(self, in_force: configuration.InForce) -> None:
        """Begin the parts of the features that apply now. Raises GoondanError: the turn fails."""
        self._followed = in_force
        extensions = in_force.spec.extensions
        self._own_code = self._own_code or (bool(extensions) and not all(one.bundled for one in extensions))
        self.parts.follow(in_force.spec)

    def _close_leftover(self, row: TurnRow, at: str) -> None:
        """An unfinished turn whose event was taken from this instance for good: its history is made valid and kept."""
        steps = self._give_up(row.turn_id, _LEFT, at)
        used, store = TurnUsage(), self.instance.store
        used.count_notes(store.model_notes(row.turn_id))
        store.finish_turn(row.event_key, row.turn_id, "abandoned", at, steps=steps, answer=None, used=used.parts)
        log.warning("event %s: its unfinished turn %s was closed", row.event_key, row.turn_id)

    def _give_up(self, turn_id: str, cancel: machine.Cancel, at: str) -> int:
        """End the stored part of a turn with a result for every call (inside `write`). Returns the turn's steps."""
        store = self.instance.store
        turn = machine.Turn(turn_id, max_steps=self.instance.spec.max_steps_per_turn)
        turn.handle(resumption(store.turn_events(turn_id), isinstance(self.first, machine.BeginCall)), at)
        for action in turn.handle(cancel, at):
            if isinstance(action, machine.Store):
                store.append(turn_id, action.position, Append(action.message))
        return turn.steps

    def fail(self, info: ErrorPayload) -> Frame | None:
        """End a turn that met an unexpected error, as well as that can still be stored. None when it cannot
        be stored.
        """
        try:
            return self._end_with(info, "the turn met an error")
        except GoondanError as error:
            log.warning("event %s: its end could not be stored: %s", self._event_id, error)
            return None

    def _end_with(self, info: ErrorPayload, reason: str) -> Frame:
        """Storing failed: the turn ends with its stored part and this error."""
        instance, name, at = self.instance, self.turn.turn_id, self.instance.clock()
        with instance.store.write(final=True, reserve=True):
            end = failed(info, self._give_up(name, machine.Cancel(info, reason), at))
            self.notes.model(at)
            used = self.notes.usage
            payload = answer_payload(end, name, self._event_id, at, self._trace_id, used)
            self.notes.ended(end, at)
            instance.store.finish_turn(
                self._event_id, name, "failed", at, steps=end.steps, answer=payload, used=used.parts
            )
            for storing in self.parts.hooks.storing:
                storing(end)
        return done_frame(self._event_id, self._epoch, "failed", payload)

    def _perform(self, actions: Sequence[machine.Action], at: str) -> Frame | None:
        """Store first, then act. Returns the frame that ends the event, if the actions end the turn or give it back:
        `End` and `Yield` are always the last of them. `at` is the time.
        """
        last = actions[-1] if actions else None
        end = last if isinstance(last, machine.End) else None
        if end is not None and (error := self.instance.secrets.out_of_error(end.error)) is not end.error:
            end = structs.replace(end, error=error)
            actions = [*actions[:-1], end]
        payload = self._store(actions, end, at)
        if self.live.wanted:
            self.live.tell(actions, self.notes.take_endings())
        for action in actions:
            perform = self._performs.get(type(action))
            if perform is not None:
                perform(action)
        if self.calls.untold is not None:  # no call has left that tells it
            self._renew()
        if end is not None:
            return done_frame(self._event_id, self._epoch, end.status, payload)
        if isinstance(last, machine.Yield):
            return Frame("ack", stage="release", event_id=self._event_id, epoch=self._epoch)
        return None

    def _store(self, actions: Sequence[machine.Action], end: machine.End | None, at: str) -> bytes:
        """Store the messages of the actions in one transaction. Returns the answer if the turn ends, else b""."""
        instance, payload = self.instance, b""
        stores = [action for action in actions if isinstance(action, machine.Store)]
        if self.notes.model_ends:
            self.notes.model(at)
        if not stores and end is None:
            self.notes.actions(actions, at, self.calls.catalog)
            self.noted()
            return payload
        results: list[ToolResultPart] = []
        with instance.store.write(final=end is not None):
            for store in stores:
                self._transcript.append(store.position, store.message)
                if isinstance(store.message.data, ToolData):
                    results += store.message.data.content
            if results:
                self.notes.results(results, at)
            if end is not None:
                payload = self._finish(end, at)
            for storing in self.parts.hooks.storing:
                storing(end)
            self.notes.actions(actions, at, self.calls.catalog)
        if results:
            instance.acks.add(self.calls.stored(results))
        if end is not None:
            self._left = None if self._own_code else self._transcript.left
        elif stores:
            self._messages += len(stores)  # not the place of the last one: results are stored in any order
            if self._position is None:  # a process that has got on and then dies is no reason to give the event up
                self.calls.untold = self._messages
            self._position = self._messages
        return payload

    def _finish(self, end: machine.End, at: str) -> bytes:
        """Store the end of the turn (inside `write`). Returns the answer."""
        instance, name, used = self.instance, self.turn.turn_id, self.notes.usage
        payload = answer_payload(end, name, self._event_id, at, self._trace_id, used)
        self.notes.ended(end, at)
        # An operator makes a call through an agent that has a model.
        by_operator = isinstance(self.first, machine.BeginCall) and instance.spec.name != OPERATOR_AGENT
        if by_operator and end.output is not None and end.output.status == "pending":
            note_work(instance.store, name)
        instance.context.keep()
        instance.store.finish_turn(
            self._event_id, name, end.status, at, steps=end.steps, answer=payload, used=used.parts
        )
        return payload

    def _store_notes(self) -> None:
        """Store the notes that were not stored with anything else."""
        self._notes_timer = None
        if self._lost or not self.instance.store.notes:
            return
        try:
            with self.instance.store.write():
                pass
        except GoondanError as error:  # what is stored next meets the same, and ends the turn
            log.warning("event %s: %s", self._event_id, error)

    # --- tool calls

    def _use(self, catalog: StepCatalog) -> None:
        """The tools of the step that begins."""
        self.calls.catalog = catalog

    def _layer_told(self, layer: pipeline.Layer, hangs_s: float | None) -> None:
        """A layer of an extension hangs; None: it does not any more."""
        place = layer.point or layer.kind
        self.live.hangs(layer.extension, place, hangs_s)
        if self._hangs != (hangs_s is not None):
            self._hangs = hangs_s is not None
            self.notes.hangs(layer.extension, place, self.instance.clock(), hangs_s)
            self.noted()

    def noted(self) -> None:
        """Notes wait to be stored. They are soon, if nothing else is stored before."""
        if self._notes_timer is None and self.instance.store.notes:
            self._notes_timer = self._loop.call_later(NOTES_S, self._store_notes)

    # --- into and out of the middleware around the turn and its steps

    def _leave_turn(self, stages: Stages, action: machine.LeaveTurn) -> None:
        self._models.stop()
        stages.leave_turn(action.end)

    def _enter_step(self, stages: Stages, action: machine.EnterStep) -> None:
        self._tell_completed()
        in_force = self._config.begin_step(action.step, again=action.again)
        if in_force is not self._followed:
            self._follow(in_force)
        stages.enter_step(action.step, in_force)

    # --- the model

    def completed(self, ended: Ended) -> None:
        """Pending work has ended. The next model call of this turn will read about it, if there is one."""
        self._completed[ended.event_id] = ended

    def answered(self, ended: Ended) -> None:
        """There is an answer to a question that an earlier step or turn asked without waiting. The model reads it in
        this turn.
        """
        if not self._transcript.has_origin(ended.event_id) and not self.instance.store.has_message(ended.event_id):
            self._completed[ended.event_id] = ended
            self.calls.heard()
            self.turn.hear()

    def _end_of(self, handle: str) -> ToolResult:
        return end_of(handle, self._completed.values(), self._transcript.next_messages)

    def _tell_completed(self) -> None:
        completed, self._completed = self._completed, {}
        for ended in completed.values():
            data = {"role": "user", "content": ended.text}
            message = {"id": ended.event_id, "data": data, "source": msgspec.to_builtins(ended.source)}
            message["metadata"] = ended.metadata
            self.instance.notice(ended)
            self._transcript.emit(ended.event_id, "", {"type": "append", "message": message})

    def _ask_model(self, action: machine.AskModel) -> None:
        instance = self.instance
        if self._wraps_steps and self._completed:
            self.turn.hear()  # what came since then, the middleware of the next step sees first
        if not self._wraps_steps:
            if self._completed:
                self._tell_completed()
            in_force = self._config.begin_step(action.step, again=False)
            if in_force is not self._followed:
                self._follow(in_force)
            self.calls.catalog = instance.catalog.for_step()
        own, spec = self._config.in_force.system, instance.spec
        provider, around = instance.provider, None if self._stages is None else self._stages.step
        messages = self._transcript.shown() if provider.needs_history else self._transcript.own_messages
        try:
            if around is not None and provider.needs_history:
                messages = apply_views(around.views, messages)
        except GoondanError as error:
            self.push(machine.ModelFailed(error.info))
            return
        own_choice = spec.tool_choice
        holds = action.step == 1 or own_choice in ("auto", "none")  # a word that one is called would never end the turn
        request = ModelRequest(
            agent=spec.name,
            model=self._config.in_force.model,
            messages=instance.context.presented.of(messages),
            tools=self.calls.catalog.shown,
            step=action.step,
            system=own if around is None or around.system is contexts.UNCHANGED else around.system,
            blocks=[] if around is None else around.blocks,
            turn_id=self.turn.turn_id,
            files=instance.files.place,
            output=spec.output,
            tool_choice=(around and around.tool_choice) or (own_choice if holds else None),
            trace_id=self._trace_id,
        )
        self._models.start(provider, request, self._stages)

    def time_left(self) -> float | None:
        """The turn's remaining time (seconds)."""
        deadline = self.calls.context.deadline
        return None if deadline is None else max(0.0, deadline - self._loop.time())

    # --- timers

    def _set_deadline(self, deadline: float | None) -> None:
        """Set the end of the turn (the loop's time); None: there is no limit now."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = None if deadline is None else self._loop.call_at(deadline, self._out_of_time)
        self.calls.set_deadline(deadline)

    def _out_of_time(self) -> None:
        late = error_payload("E_AGENT_TIMEOUT", "the turn did not finish within its deadline")
        self.push(machine.Cancel(late, "the turn ran out of time"))

    def _renew(self) -> None:
        """Tell the broker that the turn is alive, and learn whether the lease is gone."""
        self.instance.loop_watch.go_on()
        self._timers[0].cancel()
        self._timers[0] = self._loop.call_later(RENEW_S, self._renew)
        if self._renewing is not None:
            self.instance.link.forget(self._renewing.id)
        frame = self._renewing = Frame("ack", stage="renew", event_id=self._event_id, epoch=self._epoch)
        frame.position, self.calls.untold = self._position, None
        try:
            self.instance.link.post(frame).add_done_callback(self._renewed)
        except GoondanError as error:
            log.warning("event %s: %s", self._event_id, error)

    def _renewed(self, future: asyncio.Future[Frame]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, GoondanError) and error.info.code == "E_LEASE_LOST":
            log.warning("event %s: %s", self._event_id, error)
            self.abandon()


#: The name that the turns are kept under.
_NAME: Final = "operators.work"
#: So many turns are known, the last ones: more pieces of work of one instance never run at once.
MAX_KNOWN: Final = 256


# Pending work that an operator's calls have begun in an ordinary agent. Its end is told to nobody by itself: the model
# of the agent has not asked for it, and an operator polls.


def note_work(store: ConversationStore, turn_id: str) -> None:
    """An operator's call in this turn has begun pending work (inside `write`)."""
    known = [one for one in operators_work(store) if one != turn_id]
    store.remember(_NAME, msgspec.msgpack.encode([*known[1 - MAX_KNOWN :], turn_id]))


def operators_work(store: ConversationStore) -> list[str]:
    """The turns in which operators' calls have begun pending work."""
    kept = store.remembered(_NAME)
    return [] if kept is None else msgspec.msgpack.decode(kept, type=list[str])
