"""Calls that a server goes on with after its first answer: tasks. The SDK's client has none.

Two shapes of the same. Up to 2025-11-25: the client asks for a task (`task` in the parameters of `tools/call`), polls
`tasks/get`, and has the result by `tasks/result`. With 2026-07-28 tasks are an extension: the server makes a task when
it likes (`resultType: task`), and `tasks/get` holds the result, or what the server asks.

Source: docs/design/tools.md section 11; the protocol's page "Tasks" (2025-11-25) and its tasks extension (2026-07-28).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Literal

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter, ValidationError

from goondan.features.mcp.jail import bounds
from goondan.features.mcp.jail.results import Failure

#: The name of the extension.
EXTENSION: Final = "io.modelcontextprotocol/tasks"
#: How long a server is to keep what came of a task (milliseconds): as long as the host waits for pending work.
TTL_MS: Final = 3_600_000
#: A task that ends this quickly is answered like any call (seconds).
QUICK_S: Final = 1.0
#: How often a server is asked (seconds): as it wishes, within these.
POLL_S: Final = 1.0
MIN_POLL_S: Final = 0.1
MAX_POLL_S: Final = 60.0
#: Questions that a server may ask in one task.
MAX_QUESTIONS: Final = 100

_MAP: Final[TypeAdapter[Any]] = TypeAdapter(dict[str, Any])
_INPUTS: Final[TypeAdapter[dict[str, types.InputRequest]]] = TypeAdapter(dict[str, types.InputRequest])

#: Answers what a server asks, by the names of its questions.
Inputs = Callable[[dict[str, types.InputRequest]], Awaitable[dict[str, Any]]]


class _Get(types.Request[dict[str, Any], Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    #: The parameters.
    params: dict[str, Any]
    name_param = "taskId"


class _Result(types.Request[dict[str, Any], Literal["tasks/result"]]):
    method: Literal["tasks/result"] = "tasks/result"
    #: The parameters.
    params: dict[str, Any]
    name_param = "taskId"


class _Update(types.Request[dict[str, Any], Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    #: The parameters.
    params: dict[str, Any]
    name_param = "taskId"


class _Cancel(types.Request[dict[str, Any], Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
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
            self._take(await self._ask(_Get(params={"taskId": self._id})))
        return True

    async def result(self) -> dict[str, Any]:
        """What came of it: a `CallToolResult`. Raises Failure, MCPError."""
        status, said = self._state.get("status"), bounds.line(self._state.get("statusMessage"), 2000)
        if status == "cancelled":
            raise Failure("E_CANCELLED", f"the server cancelled its task: {said or 'it says no reason'}")
        if not self._modern:
            # Of a failed one too: the server's error, or a result that says so.
            return await self._ask(_Result(params={"taskId": self._id}))
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
            await self._ask(_Cancel(params={"taskId": self._id}))

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
        if self._asked > MAX_QUESTIONS:
            raise Failure("E_MCP_PROTOCOL", f"the server's task asked more than {MAX_QUESTIONS} questions")
        if not fresh:
            return
        self._answered.update(fresh)
        answers = {key: value.model_dump(by_alias=True, mode="json", exclude_none=True)
                   for key, value in (await inputs(fresh)).items()}  # fmt: skip
        await self._ask(_Update(params={"taskId": self._id, "inputResponses": answers}))

    async def _ask(self, request: types.Request[Any, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._session.send_request(request, _MAP)
        return answer
