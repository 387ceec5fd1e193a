"""A link that speaks the older message form: for programs written for delegate and delegate_result.

Rules.
- One message in, one call of the handler, in a task of its own: a handler may wait for the result of a delegate that
  it sends. A handler that raises fails the event; the others go on.
- An `event` ends when its handler returns. A `delegate` ends with its `delegate_result`, sent by the handler or later.
- An event that is handed over again while it is held is not shown again: only its epoch is new.
- Events that are still held at `close` are released, for another process or a later one.

Source: docs/design/wire.md section 9; requirement IPC-08.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import FrameError
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import ORCHESTRATOR, ErrorPayload, Frame, Lease, Welcome
from tests.legacy.messages import (
    LegacyMessage,
    end_frame,
    error_value,
    failure,
    message_of,
    parse,
    request_frame,
    result_frame,
    unparse,
)

#: How often the broker hears that a held event is worked on (seconds); it gives up on a silent holder after 60.
RENEW_S: Final = 10.0
#: How long `close` waits for the broker to take held events back (seconds).
RELEASE_S: Final = 1.0

Handler = Callable[[LegacyMessage], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


class _Held:
    """An event under lease."""

    __slots__ = ("ended", "epoch", "event_id", "message", "root_event")

    def __init__(self, event_id: str, epoch: int, root_event: str | None, message: LegacyMessage) -> None:
        self.event_id = event_id
        self.epoch = epoch
        self.root_event = root_event
        self.message = message
        self.ended = False


class LegacyPort:
    """One program on the bus, client or agent by its token. `on_message` is a coroutine function, called for each
    incoming message; a `shutdown` is one of them, after which the program should `close` within its gracePeriodMs.
    """

    def __init__(self, endpoint: str, token: str, on_message: Handler) -> None:
        self.link = Link(
            endpoint,
            token,
            on_frame=self._on_frame,
            held=lambda: {"leases": self._leases()},
            on_welcome=self._take_name,
        )
        self.name = "client"
        self._on_message = on_message
        self._key = "default"
        self._held: dict[str, _Held] = {}
        self._asked: dict[str, asyncio.Future[Frame]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shutdown: Frame | None = None
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, timeout_s: float = 10.0) -> Welcome:
        """Connect and say hello. Raises GoondanError like Link.start."""
        welcome = await self.link.start(timeout_s)
        self._timer = asyncio.get_running_loop().call_later(RENEW_S, self._renew)
        return welcome

    async def close(self, linger_s: float = 1.0) -> None:
        """Stop handlers, release what is held, acknowledge a shutdown, end the link."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for future in self._asked.values():
            future.cancel()
        releases = [asyncio.ensure_future(self._release(held)) for held in self._held.values() if not held.ended]
        if releases:
            await asyncio.wait(releases, timeout=RELEASE_S)
        if self._shutdown is not None:
            to = self._shutdown.from_ or ORCHESTRATOR
            self.link.send(Frame("shutdown_ack", from_=self.name, to=to, in_reply_to=self._shutdown.id))
        await self.link.close(linger_s)

    async def send(
        self,
        message: LegacyMessage | dict[str, Any],
        *,
        instance_key: str | None = None,
        deadline_ms: int | None = None,
    ) -> str | None:
        """Send a message; its correlationId, which a `delegate` gets here if it has none.

        Returns for an `event` when it is accepted, for a `delegate_result` when the broker has it, for a `delegate` at
        once: its result comes to the handler, also when it failed. `instance_key` is the receiver's (default: our own,
        for clients `default`). Raises GoondanError: E_FRAME_INVALID, E_FRAME_TOO_LARGE, E_FORBIDDEN for a `shutdown`,
        E_LEASE_LOST for a result whose event is somebody else's now, or what the broker answers to an event.
        """
        given = parse(_builtins(message))
        if given.type == "shutdown":
            raise fail("E_FORBIDDEN", "a shutdown comes from the kernel only")
        if given.type == "delegate_result":
            await self._answer(given)
            return given.correlation_id
        if given.type == "delegate":
            given = _named(given)
            if given.correlation_id in self._asked:
                raise fail("E_FRAME_INVALID", f"correlationId {given.correlation_id!r} waits for a result already")
        frame = request_frame(
            given,
            event_id=os.urandom(12).hex(),
            created_at=_now(),
            instance_key=instance_key or self._key,
            deadline_ms=deadline_ms,
        )
        if given.type == "event":
            await self.link.post(frame)
        else:
            self._ask(given, frame)
        return given.correlation_id

    # --- inside

    def _take_name(self, welcome: Welcome) -> None:
        parts = welcome.principal.split("/", 2)
        if parts[0] == "agent":
            self.name = parts[1]
        self._key = welcome.instance_key or "default"

    def _ask(self, request: LegacyMessage, frame: Frame) -> None:
        correlation = request.correlation_id or ""
        answer = self._asked[correlation] = self.link.ask(frame)

        def answered(future: asyncio.Future[Frame]) -> None:
            self._asked.pop(correlation, None)
            if future.cancelled():
                return
            try:
                result = message_of(future.result(), request.from_)
            except GoondanError as error:
                if error.info.code == "E_LINK_CLOSED":
                    return
                result = failure(request, error.info)
            if result is not None:
                self._start(self._handle(result))

        answer.add_done_callback(answered)

    async def _answer(self, result: LegacyMessage) -> None:
        waiting = [
            held
            for held in self._held.values()
            if held.message.type == "delegate"
            and not held.ended
            and result.correlation_id in (None, held.message.correlation_id)
        ]
        if len(waiting) != 1 or result.to != waiting[0].message.from_:
            message = f"no delegate of {result.to!r} with correlationId {result.correlation_id!r} waits for a result"
            raise fail("E_FRAME_INVALID", message)
        held = waiting[0]
        frame = result_frame(result, event_id=held.event_id, epoch=held.epoch, created_at=_now())
        await self._end(held, frame)

    async def _end(self, held: _Held, frame: Frame) -> None:
        """Send what ends an event, until the broker has it; it is named as held until then.

        Raises GoondanError. A message that is too large leaves the event as it was: the event can still be ended in
        another way.
        """
        held.ended = True
        try:
            while True:
                frame.epoch = held.epoch
                try:
                    await self.link.post(frame)
                    return
                except FrameError:
                    held.ended = False
                    raise
                except GoondanError as error:
                    if error.info.code != "E_LEASE_LOST" or held.epoch == frame.epoch:
                        raise
                    frame.id = ""  # handed over again in the meantime: the same end, under the new epoch
        finally:
            if held.ended:
                self._held.pop(held.event_id, None)

    def _on_frame(self, frame: Frame) -> None:
        if self._closing:
            return  # what is released may be handed over again at once
        if frame.type == "event" and frame.event_id is not None and frame.in_reply_to is None:
            held = self._held.get(frame.event_id)
            if held is not None:
                held.epoch = frame.epoch or 0
                return
        try:
            message = message_of(frame, self.name)
        except GoondanError as error:
            log.warning("a %s was not understood: %s", frame.type, error)
            if frame.type == "event" and frame.in_reply_to is None:
                unread = LegacyMessage("event", ORCHESTRATOR, self.name, None)
                self._start(self._fail(self._hold(frame, unread), error.info))
            return
        if message is None:
            return
        if message.type == "shutdown":
            self._shutdown = frame
            self._start(self._handle(message))
        elif message.type != "delegate_result":  # a result that is not asked for any more is no news
            self._start(self._work(self._hold(frame, message)))

    def _hold(self, frame: Frame, message: LegacyMessage) -> _Held:
        event_id = frame.event_id or ""
        held = self._held[event_id] = _Held(event_id, frame.epoch or 0, frame.root_event, message)
        return held

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: LegacyMessage) -> None:
        """A message that nobody waits for the end of."""
        try:
            await self._on_message(message)
        except Exception:
            log.exception("the handler of a %s failed", message.type)

    async def _work(self, held: _Held) -> None:
        info: ErrorPayload | None = None
        try:
            await self._on_message(held.message)
        except Exception as error:
            log.exception("the handler of a %s failed", held.message.type)
            info = error.info if isinstance(error, GoondanError) else _failed(error)
        if held.ended or (info is None and held.message.type == "delegate"):
            return  # a delegate's result may still come
        await self._fail(held, info)

    async def _fail(self, held: _Held, info: ErrorPayload | None) -> None:
        """End an event without a result. That somebody else has it by now changes nothing for us."""
        value = None if info is None else error_value(info)
        try:
            await self._end(held, end_frame(held.event_id, held.epoch, _now(), error=info, value=value))
        except GoondanError as error:
            log.warning("event %s: %s", held.event_id, error)

    async def _release(self, held: _Held) -> None:
        try:
            await self._end(held, Frame("ack", stage="release", event_id=held.event_id))
        except GoondanError as error:
            log.warning("event %s: %s", held.event_id, error)

    def _leases(self) -> list[Lease]:
        return [Lease(held.event_id, held.epoch, self._key, held.root_event) for held in self._held.values()]

    def _renew(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RENEW_S, self._renew)
        for held in self._held.values():
            self.link.send(Frame("ack", stage="renew", event_id=held.event_id, epoch=held.epoch))


def _named(message: LegacyMessage) -> LegacyMessage:
    """A delegate with a correlationId."""
    if message.correlation_id is not None:
        return message
    return LegacyMessage(message.type, message.from_, message.to, message.payload, os.urandom(12).hex())


def _builtins(message: LegacyMessage | dict[str, Any]) -> Any:
    if isinstance(message, LegacyMessage):
        return unparse(message)
    return message


def _failed(error: Exception) -> ErrorPayload:
    return error_payload("E_AGENT_FAILED", f"the agent's handler failed with {type(error).__name__}")


def _now() -> str:
    return rfc3339(time.time())
