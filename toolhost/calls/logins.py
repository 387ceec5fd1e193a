"""What MCP workers ask while they log in to their servers: on its way to the process that holds tokens, and back.

A worker speaks with somebody hostile. So it asks for its own server only, few things at a time, and within bounds.

Source: schemas/WORKER.md section 10; schemas/PROTOCOL-AGENTS.md, "Access tokens"; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
from typing import Final

from goondan.schemas.codec import from_raw, to_raw
from goondan.schemas.errors import GoondanError, error_payload, fail
from goondan.schemas.frames import ErrorPayload, Frame
from goondan.schemas.oauth import MAX_DOCUMENT, ServerReply, ServerWish
from goondan.schemas.worker_frames import LoginAnswer, LoginAsk, WorkerError
from goondan.toolhost.calls.asking import Speaker
from goondan.toolhost.untrusted import Violation

#: Questions of one worker that have no answer yet: a login takes one after the other.
MAX_OPEN: Final = 8
#: Characters of a URL.
MAX_URL: Final = 8192


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
        wish = ServerWish(op=ask.op, server=prefix, agent=agent, document=ask.document, url=ask.url)
        answer: asyncio.Future[LoginAnswer] = self._loop.create_future()
        if self._speaker is None:
            info = error_payload("E_KERNEL_NOT_RUNNING", "this tool host has no bus, so nobody holds tokens for it")
            answer.set_result(_refused(ask, info))
            return answer
        frame = Frame("oauth.server", payload=to_raw(wish))
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
