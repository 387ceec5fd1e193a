"""What a tool author uses: ToolContext, Runtime, Pending, ToolError.

A tool's entry module exposes `handlers`, a dict from export name to `def handler(ctx, input)` or
`async def handler(ctx, input)`. What a handler returns is the call's output: None, booleans, numbers, strings, lists
(or tuples) and dicts with string keys. `Pending(handle)` says that the work goes on elsewhere; an exception is the
call's error, and its `code`, `suggestion` and `help_url` attributes travel with it.

Source: docs/tools.md; requirements HANDLER-01 to HANDLER-07, CONTEXT-01 to CONTEXT-10, RESULT-03.
"""

from __future__ import annotations

from time import monotonic

from . import wire
from .running import MAX_LINE

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .running import AskTools, Running

#: Two progress reports of a call are at least this far apart (seconds).
PROGRESS_S = 0.05


class ToolError(Exception):
    """An error with its own code and advice. Any exception will do; this one only saves setting attributes.

    `code` is a stable name of your own (default `E_TOOL`), `suggestion` says how to go on, `help_url` where to read.
    """

    def __init__(
        self, message: str, *, code: str | None = None, suggestion: str | None = None, help_url: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.suggestion = suggestion
        self.help_url = help_url


class AgentError(ToolError):
    """What was asked through `ctx.runtime` failed. `code` says how, for example E_AGENT_NOT_FOUND, E_AGENT_TIMEOUT,
    E_AGENT_CYCLE, E_AGENT_FAILED, E_AGENT_SPAWN_FAILED, E_CALL_ENDED or E_TOOL_LIMIT.
    """


class Pending:
    """Return it from a handler: the call's result is `pending`, with the handle `TOOL/handle`, and the work goes on.

    `work` is what goes on here: something to await, or a function without arguments, which runs in a thread. What
    it returns or raises is the final result: it reaches the agent by itself, or by `tool-result__get` with the handle.
    Without `work` it goes on somewhere else, and the tool itself must say how one hears of its end.
    """

    __slots__ = ("handle", "work")

    def __init__(self, handle: str, work: Any = None) -> None:
        if type(handle) is not str or not 1 <= len(handle) <= 1024 or not handle.isprintable():
            raise ValueError("a Pending needs a handle: 1 to 1,024 characters, without controls and ends of lines")
        if work is not None and not callable(work) and not hasattr(type(work), "__await__"):
            raise ValueError("the work of a Pending is something to await, or a function without arguments")
        self.handle = handle
        self.work = work


class _ReadOnly:
    """Shows the one thing that it is made with, and lets nobody exchange it."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, shown: object) -> None:
        object.__setattr__(self, self.__slots__[0], shown)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only")


class Message(_ReadOnly):
    """The assistant message that made the call. Only the content of `metadata` may be changed; it is a copy."""

    __slots__ = ("_fields",)
    _fields: dict[str, Any]

    @property
    def id(self) -> str:
        """The message's id."""
        return self._fields["id"]  # type: ignore[no-any-return]

    @property
    def data(self) -> Any:
        """The model's message: `{"role": …, "content": …}`."""
        return self._fields.get("data")

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON values that travel with the message; changes stay in this call."""
        return self._fields.setdefault("metadata", {})  # type: ignore[no-any-return]

    @property
    def created_at(self) -> str:
        """When the message was made: RFC 3339, UTC."""
        return self._fields.get("createdAt", "")  # type: ignore[no-any-return]

    @property
    def source(self) -> Any:
        """Who made the message: `{"type": "assistant", …}`."""
        return self._fields.get("source")


class Logger(_ReadOnly):
    """The four methods of a console. Each line reaches the kernel's log with the name of the call."""

    __slots__ = ("_sink",)
    _sink: Callable[[str, str], None]

    def debug(self, *values: object) -> None:
        """Log for developers."""
        self._sink("debug", " ".join(map(str, values)))

    def info(self, *values: object) -> None:
        """Log what happened."""
        self._sink("info", " ".join(map(str, values)))

    def warn(self, *values: object) -> None:
        """Log what may become a problem."""
        self._sink("warn", " ".join(map(str, values)))

    warning = warn

    def error(self, *values: object) -> None:
        """Log what went wrong."""
        self._sink("error", " ".join(map(str, values)))


class Runtime(_ReadOnly):
    """Other agents, for tools with `permissions: [agents]` (CONTEXT-09). All of it ends with the call.

    In a plain handler each method waits and returns; where an event loop runs it returns something to await. Each
    raises AgentError. What comes back are dicts, named as in JSON.
    """

    __slots__ = ("_ask",)
    _ask: Callable[[str, dict[str, Any]], Any]

    def request(
        self,
        target: str,
        input: Any,
        *,
        instance_key: str | None = None,
        event_type: str = "agent.request",
        timeout_ms: int | None = None,
        async_: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Ask an agent, and wait for its answer: {target, eventId, correlationId, accepted, async, response}.

        `response` is what it says. `input` is a text, or any JSON value. `instance_key` is the caller's unless another
        one is given. The answer has `timeout_ms` milliseconds (60,000), and no longer than the call itself.

        With `async_` nobody waits: it returns as soon as the question cannot get lost, `response` is None, and the
        answer becomes a message to the agent that makes this call. It has no end but `timeout_ms`, if given.
        """
        fields = {"target": target, "input": input, "instanceKey": instance_key, "eventType": event_type}
        more = {"timeoutMs": timeout_ms, "metadata": metadata, "async": True if async_ else None}
        return self._ask("request", {**fields, **more})

    def send(
        self,
        target: str,
        input: Any,
        *,
        instance_key: str | None = None,
        event_type: str = "agent.send",
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Give an agent something to do: {target, eventId, accepted}, as soon as that cannot get lost."""
        fields = {"target": target, "input": input, "instanceKey": instance_key, "eventType": event_type}
        return self._ask("send", {**fields, "metadata": metadata})

    def spawn(self, target: str, instance_key: str | None = None, cwd: str | None = None) -> Any:
        """Start an instance of an agent: {target, instanceKey, spawned, cwd}; `spawned` is false when it ran already.

        `cwd` gives it a working directory instead of one of its own: "." for this call's, a folder below that, or one
        that the operator's policy opens.
        """
        return self._ask("spawn", {"target": target, "instanceKey": instance_key, "cwd": cwd})

    def list(self, include_all: bool = False) -> Any:
        """The instances that the calling agent has spawned, or all: {count, agents: [{target, instanceKey, …}]}."""
        return self._ask("list", {"includeAll": bool(include_all)})

    def catalog(self) -> Any:
        """The agents of the swarm: {swarmName, entryAgent, selfAgent, availableAgents, callableAgents, …Count}."""
        return self._ask("catalog", {})


class ToolContext(_ReadOnly):
    """What a handler knows about its call. All of it is read-only (CONTEXT-08)."""

    __slots__ = ("_call",)
    _call: Running

    @property
    def agent_name(self) -> str:
        """The agent that makes the call."""
        return self._call.frame["agentName"]  # type: ignore[no-any-return]

    @property
    def instance_key(self) -> str:
        """The instance of that agent."""
        return self._call.frame["instanceKey"]  # type: ignore[no-any-return]

    @property
    def turn_id(self) -> str:
        """The turn that the call belongs to."""
        return self._call.frame["turnId"]  # type: ignore[no-any-return]

    @property
    def tool_call_id(self) -> str:
        """The id that the model gave this call."""
        return self._call.frame["toolCallId"]  # type: ignore[no-any-return]

    @property
    def workdir(self) -> str:
        """The instance's workspace, the only folder of the host that may be written to. The process starts there."""
        return self._call.frame["workdir"]  # type: ignore[no-any-return]

    @property
    def message(self) -> Message | None:
        """The assistant message that contains this call; None when an operator made the call by hand."""
        call = self._call
        if call.message is None:
            call.message = call.worker.message_of(call)
        return None if call.message is None else Message(call.message)

    @property
    def logger(self) -> Logger:
        """The call's logger: `debug`, `info`, `warn`, `error`."""
        call = self._call
        return Logger(lambda level, text: call.worker.log(level, text, call.id))

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave up. A long handler that looks at it now and then can stop in time to clean up."""
        return self._call.cancelled

    @property
    def remaining_ms(self) -> int | None:
        """Milliseconds until the host ends this process together with the call; None without a deadline."""
        deadline = self._call.frame.get("deadlineMs")
        return None if deadline is None else max(0, deadline - int((monotonic() - self._call.started) * 1000))

    @property
    def output_limit(self) -> int:
        """How many bytes the call's output may have as it travels; more is the error E_TOOL_LIMIT."""
        return self._call.worker.output_limit

    @property
    def runtime(self) -> Runtime | None:
        """Other agents; None unless the tool was granted `permissions: [agents]` (CONTEXT-09)."""
        ask = self._call.worker.asking(self._call)
        return None if ask is None else Runtime(ask)

    @property
    def tools(self) -> AskTools | None:
        """The tools of the agent that makes this call; None unless the tool was granted `permissions: [tools]`, which
        is for the bundled tool of code mode.
        """
        return self._call.worker.calling(self._call)

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Tell whoever watches how far the work is. Cheap and lossy: at most some 20 a second are passed on."""
        call, now = self._call, monotonic()
        if now - call.progress_at < PROGRESS_S and done != total:
            return
        call.progress_at = now
        frame: dict[str, Any] = {"type": "progress", "callId": call.id, "done": float(done)}
        if total is not None:
            frame["total"] = float(total)
        if message is not None:
            frame["message"] = str(message)[:MAX_LINE]
        call.worker.send(wire.pack(frame))
