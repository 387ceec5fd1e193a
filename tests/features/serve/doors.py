"""Doors for tests: their gate and their HTTP in a thread of this process, and requests byte by byte."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvloop

from goondan.features.serve.api import Formatter
from goondan.features.serve.api.gate import Gate, Way
from goondan.features.serve.api.http import Bounds, HttpService, listen
from goondan.features.serve.api.rules.callers import Caller, Tokens, parse
from goondan.features.serve.api.rules.heads import Names

#: Tokens of each role, for the agents that their lines say.
LOOK, TALK, OPERATE = "look-0123456789abcdef", "talk-0123456789abcdef", "operate-0123456789abcdef"
LINES = f"watcher look {LOOK} main\nphone talk {TALK} main help-*\nowner operate {OPERATE} *\n"
TOKENS = parse(LINES)


class InProcess:
    """A door whose gate a test can reach."""

    def __init__(self, gate: Gate, port: int, loop: asyncio.AbstractEventLoop, service: HttpService) -> None:
        self.gate = gate
        self.port = port
        self.loop = loop
        self.service = service

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        return self.service._uvicorn.server_state.connections

    def call(self, what: Callable[[], Any]) -> None:
        """Do something in the door's loop."""
        self.loop.call_soon_threadsafe(what)

    def head(self, path: str = "/", method: str = "GET", token: str = OPERATE, **more: str) -> bytes:
        """The head of a request; a header is left out by an empty value."""
        return head(self.port, path, method, token, **more)

    def asks(self, data: bytes, patience_s: float = 20.0) -> bytes:
        """Send some bytes; all that comes until the door closes."""
        return asks(self.port, data, patience_s)


@contextmanager
def in_process(
    ways: list[Way],
    bounds: Bounds | None = None,
    tokens: Tokens = TOKENS,
    forms: Mapping[str, Formatter] | None = None,
    log: Callable[[bytes], None] | None = None,
    callers: Sequence[Callable[[bytes], Caller | None]] = (),
) -> Iterator[InProcess]:
    """A door with these ways."""
    bounds = bounds or Bounds()
    made: list[InProcess] = []
    ready = threading.Event()

    async def serve() -> None:
        with listen(0) as listening:
            port = listening.getsockname()[1]
            gate = Gate(ways, Names(port), tokens, bounds, forms, log, callers)
            service = HttpService(gate.begin, listening, bounds)
            made.append(InProcess(gate, port, asyncio.get_running_loop(), service))
            ready.set()
            await service.serve()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield made[0]
    finally:
        made[0].call(lambda: made[0].service.stop(now=True))
        thread.join(20)
    assert not thread.is_alive()


def head(port: int, path: str = "/", method: str = "GET", token: str = OPERATE, **more: str) -> bytes:
    """The head of a request to a door at this port; a header is left out by an empty value."""
    lines = {"Host": f"127.0.0.1:{port}", "Authorization": f"Bearer {token}", "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in more.items()}
    said = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{said}\r\n".encode("latin-1")


def asks(port: int, data: bytes, patience_s: float = 20.0) -> bytes:
    """Send some bytes; all that comes until the door closes. Raises TimeoutError when it does not."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as stream:
        came = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it may be refused while we write
            stream.sendall(data)
        with suppress(ConnectionResetError):
            while chunk := stream.recv(1 << 16):
                came += chunk
    return came


def status(answer: bytes) -> int:
    """The status of an answer; 0: the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer else 0
