"""The two ways out of a jail, read by turns: one that says much does not keep the host from hearing another."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec

from goondan.schemas.worker.worker_frames import Log, WorkerFrame
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.jails.worker import FrameStream, PrintedOutput
from goondan.toolhost.socket_end import READ_BYTES


def framed(text: str) -> bytes:
    body = msgspec.msgpack.encode(Log(level="info", message=text))
    return len(body).to_bytes(4, "little") + body


class Heard:
    """Streams of several jails, and what they said in the order in which it was heard."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.broken: list[str] = []
        self.streams: list[FrameStream] = []
        self.theirs: list[socket.socket] = []

    def open(self, name: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)

        def hear(frames: list[WorkerFrame]) -> None:
            self.order += [name] * len(frames)

        def violation(found: Violation) -> None:
            self.broken.append(str(found))

        self.streams.append(
            FrameStream(
                ours,
                asyncio.get_running_loop(),
                1 << 20,
                on_frames=hear,
                on_end=lambda: None,
                on_violation=violation,
            )
        )
        self.theirs.append(theirs)
        return theirs

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        for end in self.theirs:
            end.close()


async def test_jails_are_read_by_turns() -> None:
    heard = Heard()
    loud, quiet = heard.open("loud"), heard.open("quiet")
    line = framed("x" * 1000)
    assert loud.send(line * 400) > READ_BYTES, "more than is read in one go"
    quiet.send(framed("here"))
    async with asyncio.timeout(20):
        while "quiet" not in heard.order:
            await asyncio.sleep(0)
    assert heard.order.index("quiet") <= READ_BYTES // len(line) + 1, "it has waited for one read of the other"
    assert heard.broken == []
    heard.close()


async def test_stray_output_is_read_within_a_budget() -> None:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    said: list[str] = []
    output = PrintedOutput(reading, asyncio.get_running_loop(), said.append)
    budget = output._left
    written = 0
    while written < 4 * budget:
        try:
            written += os.write(writing, b"x" * 4096)
        except BlockingIOError:
            before = sum(map(len, said))
            for _ in range(5):
                await asyncio.sleep(0)
            if sum(map(len, said)) == before:
                break  # whoever writes waits now
    assert sum(map(len, said)) == budget
    output.close()
    os.close(writing)
