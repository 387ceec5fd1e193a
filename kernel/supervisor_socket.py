"""`supervisor.sock`: how the commands talk to a supervisor, also while its broker is down.

One JSON object a line in, one a line out, any number on a connection. Operations:
- `{"op":"ps"}` -> `{"ok":true,"processes":[…]}`.
- `{"op":"stop"}` -> `{"ok":true}` at once; the stop is over when the process that listens here is gone.
- `{"op":"hold"}` -> when the kernel is ready `{"ok":true,"entryAgent":…,"shared":…}`, or `{"error":…}` when it will
  not be. A kernel that `gdn call` started for itself (`shared`) lives until nobody holds it.
- `{"op":"release"}` -> `{"ok":true,"stopping":…}`. Closing the connection releases, too.

Who may connect: the directory is closed to others, and the peer's uid is checked besides.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import struct
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from kernel import rundir
from schemas.errors import GoondanError, error_payload, fail
from schemas.frames import ErrorPayload

#: Requests are a few bytes, an answer to `ps` some hundred a process.
MAX_REQUEST: Final = 4096
#: How long a supervisor may take to accept and answer `ps` before it counts as hung (seconds).
ANSWER_S: Final = 5.0

_PEER: Final = struct.Struct("3i")  # pid, uid, gid


class ProcessInfo(msgspec.Struct, rename="camel", kw_only=True):
    """One line of `gdn ps`. `pid` is the host's, None while there is none; `since`: RFC 3339, when `status` began."""

    role: str
    name: str
    instance_key: str | None
    pid: int | None
    status: str
    since: str
    restarts: int
    last_exit: str | None


def rfc3339(seconds: float) -> str:
    """A wall-clock time, in seconds since 1970, as the commands print it: UTC with milliseconds."""
    text = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Request(msgspec.Struct):
    """What a command asks."""

    op: str


class Reply(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """What it is told."""

    ok: bool = False
    error: ErrorPayload | None = None
    processes: list[ProcessInfo] | None = None
    entry_agent: str | None = None
    shared: bool = False
    stopping: bool = False


class Kernel(Protocol):
    """What the socket needs of the supervisor."""

    shared: bool
    entry_agent: str | None
    stopping: bool
    holders: set[object]

    def processes(self) -> list[ProcessInfo]:
        """All processes, for `ps`."""

    def stop(self, reason: str) -> None:
        """Begin the end."""

    def released(self) -> None:
        """One holder less."""

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

    def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holder = object()
        self._writers.add(writer)
        try:
            peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] not in (os.geteuid(), 0):
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
            return Reply(ok=True, processes=kernel.processes())
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
            return Reply(ok=True, entry_agent=kernel.entry_agent, shared=kernel.shared)
        if request.op == "release":
            kernel.holders.discard(holder)
            kernel.released()
            return Reply(ok=True, stopping=kernel.stopping)
        return Reply(error=error_payload("E_USAGE", f"no operation {request.op[:40]!r}"))


class SupervisorClient:
    """The commands' half, without an event loop: `ps` and `stop` start no more than they need."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self._connection = connection
        self._input = connection.makefile("rb")
        #: The supervisor; `pidfd` tells when it is gone.
        self.pid = pid
        self.pidfd = pidfd

    @classmethod
    def connect(cls, run_dir: str) -> SupervisorClient | None:
        """The supervisor of this directory; None without one. Raises GoondanError E_RUN_DIR, E_KERNEL_LOST."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(ANSWER_S)
        try:
            rundir.check(run_dir)
            connection.connect(f"{run_dir}/{rundir.SUPERVISOR_SOCKET}")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            pid = _PEER.unpack(peer)[0]
            return cls(connection, pid, os.pidfd_open(pid))
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
            connection.close()
            return None
        except TimeoutError:
            connection.close()
            raise fail("E_KERNEL_LOST", f"the supervisor in {run_dir} does not answer") from None
        except GoondanError:
            connection.close()
            raise

    def ask(self, op: str, timeout_s: float = ANSWER_S) -> Reply:
        """One question. Raises GoondanError: the answer's error, or E_KERNEL_LOST when none comes."""
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(msgspec.json.encode(Request(op)) + b"\n")
            line = self._input.readline()
            reply = msgspec.json.decode(line, type=Reply) if line else None
        except (OSError, msgspec.DecodeError):
            reply = None
        if reply is None:
            raise fail("E_KERNEL_LOST", "the supervisor went away without an answer")
        if reply.error is not None:
            raise GoondanError(reply.error)
        return reply

    def close(self) -> None:
        """Leave; a hold ends with it."""
        self._input.close()
        self._connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
