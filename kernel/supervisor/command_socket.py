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
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from goondan.kernel import rundir
from goondan.kernel.revisions.held import Waiting
from goondan.kernel.supervisor_client import PEER, ProcessInfo, Reply, Request
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.worker.tool_host_reports import WorkerNews

if TYPE_CHECKING:
    from goondan.kernel.revisions.conductor import Conductor

#: The longest request (bytes). Requests have a few bytes.
MAX_REQUEST: Final = 4096
#: The most commands that wait to be accepted: more than ever run at once.
BACKLOG: Final = 100
#: How soon accepting is tried again when no descriptor is free (seconds).
ACCEPT_RETRY_S: Final = 1.0
#: How long the last answers may take to leave at the end (seconds).
LINGER_S: Final = 0.5


class KernelCommands(Protocol):
    """What commands can ask and tell the kernel over the socket (life.Supervisor)."""

    shared: bool
    detached: bool
    entry_agent: str | None
    private_copy: str | None
    state_dir: str
    model: str | None
    holders: set[object]

    @property
    def ending(self) -> bool:
        """Whether it ends for good."""

    def processes(self) -> list[ProcessInfo]:
        """All processes, for `ps`."""

    def servers(self) -> list[WorkerNews]:
        """How each session of an MCP server is, for `ps`."""

    def stop(self, reason: str) -> None:
        """Begin the end."""

    def released(self, *, hurry: bool = False) -> None:
        """A command has let the kernel go. `hurry`: it does not wait for work that still runs."""

    async def when_ready(self) -> None:
        """Wait for the end of the start. Raises GoondanError when it has failed."""

    async def restart(self, reason: str, *, fresh: bool) -> None:
        """Restart in place. After a success the next program answers. Raises GoondanError when there is no restart."""

    @property
    def conducting(self) -> Conductor:
        """The conductor, which restarts single agents and follows the bundle. Raises GoondanError E_RESTART_REFUSED
        during a start.
        """

    async def restarted(self) -> None:
        """Wait for the end of the restart with which this program began. Raises GoondanError when it has failed."""


class _Command:
    """A command that is connected. Waiting has the rest of the fields."""

    def __init__(self, connection: socket.socket, rest: bytes = b"", asked: bytes = b"") -> None:
        self.connection = connection
        self.rest = rest
        self.asked = asked
        self.task: asyncio.Task[None] | None = None


class SupervisorSocket:
    """The listening half."""

    def __init__(self, kernel: KernelCommands) -> None:
        self._kernel = kernel
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._commands: dict[_Command, None] = {}

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
            command = _Command(connection, one.rest, one.asked)
            if one.holds:
                self._kernel.holders.add(command)
            self._serve_soon(command)

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
            Waiting(
                fd=command.connection.detach(),
                rest=command.rest,
                asked=command.asked,
                holds=command in self._kernel.holders,
            )
            for command in waiting
            if command.connection.fileno() >= 0
        ]

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
                self._serve_soon(_Command(connection))
            else:
                connection.close()

    def _serve_soon(self, command: _Command) -> None:
        self._commands[command] = None
        command.task = asyncio.get_running_loop().create_task(self._serve(command))

    async def _serve(self, command: _Command) -> None:
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
                if command in self._kernel.holders:
                    self._kernel.holders.discard(command)
                    self._kernel.released()

    async def _next(self, command: _Command) -> bool:
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

    async def _answer(self, command: _Command, *, resumed: bool) -> Reply:
        kernel = self._kernel
        try:
            request = msgspec.json.decode(command.asked, type=Request)
        except msgspec.DecodeError as error:
            return Reply(error=error_payload("E_USAGE", f"not a request: {error}"))
        try:
            if request.op == "ps":
                return Reply(
                    ok=True,
                    processes=kernel.processes(),
                    servers=kernel.servers(),
                    private_copy=kernel.private_copy,
                    state_dir=kernel.state_dir,
                )
            if request.op == "stop":
                kernel.stop("asked to")
                return Reply(ok=True, stopping=True)
            if request.op == "hold":
                return await self._hold(command)
            if request.op in ("release", "abandon"):
                kernel.holders.discard(command)
                kernel.released(hurry=request.op == "abandon")
                return Reply(ok=True, stopping=kernel.ending)
            if request.op == "news":
                lines, told = await kernel.conducting.news.after(request.after)
                return Reply(ok=True, news=lines, told=told)
            if request.op == "feature" and request.feature is not None:
                return Reply(ok=True, answer=await kernel.conducting.ask(request.feature, request.question))
            if request.op == "restart" and request.agent is not None:
                many = await kernel.conducting.restart_agent(request.agent, fresh=request.fresh)
                return Reply(ok=True, restarted=many)
            if request.op == "restart":
                await (kernel.restarted() if resumed else kernel.restart(request.reason, fresh=request.fresh))
                return Reply(ok=True, entry_agent=kernel.entry_agent, model=kernel.model)
        except GoondanError as error:
            return Reply(error=error.info, stopping=kernel.ending)
        return Reply(error=error_payload("E_USAGE", f"no operation {request.op[:40]!r}"))

    async def _hold(self, command: _Command) -> Reply:
        kernel = self._kernel
        if kernel.ending:
            return Reply(error=error_payload("E_KERNEL_NOT_RUNNING", "the kernel is stopping"), stopping=True)
        kernel.holders.add(command)
        try:
            await kernel.when_ready()
        except GoondanError as error:
            return Reply(error=error.info, stopping=True)
        return Reply(
            ok=True,
            entry_agent=kernel.entry_agent,
            model=kernel.model,
            shared=kernel.shared,
            detached=kernel.detached,
        )
