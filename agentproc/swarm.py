"""One turn's side of its swarm: asks other agents over the agent's own link, and waits for what they answer.

The bundled tools `agents`, `handoff` and `self-restart` and the `ctx.agents` of middleware all go through here.

Source: docs/design/delivery.md section 5; requirements AGENTS-08, AGENTS-14, AGENTS-17, AGENTS-21.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from agentproc.calls import TURN_MARGIN_S
from agentproc.questions import (
    Asker,
    Question,
    catalog_frame,
    event_frame,
    late,
    list_frame,
    response_of,
    restart_frame,
    spawn_frame,
)
from schemas.codec import from_raw
from schemas.errors import GoondanError, fail
from schemas.frames import OPERATOR_AGENT, Frame, RestartAnswer
from schemas.questions import answered, correlation

#: A bundled tool's handler: the turn's side of the swarm, the tool call's id, and the checked arguments; what it gives
#: is a JSON value or a ToolResult.
Handler = Callable[["Swarm", str, dict[str, Any]], Awaitable[Any]]


class AskingLink(Protocol):
    """What is needed of a link (schemas.link.Link)."""

    def ask(self, frame: Frame) -> asyncio.Future[Frame]: ...
    def post(self, frame: Frame) -> asyncio.Future[Frame]: ...
    def forget(self, frame_id: str) -> None: ...


class Notices(Protocol):
    """Who is told of what is asked and answered (extensions/events.py)."""

    def wants(self, kind: str) -> bool: ...
    def emit(self, kind: str, payload: dict[str, Any], *, emitter: str) -> None: ...


#: What extensions are told (EVENTS-10, EVENTS-11): news for them, and not another way to ask.
DELEGATE: Final = "agent.delegate"
DELEGATION_RESULT: Final = "agent.delegationResult"


class Swarm:
    """What one turn can ask. `deadline` is the turn's, in the loop's time, None for no end; `clock` gives RFC 3339.
    `notices` hears of each event that goes to another agent, and of each answer that is waited for.

    Every method raises GoondanError: E_TOOL_INVALID_ARGS, E_AGENT_CYCLE, E_FRAME_TOO_LARGE, E_AGENT_NOT_FOUND,
    E_AGENT_SPAWN_FAILED, E_AGENT_TIMEOUT, E_AGENT_FAILED, or what else the broker refused it with.
    """

    def __init__(
        self, link: AskingLink, asker: Asker, deadline: float | None, clock: Callable[[], str], notices: Notices
    ) -> None:
        self._notices = notices
        self._link = link
        self._asker = asker
        #: The turn's; it moves when a person was asked meanwhile.
        self.deadline = deadline
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        #: The kernel restarts as soon as the turn has left its event: no further step before that.
        self.restarts = False

    async def request(self, question: Question) -> dict[str, Any]:
        """A turn of another agent, and its answer."""
        frame = event_frame(self._asker, question, self._left_ms(), self._clock())
        self._tell(question)
        try:
            answer = await self._until_done(frame, self._link.ask(frame))
        except GoondanError as error:
            # The link gave up waiting. What an agent's answer says comes from `response_of`.
            raise late(frame) if error.info.code == "E_AGENT_TIMEOUT" else error from None
        response = response_of(frame, answer)
        told = {"sourceAgent": question.target, "result": response["response"]}
        self._notices.emit(DELEGATION_RESULT, told, emitter="the kernel")
        return response

    async def send(self, question: Question) -> dict[str, Any]:
        """A turn of another agent that nobody waits for: the broker has the event when this returns."""
        frame = event_frame(self._asker, question, self._left_ms(), self._clock())
        self._tell(question)
        await self._until_done(frame, self._link.post(frame))
        return {"target": question.target, "eventId": frame.event_id, "accepted": True, "sent": True}

    async def start(self, question: Question) -> dict[str, Any]:
        """A turn of another agent whose answer comes as a message later; what `request` gives, without a response."""
        event_id = (await self.submit(question)).event_id or ""
        return {**answered(question.target, event_id, correlation(event_id), None), "async": True}

    async def submit(self, question: Question) -> Frame:
        """A turn of another agent whose answer comes as a message later: the broker has the event when this returns.

        Gives the frame of the event.
        """
        if self._asker.agent == OPERATOR_AGENT:
            message = "a call from outside has no conversation that an answer could come to later"
            raise fail("E_USAGE", message, suggestion="Use agents__request without async, or agents__send.")
        frame = event_frame(self._asker, question, None, self._clock())
        self._tell(question)
        await self._until_done(frame, self._link.post(frame))
        return frame

    async def spawn(self, name: str, target: str, instance_key: str | None, cwd: str | None) -> Any:
        """The process of an instance; returns when it is there. `name` names the question within its turn."""
        return await self._look_up(spawn_frame(self._asker, name, target, instance_key, cwd, self._left_ms()))

    async def restart(self, name: str, reason: str) -> None:
        """Have the kernel restart at the end of this step. `name` is the tool call's id, by which a repeat is known.

        Raises GoondanError: what is wrong with the bundle, E_RESTART_REFUSED, E_FORBIDDEN.
        """
        frame = restart_frame(self._asker, name, reason)
        reply = await self._until_done(frame, self._link.post(frame))
        self.restarts = self.restarts or from_raw(reply.payload, RestartAnswer).comes

    async def list(self, include_all: bool) -> Any:
        """The instances that the asker has spawned, or all."""
        return await self._look_up(list_frame(include_all, self._left_ms()))

    async def catalog(self) -> Any:
        """The agents of the swarm."""
        return await self._look_up(catalog_frame(self._left_ms()))

    def _tell(self, question: Question) -> None:
        """An event goes to another agent."""
        if not self._notices.wants(DELEGATE):
            return
        given = question.input
        text = given if isinstance(given, str) else msgspec.json.encode(given, enc_hook=str).decode()
        told: dict[str, Any] = {"targetAgent": question.target, "input": text}
        if question.metadata is not None:
            told["metadata"] = question.metadata
        self._notices.emit(DELEGATE, told, emitter="the kernel")

    async def _look_up(self, frame: Frame) -> Any:
        return from_raw((await self._until_done(frame, self._link.post(frame))).payload, object)

    async def _until_done(self, frame: Frame, future: asyncio.Future[Frame]) -> Frame:
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self._link.forget(frame.id)

    def _left_ms(self) -> int | None:
        """What the turn has left, less what it needs to end with a message of its own."""
        if self.deadline is None:
            return None
        left = self.deadline - self._loop.time()
        left = max(left - TURN_MARGIN_S, left / 2)
        if left <= 0:
            raise fail("E_AGENT_TIMEOUT", "the turn has no time left to ask another agent")
        return max(1, int(left * 1000))
