"""The handlers of extensions in one running turn: middleware around it, its steps and its calls, and the points inside.
Each chain is a task, and its progress becomes inputs of the turn machine.

The machine says when a chain begins (`EnterTurn`, `EnterStep`, each tool call) and when its core is done (`LeaveTurn`,
`LeaveStep`, the call's result). This module runs the chain around a core that waits for that. When a chain fails, or
returns before its core is done, that is an input as well. So the rules of a turn stay in turn.py.

Source: docs/design/turns.md section 8; requirements CALL-09 to CALL-14, PIPELINE-02, PIPELINE-10 to PIPELINE-25,
COMPAT-03, CONFIG-03, CONTEXT-10, RECONCILE-01.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from goondan.agentproc.conversation.transcript import Transcript, read_event
from goondan.agentproc.extensions import api, loaded
from goondan.agentproc.extensions.engine import LayerFailed, Watch, run
from goondan.agentproc.extensions.points import contexts, results
from goondan.agentproc.extensions.points.pipeline import Kind, Layer, MiddlewareError
from goondan.agentproc.machine.catalog import REFUSED, Catalog, StepCatalog
from goondan.agentproc.machine.messages import Append, Message, ToolCallPart, error_result
from goondan.agentproc.machine.turn import End, Input, LeaveStep, StepEntered, StepLeft, TurnEntered, TurnLeft
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.turn.configuration import InForce
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, ToolError, ToolResult

#: How often `step.llmError` may ask the model again in one step. A call that fails a fourth time in a row is seldom
#: cured by asking again, and each try costs money.
MAX_ASKED_AGAIN: Final = 3
#: How long turn middleware may take behind its next() (seconds). The answer waits for it.
AFTER_TURN_S: Final = 30.0

log = logging.getLogger("agentproc")

#: One try of a model call, with these blocks and this catalog. Raises GoondanError.
Ask = Callable[[list[dict[str, Any]], list[CatalogItem]], Awaitable[ModelAnswer]]

R = TypeVar("R", results.TurnResult, results.StepResult, results.ToolCallResult)

#: Chains that were cancelled and have not ended yet. They are kept here because the event loop holds tasks only weakly.
_unwinding: set[asyncio.Task[None]] = set()


class Stages:
    """The chains of one turn, which begins with the configuration `in_force`. `push` gives the turn machine an input.
    `use` gives the run the catalog of its step. `lost` is called when the lease is gone. The turn's extensions ask
    other agents through `asking`, and the agent's own model through `ask_aside`.
    """

    def __init__(
        self,
        extensions: loaded.Extensions,
        watch: Watch,
        in_force: InForce,
        catalog: Catalog,
        transcript: Transcript,
        execution: contexts.Execution,
        input_event: AgentEvent,
        asking: api.Asking,
        *,
        push: Callable[[Input], None],
        use: Callable[[StepCatalog], None],
        lost: Callable[[], None],
        ask_aside: Callable[[str, str | None, int], Awaitable[ModelAnswer]],
    ) -> None:
        self._extensions = extensions
        self._pipeline = extensions.pipeline
        self._tools = extensions.tools
        self._watch = watch
        self._in_force = in_force
        self._catalog = catalog
        self._transcript = transcript
        self._push = push
        self._use = use
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._place = "turn"
        self._emitted = 0
        self._turn = contexts.TurnScope(
            execution,
            input_event,
            transcript,
            self._emit,
            asking.at,
            ask_aside,
            self._new_config,
            lambda: extensions.tools.dotted,
            *_documents(in_force),
        )
        self._turn_end: asyncio.Future[End] | None = None
        self._turn_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: The step that runs, as its middleware sees and changes it. None: none does, or none is wrapped.
        self.step: contexts.StepScope | None = None
        self._step_end: asyncio.Future[LeaveStep] | None = None
        self._step_task: asyncio.Task[None] | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}

    # --- the turn

    def enter_turn(self) -> None:
        """Run the turn middleware. Its next() pushes TurnEntered, its end TurnLeft."""
        self._turn_task = self._loop.create_task(self._run_turn())

    def leave_turn(self, end: End) -> None:
        """The core of the turn is done."""
        self._stop_step()
        self._place, self._emitted = "end", 0
        if self._turn_end is not None and not self._turn_end.done():
            self._turn_end.set_result(end)
        self._timer = self._loop.call_later(AFTER_TURN_S, self._too_late)

    async def _run_turn(self) -> None:
        turn_id = self._turn.execution.turn_id
        core_end: list[End] = []

        async def core() -> results.TurnResult:
            self._turn_end = self._loop.create_future()
            self._push(TurnEntered())
            end = await self._turn_end
            core_end.append(end)
            self._turn.result = result = results.turn_result(turn_id, end, self._transcript.own_messages)
            await self._mutate("turn.post", self._turn)
            return result

        def failed(layer: Layer | None, error: BaseException) -> results.TurnResult:
            return results.TurnResult(turn_id=turn_id, finish_reason="error", error=_report(layer, "turn", error))

        result = await self._around("turn", self._turn, core, results.TurnResult, failed)
        self._push(TurnLeft(results.changed_end(result, core_end[0] if core_end else None)))

    async def _around(
        self,
        kind: Kind,
        scope: contexts.TurnScope | contexts.StepScope | contexts.CallScope,
        core: Callable[[], Awaitable[R]],
        result: type[R],
        failed: Callable[[Layer | None, BaseException], R],
    ) -> R:
        """Run `core` inside the middleware of a kind. `failed` makes the result of a layer that failed; None: the
        engine itself did, and without an end the turn would wait for ever.
        """

        async def inside(_: Any) -> R:
            try:
                return await core()
            except LayerFailed as fault:
                return failed(fault.layer, fault.error)

        try:
            layers = self._pipeline.at(kind)
            return await run(
                layers,
                contexts.binding(scope),
                inside,
                self._watch,
                accept=partial(results.accepted, result),
                failed=failed,
            )
        except Exception as error:
            return failed(None, error)

    def _too_late(self) -> None:
        log.warning("turn %s: its middleware took longer than %g s", self._turn.execution.turn_id, AFTER_TURN_S)
        self._push(TurnLeft())

    # --- a step

    def enter_step(self, step: int, in_force: InForce) -> None:
        """Run the middleware of a step (from 1) with this configuration. Its next() pushes StepEntered, its end
        StepLeft.
        """
        self._place, self._emitted = f"step{step}", 0
        self.step = None
        self._step_task = self._loop.create_task(self._begin_step(step, in_force))

    async def _begin_step(self, step: int, in_force: InForce) -> None:
        if in_force.spec is not self._in_force.spec:
            self._turn.swarm, self._turn.agent = _documents(in_force)
        self._in_force = in_force
        try:
            await self._extensions.settle(in_force.extensions)
        except GoondanError as error:
            self._push(StepLeft(False, error.info))
            return
        scope = self.step = contexts.StepScope(self._turn, step - 1, self._catalog, self._new_config())
        await self._run_step(scope)

    def leave_step(self, leave: LeaveStep) -> None:
        """The core of the step is done."""
        if self._step_end is not None and not self._step_end.done():
            self._step_end.set_result(leave)

    async def _run_step(self, scope: contexts.StepScope) -> None:
        core_error: list[ErrorPayload] = []

        async def core() -> results.StepResult:
            try:
                await self._configure(scope)
            except GoondanError as error:
                return results.StepResult(status="failed", error=error.info)
            for point in ("step.tools", "step.blocks"):
                await self._mutate(point, scope)
            self._use(scope.settle_catalog())
            self._step_end = self._loop.create_future()
            self._push(StepEntered())
            leave = await self._step_end
            if leave.error is not None:
                core_error.append(leave.error)
            scope.result = result = results.step_result(leave)
            await self._mutate("step.post", scope)
            return result

        def failed(layer: Layer | None, error: BaseException) -> results.StepResult:
            return results.StepResult(status="failed", error=_report(layer, "step", error))

        result = await self._around("step", scope, core, results.StepResult, failed)
        goes_on = bool(result.should_continue)
        error = None if goes_on or result.error in core_error else results.given_error(result.error)
        self._push(StepLeft(goes_on, error))

    async def _configure(self, step: contexts.StepScope) -> None:
        """Run `step.config`, and apply its choice of extensions, tools and prompt.

        Raises LayerFailed, and GoondanError E_EXTENSION_FAILED.
        """
        extensions, handlers = self._in_force.extensions, self._pipeline.at("step.config")
        if not handlers and self._extensions.fit(extensions):
            return
        known = {extension.name: extension for extension in extensions}
        for layer in handlers:
            await run((layer,), contexts.binding(step), _nothing, self._watch)
            config = step.effective_config
            try:
                extensions = results.wanted_extensions(config, known)
                step.system = results.wanted_system(config)
                results.check_rest(config, self._in_force.config)
                if config["tools"] != self._in_force.config["tools"]:
                    tools = results.wanted_tools(config, step.bound)
                    named = {item.name for item in tools}
                    step.tool_catalog = [*tools, *(item for item in self._tools.exposed if item.name not in named)]
                    step.settle_catalog()
            except MiddlewareError as error:
                raise LayerFailed(layer, error) from None
        before = set(self._tools.names)
        await self._extensions.reconcile(extensions)
        now = set(self._tools.names)
        if before != now:  # extensions came or went, and their tools with them
            kept = [item for item in step.tool_catalog if item.name not in before - now]
            step.tool_catalog = [*kept, *(item for item in self._tools.exposed if item.name not in before)]

    # --- the model call

    @property
    def wraps_model(self) -> bool:
        """Whether any handler wraps the model call of the running step."""
        return self.step is not None and bool(self._pipeline.at("step.llmCall") or self._pipeline.at("step.llmError"))

    async def ask_model(
        self, ask: Callable[[list[dict[str, Any]], StepCatalog], Awaitable[ModelAnswer]]
    ) -> ModelAnswer:
        """Run the model call inside its wraps; `ask` is one try. Raises GoondanError."""
        if self.step is None:
            raise AssertionError("a model call belongs to a step")

        async def attempt(blocks: list[dict[str, Any]], items: list[CatalogItem]) -> ModelAnswer:
            catalog = self._catalog.of_items(items)
            self._use(catalog)
            return await ask(blocks, catalog)

        try:
            return await self._ask_in_wraps(self.step, attempt)
        except LayerFailed as fault:
            raise GoondanError(_report(fault.layer, "step", fault.error)) from None

    async def _ask_in_wraps(self, step: contexts.StepScope, ask: Ask) -> ModelAnswer:
        """Run the model call inside its wraps. `step.llmError` may have it asked again, within its limit.

        Raises the exception of the last try (GoondanError), and LayerFailed.
        """
        asked_again = 0
        answers: list[ModelAnswer] = []

        async def attempt(given: contexts.PointContext) -> contexts.PointContext:
            given.store()
            answer = await ask(step.blocks, step.tool_catalog)
            answers[:] = [answer]
            return given.replace(llm_result=results.told_answer(answer))

        async def call(given: contexts.PointContext) -> contexts.PointContext:
            return await self._wrapped(self._pipeline.at("step.llmCall"), given.at("step.llmCall"), attempt)

        async def again(given: contexts.PointContext) -> contexts.PointContext:
            nonlocal asked_again
            asked_again += 1
            made = await call(given.replace(llm_error=None))
            return made.at("step.llmError").replace(llm_error=given["llm_error"])

        rescuers = self._pipeline.at("step.llmError")
        failure: GoondanError | None = None
        while True:
            before = asked_again
            step.llm_result, step.llm_error = None, None if failure is None else failure.info
            context = contexts.PointContext(step, "step.llmError")
            try:
                context = await (call(context) if failure is None else self._wrapped(rescuers, context, again))
            except GoondanError as error:
                wanted = failure is None or asked_again > before
                failure = error
                if rescuers and wanted and asked_again < MAX_ASKED_AGAIN:
                    continue
                raise
            if context["llm_result"] is None:  # nobody wants to ask again
                raise failure or AssertionError("a wrap of step.llmCall gives an answer")
            return results.changed_answer(context["llm_result"], answers[0] if answers else None)

    def _stop_step(self) -> None:
        for task in (self._step_task, *self._calls.values()):
            _cancel(task)
        self._step_task = None
        self._calls.clear()

    # --- tool calls

    def run_call(
        self,
        part: ToolCallPart,
        step: int,
        start: Callable[[Any, Callable[[ToolResult], None]], None],
        drop: Callable[[], None],
        done: Callable[[ToolResult], None],
        limit: int,
    ) -> None:
        """Run one tool call inside its middleware.

        `start(args, then)` makes the call itself, `drop` gives it up. `done` gets the result of the outermost layer,
        with its error message within `limit` characters.
        """
        # A copy: layers may change the arguments, and the conversation keeps the arguments that the model wrote.
        args = results.json_copy(part.args)
        scope = contexts.CallScope(self._turn, self.step, step - 1, part.tool_name, part.tool_call_id, args)

        async def chain() -> None:
            open_call: asyncio.Future[ToolResult] | None = None

            async def call() -> results.ToolCallResult:
                nonlocal open_call
                waiter: asyncio.Future[ToolResult] = self._loop.create_future()
                open_call = waiter
                start(scope.args, lambda result: None if waiter.done() else waiter.set_result(result))
                return results.ToolCallResult.of(part.tool_call_id, part.tool_name, await waiter)

            async def core() -> results.ToolCallResult:
                return await (call() if scope.step is None else self._call_in_wraps(scope, call))

            def failed(layer: Layer | None, error: BaseException) -> results.ToolCallResult:
                told = error_result(_call_error(layer, error))
                return results.ToolCallResult.of(part.tool_call_id, part.tool_name, told)

            result = await self._around("toolCall", scope, core, results.ToolCallResult, failed)
            if open_call is not None and not open_call.done():
                drop()  # the chain ended without it
            self._calls.pop(part.tool_call_id, None)
            done(results.wire_result(result, limit))

        self._calls[part.tool_call_id] = self._loop.create_task(chain())

    async def _call_in_wraps(
        self, call: contexts.CallScope, core: Callable[[], Awaitable[results.ToolCallResult]]
    ) -> results.ToolCallResult:
        """Run the call inside the wraps of `toolCall.exec`, then `toolCall.post`. Raises LayerFailed."""
        wraps, posts = self._pipeline.at("toolCall.exec"), self._pipeline.at("toolCall.post")
        if not wraps and not posts:
            return await core()

        async def make(given: contexts.PointContext) -> contexts.PointContext:
            return given.replace(tool_result=await core())

        context = await self._wrapped(wraps, contexts.PointContext(call, "toolCall.exec"), make)
        context.store()
        await self._mutate("toolCall.post", call)
        if call.result is None:
            raise AssertionError("every wrap makes a result, and every mutator keeps one")
        return call.result

    def drop_calls(self, tool_call_ids: Sequence[str]) -> None:
        """Give these calls up: their results are not wanted any more."""
        for tool_call_id in tool_call_ids:
            _cancel(self._calls.pop(tool_call_id, None))

    # --- the end

    def close(self) -> None:
        """Cancel every chain that still runs. Their later inputs are ignored."""
        if self._timer is not None:
            self._timer.cancel()
        self._stop_step()
        _cancel(self._turn_task)

    # --- inside

    def _new_config(self) -> dict[str, Any]:
        """The configuration of a step that begins, as a copy that its handlers may change."""
        return results.json_copy(self._in_force.config) if self._pipeline.uses_points else {}

    async def _mutate(self, point: str, scope: Any) -> None:
        """Run the mutators of a point. Raises LayerFailed."""
        if layers := self._pipeline.at(point):
            await run(layers, contexts.binding(scope), _nothing, self._watch)

    async def _wrapped(
        self,
        layers: Any,
        given: contexts.PointContext,
        core: Callable[[contexts.PointContext], Any],
    ) -> contexts.PointContext:
        """Run `core` inside the wraps of a point. Each of the two makes a context of the one that it gets."""
        return (
            await run(layers, contexts.binding(None), core, self._watch, given=given) if layers else await core(given)
        )

    def _emit(self, extension: str, event: Any) -> None:
        self._emitted += 1
        try:
            self._transcript.emit(f"{self._place}.{self._emitted}", extension, event)
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":
                self._lost()
            raise


async def _nothing(_: Any) -> None:
    """What lies inside of mutators."""


def _documents(in_force: InForce) -> tuple[contexts.Resource, contexts.Resource]:
    """The documents of the Swarm and of the agent, as written."""
    return contexts.Resource(in_force.spec.swarm), contexts.Resource(in_force.spec.resource)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        _unwinding.add(task)
        task.add_done_callback(_unwound)


def _unwound(task: asyncio.Task[None]) -> None:
    _unwinding.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("middleware that was cancelled ended with %s: %s", type(error).__name__, error)


def _report(layer: Layer | None, kind: str, error: BaseException) -> ErrorPayload:
    """The error of a turn or a step, which is logged."""
    if layer is None:
        log.error("the %s middleware", kind, exc_info=error)
        return error_payload("E_INTERNAL", f"the {kind} middleware: {type(error).__name__}: {error}")
    _log(layer, kind, error)
    return results.error_of(error, "E_MIDDLEWARE", f"{_whose(layer, kind)} failed")


def _call_error(layer: Layer | None, error: BaseException) -> ToolError:
    """The error of a call, which is logged."""
    if layer is None:
        return results.tool_error_of(GoondanError(_report(layer, "toolCall", error)), "E_INTERNAL")
    _log(layer, "toolCall", error)
    told = results.tool_error_of(error, "E_MIDDLEWARE" if isinstance(error, MiddlewareError) else "E_TOOL")
    if getattr(error, "suggestion", None) is None and not isinstance(error, GoondanError):
        # The message is the extension's own text (CALL-14). The suggestion says which extension wrote it.
        told.suggestion = f"It comes from {_whose(layer, 'toolCall')}. {told.suggestion or ''}".rstrip()
    return told


def _log(layer: Layer, kind: str, error: BaseException) -> None:
    if isinstance(error, GoondanError) and error.code == REFUSED:
        log.warning("%s", error.info.message)
        return
    log.warning("%s failed\n%s", _whose(layer, kind), results.trace_of(error))


def _whose(layer: Layer, kind: str) -> str:
    what = f"{kind} middleware" if layer.point is None else f"{layer.point} handler"
    return f"the {what} of extension {layer.extension}"


# --- views of the conversation: a message that one leaves out is there again in the next step ---


def apply_views(views: Iterable[contexts.View], messages: list[Message]) -> list[Message]:
    """The messages after every change, in the order in which the layers asked. Raises GoondanError, which names the
    extension whose change fails or does not return a list of messages.
    """
    for view in views:
        try:
            messages = _read(view.change(list(messages)), messages, view.extension)
        except Exception as error:
            what = f"the view of the conversation of extension {view.extension} failed"
            raise GoondanError(results.error_of(error, "E_MIDDLEWARE", what)) from None
    return messages


def _read(given: Any, before: list[Message], extension: str) -> list[Message]:
    if not isinstance(given, list | tuple):
        raise MiddlewareError(f"it returned {type(given).__name__}, not a list of messages")
    at = before[-1].created_at if before else ""
    read: list[Message] = []
    for index, item in enumerate(given):
        if not isinstance(item, Message):
            event = read_event({"type": "append", "message": item}, message_id=f"view.{index}", source=extension, at=at)
            if not isinstance(event, Append):
                raise AssertionError("what is read as an append is one")
            item = event.message
        read.append(item)
    return read
