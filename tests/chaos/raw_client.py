"""A client of the bus without the link's manners: every frame that arrives is counted.

The link hides an answer that comes twice. Here each one is kept, beside how often it was asked for: a question that is
sent again because the broker was gone may be answered again, with the same words.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from typing import Final

import zmq

from goondan.schemas.wire.codec import MAX_RELAYED_BYTES, decode, encode, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello

#: How soon a question that found no room is asked again (seconds).
AGAIN_S: Final = 0.1
#: How often the socket is looked at (seconds). Its descriptor speaks once, and a send may swallow the word.
LOOK_S: Final = 0.005


class RawClient:
    """One DEALER socket at `endpoint`, which says hello with `token` whenever a broker asks for it."""

    def __init__(self, endpoint: str, token: str) -> None:
        self._hello = to_raw(Hello(token, os.urandom(8).hex()))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Each new connection probes, so that a new broker asks for hello.
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.PROBE_ROUTER, 1), (zmq.RECONNECT_IVL, 20)):
            self._socket.setsockopt(option, value)
        self._socket.connect(endpoint)
        self._ready = False
        self._reader = asyncio.create_task(self._read())
        self._frames: dict[str, Frame] = {}
        self._waiting: dict[str, asyncio.Future[Frame]] = {}
        #: Event ids that the broker has acknowledged.
        self.accepted: set[str] = set()
        #: Event id -> how often it was sent.
        self.sent: Counter[str] = Counter()
        #: Event id -> the payload of every answer that came.
        self.answers: dict[str, list[bytes]] = {}

    async def ask(self, frame: Frame) -> Frame:
        """Send an event that wants an answer, as often as it takes. Raises GoondanError when it is refused for good."""
        event_id = frame.event_id or ""
        frame.id = f"f.{event_id}"
        self._frames[event_id] = frame
        waiter: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[event_id] = waiter
        if self._ready:
            self._send_event(event_id)
        try:
            return await waiter
        finally:
            self._waiting.pop(event_id, None)
            self._frames.pop(event_id, None)

    def close(self) -> None:
        """Be gone at once. Whoever waits gets E_LINK_CLOSED."""
        self._reader.cancel()
        self._socket.close(0)
        self._context.term()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(GoondanError(error_payload("E_LINK_CLOSED", "the client is gone")))

    def _send(self, frame: Frame) -> None:
        with suppress(zmq.Again):  # no broker is there; what is open is sent again after the next welcome
            self._socket.send(encode(frame), zmq.NOBLOCK)

    def _send_event(self, event_id: str) -> None:
        self.sent[event_id] += 1
        self._send(self._frames[event_id])

    async def _read(self) -> None:
        while True:
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                data = self._socket.recv(zmq.NOBLOCK)
                if data:
                    self._take(decode(data, MAX_RELAYED_BYTES))
            await asyncio.sleep(LOOK_S)

    def _take(self, frame: Frame) -> None:
        if frame.type == "ping":
            self._send(Frame("pong", id="p", in_reply_to=frame.id))
        elif frame.type == "welcome":
            self._ready = True
            for event_id in list(self._frames):
                self._send_event(event_id)
        elif frame.type == "ack":
            self.accepted.add(frame.event_id or "")
        elif frame.type == "event":
            event_id = frame.in_reply_to or ""
            self.answers.setdefault(event_id, []).append(bytes(frame.payload))
            waiter = self._waiting.get(event_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(frame)
        elif frame.type == "error":
            self._refused(frame, from_raw(frame.payload, ErrorPayload))

    def _refused(self, frame: Frame, error: ErrorPayload) -> None:
        event_id = (frame.in_reply_to or "").removeprefix("f.")
        if error.code == "E_HELLO_REQUIRED":
            self._ready = False
            self._send(Frame("hello", id="h", payload=self._hello))
        elif error.code == "E_OVERLOADED":
            asyncio.get_running_loop().call_later(AGAIN_S, self._ask_again, event_id)
        elif (waiter := self._waiting.get(event_id)) is not None and not waiter.done():
            waiter.set_exception(GoondanError(error))

    def _ask_again(self, event_id: str) -> None:
        if event_id in self._frames and self._ready and not self._socket.closed:
            self._send_event(event_id)
