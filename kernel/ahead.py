"""Forks the programs of a kernel ahead, so that what they share is imported once.

The supervisor forks before it has anything: it has one thread then, no event loop, no context of ZeroMQ, no descriptor
that counts, and no variable of a person's environment (that comes on a descriptor, which it reads afterwards). Each
fork imports the rest of its program while the supervisor goes on, and waits for what an exec would have given it:
arguments, environment, output and descriptors. It ends when the supervisor ends or does not need it.

A later start is an exec, because the supervisor has threads and secrets by then.

Source: docs/design/processes.md section 1.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Final

import msgspec

from goondan.features import parts
from goondan.kernel.lock import ALIVE
from goondan.kernel.paths import FOLDER
from goondan.kernel.spawn import command, start_program
from goondan.kernel.start import (
    INSPECTION,
    TOOL_HOST,
    asyncio_without_tls,
    jsonschema_rs_alone,
    leave_out_tls,
    zmq_alone,
)
from goondan.schemas.system.startup import die_with_parent

#: The program that forks agents, and the module with all that agents need.
FORK_SERVER: Final = "goondan.agentproc.start.forkserver"
AGENTS: Final = "goondan.agentproc.start.warmup"
#: The programs of a kernel that always run.
PROGRAMS: Final = (TOOL_HOST, FORK_SERVER, "goondan.kernel.broker")
#: What several of the programs import. The first has most of it: asyncio, msgspec, what goes over a link.
SHARED: Final = (
    "goondan.schemas.transport.link",
    "goondan.schemas.worker.grantable",
    "goondan.schemas.bundle.arguments",
    "goondan.schemas.bundle.launch",
    "goondan.schemas.bundle.effective_config",
    "goondan.schemas.models.server_answers",
    "goondan.schemas.text.redaction",
    "goondan.schemas.text.times",
    "goondan.schemas.wire.runtime_events",
    "goondan.schemas.wire.spans",
    "goondan.schemas.worker.servers",
    "sqlite3",
)
#: More than arguments and environment of a program have, and than a socket takes by default (bytes).
MAX_REQUEST: Final = 256 << 10
#: More descriptors than a program gets.
MAX_DESCRIPTORS: Final = 32


class _Request(msgspec.Struct):
    """What an exec would have given. The descriptors come beside it."""

    #: The words behind the module. As the system has them: neither words nor variables need be UTF-8.
    arguments: list[bytes]
    #: The whole environment: names and values.
    env: list[tuple[bytes, bytes]]
    #: The numbers that the descriptors shall have, in the order in which they come.
    numbers: list[int]


class Ahead:
    """The programs that were forked and wait for their start, by module. `start` takes one."""

    def __init__(self, early: Mapping[str, Iterable[str]] | None = None) -> None:
        """Fork programs. `early` has by module what each imports before its start; one without any may not be needed.

        Returns in this process only; a fork ends with SystemExit, when its program has run.
        """
        early = early or {}
        self._waiting: dict[str, tuple[int, socket.socket]] = {}
        self._later = [module for module, imports in early.items() if not imports]
        parent_pid = os.getpid()
        for module, imports in early.items():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                pid = os.fork()
            except OSError:  # no room for a process now: its start is an exec, which is tried again
                ours.close()
                theirs.close()
                continue
            if pid == 0:
                sys.exit(_run(module, theirs, parent_pid, imports))
            theirs.close()
            self._waiting[module] = (pid, ours)

    def __contains__(self, pid: object) -> bool:
        """Whether this process waits for its start."""
        return any(pid == waiting for waiting, _ in self._waiting.values())

    def add(self, module: str, pid: int, fd: int) -> None:
        """Take over a program that waits in `receive`, and our end of its socket."""
        self._waiting[module] = (pid, socket.socket(fileno=fd))

    @property
    def descriptors(self) -> list[int]:
        """What this process must keep open."""
        return [channel.fileno() for _, channel in self._waiting.values()]

    def start(
        self, module: str, arguments: Sequence[str], *, env: Mapping[str, str], output_fd: int, pass_fds: Sequence[int]
    ) -> int:
        """Start a program, the one that waits or else by exec: see spawn.start_program. Returns its pid."""
        pid, channel = self._waiting.pop(module, (0, None))
        if channel is not None:
            numbers = [1, 2, *pass_fds]
            variables = [(os.fsencode(name), os.fsencode(value)) for name, value in env.items()]
            request = msgspec.msgpack.encode(_Request([*map(os.fsencode, arguments)], variables, numbers))
            with channel, suppress(OSError):  # it was killed, or the request is too long
                if len(request) > MAX_REQUEST:  # where the system's sockets take it, it would be cut
                    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
                socket.send_fds(channel, [request], [output_fd, output_fd, *pass_fds])
                return pid
        return start_program(command(module, arguments), env=env, output_fd=output_fd, pass_fds=pass_fds)

    def close_unneeded(self) -> None:
        """Let those end that were not started and have imported nothing."""
        for module in self._later:
            if (waiting := self._waiting.pop(module, None)) is not None:
                waiting[1].close()

    def close(self) -> None:
        """Let all end that were not started."""
        while self._waiting:
            self._waiting.popitem()[1][1].close()


def fork_programs(state_dir: str, *, soon: bool) -> Ahead:
    """Fork what the start of a kernel with this state needs. `soon`: a command waits with a message for an agent."""
    early = {program: [program] for program in PROGRAMS}
    if soon:
        early[FORK_SERVER] = [AGENTS]
    if not os.path.exists(f"{state_dir}/{FOLDER}/{ALIVE}"):
        early[INSPECTION] = []
    return Ahead(early)


def import_shared() -> None:
    """Import what several programs need, and look through the types of a plan, of which each of them reads a part."""
    asyncio_without_tls()
    jsonschema_rs_alone()
    for name in SHARED:
        import_module(name)
    parts("wire")
    from goondan.schemas.bundle.launch import KernelPlan
    from goondan.schemas.transport import TRANSPORTS, chosen
    from goondan.schemas.transport.link import transport_class

    msgspec.msgpack.Decoder(KernelPlan)  # what this finds out about the types stays with them

    with suppress(Exception):  # GOONDAN_TRANSPORT names none: each program says so
        if chosen(TRANSPORTS[0]) == "libzmq":
            zmq_alone()
        transport_class()


def close_all_but(keep: Container[int]) -> None:
    """Close all descriptors but the standard streams and these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):  # the listing's own is closed already
                os.close(int(name))


def program_of(module: str) -> ModuleType:
    """The module with the `main` of a program."""
    program = import_module(module)
    return import_module(f"{module}.__main__") if hasattr(program, "__path__") else program


def _run(module: str, channel: socket.socket, parent_pid: int, imports: Iterable[str]) -> int:
    """One program, from the fork to its exit status. It imports these modules before its start."""
    die_with_parent(parent_pid)
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a restart in place blocks some
    close_all_but({channel.fileno()})
    leave_out_tls(module)
    for name in imports:
        program_of(name)
    if not receive(module, channel):
        return 0
    status: int = program_of(module).main()
    return status


def receive(module: str, channel: socket.socket) -> bool:
    """Wait for what an exec would have given this program. False: it is not needed."""
    with channel:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return False
    request = msgspec.msgpack.decode(data, type=_Request)
    beyond = max(request.numbers) + 1  # so none of them takes the place of one that still waits for its number
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(aside, request.numbers, strict=True):
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)
    os.environ.clear()
    os.environb.update(request.env)
    sys.argv = [module, *map(os.fsdecode, request.arguments)]
    _show_in_lists(sys.argv)
    return True


def _show_in_lists(words: Sequence[str]) -> None:
    """Have `ps` and /proc/PID/cmdline show these words, as far as those of the supervisor leave room."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        start, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
    text = "\0".join(words).encode("utf-8", "surrogateescape")[: end - start - 1]
    if start:  # else the system does not tell
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
