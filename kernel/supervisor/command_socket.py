"""`supervisor.sock`: the socket through which commands reach a supervisor, also while its broker is down. This is the
listening half. supervisor_client.py describes the messages.

Only our own user may connect: the directory is closed to others, and the peer's uid is checked as well.

The bytes that were read from a connection are kept here, and not in a stream of asyncio, because a restart in place
hands over the descriptors together with the bytes that were not answered yet.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel import rundir
from goondan.kernel.supervisor_client import PEER, Reply, Request
from goondan.schemas.wire.errors import error_payload

#: The longest request (bytes). Requests have a few bytes.
MAX_REQUEST: Final = 4096
#: The most commands that wait to be accepted: more than ever run at once.
BACKLOG: Final = 100
#: How soon accepting is tried again when no descriptor is free (seconds).
ACCEPT_RETRY_S: Final = 1.0
#: How long the last answers may take to leave at the end (seconds).
LINGER_S: Final = 0.5


class Waiting(Struct, kw_only=True):
    """A command that is connected."""

    #: Its connection.
    fd: int
    #: The bytes after its last whole line.
    rest: bytes = b""
    #: The line that it waits for an answer to. Empty: it waits for none.
    asked: bytes = b""
    #: It uses the kernel.
    holds: bool = False


class Command:
    """A command that is connected. Waiting has the rest of the fields."""

    def __init__(
        self, connection: socket.socket, rest: bytes = b"", asked: bytes = b"", *, holds: bool = False
    ) -> None:
        self.connection = connection
        self.rest = rest
        self.asked = asked
        #: It holds the kernel: one that was started for calls does not end before it is let go.
        self.holds = holds
        self.task: asyncio.Task[None] | None = None


#: Answers a command's request. `resumed`: the program before this one got it. Raises GoondanError to refuse it.
Answer = Callable[[Command, Request, bool], Awaitable[Reply]]


class SupervisorSocket:
    """The listening half. `answer` answers requests. `left` is called when a command that held the kernel has gone."""

    def __init__(self, answer: Answer, left: Callable[[], None]) -> None:
        self._answers = answer
        self._left = left
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._commands: dict[Command, None] = {}

    def open(self, run_dir: str) -> None:
        """Listen. The caller holds the kernel's lock. Raises OSError."""
        path = f"{run_dir}/{rundir.SUPERVISOR_SOCKET}"
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listen(listener)

    def resume(self, listener_fd: int, waiting: Iterable[Waiting]) -> None:
        """Go on with the descriptors and bytes of `hand_over`."""
        self._listen(socket.socket(fileno=listener_fd))
        for one in waiting:
            connection = socket.socket(fileno=one.fd)
            connection.setblocking(False)
            self._serve_soon(Command(connection, one.rest, one.asked, holds=one.holds))

    async def hand_over(self) -> tuple[int, list[Waiting]]:
        """Stop, and return the descriptors of the listener and of every command. The caller must close them."""
        if self._listener is None:
            raise AssertionError("a kernel that runs listens")
        tasks = [command.task for command in self._commands if command.task is not None]
        if self._accepting is not None:
            tasks.append(self._accepting)
        waiting = dict(self._commands)
        self._commands = {}  # so that a cancelled task does not count as a command that has let go
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return self._listener.detach(), [
            Waiting(fd=command.connection.detach(), rest=command.rest, asked=command.asked, holds=command.holds)
            for command in waiting
            if command.connection.fileno() >= 0
        ]

    @property
    def held(self) -> bool:
        """Whether any command holds the kernel."""
        return any(command.holds for command in self._commands)

    def stop_listening(self) -> None:
        """Accept no more connections. The open ones go on."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Stop listening, let the last answers leave, and close every connection."""
        self.stop_listening()
        answering = [command.task for command in self._commands if command.asked and command.task is not None]
        if answering:
            await asyncio.wait(answering, timeout=LINGER_S)
        for command in list(self._commands):
            if command.task is not None:
                command.task.cancel()

    # --- inside

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(peer)[1] in (os.geteuid(), 0):
                self._serve_soon(Command(connection))
            else:
                connection.close()

    def _serve_soon(self, command: Command) -> None:
        self._commands[command] = None
        command.task = asyncio.get_running_loop().create_task(self._serve(command))

    async def _serve(self, command: Command) -> None:
        loop = asyncio.get_running_loop()
        try:
            resumed = bool(command.asked)
            while command.asked or await self._next(command):
                reply = await self._answer(command, resumed=resumed)
                resumed, command.asked = False, b""
                await loop.sock_sendall(command.connection, msgspec.json.encode(reply) + b"\n")
        except OSError:
            pass  # it left
        finally:
            if command in self._commands:
                del self._commands[command]
                command.connection.close()
                if command.holds:
                    self._left()

    async def _next(self, command: Command) -> bool:
        """Read one line. False when the command has left, or has sent something that no command sends."""
        loop = asyncio.get_running_loop()
        while b"\n" not in command.rest:
            if len(command.rest) > MAX_REQUEST:
                return False
            chunk = await loop.sock_recv(command.connection, MAX_REQUEST)
            if not chunk:
                return False
            command.rest += chunk
        command.asked, _, command.rest = command.rest.partition(b"\n")
        command.asked = command.asked or b" "  # an empty line is a request too, a bad one
        return True

    async def _answer(self, command: Command, *, resumed: bool) -> Reply:
        try:
            request = msgspec.json.decode(command.asked, type=Request)
        except msgspec.DecodeError as error:
            return Reply(error=error_payload("E_USAGE", f"not a request: {error}"))
        return await self._answers(command, request, resumed)
