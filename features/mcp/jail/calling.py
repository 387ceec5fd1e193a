"""Calls of one server: from the arguments to the one result, with what the server asks meanwhile, and tasks.

Rules.
- A call ends at its deadline, when the server has said nothing of it for too long, when it is cancelled, and when the
  server is gone; then the server is told (`notifications/cancelled`), and a late answer is dropped. While a person or a
  model is asked, both clocks stand still.
- What the server asks belongs to a call. In the handshake era it does not say to which: with calls of one agent open
  it is the newest of them; with calls of several agents, nobody is asked, because the wrong one could be.

A task is a call that a server goes on with after its first answer. The SDK's client has none. Up to 2025-11-25: the
client asks for a task (`task` in the parameters of `tools/call`), polls `tasks/get`, and has the result by
`tasks/result`. With 2026-07-28 tasks are an extension: the server makes a task when it likes (`resultType: task`), and
`tasks/get` holds the result, or what the server asks.

Source: docs/design/tools.md section 11; requirement MCP-16; the protocol's page "Tasks" (2025-11-25) and its tasks
extension (2026-07-28).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal

import mcp_types as types
import msgspec
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from msgspec import Raw
from pydantic import TypeAdapter, ValidationError

from goondan.features.mcp.jail.client import Client
from goondan.features.mcp.jail.protocol import bounds, results
from goondan.features.mcp.jail.protocol.results import Failure, error_of
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker.servers import GET_PROMPT, ServerAnswer, ServerQuestion, ServerTool
from goondan.schemas.worker.worker_frames import Answer, Ask, Call, Progress, Result, WorkerError, WorkerFrame
from goondan.toolhost.calls.untrusted import Allowance

#: How often a server may ask within one call before it is refused, and how many questions of one answer are asked.
MAX_ROUNDS: Final = 10
MAX_QUESTIONS: Final = 16
#: Waits between the rounds of a server that only wants to be asked again (seconds).
AGAIN_S: Final = (0.05, 0.1, 0.25)
#: Progress of one call that is passed on, at once and per second after that. The host passes 20 a second on.
PROGRESS_BURST: Final = 40
PROGRESS_PER_S: Final = 20
#: Bytes of a question's schema.
MAX_FORM_BYTES: Final = 64 << 10

_MAP: Final[TypeAdapter[Any]] = TypeAdapter(dict[str, Any])
_decode = msgspec.msgpack.Decoder().decode
_elicited = msgspec.msgpack.Decoder(ServerAnswer).decode

Input = Mapping[str, Any]


class Running:
    """One call that runs."""

    __slots__ = ("asked", "call", "deadline", "idle_s", "open", "paused", "progress", "task", "timeout")

    def __init__(self, call: Call, now: float, idle_s: float | None) -> None:
        self.call = call
        self.idle_s = idle_s
        #: When it ends at the latest (the loop's time).
        self.deadline = None if call.deadline_ms is None else now + call.deadline_ms / 1000
        self.timeout: asyncio.Timeout | None = None
        self.task: asyncio.Task[None] | None = None
        self.progress = Allowance(PROGRESS_BURST, PROGRESS_PER_S, now)
        #: Questions so far, and those that have no answer.
        self.asked = 0
        self.open: dict[int, asyncio.Future[Answer]] = {}
        #: Since when the clocks stand still; None: they run.
        self.paused: float | None = None

    @property
    def who(self) -> tuple[str, str]:
        """The agent instance that calls."""
        return self.call.agent_name, self.call.instance_key

    def until(self, now: float) -> float | None:
        """When it is given up if nothing is heard from now on."""
        idle = None if self.idle_s is None else now + self.idle_s
        if self.deadline is None or idle is None:
            return self.deadline if idle is None else idle
        return min(self.deadline, idle)

    def heard(self, now: float) -> None:
        """The server has said something of it."""
        if self.timeout is not None and self.paused is None and self.idle_s is not None:
            self.timeout.reschedule(self.until(now))


class Calls:
    """The calls of one server. Use from the loop's thread only."""

    def __init__(
        self, client: Client, send: Callable[[WorkerFrame], None], output_limit: int, idle_ms: int | None
    ) -> None:
        self._client = client
        self._send = send
        self._output_limit = output_limit
        self._idle_s = None if idle_ms is None else idle_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: Call) -> None:
        """Begin a call. Exactly one result follows."""
        running = Running(call, self._loop.time(), self._idle_s)
        self._running[call.call_id] = running
        running.task = self._loop.create_task(self._run(running))
        self._tasks.add(running.task)
        running.task.add_done_callback(self._tasks.discard)

    def cancel(self, call_id: str) -> None:
        """The caller gave up."""
        running = self._running.get(call_id)
        if running is not None and running.task is not None:
            running.task.cancel()

    def answered(self, answer: Answer) -> None:
        """The answer to a question."""
        running = self._running.get(answer.call_id)
        waiter = None if running is None else running.open.pop(answer.ask_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    # --- one call

    async def _run(self, running: Running) -> None:
        call = running.call
        try:
            result = await self._result(running)
            if isinstance(result, Task):
                result = await self._go_on_with(running, result)
        except asyncio.CancelledError:
            result = Result(
                call_id=call.call_id,
                status="error",
                error=WorkerError(name="CancelledError", message="the call was cancelled", code="E_CANCELLED"),
            )
        except Exception as error:
            result = Result(call_id=call.call_id, status="error", error=error_of(error))
        self._running.pop(call.call_id, None)
        self._send(result)

    async def _result(self, running: Running) -> Result | Task:
        """The result of a call, or the task that the server goes on with."""
        call = running.call
        tool = self._client.exports.get(call.export)
        if tool is None:
            raise Failure("E_TOOL_NOT_FOUND", f"the server has no tool {call.export!r} now", name="LookupError")
        arguments = _decode(call.input)
        try:
            async with asyncio.timeout_at(running.until(self._loop.time())) as timeout:
                running.timeout = timeout
                output = await self._output(running, tool, arguments)
                if isinstance(output, Task):
                    return output
        except TimeoutError:
            raise _late(running, self._loop.time()) from None
        return Result(call_id=call.call_id, status="ok", output=results.packed(output, self._output_limit))

    async def _output(self, running: Running, tool: ServerTool, arguments: dict[str, Any]) -> Any:
        if not tool.offered:
            if self._client.only_as_task(tool):
                answer = await self._client.call_as_task(tool, arguments, TTL_MS)
                return await self._begun(running, tool, Task(self._client.session, answer, modern=False))
            result = await self._rounds(running, lambda more: _call_request(tool.name, arguments, more))
            if result.get("resultType") == "task":
                return await self._begun(running, tool, Task(self._client.session, result, modern=True))
            return self._told(tool, result)
        if tool.name == GET_PROMPT:
            name, values = arguments.get("name"), arguments.get("arguments")
            return results.prompt_output(await self._rounds(running, lambda more: _prompt_request(name, values, more)))
        uri = arguments.get("uri")
        return results.resource_output(await self._rounds(running, lambda more: _read_request(uri, more)))

    def _told(self, tool: ServerTool, result: dict[str, Any]) -> Any:
        """The output of a finished call. Raises Failure."""
        if result.get("isError") is True:
            raise Failure("E_TOOL", results.error_text(result), name="McpToolError")
        self._client.check_structured(tool, result)
        return results.call_output(result)

    async def _begun(self, running: Running, tool: ServerTool, task: Task) -> Any:
        """The output of a task that ends quickly, or the task."""
        try:
            over = await task.follow(lambda requests: self._inputs(running, requests), QUICK_S)
            return self._told(tool, await task.result()) if over else task
        except BaseException:
            if not task.over:
                self._let_go(task)
            raise

    async def _go_on_with(self, running: Running, task: Task) -> Result:
        """Send the `pending` result of a call, and wait for what comes of its task."""
        call = running.call
        tool = self._client.exports.get(call.export)
        handle = f"task-{os.urandom(6).hex()}"
        self._send(Result(call_id=call.call_id, status="pending", handle=handle, continues=True))
        try:
            await task.follow(_nobody)
            if tool is None:
                raise Failure("E_TOOL_NOT_FOUND", f"the server has no tool {call.export!r} now", name="LookupError")
            output = self._told(tool, await task.result())
        except BaseException:
            if not task.over:
                self._let_go(task)
            raise
        return Result(call_id=call.call_id, status="ok", output=results.packed(output, self._output_limit))

    def _let_go(self, task: Task) -> None:
        """Have a task cancelled, without waiting for it."""
        work = self._loop.create_task(task.cancel())
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    async def _rounds(self, running: Running, request: Callable[[Input], types.Request[Any, Any]]) -> dict[str, Any]:
        """Ask until the answer is a result, with what the server wants to know in between."""
        more: Input = {}
        idle = 0
        relisted = False
        for _ in range(MAX_ROUNDS):
            session = self._client.session
            try:
                raw: dict[str, Any] = await session.send_request(
                    request(more), _MAP, progress_callback=lambda *news: self._progressed(running, *news)
                )
            except MCPError as error:
                if error.code == types.HEADER_MISMATCH and self._client.modern and not relisted:
                    relisted = True  # its schema has changed: some arguments are told in headers too
                    await self._client.look()
                elif error.code == types.URL_ELICITATION_REQUIRED:
                    await self._open_urls(running, error)
                else:
                    raise
                continue
            if raw.get("resultType") != "input_required":
                return raw
            wanted = types.InputRequiredResult.model_validate(raw, by_name=False)
            responses: dict[str, Any] | None = None
            if wanted.input_requests:
                idle = 0
                responses = await self._inputs(running, wanted.input_requests)
            else:
                await asyncio.sleep(AGAIN_S[min(idle, len(AGAIN_S) - 1)])
                idle += 1
            more = {"input_responses": responses, "request_state": wanted.request_state}
        raise Failure("E_MCP_PROTOCOL", f"the server asked {MAX_ROUNDS} times, and gave no result")

    async def _progressed(self, running: Running, done: float, total: float | None, message: str | None) -> None:
        now = self._loop.time()
        running.heard(now)
        if running.call.call_id in self._running and running.progress.take(now):
            text = bounds.line(message, 1000) if message is not None else None
            self._send(Progress(call_id=running.call.call_id, done=done, total=total, message=text))

    # --- what the server asks

    async def _inputs(self, running: Running, requests: dict[str, types.InputRequest]) -> dict[str, Any]:
        """The answers to what a call needs. Raises Failure when one of them is refused."""
        if len(requests) > MAX_QUESTIONS:
            raise Failure(
                "E_MCP_PROTOCOL", f"the server asked {len(requests)} questions at once, limit {MAX_QUESTIONS}"
            )
        answers: dict[str, Any] = {}
        for key, request in requests.items():
            answers[key] = await self._input(running, request)
        return answers

    async def _input(self, running: Running, request: types.InputRequest) -> Any:
        match request:
            case types.ElicitRequest(params=params):
                return await self.elicit(params, running)
            case types.CreateMessageRequest(params=wanted):
                return await self.sample(wanted, running)
            case _:
                return self._client.roots()

    async def elicit(self, params: types.ElicitRequestParams, running: Running | None = None) -> types.ElicitResult:
        """Ask a person. Raises Failure when nobody can be asked."""
        again = running is not None
        running = running or self._of_whom()
        question = _question(params, again=again)
        answer = await self._ask(running, "elicit", encode_value(question))
        elicited = _elicited(answer)
        content = elicited.content
        if elicited.action == "accept" and question.mode == "form":
            content = {**_defaults(question.schema), **(content or {})}
        return types.ElicitResult(action=elicited.action, content=content)

    async def sample(
        self, params: types.CreateMessageRequestParams, running: Running | None = None
    ) -> types.CreateMessageResult:
        """Ask the agent's model. Raises Failure when that was not granted, or nobody can be asked."""
        self._client.check_granted("sampling")
        running = running or self._of_whom()
        wanted = params.model_dump(by_alias=True, mode="json", exclude_none=True, exclude={"meta"})
        answer = await self._ask(running, "sample", encode_value(wanted))
        try:
            return types.CreateMessageResult.model_validate(_decode(answer), by_name=False)
        except ValidationError:
            raise Failure("E_MCP_INPUT", "the agent's answer is no answer of a model") from None

    def _of_whom(self) -> Running:
        """The call that a request of the server belongs to. Raises Failure."""
        calls = list(self._running.values())
        if not calls:
            raise Failure("E_MCP_INPUT", "no call is open, so there is nobody to ask")
        if len({running.who for running in calls}) > 1:
            raise Failure("E_MCP_INPUT", "calls of several agents are open, and the server does not say which one asks")
        return calls[-1]

    async def _ask(self, running: Running, op: Literal["elicit", "sample"], value: bytes) -> bytes:
        """Ask the agent that made a call; the call's clocks stand still. Raises Failure."""
        running.asked += 1
        number = running.asked
        waiter = running.open[number] = self._loop.create_future()
        self._pause(running)
        try:
            self._send(Ask(call_id=running.call.call_id, ask_id=number, op=op, value=Raw(value)))
            answer = await waiter
        finally:
            running.open.pop(number, None)
            self._go_on(running)
        if answer.error is not None:
            raise Failure(answer.error.code or "E_MCP_INPUT", answer.error.message, name=answer.error.name)
        return bytes(answer.value) if answer.value is not None else b"\xc0"

    def _pause(self, running: Running) -> None:
        if running.paused is None:
            running.paused = self._loop.time()
            if running.timeout is not None:
                running.timeout.reschedule(None)

    def _go_on(self, running: Running) -> None:
        if running.open or running.paused is None:
            return
        now = self._loop.time()
        if running.deadline is not None:
            running.deadline += now - running.paused
        running.paused = None
        if running.timeout is not None:
            running.timeout.reschedule(running.until(now))

    async def _open_urls(self, running: Running, error: MCPError) -> None:
        """A call that needs a person to open a page first. Raises Failure unless the person says it is done."""
        try:
            needed = types.ElicitationRequiredErrorData.model_validate(error.data, by_name=False)
        except ValidationError:
            raise Failure("E_MCP_PROTOCOL", "the server needs a page to be opened, and does not say which") from None
        for params in needed.elicitations[:MAX_QUESTIONS]:
            result = await self.elicit(params, running)
            if result.action != "accept":
                raise Failure("E_MCP_INPUT", f"the server needs a page to be opened: {bounds.line(error.message, 500)}")


async def _nobody(requests: object) -> dict[str, Any]:
    raise Failure("E_MCP_INPUT", "the server's task asks something after its call had a result")


def _late(running: Running, now: float) -> Failure:
    if running.deadline is not None and now >= running.deadline - 0.001:
        return Failure("E_TOOL_TIMEOUT", "the server did not answer before the call's deadline", name="TimeoutError")
    return Failure("E_TOOL_TIMEOUT", f"the server said nothing for {running.idle_s:g} s", name="TimeoutError")


def _question(params: types.ElicitRequestParams, *, again: bool) -> ServerQuestion:
    """A question as an agent is told it. Raises Failure for one that cannot be shown."""
    message = bounds.text(params.message, bounds.MAX_DESCRIPTION)
    if isinstance(params, types.ElicitRequestURLParams):
        if not bounds.is_page(params.url):
            raise Failure("E_MCP_PROTOCOL", "the server wants an address to be opened that is no plain http address")
        return ServerQuestion(mode="url", message=message, url=params.url, again=again)
    if len(encode_value(params.requested_schema)) > MAX_FORM_BYTES:
        raise Failure("E_MCP_PROTOCOL", f"the server asks with a form of more than {MAX_FORM_BYTES} bytes")
    return ServerQuestion(mode="form", message=message, schema=params.requested_schema, again=again)


def _defaults(schema: dict[str, Any] | None) -> dict[str, Any]:
    """What a form is filled in with where the person left it empty."""
    properties = (schema or {}).get("properties")
    fields = properties.items() if isinstance(properties, dict) else ()
    return {name: field["default"] for name, field in fields if isinstance(field, dict) and "default" in field}


def _call_request(name: str, arguments: dict[str, Any], more: Input) -> types.CallToolRequest:
    return types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=arguments, **more))


def _prompt_request(name: object, values: object, more: Input) -> types.GetPromptRequest:
    if not isinstance(name, str) or not isinstance(values, dict | None):
        raise Failure("E_TOOL_INVALID_ARGS", "get_prompt takes a name, and arguments as an object", name="ValueError")
    texts = None if values is None else {key: str(value) for key, value in values.items()}
    return types.GetPromptRequest(params=types.GetPromptRequestParams(name=name, arguments=texts, **more))


def _read_request(uri: object, more: Input) -> types.ReadResourceRequest:
    if not isinstance(uri, str):
        raise Failure("E_TOOL_INVALID_ARGS", "read_resource takes a uri", name="ValueError")
    return types.ReadResourceRequest(params=types.ReadResourceRequestParams(uri=uri, **more))


#: How long a server is to keep what came of a task (milliseconds): as long as the host waits for pending work.
TTL_MS: Final = 3_600_000
#: A task that ends this quickly is answered like any call (seconds).
QUICK_S: Final = 1.0
#: How often a server is asked (seconds): as it wishes, within these.
POLL_S: Final = 1.0
MIN_POLL_S: Final = 0.1
MAX_POLL_S: Final = 60.0
#: Questions that a server may ask in one task.
MAX_TASK_QUESTIONS: Final = 100

_INPUTS: Final[TypeAdapter[dict[str, types.InputRequest]]] = TypeAdapter(dict[str, types.InputRequest])

#: Answers what a server asks, by the names of its questions.
Inputs = Callable[[dict[str, types.InputRequest]], Awaitable[dict[str, Any]]]


class _OfTask(types.Request[dict[str, Any], str]):
    """A request about a task."""

    #: The method.
    method: str
    #: The parameters.
    params: dict[str, Any]
    name_param = "taskId"


class Task:
    """One task of a server, from the answer that made it."""

    def __init__(self, session: ClientSession, answer: dict[str, Any], *, modern: bool) -> None:
        """Raises Failure when `answer` makes no task."""
        self._session = session
        self._modern = modern
        self._asked = 0
        self._answered: set[str] = set()
        self._id = ""
        self._take(answer["task"] if isinstance(answer.get("task"), dict) else answer)

    def _take(self, state: dict[str, Any]) -> None:
        key = state.get("taskId", self._id)
        if not bounds.is_name(key, 1024) or (self._id and key != self._id):
            raise Failure("E_MCP_PROTOCOL", "the server's task has no name, or another one than before")
        self._id = key
        self._state = state

    @property
    def over(self) -> bool:
        """Whether it has come to its end."""
        return self._state.get("status") in ("completed", "failed", "cancelled")

    @property
    def _poll_s(self) -> float:
        wished = bounds.number(self._state.get("pollIntervalMs" if self._modern else "pollInterval"))
        return POLL_S if wished is None else min(MAX_POLL_S, max(MIN_POLL_S, wished / 1000))

    async def follow(self, inputs: Inputs, seconds: float | None = None) -> bool:
        """Ask how it is until it is over, or until the seconds are; whether it is over. Raises Failure, MCPError."""
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        while not self.over:
            if self._state.get("status") == "input_required":
                await self._give(inputs)
            wait = self._poll_s
            if end is not None:
                if loop.time() >= end:
                    return False
                wait = min(wait, max(0.0, end - loop.time()))
            await asyncio.sleep(wait)
            self._take(await self._ask(_OfTask(method="tasks/get", params={"taskId": self._id})))
        return True

    async def result(self) -> dict[str, Any]:
        """What came of it: a `CallToolResult`. Raises Failure, MCPError."""
        status, said = self._state.get("status"), bounds.line(self._state.get("statusMessage"), 2000)
        if status == "cancelled":
            raise Failure("E_CANCELLED", f"the server cancelled its task: {said or 'it says no reason'}")
        if not self._modern:
            # Of a failed one too: the server's error, or a result that says so.
            return await self._ask(_OfTask(method="tasks/result", params={"taskId": self._id}))
        error, result = self._state.get("error"), self._state.get("result")
        if status == "failed":
            text = bounds.text(error.get("message"), 2000) if isinstance(error, dict) else said
            raise Failure("E_MCP_REFUSED", f"the server's task failed: {text or 'it says no reason'}")
        if not isinstance(result, dict):
            raise Failure("E_MCP_PROTOCOL", "the server's task is completed and has no result")
        return result

    async def cancel(self) -> None:
        """Tell the server that nobody wants it any more."""
        with suppress(MCPError, Failure, ValidationError):  # it has ended, or the server cannot
            await self._ask(_OfTask(method="tasks/cancel", params={"taskId": self._id}))

    async def _give(self, inputs: Inputs) -> None:
        """Answer what the server asks within its task."""
        if not self._modern:
            return  # it asks by requests of its own
        try:
            wanted = _INPUTS.validate_python(self._state.get("inputRequests") or {}, by_name=False)
        except ValidationError:
            raise Failure("E_MCP_PROTOCOL", "the server's task asks what is no question") from None
        fresh = {key: request for key, request in wanted.items() if key not in self._answered}
        self._asked += len(fresh)
        if self._asked > MAX_TASK_QUESTIONS:
            raise Failure("E_MCP_PROTOCOL", f"the server's task asked more than {MAX_TASK_QUESTIONS} questions")
        if not fresh:
            return
        self._answered.update(fresh)
        answers = {key: value.model_dump(by_alias=True, mode="json", exclude_none=True)
                   for key, value in (await inputs(fresh)).items()}  # fmt: skip
        await self._ask(_OfTask(method="tasks/update", params={"taskId": self._id, "inputResponses": answers}))

    async def _ask(self, request: types.Request[Any, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._session.send_request(request, _MAP)
        return answer
