"""The tool host's side of the network. It starts the egress proxy, has sockets made in jails, gives them to the proxy,
and keeps what the proxy reports about them.

One proxy serves all jails of a tool host. It is started for the first jail that has a network. When it ends, its jails
have no network any more, and the next jail gets a new proxy.

Source: docs/design/sandbox.md section 6; docs/decisions/024.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from goondan.schemas.worker.hosts import Network
from goondan.toolhost.lookup.this_host import machine
from goondan.toolhost.policy.seccomp import own_program
from goondan.toolhost.privileges.launcher_link import LauncherLink, OwnPrograms
from goondan.toolhost.traffic import messages, rules
from goondan.toolhost.traffic.messages import Close, Denied, Failed, Open, Reached, Settle, Settled

#: How long a jail's sockets may take (seconds): a short program and one round trip, some 30 ms.
ATTACH_S: Final = 10.0
#: How long the proxy may take to report what it has seen; after that a result goes out without it (seconds).
SETTLE_S: Final = 0.5
#: How many refused and reached hosts are kept of one jail.
MAX_KEPT: Final = 256


class JailNetwork:
    """What is known of one jail's connections."""

    def __init__(self, network: Network, layout: rules.Layout) -> None:
        self.network = network
        self.layout = layout
        self.denied: deque[Denied] = deque(maxlen=MAX_KEPT)
        #: How many connections were denied, kept or not.
        self.denied_count = 0
        #: Hosts and ports that were reached, each once.
        self.reached: dict[tuple[str, int], None] = {}
        #: What takes secrets out of the names of hosts: its programs may write them there. None: it has none.
        self.redact: Callable[[str], str] | None = None

    def denied_since(self, count: int) -> list[Denied]:
        """The denials since `denied_count` was `count`, as far as they are kept."""
        return list(self.denied)[max(0, len(self.denied) - (self.denied_count - count)) :]

    def note(self, event: Denied | Reached) -> None:
        """Keep a report of the proxy."""
        if isinstance(event, Denied):
            self.denied.append(event)
            self.denied_count += 1
        elif len(self.reached) < MAX_KEPT:
            self.reached[event.host, event.port] = None


#: The listeners that could be made, and their descriptors with those that see refused connections.
_Listening = tuple[tuple[rules.Listener, ...], list[int]]
_Listen = Callable[[], Coroutine[None, None, _Listening]]
#: Gets None when a network is there, else why it is not.
Ready = Callable[[str | None], None]


class _Attached:
    """A jail that is attached, or is being attached."""

    def __init__(self, known: JailNetwork, ready: Ready) -> None:
        self.known = known
        self.ready = ready
        #: Set when the proxy serves the jail, or when it is known that it cannot: then `problem` says why.
        self.decided = asyncio.Event()
        self.problem: str | None = None
        #: Whether those who wait for the network were told that it is there.
        self.is_up = False
        self.settling: dict[int, tuple[Callable[[], None], asyncio.TimerHandle]] = {}


class Egress:
    """The proxy, as the tool host sees it. Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launcher: LauncherLink,
        on_lost: Callable[[int], None],
        on_news: Callable[[int, Denied | Failed], None],
    ) -> None:
        """`on_lost` gets each jail whose network ended with the proxy, `on_news` what a jail could not reach."""
        self._loop = loop
        self._programs = OwnPrograms(loop, launcher)
        self._on_lost = on_lost
        self._on_news = on_news
        self._channel: socket.socket | None = None
        self._jails: dict[int, _Attached] = {}
        self._numbers = 0
        self._outbox: deque[tuple[bytes, list[int]]] = deque()  # what the proxy has not had room for, with descriptors
        self._writing = False
        self._closed = False
        self._attaching: set[asyncio.Task[None]] = set()

    def attach(self, jail: int, pid: int, known: JailNetwork, ready: Ready) -> None:
        """Give the jail of the process `pid` its network. `ready` gets None, or why it has none; never at once."""
        self._begin(jail, _Attached(known, ready), lambda: self._listen(pid, known.layout))

    def connect(self, jail: int, connector: socket.socket, known: JailNetwork, ready: Ready) -> None:
        """Give an MCP worker without a jail its network: it asks for connections at the other end of `connector`, which
        becomes the proxy's. `ready`: see attach.
        """

        async def hand_over() -> _Listening:
            return (rules.Listener("connector", "", 0),), [connector.detach()]

        self._begin(jail, _Attached(known, ready), hand_over)

    def _begin(self, jail: int, attached: _Attached, listen: _Listen) -> None:
        self._jails[jail] = attached
        task = self._loop.create_task(self._attach(jail, attached, listen))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, jail: int, attached: _Attached, listen: _Listen) -> None:
        try:
            async with asyncio.timeout(ATTACH_S):
                await self._start_proxy()
                layout = attached.known.layout
                made, fds = await listen()
                try:
                    if self._jails.get(jail) is attached:
                        self._say(Open(jail, attached.known.network, made, layout.addresses), fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                await attached.decided.wait()
                problem = attached.problem
        except TimeoutError:
            problem = "its sockets could not be made in time"
        except OSError as error:
            problem = error.strerror
        if self._jails.get(jail) is attached:  # else it is gone meanwhile
            attached.is_up = problem is None
            if problem is not None:
                self.detach(jail)
            attached.ready(problem)

    async def _listen(self, pid: int, layout: rules.Layout) -> _Listening:
        """Have the sockets made in the jail. Returns the listeners that could be made, and descriptors.

        Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answered = asyncio.Event()
        with ours:
            ours.setblocking(False)
            ours.send(json.dumps([(listener.address, listener.port) for listener in layout.listeners]).encode())
            try:
                with theirs:
                    await self._programs.run({"program": "listen", "arguments": [str(pid)]}, [theirs.fileno()])
                self._loop.add_reader(ours.fileno(), answered.set)
                try:
                    await answered.wait()
                finally:
                    self._loop.remove_reader(ours.fileno())
                data, fds, _, _ = socket.recv_fds(ours, messages.MAX_MESSAGE, messages.MAX_FDS, socket.MSG_CMSG_CLOEXEC)
                answer = json.loads(data) if data else {"error": "their maker ended"}
                if answer["error"] is not None:
                    raise OSError(0, answer["error"])
            except OSError as error:
                raise OSError(0, f"its sockets could not be made: {error.strerror or error}") from None
        return tuple(itertools.compress(layout.listeners, answer["made"])), fds

    def detach(self, jail: int) -> None:
        """The jail is gone."""
        gone = self._jails.pop(jail, None)
        if gone is None:
            return
        gone.decided.set()
        for done, timer in gone.settling.values():
            timer.cancel()
            self._loop.call_soon(done)
        self._say(Close(jail))

    def settle(self, jail: int, done: Callable[[], None]) -> None:
        """Call `done` when everything that has happened in the jail is known, and after SETTLE_S at the latest."""
        known = self._jails.get(jail)
        if known is None or self._channel is None:
            self._loop.call_soon(done)
            return
        self._numbers += 1
        number = self._numbers
        timer = self._loop.call_later(SETTLE_S, self._settled, Settled(jail, number))
        known.settling[number] = (done, timer)
        self._say(Settle(jail, number))

    def close(self) -> None:
        """End the proxy."""
        self._closed = True
        for task in self._attaching:
            task.cancel()
        for jail in list(self._jails):
            self.detach(jail)
        self._end_channel()
        self._programs.close()

    # --- processes

    async def _start_proxy(self) -> None:
        """Make sure that the proxy runs, or that it is being started. Raises OSError."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel = ours  # what others say to it meanwhile, it reads when it is there
        self._loop.add_reader(ours.fileno(), self._readable)
        try:
            with theirs, open(os.memfd_create("filter", os.MFD_CLOEXEC), "wb") as filter_:
                filter_.write(own_program("relay", machine()))
                filter_.seek(0)
                await self._programs.run({"program": "proxy", "arguments": []}, [theirs.fileno(), filter_.fileno()])
        except BaseException as error:
            self._loop.call_soon(self._lost)  # for those who have come to rely on it meanwhile
            if isinstance(error, OSError):
                raise OSError(0, f"the egress proxy could not be started: {error.strerror or error}") from None
            raise

    # --- from the proxy

    def _readable(self) -> None:
        for _ in range(64):
            if self._channel is None:
                return
            try:
                message = messages.decode(self._channel.recv(messages.MAX_MESSAGE))
            except BlockingIOError:
                return
            except (OSError, ValueError):  # it has ended, which reads as b"", or it is not what we have started
                self._lost()
                return
            if isinstance(message, Settled):
                self._settled(message)
            elif isinstance(message, Denied | Reached | Failed) and (jail := self._jails.get(message.jail)):
                if (redact := jail.known.redact) is not None:
                    texts: dict[str, Any] = {
                        name: redact(getattr(message, name)) for name in ("host", "reason") if hasattr(message, name)
                    }
                    message = message._replace(**texts)
                if not isinstance(message, Failed):
                    jail.known.note(message)
                if not isinstance(message, Reached):
                    self._on_news(message.jail, message)

    def _settled(self, message: Settled) -> None:
        jail = self._jails.get(message.jail)
        if jail is None:
            return
        if message.number == 0:
            jail.decided.set()
        elif (waiting := jail.settling.pop(message.number, None)) is not None:
            done, timer = waiting
            timer.cancel()
            done()

    def _lost(self) -> None:
        """The proxy has ended, and with it the networks of its jails."""
        self._end_channel()
        if self._closed:
            return
        for number, jail in list(self._jails.items()):
            if jail.is_up:
                self.detach(number)
                self._on_lost(number)
            else:
                jail.problem = "the egress proxy ended"
                jail.decided.set()

    def _end_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._loop.remove_reader(channel.fileno())
            if self._writing:
                self._writing = False
                self._loop.remove_writer(channel.fileno())
            channel.close()
        while self._outbox:
            for fd in self._outbox.popleft()[1]:
                os.close(fd)

    def _say(self, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send a message, or queue it while the proxy does not read; `fds` stay the caller's."""
        if self._channel is not None:
            self._outbox.append((messages.encode(message), [os.dup(fd) for fd in fds or []]))
            self._flush()

    def _flush(self) -> None:
        channel = self._channel
        while channel is not None and self._outbox:
            data, fds = self._outbox[0]
            try:
                socket.send_fds(channel, [data], fds)
            except BlockingIOError:
                break
            except OSError:
                self._lost()  # it has ended
                return
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        if channel is not None and bool(self._outbox) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(channel.fileno(), self._flush)
            else:
                self._loop.remove_writer(channel.fileno())
