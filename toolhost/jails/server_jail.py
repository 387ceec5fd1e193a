"""One server as the host sees it: the template that forks its worker, the worker outside that speaks with it, and the
jail that it runs in.

For the first server the launcher starts `jail/start.py` of the feature, which becomes the template. When it has ended,
its workers have ended with it, and the next server gets a new template. Use from the loop's thread.

A stdio server is a jail (jails/jail.py) whose first program is the server's command. Its standard input and output are
one socket, and the worker has the other end. The host hears the worker only. An http server is the worker alone.

Rules.
- The two end together. A worker that has ended takes its jail along, unless it was told to leave: then the server gets
  time to end by itself. A jail that has ended takes its worker along, after what the worker had sent.
- Standard error of both goes to the host's log. Its last line is what a dead server said last.

A server of the handshake era need not know `server/discover`, and some end instead of answering with an error. So a
server that ended before it had said what it offers begins with the handshake at its next start, which is that of
whoever attaches next. When that start fails too, the end had another reason, and the next one begins as usual (`Eras`).

Source: docs/design/processes.md; docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.system.authorities import authorities_pem
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.hosts import Network, Rule, join, network, parse_host, read_network
from goondan.schemas.worker.worker_frames import WORKER_FD
from goondan.toolhost.calls.untrusted import output_limit
from goondan.toolhost.jails import jail, worker
from goondan.toolhost.jails.launch import Launched, Wires, launch
from goondan.toolhost.lookup.this_host import machine
from goondan.toolhost.policy import launch_plan, limits, seccomp, subject
from goondan.toolhost.privileges.launcher_link import OwnPrograms
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.traffic.rules import Layout
from goondan.toolhost.watch import jail_usage, keeper
from goondan.toolhost.watch.procfs import TICKS_PER_S, children, members, process_stat, process_status, signal_all

#: How long a worker may take to begin, a new template included (seconds). Importing the SDK takes half a second on an
#: idle machine, and some seconds among many that compute.
FORK_S: Final = 20.0
#: An answer is one number or a sentence (bytes).
_MAX_ANSWER: Final = 4096


class Forked(NamedTuple):
    """A worker that has begun. Whoever gets it owns the descriptor."""

    #: Its number on the host.
    pid: int
    #: A descriptor of it (a pidfd).
    pidfd: int


_Waiter = asyncio.Future[Forked]


class TemplateLink:
    """The template of one feature in one tool host."""

    def __init__(self, feature: str, loop: asyncio.AbstractEventLoop, powers: Powers) -> None:
        self._feature = feature
        self._loop = loop
        self._powers = powers
        self._programs = OwnPrograms(loop, powers.launcher)
        self._channel: socket.socket | None = None
        self._started: asyncio.Task[None] | None = None
        self._uid: int | None = None
        self._asked: deque[_Waiter] = deque()  # in the order of the answers
        #: The template's number on the host; 0 while there is none.
        self.pid = 0

    async def fork(self, ends: dict[str, socket.socket | int]) -> Forked:
        """Have a worker forked that gets these descriptors: `channel`, `output`, and `server` or `connector`.

        They stay the caller's. Raises OSError.
        """
        try:
            async with asyncio.timeout(FORK_S):
                await self._start()
                return await self._ask(ends)
        except TimeoutError:
            raise OSError(0, f"the worker did not begin in {FORK_S:g} s") from None

    def close(self) -> None:
        """End the template, and with it every worker."""
        if self._started is not None:
            self._started.cancel()
        self._lost()
        self._programs.close()
        self._give_back()

    async def _start(self) -> None:
        """Make sure that the template runs, or that it is being started. Raises OSError."""
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._channel = ours  # what is asked meanwhile, it reads when it is there
            self._loop.add_reader(ours.fileno(), self._readable, ours)
            self._started = self._loop.create_task(self._launch(theirs))
        if self._started is not None:
            await asyncio.shield(self._started)

    async def _launch(self, theirs: socket.socket) -> None:
        programs = (seccomp.own_program("template", machine()), seccomp.own_program("worker", machine()))
        files = [os.memfd_create("given", os.MFD_CLOEXEC) for _ in range(3)]
        try:
            with theirs:
                for file, data in zip(files, (*programs, authorities_pem()), strict=True):
                    with open(file, "wb", closefd=False) as out:
                        out.write(data)
                    os.lseek(file, 0, os.SEEK_SET)
                if not self._powers.shares_user and self._uid is None:
                    self._uid = self._powers.uids.take()
                    if self._uid is None:
                        raise OSError(0, "every user number for jails is in use")
                arguments = [self._feature, *([] if self._uid is None else [str(self._uid)])]
                fds = [theirs.fileno(), *files]
                self.pid = await self._programs.run({"program": "worker", "arguments": arguments}, fds)
        except OSError as error:
            self._lost()
            raise OSError(
                0, f"the template of the servers' workers could not be started: {error.strerror or error}"
            ) from None
        finally:
            for file in files:
                os.close(file)

    async def _ask(self, ends: dict[str, socket.socket | int]) -> Forked:
        channel = self._channel
        if channel is None:
            raise _ended()
        fds = [end if isinstance(end, int) else end.fileno() for end in ends.values()]
        waiter: _Waiter = self._loop.create_future()
        try:
            socket.send_fds(channel, [json.dumps({"ends": list(ends)}).encode()], fds)
        except OSError as error:
            raise OSError(0, f"the template of the servers' workers takes no request: {error.strerror}") from None
        self._asked.append(waiter)
        return await waiter

    def _readable(self, channel: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data or not self._asked:
            for fd in fds:
                os.close(fd)
            self._lost()
            return
        answer, waiter = json.loads(data), self._asked.popleft()
        if waiter.done():  # nobody waits any more: without its channel the worker ends
            for fd in fds:
                os.close(fd)
        elif "error" in answer:
            waiter.set_exception(OSError(0, f"the worker could not be forked: {answer['error']}"))
        else:
            waiter.set_result(Forked(int(answer["pid"]), fds[0]))

    def _lost(self) -> None:
        """The template has ended, or is to end: it does when it finds its socket closed."""
        channel, self._channel, self._started, self.pid = self._channel, None, None, 0
        if channel is not None:
            self._loop.remove_reader(channel.fileno())
            channel.close()
        asked, self._asked = self._asked, deque()
        for waiter in asked:
            if not waiter.done():
                waiter.set_exception(_ended())

    def _give_back(self) -> None:
        if self._uid is not None:
            self._powers.uids.give_back(self._uid)
            self._uid = None


def _ended() -> OSError:
    return OSError(0, "the template of the servers' workers has ended")


#: Servers that are remembered.
MAX_KNOWN: Final = 1024


class WorkerProcess:
    """The process of a server's worker. It is no child of ours: what is known of it is a descriptor."""

    def __init__(self, forked: Forked, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self.pid = forked.pid
        self._pidfd = forked.pidfd
        self._loop = loop
        self._on_end = on_end
        loop.add_reader(self._pidfd, self._ended)

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self._pidfd < 0

    def kill(self) -> None:
        """End it at once. Safe to call again."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def used(self) -> limits.Used:
        """What it has used, without what it shares with the template since its fork."""
        with suppress(ValueError, IndexError):
            ticks = sum(map(int, process_stat(self.pid)[11:13]))
            memory = int(process_status(self.pid).get("RssAnon", "0 kB").removesuffix(" kB"))
            return limits.Used(int(ticks / TICKS_PER_S * 1000), memory)
        return limits.Used(0, 0)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._on_end()
        del self._on_end  # it belongs to who has this object


class Ends:
    """The descriptors around one worker, made before it is: the host's, the worker's, the jail's."""

    def __init__(self, *, jailed: bool) -> None:
        """Raises OSError."""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.output, writing = os.pipe()
        os.set_blocking(self.output, False)
        #: The worker's, by their names (jail/template.py of the feature).
        self.worker: dict[str, socket.socket | int] = {"channel": theirs, "output": writing}
        #: The jail's, by their numbers there.
        self.places: dict[int, int] = {}
        #: What lets the server begin when it is closed.
        self.gate = -1
        #: The other end of what an http server's worker asks for connections.
        self.connector: socket.socket | None = None
        if not jailed:
            self.connector, self.worker["connector"] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            ours, server = socket.socketpair()
            self.worker["server"] = ours
            waiting, self.gate = os.pipe()
            stdin = server.detach()
            self.places = {0: stdin, 1: os.dup(stdin), 2: os.dup(writing), WORKER_FD: waiting}

    def give_worker(self) -> None:
        """The worker has its descriptors."""
        for end in self.worker.values():
            if isinstance(end, int):
                os.close(end)
            else:
                end.close()
        self.worker = {}

    def close(self) -> None:
        """Nothing came of it."""
        self.give_worker()
        self.channel.close()
        if self.connector is not None:
            self.connector.close()
        for fd in (self.output, *self.places.values(), *([self.gate] if self.gate >= 0 else [])):
            os.close(fd)


class ServerJail(jail.Jail):
    """A jail that runs a server, and the worker that speaks with the server."""

    def __init__(
        self,
        launched: Launched,
        owner: jail.JailOwner,
        powers: Powers,
        loop: asyncio.AbstractEventLoop,
        forked: Forked,
        gate: int,
    ) -> None:
        """`gate` and the descriptor of `forked` become ours."""
        super().__init__(launched, owner, powers, loop)
        #: Its worker was told to leave.
        self.leaving = False
        self.process = WorkerProcess(forked, loop, lambda: None)  # its channel tells
        self._gate = gate
        self.hold = lambda: None
        self.release = self.open_gate

    def open_gate(self) -> None:
        """The jail has what it was granted: its server may begin. Safe to call again."""
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def orphans(self) -> list[int]:
        """None: a server's processes are its own as long as it lives."""
        return []

    def terminate(self) -> None:
        """Ask the server to end, as a service manager would."""
        signal_all(self._first, signal.SIGTERM)

    def _first(self) -> list[int]:
        """The server's own process, by its number on this host."""
        return members(self.pid) if self._reduced else children(self._init_pid)[:1]

    def kill(self, reason: str) -> None:
        super().kill(reason)
        self.process.kill()

    def ends(self) -> None:
        if not self.leaving:
            super().ends()

    def _finish(self) -> None:
        super()._finish()  # what the worker has sent still counts
        self.open_gate()
        self.release = lambda: None
        self.process.kill()


class RemoteServer(worker.Worker):
    """The worker that speaks with an http server. It has no jail: its only way out is the egress proxy."""

    #: What the boot stage of a jail could find.
    was_replaced = False

    def __init__(
        self,
        ends: Ends,
        tool: ToolSpec,
        owner: jail.JailOwner,
        powers: Powers,
        loop: asyncio.AbstractEventLoop,
        forked: Forked,
    ) -> None:
        """Its part of `ends` and the descriptor of `forked` become ours."""
        super().__init__(ends.channel, ends.output, owner, loop, output_limit(tool.sandbox.limits.output_mb))
        assert ends.connector is not None
        #: The prefix of its tools.
        self.name = tool.name
        self.plan = remote_plan(tool)
        #: Where the worker asks for connections. The egress proxy gets it.
        self.connector = ends.connector
        #: Its worker was told to leave.
        self.leaving = False
        self.process = WorkerProcess(forked, loop, self._finish)
        #: Whether it has ended.
        self.gone = False
        self.pid = forked.pid
        #: No jail has a user of this host here.
        self.uid: int | None = None
        self.worker_pid: int | None = forked.pid
        self.usage = jail_usage.JailUsage(tool.sandbox.limits, [], keeper.Keeper(powers), 0, powers)

    def orphans(self) -> list[int]:
        """None: it can start no process."""
        return []

    def processes(self) -> list[int]:
        """Its one process, as this host counts."""
        return [self.process.pid]

    def used(self) -> limits.Used:
        """What it has used."""
        return self.process.used()

    def terminate(self) -> None:
        """Its worker was told to leave, and there is nobody else to tell."""

    def kill(self, reason: str) -> None:
        if self.gone or self._reason is not None:
            return
        self.dying, self._reason = True, reason
        self._stream.close()
        self.process.kill()

    def _finish(self) -> None:
        self.gone = self.dying = True
        self.usage.close()
        self.connector.close()
        self._end("ended")


async def fork_worker(template: TemplateLink, ends: Ends) -> Forked:
    """Have the worker forked; it gets its ends. Raises OSError; then nothing is left of `ends`."""
    try:
        forked = await template.fork(ends.worker)
    except BaseException:
        ends.close()
        raise
    ends.give_worker()
    return forked


async def launch_server(
    make_plan: Callable[[], launch_plan.LaunchPlan], template: TemplateLink, powers: Powers, *, niceness: int
) -> tuple[Launched, Forked, int]:
    """Fork a worker, and launch the jail of its server. Returns both, and the gate of the jail.

    Raises what jails.launch.launch raises, and OSError.
    """
    ends = Ends(jailed=True)
    forked = await fork_worker(template, ends)
    try:
        wires = Wires(ends.channel, ends.output, ends.places)
        return await launch(make_plan, powers, niceness=niceness, wires=wires), forked, ends.gate
    except BaseException:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(forked.pidfd, signal.SIGKILL)
        os.close(forked.pidfd)
        os.close(ends.gate)
        raise


def remote_plan(tool: ToolSpec) -> launch_plan.LaunchPlan:
    """What is known of an http server in place of the plan of its jail."""
    return launch_plan.LaunchPlan(
        request=subject.Request(tool=tool),
        filter=b"",
        landlock=None,
        limits=[],
        command=[],
        workdir="",
        layout=Layout((), "", {}, {}),
        walls=["seccomp", "landlock"],
    )


def network_of(tool: ToolSpec) -> Network:
    """What an http server's worker may reach: its endpoint, and what was granted besides. Raises GoondanError."""
    server = tool.server
    endpoint = "" if server is None or server.endpoint is None else server.endpoint
    try:
        parts = urlsplit(endpoint)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        rule = Rule(parse_host(parts.hostname or ""), port)
        return join(network([rule]), read_network(tool.sandbox.network))
    except (KeyError, ValueError) as error:
        message = f"the endpoint or the network of the MCP server {tool.name} cannot be read: {error}"
        raise fail("E_SANDBOX_DENIED", message) from None


class Eras:
    """What one tool host has learned of its servers."""

    def __init__(self) -> None:
        self._handshake_first: dict[tuple[str, str], None] = {}

    def ended_early(self, tool: ToolSpec) -> None:
        """This server has ended before it had said what it offers."""
        name = _name(tool)
        if name in self._handshake_first:
            del self._handshake_first[name]
            return
        self._handshake_first[name] = None
        if len(self._handshake_first) > MAX_KNOWN:
            del self._handshake_first[next(iter(self._handshake_first))]

    def handshake_first(self, tool: ToolSpec) -> bool:
        """Whether the next start of this server begins with the handshake."""
        return _name(tool) in self._handshake_first


def _name(tool: ToolSpec) -> tuple[str, str]:
    """A server by its prefix, and by what it is: another command is another server."""
    return tool.name, "" if tool.server is None else tool.server.digest
