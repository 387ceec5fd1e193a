"""The tool host's side of the network: starts the egress proxy, gives it the sockets of jails, hears what they reached.

One proxy serves all jails of a tool host. It is started with the first jail that has a network, and again when it has
ended; what jails of a proxy that ended had is gone with it.

Source: docs/design/sandbox.md section 6; docs/decisions/024.
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
from typing import Final

from schemas.hosts import Network
from toolhost.egress import messages
from toolhost.egress.messages import Close, Denied, Failed, Open, Reached, Settle, Settled
from toolhost.egress.rules import Layout
from toolhost.launcher.request import Run
from toolhost.policy.facts import machine
from toolhost.privileges.launcher_link import LauncherLink, LauncherLost
from toolhost.seccomp.program import relay_program

#: How long a jail's sockets may take (seconds): a short program and one round trip, some 30 ms.
ATTACH_S: Final = 10.0
#: How long the proxy may take to say what it has seen before a result goes without (seconds).
SETTLE_S: Final = 0.5
#: Refused and reached hosts that are kept of one jail.
MAX_KEPT: Final = 256


class JailNetwork:
    """What is known of one jail's connections. `denied_count` counts all that were denied, kept or not."""

    __slots__ = ("denied", "denied_count", "failed", "layout", "network", "reached")

    def __init__(self, network: Network, layout: Layout) -> None:
        self.network = network
        self.layout = layout
        self.denied: deque[Denied] = deque(maxlen=MAX_KEPT)
        self.denied_count = 0
        self.failed: deque[Failed] = deque(maxlen=MAX_KEPT)
        self.reached: dict[tuple[str, int], int] = {}

    def denied_since(self, count: int) -> list[Denied]:
        """What was denied after `denied_count` was `count`, as far as it is kept."""
        new = min(self.denied_count - count, len(self.denied))
        return list(self.denied)[len(self.denied) - new :]

    def note(self, news: Denied | Reached | Failed) -> None:
        """Keep what the proxy says."""
        if isinstance(news, Denied):
            self.denied.append(news)
            self.denied_count += 1
        elif isinstance(news, Failed):
            self.failed.append(news)
        elif (news.host, news.port) in self.reached or len(self.reached) < MAX_KEPT:
            self.reached[news.host, news.port] = self.reached.get((news.host, news.port), 0) + 1


class _Jail:
    """A jail that is, or is being, attached."""

    def __init__(self, known: JailNetwork, ready: Callable[[str | None], None]) -> None:
        self.known = known
        self.ready: Callable[[str | None], None] | None = ready
        self.timer: asyncio.TimerHandle | None = None
        self.settling: dict[int, tuple[Callable[[], None], asyncio.TimerHandle]] = {}


class Egress:
    """The proxy, seen from the tool host. Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launcher: LauncherLink,
        on_lost: Callable[[int], None],
        on_news: Callable[[int, Denied | Failed], None],
    ) -> None:
        """`on_lost` is told each jail whose network ended with the proxy, `on_news` what a jail could not reach."""
        self._loop = loop
        self._launcher = launcher
        self._on_lost = on_lost
        self._on_news = on_news
        self._channel: socket.socket | None = None
        self._pidfds: dict[int, int] = {}
        self._jails: dict[int, _Jail] = {}
        self._numbers = 0
        self._outbox: deque[tuple[bytes, list[int]]] = deque()  # what the proxy has not had room for, with descriptors
        self._writing = False
        self._closed = False
        self._attaching: set[asyncio.Task[None]] = set()

    def attach(self, jail: int, pid: int, known: JailNetwork, ready: Callable[[str | None], None]) -> None:
        """Give the jail with the process `pid` its network. `ready` gets None, or why it has none; later, never now."""
        made = self._jails[jail] = _Jail(known, ready)
        made.timer = self._loop.call_later(ATTACH_S, self._fail, jail, "its sockets could not be made in time")
        task = self._loop.create_task(self._attach(jail, pid, known))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, jail: int, pid: int, known: JailNetwork) -> None:
        try:
            await self._start_proxy()
        except OSError as error:
            self._fail(jail, f"the egress proxy could not be started: {error.strerror or error}")
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            wanted = [(listener.address, listener.port) for listener in known.layout.listeners]
            ours.send(json.dumps(wanted).encode())
            try:
                await self._run({"program": "listen", "arguments": [str(pid)]}, [theirs.fileno()])
            except OSError as error:
                ours.close()
                self._fail(jail, f"its sockets could not be made: {error.strerror or error}")
                return
            except BaseException:
                ours.close()
                raise
        self._loop.add_reader(ours.fileno(), self._sockets, jail, ours)

    def detach(self, jail: int) -> None:
        """The jail is gone."""
        gone = self._jails.pop(jail, None)
        if gone is None:
            return
        if gone.timer is not None:
            gone.timer.cancel()
        for done, timer in gone.settling.values():
            timer.cancel()
            self._loop.call_soon(done)
        self._say(Close(jail))

    def settle(self, jail: int, done: Callable[[], None]) -> None:
        """Call `done` when everything that has happened in the jail so far is known, after SETTLE_S at the latest."""
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
        for pid in list(self._pidfds):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._reap(pid)

    # --- processes

    async def _start_proxy(self) -> None:
        """See to it that it runs, or that somebody is about to start it. Raises OSError."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel = ours  # what others say to it meanwhile, it reads when it is there
        self._loop.add_reader(ours.fileno(), self._readable)
        with theirs:
            try:
                filter_fd = os.memfd_create("filter", os.MFD_CLOEXEC)
                try:
                    os.write(filter_fd, relay_program(machine()))
                    os.lseek(filter_fd, 0, os.SEEK_SET)
                    await self._run({"program": "proxy", "arguments": []}, [theirs.fileno(), filter_fd])
                finally:
                    os.close(filter_fd)
            except OSError:
                self._loop.call_soon(self._lost)  # for those who have come to rely on it meanwhile
                raise

    async def _run(self, program: Run, fds: list[int]) -> None:
        """Have the launcher start one of the two programs; a launcher that is lost meanwhile is asked once more.

        Raises OSError.
        """
        try:
            answer, _ = await self._launcher.ask(program, fds)
        except LauncherLost:
            answer, _ = await self._launcher.ask(
                program, fds
            )  # what the first may have begun ends with its descriptors
        if "error" in answer:
            raise OSError(0, answer["error"])
        pid = int(answer["pid"])
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._reap, pid)

    def _reap(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is None:
            return
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)

    # --- from the two programs

    def _sockets(self, jail: int, channel: socket.socket) -> None:
        """The sockets that were made in a jail; they go on to the proxy."""
        try:
            data, fds, _, _ = socket.recv_fds(channel, messages.MAX_MESSAGE, messages.MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._loop.remove_reader(channel.fileno())
        channel.close()
        try:
            known = self._jails.get(jail)
            if known is None:
                return
            answer = json.loads(data) if data else {"error": "their maker ended"}
            if answer["error"] is not None:
                self._fail(jail, f"its sockets could not be made: {answer['error']}")
                return
            layout = known.known.layout
            made = tuple(
                listener for listener, is_made in zip(layout.listeners, answer["made"], strict=True) if is_made
            )
            self._say(Open(jail, known.known.network, made, layout.addresses), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _readable(self) -> None:
        channel = self._channel
        if channel is None:
            return
        for _ in range(64):
            try:
                data = channel.recv(messages.MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            try:
                self._take(messages.decode(data))
            except ValueError:
                self._lost()
                return

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, Settled):
            self._settled(message)
        elif isinstance(message, Denied | Reached | Failed):
            known = self._jails.get(message.jail)
            if known is not None:
                known.known.note(message)
                if not isinstance(message, Reached):
                    self._on_news(message.jail, message)

    def _settled(self, message: Settled) -> None:
        jail = self._jails.get(message.jail)
        if jail is None:
            return
        if message.number == 0:
            ready, jail.ready = jail.ready, None
            if jail.timer is not None:
                jail.timer.cancel()
                jail.timer = None
            if ready is not None:
                ready(None)
            return
        waiting = jail.settling.pop(message.number, None)
        if waiting is not None:
            done, timer = waiting
            timer.cancel()
            done()

    def _fail(self, jail: int, reason: str) -> None:
        known = self._jails.get(jail)
        if known is None or known.ready is None:
            return
        ready = known.ready
        self.detach(jail)
        ready(reason)

    def _lost(self) -> None:
        """The proxy has ended: nothing of its jails' networks is left."""
        self._end_channel()
        if self._closed:
            return
        for number, jail in list(self._jails.items()):
            if jail.ready is not None:
                self._fail(number, "the egress proxy ended")
            else:
                self.detach(number)
                self._on_lost(number)

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
        """Send, or queue while the proxy reads slower than results come; `fds` stay the caller's."""
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
