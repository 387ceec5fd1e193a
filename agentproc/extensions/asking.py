"""`ctx.agents` of turn and step middleware, and `ctx.runtime` of tools that extensions registered: they ask other
agents of the swarm, over the agent's own link.

Rules.
- A question's id has three parts: the id of the turn, the place of the question (the turn or a step with the extension,
  or a tool call), and how often the same question was asked there. So middleware that another process enters again uses
  the same ids in any order, and gets the stored answers.
- When the turn ends, open questions are given up. Later questions are refused.

Source: docs/design/delivery.md section 5; requirements AGENTS-02, AGENTS-03, AGENTS-12, AGENTS-19.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from goondan.agentproc.calls.swarm import Swarm
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.machine.questions import Question, call_place
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.questions import TIMEOUT_MS


class Agents:
    """`ctx.agents`, `ctx.runtime`. A failure raises GoondanError with one of these codes: E_AGENT_NOT_FOUND,
    E_AGENT_TIMEOUT, E_AGENT_FAILED, E_AGENT_CYCLE, E_AGENT_SPAWN_FAILED, E_TOOL_INVALID_ARGS, E_FRAME_TOO_LARGE.
    """

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[Literal["request", "send"], dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask

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

        async def ask(op: Literal["request", "send"], fields: dict[str, Any]) -> dict[str, Any]:
            with standing():
                return await self._ask(f"@{place}.{extension}", op, fields)

        return Agents(ask)

    def in_call(self, tool_call_id: str) -> Agents:
        """The `ctx.runtime` of the handler of one tool call. Its time is the time of the call."""

        async def ask(op: Literal["request", "send"], fields: dict[str, Any]) -> dict[str, Any]:
            return await self._ask(call_place(tool_call_id), op, fields)

        return Agents(ask)

    async def _ask(self, layer: str, op: Literal["request", "send"], fields: dict[str, Any]) -> dict[str, Any]:
        if self._over:
            raise MiddlewareError("the turn has ended, and nothing can be asked any more")
        question = Question(op=op, name=self._name(layer, op, fields), **fields)
        task = asyncio.get_running_loop().create_task(self._put(question))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return await task

    def _put(self, question: Question) -> Coroutine[Any, Any, dict[str, Any]]:
        if question.op == "send":
            return self._swarm.send(question)
        return self._swarm.start(question) if question.asynchronous else self._swarm.request(question)

    def _name(self, layer: str, op: str, fields: dict[str, Any]) -> str:
        """The question's name within its turn."""
        try:
            same = layer, encode_value((op, fields))
        except Exception:  # It is no JSON value, and is refused for that reason.
            return layer
        self._same[same] += 1
        return f"{layer}.{self._same[same]}"

    def close(self) -> None:
        """The turn has ended."""
        self._over = True
        for task in list(self._open):
            task.cancel()
