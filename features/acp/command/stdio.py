"""The two streams of the protocol: one JSON-RPC message a line, each of bounded size, as a transport of the SDK.

What is printed meanwhile goes to stderr, and nobody else reads the input: descriptors 0 and 1 are given other files. A
line that is no message is answered with an error. No line is read while many answers are unread, so a client that only
sends takes constant memory. A thread writes, so a client that does not read keeps nobody from ending.

Source: https://agentclientprotocol.com/protocol/transports.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.features.acp.command.rules.prompts import INVALID_REQUEST, BadLine, read_message
from goondan.kernel.cli.console.lines import LineReader

#: The longest line that is read (bytes): the files of one message as base64, with its text.
MAX_LINE: Final = 32 << 20
#: The most answers that may be unread before the next line is.
MAX_UNSENT: Final = 64
#: How long the last answers have at the end (seconds).
FLUSH_S: Final = 1.0


class Stdio:
    """Standard input and output. Make it inside the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        reading, self._writing = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._loop = loop
        self._lines = aiter(LineReader(reading, MAX_LINE))
        self._out: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        self._unsent = 0
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()
        #: Done when the client no longer reads.
        self.broken: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._write, name="answers", daemon=True).start()

    async def receive(self) -> dict[str, Any] | None:
        """The next message. None at the end of the input."""
        while True:
            await self._room.wait()
            line = await anext(self._lines, None)
            if line is None:
                return None
            try:
                if line.data is None:
                    raise BadLine(INVALID_REQUEST, f"a message of {line.size} bytes; at most {MAX_LINE}")
                if line.data.strip():
                    return read_message(line.data)
            except BadLine as bad:
                error = {"code": bad.code, "message": str(bad)}
                self._put({"jsonrpc": "2.0", "id": bad.id, "error": error})

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message, and wait until it is written. Raises ConnectionError when nobody reads any more."""
        await self._put(message)

    async def close(self) -> None:
        """Wait for the last answers, for some time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._idle.wait()

    # --- inside

    def _put(self, message: dict[str, Any]) -> asyncio.Future[None]:
        written: asyncio.Future[None] = self._loop.create_future()
        self._unsent += 1
        self._idle.clear()
        if self._unsent >= MAX_UNSENT:
            self._room.clear()
        self._out.put((msgspec.json.encode(message) + b"\n", written))
        return written

    def _written(self, written: asyncio.Future[None], lost: bool) -> None:
        self._unsent -= 1
        if self._unsent < MAX_UNSENT:
            self._room.set()
        if not self._unsent:
            self._idle.set()
        if lost and not self.broken.done():
            self.broken.set_result(None)
        if written.done():  # whoever waited was cancelled
            return
        if lost:
            written.set_exception(ConnectionError("the client has gone"))
            written.exception()  # nobody has to ask for it
        else:
            written.set_result(None)

    def _write(self) -> None:
        lost = False
        while True:
            data, written = self._out.get()
            view = memoryview(data)
            try:
                while view and not lost:
                    view = view[os.write(self._writing, view) :]
            except OSError:
                lost = True
            try:
                self._loop.call_soon_threadsafe(self._written, written, lost)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
