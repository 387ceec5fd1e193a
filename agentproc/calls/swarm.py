"""One turn's access to its swarm: it asks other agents over the agent's own link, and waits for their answers.

The bundled tools `agents`, `handoff` and `self-restart` and the `ctx.agents` of middleware all go through here.

Source: docs/design/delivery.md section 5; requirements AGENTS-08, AGENTS-14, AGENTS-17, AGENTS-21.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from goondan.agentproc.calls.caller import TURN_MARGIN_S, AgentLink, until_answered
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.machine import questions
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import OPERATOR_AGENT, Frame, RestartAnswer, ToolResult
from goondan.schemas.wire.questions import TIMEOUT_MS, answered, correlation

#: A bundled tool's handler. It gets the turn's access to the swarm, the tool call's id and the checked arguments. It
#: returns a JSON value or a ToolResult.
Handler = Callable[["Swarm", str, dict[str, Any]], Awaitable[Any]]


#: The types of news for extensions (EVENTS-10, EVENTS-11). They are not another way to ask.
DELEGATE: Final = "agent.delegate"
DELEGATION_RESULT: Final = "agent.delegationResult"


class Swarm:
    """The questions of one turn. `deadline` is the turn's, in the loop's time, None for no end. `clock` gives RFC 3339.
    `notices` gets each event that goes to another agent, and each answer that is waited for.

    Every method raises GoondanError: E_TOOL_INVALID_ARGS, E_AGENT_CYCLE, E_FRAME_TOO_LARGE, E_AGENT_NOT_FOUND,
    E_AGENT_SPAWN_FAILED, E_AGENT_TIMEOUT, E_AGENT_FAILED, or another refusal of the broker.
    """

    def __init__(
        self,
        link: AgentLink,
        asker: questions.Asker,
        deadline: float | None,
        clock: Callable[[], str],
        notices: EventBus,
    ) -> None:
        self._notices = notices
        self._link = link
        self._asker = asker
        #: The turn's deadline. It moves when a person was asked in between.
        self.deadline = deadline
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        #: Says what became of handed-over work, by its handle (machine/questions.py).
        self.end_of: Callable[[str], ToolResult] = partial(questions.end_of, news=(), messages=())
        #: Set when work that was handed over has ended.
        self.news = asyncio.Event()
        #: How long `agents__request` waits unless it says otherwise (milliseconds).
        self.patience_ms = TIMEOUT_MS
        #: The kernel restarts as soon as the turn has left its event. No further step runs before that.
        self.restarts = False

    async def request(self, question: questions.Question) -> dict[str, Any]:
        """Have another agent run a turn, and return its answer. With `question.goes_on` an answer that does not come in
        time comes later, as a message.
        """
        frame = questions.event_frame(self._asker, question, self._left_ms(), self._clock())
        self._tell(question)
        waits_ms = question.timeout_ms if question.goes_on else None
        try:
            asked = self._link.ask(frame, None if waits_ms is None else waits_ms / 1000)
            answer = await until_answered(self._link, frame, asked)
        except errors.GoondanError as error:
            # The link gave up waiting. Errors inside an agent's answer come from `response_of`.
            raise questions.late(frame) if error.info.code == "E_AGENT_TIMEOUT" else error from None
        if answer.type == "ack":
            raise questions.late(frame, waits_ms)
        response = questions.response_of(frame, answer)
        told = {"sourceAgent": question.target, "result": response["response"]}
        self._notices.emit(DELEGATION_RESULT, told, emitter="the kernel")
        return response

    @property
    def hears_later(self) -> bool:
        """Whether the asker has a conversation that an answer could come to later. An operator's call has none."""
        return self._asker.agent != OPERATOR_AGENT

    async def send(self, question: questions.Question) -> dict[str, Any]:
        """Have another agent run a turn, and do not wait for it. The broker has the event when this returns."""
        frame = questions.event_frame(self._asker, question, self._left_ms(), self._clock())
        self._tell(question)
        await until_answered(self._link, frame, self._link.post(frame))
        return {"target": question.target, "eventId": frame.event_id, "accepted": True, "sent": True}

    async def start(self, question: questions.Question) -> dict[str, Any]:
        """Have another agent run a turn; the answer comes later, as a message. Returns the value of `request` without a
        response.
        """
        event_id = (await self.submit(question)).event_id or ""
        return {**answered(question.target, event_id, correlation(event_id), None), "async": True}

    async def submit(self, question: questions.Question) -> Frame:
        """Have another agent run a turn; the answer comes later, as a message. The broker has the event when this
        returns.

        Returns the frame of the event.
        """
        if not self.hears_later:
            message = "a call from outside has no conversation that an answer could come to later"
            raise errors.fail("E_USAGE", message, suggestion="Use agents__request without async, or agents__send.")
        frame = questions.event_frame(self._asker, question, None, self._clock())
        self._tell(question)
        await until_answered(self._link, frame, self._link.post(frame))
        return frame

    async def end_of_work(self, handle: str, wait_s: float) -> ToolResult:
        """What handed-over work came to; `pending` when it has no end within `wait_s` seconds. Raises GoondanError: its
        error, or E_TOOL_OUTCOME_UNKNOWN.
        """
        left_ms = self._left_ms()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if left_ms is None else min(wait_s, left_ms / 1000)):
                while self.end_of(handle).status == "pending":
                    self.news.clear()
                    await self.news.wait()
        return self.end_of(handle)

    async def spawn(self, name: str, target: str, instance_key: str | None, cwd: str | None) -> Any:
        """Start the process of an instance. Returns when it is there. `name` names the question within its turn."""
        return await self._look_up(questions.spawn_frame(self._asker, name, target, instance_key, cwd, self._left_ms()))

    async def restart(self, name: str, reason: str) -> None:
        """Have the kernel restart at the end of this step. `name` is the tool call's id, which identifies a repeat.

        Raises GoondanError: what is wrong with the bundle, E_RESTART_REFUSED, E_FORBIDDEN.
        """
        frame = questions.restart_frame(self._asker, name, reason)
        reply = await until_answered(self._link, frame, self._link.post(frame))
        self.restarts = self.restarts or codec.from_raw(reply.payload, RestartAnswer).comes

    async def list(self, include_all: bool) -> Any:
        """The instances that the asker has spawned, or all instances."""
        return await self._look_up(questions.list_frame(include_all, self._left_ms()))

    async def catalog(self) -> Any:
        """The agents of the swarm."""
        return await self._look_up(questions.catalog_frame(self._left_ms()))

    def _tell(self, question: questions.Question) -> None:
        """Announce an event that goes to another agent."""
        if not self._notices.wants(DELEGATE):
            return
        given = question.input
        text = given if isinstance(given, str) else msgspec.json.encode(given, enc_hook=str).decode()
        told: dict[str, Any] = {"targetAgent": question.target, "input": text}
        if question.metadata is not None:
            told["metadata"] = question.metadata
        self._notices.emit(DELEGATE, told, emitter="the kernel")

    async def _look_up(self, frame: Frame) -> Any:
        return codec.from_raw((await until_answered(self._link, frame, self._link.post(frame))).payload, object)

    def _left_ms(self) -> int | None:
        """The time that the turn has left, without the part that it needs to end with a message of its own."""
        if self.deadline is None:
            return None
        left = self.deadline - self._loop.time()
        left = max(left - TURN_MARGIN_S, left / 2)
        if left <= 0:
            raise errors.fail("E_AGENT_TIMEOUT", "the turn has no time left to ask another agent")
        return max(1, int(left * 1000))
