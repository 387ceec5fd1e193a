"""Stand-ins behind the same small interfaces as the real things: a link, a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from goondan.agentproc.calls.caller import Answered, CallContext, ToolCaller
from goondan.agentproc.machine import context_shape as shape
from goondan.agentproc.machine.catalog import Catalog, DynamicItems, StepCatalog
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, TextDelta
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ModelSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import OPERATOR, AgentEvent, Answer, Frame, ToolCallPayload, ToolResult

Done = Callable[[Frame | None, GoondanError | None], None]
Handler = Callable[[str, Any], ToolResult | GoondanError | None]


def ok(value: Any) -> ToolResult:
    """A result with this output."""
    return ToolResult(status="ok", output=to_raw(value))


def echo(tool: str, args: Any) -> ToolResult:
    """The default handler: gives back what it got."""
    return ok({"tool": tool, "args": args})


class FakeLink:
    """The agent's side of goondan.schemas.transport.link.Link, with a broker and a tool host that are functions.

    `handler` answers tool calls; None leaves a call open, to be answered by `finish`. Everything sent is recorded.
    """

    def __init__(self, handler: Handler = echo) -> None:
        self.handler = handler
        self.calls: list[Frame] = []
        self.sent: list[Frame] = []
        self.posted: list[Frame] = []
        self.forgotten: list[str] = []
        self.asked: list[tuple[Frame, asyncio.Future[Frame]]] = []
        #: How long the asker of the last request waits (seconds).
        self.patience_s: float | None = None
        self.refuse_post: dict[str, str] = {}
        #: What a posted frame of this type is answered with: a payload, a frame, or an error. None: it waits.
        self.replies: dict[str, Callable[[Frame], Any]] = {}
        #: The answers that are waited for.
        self.waiting: list[asyncio.Future[Frame]] = []
        self.connected = True
        self._open: dict[str, tuple[str, Done]] = {}
        self._counter = 0

    def start_call(self, frame: Frame, done: Done) -> None:
        self._name(frame)
        self.calls.append(frame)
        self._open[str(frame.call_id)] = (frame.id, done)
        payload = from_raw(frame.payload, ToolCallPayload)
        outcome = self.handler(str(frame.tool), from_raw(payload.args, object))
        if outcome is not None:
            # Like the real link, never from inside start_call.
            asyncio.get_running_loop().call_soon(self.finish, str(frame.call_id), outcome)

    def finish(self, call_id: str, outcome: ToolResult | GoondanError, stage: str | None = None) -> None:
        """Answer an open call; one that was forgotten is nobody's any more."""
        if call_id not in self._open:
            return
        _, done = self._open.pop(call_id)
        if isinstance(outcome, GoondanError):
            done(None, outcome)
        else:
            done(Frame("tool.result", call_id=call_id, stage=stage, payload=to_raw(outcome)), None)

    def send(self, frame: Frame) -> bool:
        if self.connected:
            self._name(frame)
            self.sent.append(frame)
        return self.connected

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        self._name(frame)
        self.posted.append(frame)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        code = self.refuse_post.get(str(frame.stage))
        if frame.type in self.replies:
            reply = self.replies[frame.type](frame)
            if reply is None:
                self.waiting.append(future)
            elif isinstance(reply, GoondanError):
                future.set_exception(reply)
            else:
                made = reply if isinstance(reply, Frame) else Frame("reply", payload=to_raw(reply))
                made.in_reply_to = frame.id
                future.set_result(made)
        elif code is not None:
            future.set_exception(GoondanError(error_payload(code, "refused by the test")))
        else:
            future.set_result(Frame("ack", stage="accepted", in_reply_to=frame.id))
        return future

    def ask(self, frame: Frame, patience_s: float | None = None) -> asyncio.Future[Frame]:
        """A request; `asked` holds it, and its future is answered by the test."""
        self.patience_s = patience_s
        self._name(frame)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.asked.append((frame, future))
        return future

    def forget(self, frame_id: str) -> None:
        self.forgotten.append(frame_id)
        self._open = {call_id: call for call_id, call in self._open.items() if call[0] != frame_id}

    def _name(self, frame: Frame) -> None:
        self._counter += 1
        frame.id = frame.id or f"x.{self._counter}"

    # --- what tests look at

    def open_calls(self) -> list[str]:
        """callIds that wait for an answer."""
        return list(self._open)

    def answers(self) -> list[Answer]:
        """The answers of the turns that ended, in order."""
        found = [f for f in self.posted if f.stage in ("done", "failed")]
        answers = [from_raw(frame.payload, AgentEvent).answer for frame in found]
        return [answer for answer in answers if answer is not None]

    def acked(self) -> list[str]:
        """callIds that the tool host was told are stored."""
        return [call_id for frame in self.sent if frame.stage == "result" for call_id in frame.calls or []]


class Caller(ToolCaller):
    """Makes one call after the other."""

    async def call(
        self, catalog: StepCatalog, name: str, args: Any, *, call_id: str, context: CallContext
    ) -> ToolResult:
        """Make one call and wait for its result. Raises GoondanError E_LEASE_LOST when the event is no longer ours."""
        waiter: asyncio.Future[ToolResult] = self._loop.create_future()

        def done(result: ToolResult | GoondanError, answered: Answered | None) -> None:
            if waiter.done():
                return
            if isinstance(result, GoondanError):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

        refused = self.start(catalog, name, args, call_id=call_id, context=context, done=done)
        return refused if refused is not None else await waiter


class FakeModel:
    """A model that says what it is told: one entry a call, in order; an exception is raised. `requests` is without the
    tool that reads shortened results, which every request with tools has; `whole` has it.
    """

    needs_history = True

    def __init__(self, *script: ModelAnswer | Exception) -> None:
        self.script = list(script)
        self.requests: list[ModelRequest] = []
        self.whole: list[ModelRequest] = []
        self.listed: int | None = None

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        self.whole.append(request)
        self.requests.append(structs.replace(request, tools=[i for i in request.tools if i.name != shape.NAME]))
        await asyncio.sleep(0)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def window(self, request: ModelRequest) -> int | None:
        return self.listed

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        self.script.clear()


def says(text: str) -> ModelAnswer:
    """An answer without calls."""
    return ModelAnswer(text=text, finish_reason="stop")


def wants(*calls: tuple[str, str, Any]) -> ModelAnswer:
    """An answer with calls (id, tool, args)."""
    return ModelAnswer(calls=[AskedCall(*call) for call in calls], finish_reason="tool-calls")


BASH = CatalogItem(
    name="bash__exec",
    description="Run a command in the workspace.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeoutMs": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    error_message_limit=1200,
)
NOTE = CatalogItem(name="notes__add", description="Keep a note.", idempotent=True)


def make_spec(state_dir: str, name: str = "coder", **changes: Any) -> AgentSpec:
    """An agent with two tools in its catalog and one more (hidden__run) in its registry only."""
    fields: dict[str, Any] = {
        "name": name,
        "model": ModelSpec(provider="embedded"),
        "registry": [BASH, NOTE, CatalogItem(name="hidden__run")],
        "catalog": ["bash__exec", "notes__add"],
        "state_dir": state_dir,
        "revision": "r1",
        "durability": "process",
        **changes,
    }
    return AgentSpec(**fields)


def catalog_of(
    *items: CatalogItem,
    initial: Sequence[CatalogItem] = (),
    dynamic: DynamicItems | None = None,
    named: Sequence[str] = (),
    reach: Iterable[str] = (),
    allow_registry: Sequence[str] = (),
) -> Catalog:
    """The catalog of an agent with this registry. Its steps begin with `initial` and the dynamic tools `named`."""
    told: dict[str, Any] = {"registry": list(items), "catalog": [item.name for item in initial], "dynamic": list(named)}
    opened: dict[str, Any] = {"addable": list(reach), "allow_registry": list(allow_registry)}
    return Catalog(make_spec("/nowhere", **told, **opened), dynamic)


def event_frame(event_id: str, value: Any, *, kind: str = "client.message", epoch: int = 1, **header: Any) -> Frame:
    """An event as the broker delivers it."""
    if kind.startswith("operator."):
        header.setdefault("source", OPERATOR)
    event = AgentEvent(id=event_id, type=kind, created_at="2026-01-01T00:00:00.000Z", input=value)
    return Frame("event", id=f"b.{event_id}.{epoch}", event_id=event_id, epoch=epoch, payload=to_raw(event), **header)
