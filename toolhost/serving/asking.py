"""What handlers and MCP workers ask the bus, on its way there and back. The shell around asks.py.

A question whose answer is waited for lives as long as its call: when the call ends, in whatever way, what it has open
is dropped here, the handler is told, and an answer that still comes is acknowledged by the link and goes nowhere. The
log says which those were; the broker cancels them.

An MCP worker asks the process that holds tokens while it logs in to its server. It speaks with somebody hostile. So it
asks for its own server only, few things at a time, and within bounds.

Source: docs/design/delivery.md section 5; docs/design/sandbox.md section 5; schemas/WORKER.md section 10;
schemas/PROTOCOL-AGENTS.md, "Access tokens"; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from goondan.schemas.oauth import MAX_DOCUMENT, ServerReply, ServerWish
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload, Frame
from goondan.schemas.worker.tool_host_reports import LogLine
from goondan.schemas.worker.worker_frames import Answer, Ask, LoginAnswer, LoginAsk, WorkerError
from goondan.toolhost.calls.asks import Asker, Reply, ended, refusal, value_of
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.untrusted import Violation

#: Questions of one worker that have no answer yet: a login takes one after the other.
MAX_OPEN: Final = 8
#: Characters of a URL.
MAX_URL: Final = 8192


class Speaker(Protocol):
    """The side of a link (schemas/transport/link.py) that questions need."""

    def ask(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send an `event` with `replyTo` until its answering event is here."""

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send until it is answered by an `ack`, a `reply` or an `error` (which raises GoondanError)."""

    def ask_caller(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send a `tool.ask` until its `tool.answer` is here, or an `error` (which raises GoondanError)."""

    def forget(self, frame_id: str) -> None:
        """Stop sending a frame."""


class Asking:
    """All questions of one tool host. Without a `speaker` each is refused."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, speaker: Speaker | None, on_log: Callable[[LogLine], None]
    ) -> None:
        self._loop = loop
        self._speaker = speaker
        self._on_log = on_log
        self._askers: dict[str, Asker] = {}  # by the worker call id: a call that runs again begins anew

    def ask(self, call: Call, ask: Ask, reply: Reply) -> None:
        """Send a question of a running call. `reply` gets its answer, unless the jail is gone. Raises Violation."""
        asker = self._askers.setdefault(call.worker_call_id, Asker())
        try:
            if self._speaker is None:
                raise fail("E_KERNEL_NOT_RUNNING", "this tool host has no bus")
            frame = asker.frame(call, ask, self._loop.time(), rfc3339(time.time()), reply)
            answer = self._sent(self._speaker, frame)
        except GoondanError as error:
            asker.open.pop(ask.ask_id, None)
            reply(refusal(ask, error.info))
        else:
            answer.add_done_callback(partial(self._answered, call.worker_call_id, ask.ask_id))

    @staticmethod
    def _sent(speaker: Speaker, frame: Frame) -> asyncio.Future[Frame]:
        if frame.type == "tool.ask":
            return speaker.ask_caller(frame)
        waits = frame.reply_to is not None and not frame.asynchronous
        return speaker.ask(frame) if waits else speaker.post(frame)

    def drop(self, call: Call) -> None:
        """The call or its jail has ended: nobody waits for its answers."""
        asker = self._askers.pop(call.worker_call_id, None)
        left = [] if asker is None else list(asker.open.values())
        for question in left:
            if self._speaker is not None:
                self._speaker.forget(question.frame.id)
            question.reply(ended(question.ask))
        if left:
            names = ", ".join(question.frame.event_id or question.frame.type for question in left[:4])
            message = f"the call ended while {len(left)} of its questions were open: {names}"
            line = LogLine(time=time.time(), level="warn", message=message, tool=call.tool.name)
            line.agent, line.instance_key, line.call_id = call.agent, call.instance_key, call.id
            self._on_log(line)

    def _answered(self, worker_call_id: str, ask_id: int, future: asyncio.Future[Frame]) -> None:
        asker = self._askers.get(worker_call_id)
        question = None if asker is None else asker.open.pop(ask_id, None)
        if question is None or future.cancelled():
            return
        ask = question.ask
        try:
            value = value_of(ask, question.frame, future.result())
        except GoondanError as error:
            question.reply(refusal(ask, error.info))
        except Exception as error:
            question.reply(refusal(ask, error_payload("E_INTERNAL", f"the answer could not be read: {error!r}"[:500])))
        else:
            question.reply(Answer(call_id=ask.call_id, ask_id=ask.ask_id, value=value))


class Logins:
    """The questions of one tool host. Without a `speaker` each is refused."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speaker: Speaker | None) -> None:
        self._loop = loop
        self._speaker = speaker
        self._open: dict[int, dict[int, str]] = {}  # ids of frames, by the session's number and the question's

    def ask(self, session: int, prefix: str, agent: str | None, ask: LoginAsk) -> asyncio.Future[LoginAnswer]:
        """Send a question of the worker of a session. `agent` is the one whose own config of the server counts.

        Raises Violation.
        """
        opened = self._open.setdefault(session, {})
        if ask.login_id in opened or len(opened) >= MAX_OPEN:
            raise Violation(f"the worker has {len(opened)} questions about its login open, or one of this number")
        if len(ask.document or "") > MAX_DOCUMENT or len(ask.url or "") > MAX_URL:
            raise Violation("the worker sent a document or a URL that is longer than any")
        asked = ServerWish(op=ask.op, server=prefix, agent=agent, document=ask.document, url=ask.url)
        answer: asyncio.Future[LoginAnswer] = self._loop.create_future()
        if self._speaker is None:
            info = error_payload("E_KERNEL_NOT_RUNNING", "this tool host has no bus, so nobody holds tokens for it")
            answer.set_result(_refused(ask, info))
            return answer
        frame = Frame("oauth.server", payload=to_raw(asked))
        sent = self._speaker.post(frame)
        opened[ask.login_id] = frame.id

        def answered(future: asyncio.Future[Frame]) -> None:
            opened.pop(ask.login_id, None)
            if not answer.done():
                answer.set_result(_answer(ask, future))

        sent.add_done_callback(answered)
        return answer

    def drop(self, session: int) -> None:
        """The worker is gone: nobody waits for its answers."""
        for frame_id in self._open.pop(session, {}).values():
            if self._speaker is not None:
                self._speaker.forget(frame_id)


def _answer(ask: LoginAsk, future: asyncio.Future[Frame]) -> LoginAnswer:
    try:
        if future.cancelled():
            raise fail("E_OAUTH_UNAVAILABLE", "nobody waits for this any more")
        frame = future.result()
        return LoginAnswer(login_id=ask.login_id, reply=from_raw(frame.payload, ServerReply))
    except GoondanError as error:
        return _refused(ask, error.info)


def _refused(ask: LoginAsk, info: ErrorPayload) -> LoginAnswer:
    error = WorkerError(name="OAuthError", message=info.message, code=info.code, suggestion=info.suggestion)
    return LoginAnswer(login_id=ask.login_id, error=error)
