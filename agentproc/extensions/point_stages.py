"""The points of one turn. Each stage of the turn that has points calls this module. Without handlers it does nothing.

stages.py runs the onion of each kind; this module runs the points inside of it. `LayerFailed` goes to the caller, which
knows whether the turn, the step or the call fails with it.

Source: requirements PIPELINE-10 to PIPELINE-25, COMPAT-03, CONFIG-03, RECONCILE-01.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from goondan.agentproc.extensions.contexts import (
    CallScope,
    StepResult,
    StepScope,
    ToolCallResult,
    TurnResult,
    TurnScope,
)
from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.extensions.loaded import Extensions
from goondan.agentproc.extensions.pipeline import POINTS, Layer, MiddlewareError, Pipeline, Watch
from goondan.agentproc.extensions.point_contexts import (
    StepPointContext,
    StepView,
    Surroundings,
    ToolCallPointContext,
    TurnPointContext,
    TurnView,
    answer_of,
    told,
)
from goondan.agentproc.extensions.points import LayerFailed, mutate, run_mutators, run_wraps
from goondan.agentproc.extensions.resource import Resource
from goondan.agentproc.extensions.step_changes import check_rest, wanted_extensions, wanted_system, wanted_tools
from goondan.agentproc.extensions.values import json_copy
from goondan.agentproc.live_config import InForce
from goondan.agentproc.providers.base import ModelAnswer
from goondan.schemas.errors import GoondanError
from goondan.schemas.launch import CatalogItem

#: How often `step.llmError` may ask the model again in one step. A call that fails a fourth time in a row is seldom
#: cured by asking again, and each try costs money.
MAX_ASKED_AGAIN: Final = 3

#: One try of a model call, with these blocks and this catalog. Raises GoondanError.
Ask = Callable[[list[dict[str, Any]], list[CatalogItem]], Awaitable[ModelAnswer]]


class PointStages:
    """The points of one turn. `in_force` is the configuration that the turn begins with."""

    def __init__(
        self,
        pipeline: Pipeline,
        tools: DynamicTools,
        extensions: Extensions,
        in_force: InForce,
        watch: Watch,
    ) -> None:
        self._pipeline = pipeline
        self._watch = watch
        self._tools = tools
        self._extensions = extensions
        self._around = _around(in_force)
        self._in_force = in_force

    async def begin_step(self, in_force: InForce) -> None:
        """A step begins with this configuration. Raises GoondanError E_EXTENSION_FAILED."""
        if in_force.spec is not self._in_force.spec:
            self._around = _around(in_force)
        self._in_force = in_force
        await self._extensions.settle(in_force.extensions)

    def new_config(self) -> dict[str, Any]:
        """The configuration of a step that begins, as a copy that its handlers may change."""
        return json_copy(self._in_force.config) if self._pipeline.uses_points else {}

    # --- the turn

    async def turn_before(self, layer: Layer, turn: TurnScope) -> None:
        """One mutator of `turn.pre`."""
        await mutate(layer, self._turn(turn), POINTS["turn.pre"].changes, self._watch)

    async def turn_after(self, turn: TurnScope, result: TurnResult) -> None:
        """Run `turn.post`, which may change the result."""
        if layers := self._pipeline.at("turn.post"):
            await run_mutators(layers, self._turn(turn, result), POINTS["turn.post"].changes, self._watch)

    # --- a step

    async def step_before(self, layer: Layer, step: StepScope) -> None:
        """One mutator of `step.pre`."""
        context = await mutate(layer, self._step(step), POINTS["step.pre"].changes, self._watch)
        context.read_into(step)

    async def before_model(self, step: StepScope) -> None:
        """Run `step.config` and apply its changes, then run `step.tools` and `step.blocks`.

        Raises LayerFailed, and GoondanError E_EXTENSION_FAILED.
        """
        await self._reconcile(step)
        for point in ("step.tools", "step.blocks"):
            if layers := self._pipeline.at(point):
                context = await run_mutators(layers, self._step(step), POINTS[point].changes, self._watch)
                context.read_into(step)

    async def _reconcile(self, step: StepScope) -> None:
        """Run `step.config`, and apply its choice of extensions, tools and prompt."""
        extensions, handlers = self._in_force.extensions, self._pipeline.at("step.config")
        if not handlers and self._extensions.fit(extensions):
            return
        known = {extension.name: extension for extension in extensions}
        for layer in handlers:
            context = await mutate(layer, self._step(step), POINTS["step.config"].changes, self._watch)
            context.read_into(step)
            config = step.effective_config
            try:
                extensions = wanted_extensions(config, known)
                step.system = wanted_system(config)
                check_rest(config, self._in_force.config)
                if config["tools"] != self._in_force.config["tools"]:
                    tools = wanted_tools(config, step.bound)
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

    async def step_after(self, step: StepScope, result: StepResult) -> None:
        """Run `step.post`, which may change the result."""
        if layers := self._pipeline.at("step.post"):
            await run_mutators(layers, self._step(step, result), POINTS["step.post"].changes, self._watch)

    @property
    def wraps_model(self) -> bool:
        """Whether any handler wraps the model call."""
        return bool(self._pipeline.at("step.llmCall") or self._pipeline.at("step.llmError"))

    async def ask_model(self, step: StepScope, ask: Ask) -> ModelAnswer:
        """Run the model call inside its wraps. `step.llmError` may have it asked again, within its limit.

        Raises the exception of the last try (GoondanError), and LayerFailed.
        """
        asked_again = 0
        answers: list[ModelAnswer] = []

        async def attempt(given: StepPointContext) -> StepPointContext:
            given.read_into(step)
            answer = await ask(step.blocks, step.tool_catalog)
            answers[:] = [answer]
            made = given.copied()
            made.llm_result = told(answer)
            return made

        async def call(given: StepPointContext) -> StepPointContext:
            wraps = self._pipeline.at("step.llmCall")
            return await run_wraps(
                wraps, given, POINTS["step.llmCall"].changes, attempt, self._watch, makes="llm_result"
            )

        async def again(given: StepPointContext) -> StepPointContext:
            nonlocal asked_again
            asked_again += 1
            made = given.replace(llm_error=None)
            return (await call(made)).replace(llm_error=given.llm_error)

        rescuers = self._pipeline.at("step.llmError")
        failure: GoondanError | None = None
        while True:
            before, context = asked_again, self._step(step)
            try:
                if failure is None:
                    context = await call(context)
                else:
                    context.llm_error = failure.info
                    context = await run_wraps(rescuers, context, POINTS["step.llmError"].changes, again, self._watch)
            except GoondanError as error:
                wanted = failure is None or asked_again > before
                failure = error
                if rescuers and wanted and asked_again < MAX_ASKED_AGAIN:
                    continue
                raise
            if context.llm_result is None:  # nobody wants to ask again
                raise failure or AssertionError("a wrap of step.llmCall gives an answer")
            return answer_of(context.llm_result, answers[0] if answers else None)

    # --- a tool call

    async def call_before(self, layer: Layer, step: StepScope, call: CallScope) -> None:
        """One mutator of `toolCall.pre`."""
        await mutate(layer, self._call(step, call), POINTS["toolCall.pre"].changes, self._watch)

    async def call(
        self, step: StepScope, call: CallScope, core: Callable[[], Awaitable[ToolCallResult]]
    ) -> ToolCallResult:
        """Run the call inside the wraps of `toolCall.exec`, then `toolCall.post`."""
        wraps, posts = self._pipeline.at("toolCall.exec"), self._pipeline.at("toolCall.post")
        if not wraps and not posts:
            return await core()

        async def run(given: ToolCallPointContext) -> ToolCallPointContext:
            return given.replace(tool_result=await core())

        if wraps:
            context, changes = self._call(step, call), POINTS["toolCall.exec"].changes
            context = await run_wraps(wraps, context, changes, run, self._watch, makes="tool_result")
        else:
            context = self._call(step, call, await core())
        changes = POINTS["toolCall.post"].changes
        context = await run_mutators(posts, context, changes, self._watch, keeps="tool_result")
        if context.tool_result is None:
            raise AssertionError("every wrap makes a result, and every mutator keeps one")
        return context.tool_result

    # --- inside

    def _turn(self, turn: TurnScope, result: TurnResult | None = None) -> TurnPointContext:
        return TurnPointContext(TurnView(turn, result), self._around, self.new_config())

    def _step(self, step: StepScope, result: StepResult | None = None) -> StepPointContext:
        return StepPointContext(TurnView(step.turn), StepView(step, result), step, self._around, self._tools.dotted)

    def _call(self, step: StepScope, call: CallScope, result: ToolCallResult | None = None) -> ToolCallPointContext:
        views = TurnView(step.turn), StepView(step)
        return ToolCallPointContext(*views, step, self._around, self._tools.dotted, call, result)


def _around(in_force: InForce) -> Surroundings:
    """The documents of the agent and of its Swarm, as written."""
    return Surroundings(Resource(in_force.spec.swarm), Resource(in_force.spec.resource))
