"""`supervisor.sock`: how the commands reach a supervisor, also while its broker is down. This is the listening half;
supervisor_client.py says what is spoken.

Who may connect: the directory is closed to others, and the peer's uid is checked besides.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from kernel import rundir
from kernel.supervisor_client import PEER, ProcessInfo, Reply, Request
from schemas.errors import GoondanError, error_payload

#: Requests are a few bytes, an answer to `ps` some hundred a process.
MAX_REQUEST: Final = 4096


class Kernel(Protocol):
    """What the socket needs of the supervisor."""

    shared: bool
    entry_agent: str | None
    private_copy: str | None
    model: str | None
    stopping: bool
    holders: set[object]

    def processes(self) -> list[ProcessInfo]:
        """All processes, for `ps`."""

    def stop(self, reason: str) -> None:
        """Begin the end."""

    def released(self, *, hurry: bool = False) -> None:
        """One holder less. `hurry`: it does not care for what still runs."""

    async def when_ready(self) -> None:
        """Wait for the start to succeed; raises GoondanError when it has not."""


class SupervisorSocket:
    """The listening half. `close` waits for nobody."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self, run_dir: str) -> None:
        """Listen. The caller holds the kernel's lock. Raises OSError."""
        path = f"{run_dir}/{rundir.SUPERVISOR_SOCKET}"
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_REQUEST)
        os.chmod(path, 0o600)

    def stop_listening(self) -> None:
        """Take no more connections; those that are there go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self.stop_listening()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holder = object()
        self._writers.add(writer)
        try:
            peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(peer)[1] not in (os.geteuid(), 0):
                return
            while line := await reader.readline():
                reply = await self._answer(line, holder)
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # it left, sent a line that no command sends, or the kernel is at its end
        finally:
            self._writers.discard(writer)
            writer.close()
            if holder in self._kernel.holders:
                self._kernel.holders.discard(holder)
                self._kernel.released()

    async def _answer(self, line: bytes, holder: object) -> Reply:
        kernel = self._kernel
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            return Reply(error=error_payload("E_USAGE", f"not a request: {error}"))
        if request.op == "ps":
            return Reply(ok=True, processes=kernel.processes(), private_copy=kernel.private_copy)
        if request.op == "stop":
            kernel.stop("asked to")
            return Reply(ok=True, stopping=True)
        if request.op == "hold":
            if kernel.stopping:
                return Reply(error=error_payload("E_KERNEL_NOT_RUNNING", "the kernel is stopping"), stopping=True)
            kernel.holders.add(holder)
            try:
                await kernel.when_ready()
            except GoondanError as error:
                return Reply(error=error.info, stopping=True)
            return Reply(ok=True, entry_agent=kernel.entry_agent, model=kernel.model, shared=kernel.shared)
        if request.op in ("release", "abandon"):
            kernel.holders.discard(holder)
            kernel.released(hurry=request.op == "abandon")
            return Reply(ok=True, stopping=kernel.stopping)
        return Reply(error=error_payload("E_USAGE", f"no operation {request.op[:40]!r}"))
