"""The `api` object that an extension's `register(api)` gets, and `ctx.agents` and `ctx.runtime`, by which middleware
and handlers of tools ask other agents of the swarm, over the agent's own link.

Names follow the specification in snake_case. `api.server` is the one server of an extension. A bundled extension that
has one has it, and no other (docs/design/tools.md section 11).

A question's id has three parts: the id of the turn, the place of the question (the turn or a step with the extension,
or a tool call), and how often the same question was asked there. So middleware that another process enters again uses
the same ids in any order, and gets the stored answers. When the turn ends, open questions are given up. Later questions
are refused.

Source: docs/design/delivery.md section 5; requirements AGENTS-02, AGENTS-03, AGENTS-12, AGENTS-19, CONTEXT-06, EXT-03,
EXT-09 to EXT-11, PIPELINE-01, PIPELINE-02, PIPELINE-05, PIPELINE-06, DYNAMIC-01, DYNAMIC-02, DYNAMIC-04, COMPAT-03,
EVENTS-01 to EVENTS-06, OAUTH-01, STATE-01 to STATE-06.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

from msgspec import Struct

from goondan.agentproc.calls.servers import Servers
from goondan.agentproc.calls.swarm import Swarm
from goondan.agentproc.extensions.dynamic_tools import DynamicTools, Folder, Handler, ServedTool
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.extensions.events import Handler as EventHandler
from goondan.agentproc.extensions.points import contexts, results
from goondan.agentproc.extensions.points.pipeline import Middleware, MiddlewareError, Pipeline
from goondan.agentproc.extensions.state import ExtState, InstanceApi, StoredState
from goondan.agentproc.machine import catalog, questions
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.questions import TIMEOUT_MS
from goondan.schemas.worker import servers
from goondan.schemas.worker.servers import ServerListing, ServerNews

_NONE: Final[Mapping[str, object]] = MappingProxyType({})


class ConsoleLogger:
    """debug, info, warn, error (and log, warning): values are joined by spaces; `name` stands in front of each line."""

    __slots__ = ("_logger", "_name")

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger("agentproc.extension")
        self._name = name

    def debug(self, *values: Any) -> None:
        """Log details; by default the log does not contain them."""
        self._write(logging.DEBUG, values)

    def info(self, *values: Any) -> None:
        """Log what happened."""
        self._write(logging.INFO, values)

    def warn(self, *values: Any) -> None:
        """Log what may be wrong."""
        self._write(logging.WARNING, values)

    def error(self, *values: Any) -> None:
        """Log what went wrong."""
        self._write(logging.ERROR, values)

    log = info
    warning = warn

    def _write(self, level: int, values: tuple[Any, ...]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s: %s", self._name, " ".join(str(value) for value in values))


class ServerApi(Struct, frozen=True, eq=False):
    """One server. `name` is the prefix of its tools' names."""

    #: Those of the instance.
    _servers: Servers
    #: Where its tools are offered.
    _tools: DynamicTools
    #: The name of the extension.
    _extension: str
    #: The prefix.
    name: str

    async def attach(self, timeout_s: float) -> ServerListing:
        """Hold the server for this agent, and get what it offers. Raises GoondanError E_MCP_CONNECT and others."""
        return await self._servers.ask(servers.ATTACH, self.name, timeout_s)

    async def list(self, timeout_s: float) -> ServerListing:
        """What the server offers now. Raises GoondanError as `attach`."""
        return await self._servers.ask(servers.LIST, self.name, timeout_s)

    async def detach(self) -> None:
        """Hold the server no more."""
        await self._servers.detach(self.name)

    def on_news(self, listener: Callable[[ServerNews], None]) -> None:
        """Call `listener` for each piece of news of the server."""
        self._servers.listen(self.name, listener)

    def offer(self, tools: Sequence[ServedTool]) -> None:
        """Offer these tools of the server from the next step on, in place of those that were offered before."""
        self._tools.serve(tools, extension=self._extension)

    def gone(self, why: str | None) -> None:
        """From now on calls of the tools fail with this message, without being made. None: they are made."""
        self._tools.server_gone(self._extension, why)


class PipelineApi(Struct, frozen=True, eq=False):
    """`api.pipeline`."""

    #: That of the instance.
    _pipeline: Pipeline
    #: The name of the extension.
    _extension: str

    def register(self, kind: str, handler: Middleware, *, priority: int = 0) -> None:
        """Put middleware around every `turn`, `step` or `toolCall` that begins from now on. A lower priority is further
        out. Raises GoondanError E_USAGE.
        """
        self._pipeline.register(kind, handler, extension=self._extension, priority=priority)


class PipelinesApi(Struct, frozen=True, eq=False):
    """`api.pipelines`, the spelling of v0.9 over the same engine."""

    #: That of the instance.
    _pipeline: Pipeline
    #: The name of the extension.
    _extension: str

    def mutate(self, point: str, handler: Middleware, *, priority: int = 0) -> None:
        """Add a handler that gets a context and returns it, changed or not. Raises GoondanError E_USAGE for a name that
        is no such point.
        """
        self._pipeline.add_to_point("mutate", point, handler, extension=self._extension, priority=priority)

    def wrap(self, point: str, handler: Middleware, *, priority: int = 0) -> None:
        """Put `handler(ctx, next)` around `step.llmCall`, `step.llmError` or `toolCall.exec`. Raises GoondanError
        E_USAGE for any other name.
        """
        self._pipeline.add_to_point("wrap", point, handler, extension=self._extension, priority=priority)


class ToolsApi(Struct, frozen=True, eq=False):
    """`api.tools`."""

    #: Those of the instance.
    _tools: DynamicTools
    #: The name of the extension.
    _extension: str
    #: Whether the model is shown what it registers.
    _exposed: bool

    def register(self, item: Any, handler: Handler | None = None) -> None:
        """Offer a tool from the next step on: `register(item, handler)` with {name, description, parameters}, or
        `register(definition)` with the handler inside. Raises GoondanError E_USAGE, E_CONFIG_SCHEMA,
        E_TOOL_NAME_CONFLICT.
        """
        self._tools.register(item, handler, extension=self._extension, exposed=self._exposed)

    def bring(self, name: str, *, folder: Folder | None = None) -> None:
        """Offer, from the next step on, a tool whose handler runs in a jail: one that the manifest of this bundled
        extension names. `folder(args)` names the folder that a call works in; what it raises is the call's error.
        Extensions of a bundle bring none. Raises GoondanError E_USAGE.
        """
        self._tools.bring(name, folder, extension=self._extension, exposed=self._exposed)

    def unregister(self, name: str) -> None:
        """Remove a tool of this extension. An unknown name is ignored."""
        self._tools.unregister(name, extension=self._extension)


class EventsApi(Struct, frozen=True, eq=False):
    """`api.events`: the bus of the agent instance (events.py)."""

    #: That of the instance.
    _bus: EventBus
    #: The name of the extension.
    _extension: str

    def on(self, type: str, handler: EventHandler) -> Callable[[], None]:
        """Call `handler(payload)` for each event of this type. A `*` in the type stands for one segment.

        The returned function ends the subscription. Raises GoondanError E_USAGE.
        """
        return self._bus.subscribe(type, handler, extension=self._extension)

    def once(self, type: str, handler: EventHandler) -> None:
        """Call `handler(payload)` for one event only. Raises GoondanError E_USAGE."""
        self._bus.subscribe(type, handler, extension=self._extension, once=True)

    def emit(self, type: str, payload: dict[str, Any] | None = None) -> None:
        """Send an event to all subscribers of the instance. Raises GoondanError E_USAGE for a payload that is no JSON
        object.
        """
        self._bus.emit(type, payload, emitter=f"extension {self._extension}")


class ExtensionApi:
    """One extension's view of its agent."""

    __slots__ = (
        "_brought",
        "_name",
        "_server",
        "_state",
        "_workdir",
        "agent_name",
        "events",
        "extension",
        "instance",
        "instance_key",
        "logger",
        "pipeline",
        "pipelines",
        "state",
        "tools",
    )

    def __init__(
        self,
        spec: ExtensionSpec,
        pipeline: Pipeline,
        tools: DynamicTools,
        events: EventBus,
        state: ExtState,
        stored: StoredState,
        shared: dict[str, Any],
        *,
        agent: str,
        instance_key: str,
        workdir: Callable[[], str] = str,
        brought: Mapping[str, object] = _NONE,
        servers: Servers | None = None,
    ) -> None:
        """`workdir` gives the folder that the running turn works in. `brought` are the members that features
        bring, by their names. `servers` is None when there are no MCP servers.
        """
        self._name = spec.name
        self.extension = contexts.Resource(spec.resource)
        self.pipeline = PipelineApi(pipeline, spec.name)
        self.pipelines = PipelinesApi(pipeline, spec.name)
        self.tools = ToolsApi(tools, spec.name, spec.exposes_tools)
        self.events = EventsApi(events, spec.name)
        self.state = stored
        self.instance = InstanceApi(shared)
        self.logger = ConsoleLogger(spec.name)
        self.agent_name = agent
        self.instance_key = instance_key
        self._state = state
        self._brought = brought
        self._workdir = workdir
        self._server = (
            ServerApi(servers, tools, spec.name, spec.server) if servers is not None and spec.server else None
        )

    def deny(self, reason: str) -> NoReturn:
        """Refuse the tool call, the step or the turn that middleware or a handler of this extension stands around, or
        the call of its tool. The model, or whoever sent the message, is told the reason. Raises GoondanError
        E_EXTENSION_DENIED.
        """
        raise catalog.refused_by(self._name, errors.cut_message(str(reason), results.MAX_MESSAGE))

    def ext_state(self) -> ExtState:
        """This extension's own object in memory, the same at every call. It is empty again in another process."""
        return self._state

    @property
    def workdir(self) -> str:
        """The folder that the running turn works in, or the last one; "" before the first turn."""
        return self._workdir()

    def __getattr__(self, name: str) -> Any:
        """A member that a feature brings."""
        if not name.startswith("_") and name in self._brought:
            return self._brought[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def server(self) -> ServerApi:
        """The server of a bundled extension that has one. Raises GoondanError E_USAGE in any other."""
        if self._server is None:
            hint = "Name an Extension with the entry @goondan/base/mcp in spec.extensions."
            raise errors.fail("E_USAGE", "only the bundled extension mcp has a server", suggestion=hint)
        return self._server


# --- asking other agents ---


class Agents(Struct, frozen=True, eq=False):
    """`ctx.agents`, `ctx.runtime`. A failure raises GoondanError with one of these codes: E_AGENT_NOT_FOUND,
    E_AGENT_TIMEOUT, E_AGENT_FAILED, E_AGENT_CYCLE, E_AGENT_SPAWN_FAILED, E_TOOL_INVALID_ARGS, E_FRAME_TOO_LARGE.
    """

    #: Puts a question.
    _ask: Callable[[Literal["request", "send"], dict[str, Any]], Awaitable[dict[str, Any]]]

    async def request(
        self,
        target: str,
        input: Any = None,
        *,
        instance_key: str | None = None,
        event_type: str | None = None,
        timeout_ms: int | None = None,
        async_: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Have another agent run a turn. Returns {target, eventId, correlationId, accepted, async, response};
        `response` is its answer.

        `instance_key` is the caller's own by default. `timeout_ms` is 60,000 by default and never more than the turn
        has left. With `async_` the call returns at once and `response` is None. The answer becomes a message of this
        conversation, and there is no time limit unless `timeout_ms` gives one.
        """
        patience = None if async_ else TIMEOUT_MS
        return await self._ask(
            "request",
            {
                "target": target,
                "input": input,
                "instance_key": instance_key,
                "event_type": event_type,
                "timeout_ms": patience if timeout_ms is None else int(timeout_ms),
                "metadata": metadata,
                "asynchronous": async_,
            },
        )

    async def send(
        self,
        target: str,
        input: Any = None,
        *,
        instance_key: str | None = None,
        event_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Have another agent run a turn and do not wait for it. Returns {target, eventId, accepted, sent}."""
        given = {"target": target, "input": input, "instance_key": instance_key, "event_type": event_type}
        return await self._ask("send", {**given, "metadata": metadata})


class Asking:
    """The questions that the extensions of one turn ask."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._same: Counter[tuple[str, bytes]] = Counter()
        self._open: set[asyncio.Task[dict[str, Any]]] = set()
        self._over = False

    def at(
        self, place: str, extension: str, standing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Agents:
        """The `ctx.agents` of one layer. `place` is `turn`, or `step1` and so on. While the layer is within `standing`,
        its clock stands still, because a question has a time limit of its own.
        """
        return Agents(partial(self._ask, f"@{place}.{extension}", standing))

    def in_call(self, tool_call_id: str) -> Agents:
        """The `ctx.runtime` of the handler of one tool call. Its time is the time of the call."""
        return Agents(partial(self._ask, questions.call_place(tool_call_id), nullcontext))

    async def _ask(
        self,
        layer: str,
        standing: Callable[[], AbstractContextManager[None]],
        op: Literal["request", "send"],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        if self._over:
            raise MiddlewareError("the turn has ended, and nothing can be asked any more")
        question = questions.Question(op=op, name=self._name(layer, op, fields), **fields)
        task = asyncio.get_running_loop().create_task(self._put(question))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        with standing():
            return await task

    def _put(self, question: questions.Question) -> Coroutine[Any, Any, dict[str, Any]]:
        if question.op == "send":
            return self._swarm.send(question)
        return self._swarm.start(question) if question.asynchronous else self._swarm.request(question)

    def _name(self, layer: str, op: str, fields: dict[str, Any]) -> str:
        """The question's name within its turn."""
        try:
            same = layer, codec.encode_value((op, fields))
        except Exception:  # It is no JSON value, and is refused for that reason.
            return layer
        self._same[same] += 1
        return f"{layer}.{self._same[same]}"

    def close(self) -> None:
        """The turn has ended."""
        self._over = True
        for task in list(self._open):
            task.cancel()
