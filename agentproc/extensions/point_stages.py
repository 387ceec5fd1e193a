"""The points inside of a step and of a tool call, in one turn: its configuration, the model call and the call itself.

stages.py runs the middleware of each kind; this module runs what lies inside of it. Without handlers it does nothing.
`LayerFailed` goes to the caller, which knows whether the turn, the step or the call fails with it.

Source: requirements PIPELINE-10 to PIPELINE-25, COMPAT-03, CONFIG-03, RECONCILE-01.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import structs

from goondan.agentproc.extensions.contexts import PointContext, binding
from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.extensions.loaded import Extensions
from goondan.agentproc.extensions.pipeline import LayerFailed, MiddlewareError, Pipeline, Watch, run
from goondan.agentproc.extensions.results import LlmResult, ToolCall, ToolCallResult, answer_parts, json_copy
from goondan.agentproc.extensions.scopes import CallScope, Resource, StepScope, TurnScope
from goondan.agentproc.extensions.step_changes import check_rest, wanted_extensions, wanted_system, wanted_tools
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.turn.configuration import InForce
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.errors import GoondanError

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
        self._in_force = in_force

    async def begin_step(self, turn: TurnScope, in_force: InForce) -> None:
        """A step of the turn begins with this configuration. Raises GoondanError E_EXTENSION_FAILED."""
        if in_force.spec is not self._in_force.spec:
            self._in_force = in_force
            turn.swarm, turn.agent = self.documents()
        self._in_force = in_force
        await self._extensions.settle(in_force.extensions)

    def documents(self) -> tuple[Resource, Resource]:
        """The documents of the Swarm and of the agent, as written."""
        spec = self._in_force.spec
        return Resource(spec.swarm), Resource(spec.resource)

    def new_config(self) -> dict[str, Any]:
        """The configuration of a step that begins, as a copy that its handlers may change."""
        return json_copy(self._in_force.config) if self._pipeline.uses_points else {}

    def dotted(self) -> dict[str, str]:
        """The names with a dot that extensions gave to tools, by the names that models are shown."""
        return self._tools.dotted

    async def mutate(self, point: str, scope: Any) -> None:
        """Run the mutators of a point. Raises LayerFailed."""
        if layers := self._pipeline.at(point):
            await run(layers, binding(scope), _nothing, self._watch)

    async def _wrapped(
        self,
        layers: Any,
        given: PointContext,
        core: Callable[[PointContext], Any],
    ) -> PointContext:
        """Run `core` inside the wraps of a point. Each of the two makes a context of the one that it gets."""
        return await run(layers, binding(None), core, self._watch, given=given) if layers else await core(given)

    # --- a step

    async def reconcile(self, step: StepScope) -> None:
        """Run `step.config`, and apply its choice of extensions, tools and prompt.

        Raises LayerFailed, and GoondanError E_EXTENSION_FAILED.
        """
        extensions, handlers = self._in_force.extensions, self._pipeline.at("step.config")
        if not handlers and self._extensions.fit(extensions):
            return
        known = {extension.name: extension for extension in extensions}
        for layer in handlers:
            await run((layer,), binding(step), _nothing, self._watch)
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

        async def attempt(given: PointContext) -> PointContext:
            given.store()
            answer = await ask(step.blocks, step.tool_catalog)
            answers[:] = [answer]
            return given.replace(llm_result=_told(answer))

        async def call(given: PointContext) -> PointContext:
            return await self._wrapped(self._pipeline.at("step.llmCall"), given.at("step.llmCall"), attempt)

        async def again(given: PointContext) -> PointContext:
            nonlocal asked_again
            asked_again += 1
            made = await call(given.replace(llm_error=None))
            return made.at("step.llmError").replace(llm_error=given["llm_error"])

        rescuers = self._pipeline.at("step.llmError")
        failure: GoondanError | None = None
        while True:
            before = asked_again
            step.llm_result, step.llm_error = None, None if failure is None else failure.info
            context = PointContext(step, "step.llmError")
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
            return _answer_of(context["llm_result"], answers[0] if answers else None)

    # --- a tool call

    async def call(self, call: CallScope, core: Callable[[], Awaitable[ToolCallResult]]) -> ToolCallResult:
        """Run the call inside the wraps of `toolCall.exec`, then `toolCall.post`. Raises LayerFailed."""
        wraps, posts = self._pipeline.at("toolCall.exec"), self._pipeline.at("toolCall.post")
        if not wraps and not posts:
            return await core()

        async def make(given: PointContext) -> PointContext:
            return given.replace(tool_result=await core())

        context = await self._wrapped(wraps, PointContext(call, "toolCall.exec"), make)
        context.store()
        await self.mutate("toolCall.post", call)
        if call.result is None:
            raise AssertionError("every wrap makes a result, and every mutator keeps one")
        return call.result


async def _nothing(_: Any) -> None:
    """What lies inside of mutators."""


def _told(answer: ModelAnswer) -> LlmResult:
    """The model's answer as handlers see it."""
    calls = [ToolCall(call.id, call.name, call.args) for call in answer.calls]
    return LlmResult(answer.text, calls, answer.finish_reason, answer.usage)


def _answer_of(result: LlmResult, known: ModelAnswer | None) -> ModelAnswer:
    """The answer with which the turn goes on: the model's own when no handler changed it. Raises MiddlewareError."""
    if known is not None and _told(known) == result:
        return known
    text, reason, calls = answer_parts(result, () if known is None else known.calls)
    changed = ModelAnswer(text=text, calls=calls, finish_reason=reason, usage=result.usage)
    # Not the reasoning: it may have what a handler takes out of the text.
    return changed if known is None else structs.replace(changed, cut_off=known.cut_off, model=known.model)
