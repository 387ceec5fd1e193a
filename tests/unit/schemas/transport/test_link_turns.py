"""What one turn of the loop does with a link's frames, over a connection by hand."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from goondan.schemas.transport import Transport
from goondan.schemas.transport.link import Link
from goondan.schemas.wire import errors, frames
from goondan.schemas.wire.codec import decode, encode, to_raw


class Broker(Transport):
    """A broker without a socket: it says what a test says, and notes what it hears."""

    def __init__(self, *args: Any, **callbacks: Any) -> None:
        super().__init__(*args, **callbacks)
        self._said: deque[bytes] = deque()
        self.heard: list[frames.Frame] = []

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        pass

    def say(self, *said: frames.Frame) -> None:
        self._said.extend(map(encode, said))
        self._on_messages()

    def take(self) -> bytes | None:
        return self._said.popleft() if self._said else None

    def send(self, messages: deque[bytes]) -> None:
        while messages:
            self.heard.append(decode(messages.popleft()))

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    async def drain(self, messages: deque[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


async def test_a_handler_that_raises_holds_up_no_other_frame() -> None:
    def handle(frame: frames.Frame) -> None:
        link.send(frames.Frame("ack", stage="accepted", event_id=frame.event_id))
        if frame.event_id == "e1":
            raise ValueError("a bug")

    link = Link("ipc:///proc/nobody", "t", on_frame=handle, transport=Broker)
    broker = link._transport
    assert isinstance(broker, Broker)
    start = asyncio.ensure_future(link.start())
    await asyncio.sleep(0)
    broker.say(frames.Frame("error", payload=to_raw(errors.error_payload("E_HELLO_REQUIRED", ""))))
    await asyncio.sleep(0)
    body = frames.Welcome(version=1, principal="agent", broker="b", credit=64, max_frame=1, epoch=1)
    broker.say(frames.Frame("welcome", in_reply_to=broker.heard.pop().id, payload=to_raw(body)))
    await start
    with pytest.raises(ValueError, match="a bug"):
        broker.say(frames.Frame("event", event_id="e1", epoch=1), frames.Frame("event", event_id="e2", epoch=1))
    await asyncio.sleep(0)
    assert [frame.event_id for frame in broker.heard] == ["e1", "e2"]
    await link.close(0)
