"""The egress proxy's process: it accepts on listening sockets of jails, judges, connects, relays, and reports to the
tool host.

To the network it resolves, judges every address, and connects to the very address that was judged. It knows no bus and
holds no token. The tool host sends a jail's sockets together with what the jail was granted. The pure modules beside
this one judge what jails and servers send.

Rules.
- One request has one connection upstream. What follows the first request is not passed on.
- A refusal is reported to the tool host before the jail sees it, so it is known when the result of the call comes.
- Everything has a bound: connections of a jail, bytes and time of a connection, what a jail can make us report.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Final

from goondan.schemas.worker.hosts import Rule, is_address
from goondan.toolhost import own_confinement
from goondan.toolhost.traffic import messages, protocols
from goondan.toolhost.traffic.messages import Close, Denied, Failed, Message, Open, Reached, Settle, Settled
from goondan.toolhost.traffic.rules import Listener, hosts_entries, judge, reach_of, refusal, unconnected, unheard

# --- to the network ---------------------------------------------------------------------------------------------------

#: How long a name service may take (seconds): a slower one is as good as none.
RESOLVE_S: Final = 10.0
#: How long one address may take to answer (seconds), and how many addresses are tried.
CONNECT_S: Final = 10.0
MAX_ADDRESSES: Final = 4
_HOSTS_FILE: Final = "/etc/hosts"
_MAX_HOSTS_FILE: Final = 1 << 20


class Refused(Exception):
    """No address of the host may be connected to; the text says why."""


class Unreachable(Exception):
    """The host could not be resolved or did not answer; the text says why."""


async def connect(rule: Rule, host: str, port: int) -> socket.socket:
    """A connection to `host`, which `rule` allows. Raises Refused, Unreachable."""
    addresses = [host] if is_address(host) else await _resolve(host, port)
    reach = reach_of(host, confined=rule.confined, in_hosts_file=not rule.confined and _in_hosts_file(host, addresses))
    allowed: list[str] = []
    reason = ""
    for address in addresses:
        why = refusal(address, reach, own=_is_own(address))
        if why is None:
            allowed.append(address)
        else:
            reason = reason or (f"it {why}" if address == host else f"it resolves to {address}, which {why}")
    if not allowed:
        raise Refused(reason)
    problem = "no address"
    for address in allowed[:MAX_ADDRESSES]:
        try:
            return await _connect(address, port)
        except TimeoutError:
            problem = "it did not answer in time"
        except OSError as error:
            problem = error.strerror or "failed"
    raise Unreachable(problem.lower())


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


async def _connect(address: str, port: int) -> socket.socket:
    made = _socket(address)
    try:
        made.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made


async def _resolve(host: str, port: int) -> list[str]:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise Unreachable("its name was not resolved in time") from None
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"its name cannot be resolved: {getattr(error, 'strerror', None) or error}") from None
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _in_hosts_file(host: str, addresses: list[str]) -> bool:
    """Whether this machine's own hosts file gives the name all of these addresses."""
    try:
        with open(_HOSTS_FILE, encoding="utf-8", errors="replace") as source:
            entries = hosts_entries(source.read(_MAX_HOSTS_FILE))
    except OSError:
        return False
    return bool(addresses) and set(addresses) <= entries.get(host, set())


def _is_own(address: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    try:
        with _socket(address) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


# --- from jails -------------------------------------------------------------------------------------------------------

#: Connections of one jail at a time; further ones wait in the jail.
MAX_CONNECTIONS: Final = 64
#: What one connection may carry, both ways together (bytes): a large download, not a backup.
MAX_BYTES: Final = 1 << 30
#: What a client may take for its request's head or ClientHello, and either side to say nothing (seconds).
HEAD_S: Final = 15.0
IDLE_S: Final = 120.0
#: The longest life of a connection (seconds).
TOTAL_S: Final = 3600.0
CHUNK: Final = 65536
#: The request of an MCP worker for one more connection (bytes).
MAX_WISH: Final = 16
#: Reports that one jail can cause at once, and each second after that.
REPORT_BURST: Final = 256
REPORTS_PER_S: Final = 50.0
#: Reports that the tool host has not read yet (messages of some 100 bytes).
MAX_UNSENT: Final = 16384
#: Refused connections looked at in one go.
WATCH_BATCH: Final = 256
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: end with a reset
#: What getaddrinfo reads: configuration, and the libraries that its name services are.
_READABLE: Final = ("/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/run/systemd/resolve")
#: Threads of the resolver, and descriptors: two a connection, 64 connections a jail.
_DESCRIPTORS: Final = 16384


class _Ended(Exception):
    """The client is gone, or its connection has reached a bound. It is not reported."""


class JailSide:
    """One jail in the proxy: its listening sockets, its connections, and its budget of reports."""

    def __init__(self, control: Control, opened: Open, fds: list[int]) -> None:
        self.id = opened.jail
        self.network = opened.network
        self.addresses = opened.addresses
        self._control = control
        self._loop = control.loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners = [(socket.socket(fileno=fd), what) for fd, what in zip(fds, opened.listeners, strict=False)]
        self._watches = [socket.socket(fileno=fd) for fd in fds[len(self._listeners) :]]
        self._reports = float(REPORT_BURST)
        self._reported_at = self._loop.time()
        self._paused = False
        self._listen()
        for watch in self._watches:
            self._loop.add_reader(watch.fileno(), self.look, watch)

    def close(self) -> None:
        """End everything of this jail."""
        self._unlisten()
        for sock, _ in self._listeners:
            sock.close()
        for watch in self._watches:
            self._loop.remove_reader(watch.fileno())
            watch.close()
        for task in self._tasks:
            task.cancel()

    def settle(self) -> None:
        """Report what is known by now."""
        for watch in self._watches:
            self.look(watch)

    def report(self, message: Denied | Reached | Failed) -> None:
        """Tell the tool host, within the budget."""
        now = self._loop.time()
        self._reports = min(float(REPORT_BURST), self._reports + (now - self._reported_at) * REPORTS_PER_S)
        self._reported_at = now
        if self._reports >= 1:
            self._reports -= 1
            self._control.send(message)

    def look(self, watch: socket.socket) -> None:
        """Connections that found nobody: the jail's kernel has answered them with a reset."""
        for _ in range(WATCH_BATCH):
            try:
                data, source = watch.recvfrom(64)
            except OSError:
                return
            start = 0 if watch.family == socket.AF_INET6 else (data[0] & 15) * 4
            if len(data) >= start + 2:
                port = int.from_bytes(data[start : start + 2], "big")
                address = str(source[0]).partition("%")[0]
                self.report(Denied(self.id, address, port, unconnected(self.network, address, port)))

    # --- accepting

    def _listen(self) -> None:
        for sock, what in self._listeners:
            self._loop.add_reader(sock.fileno(), self._accept, sock, what)

    def _unlisten(self) -> None:
        for sock, _ in self._listeners:
            self._loop.remove_reader(sock.fileno())

    def _accept(self, sock: socket.socket, what: Listener) -> None:
        try:
            connection = _hand_over(sock) if what.kind == "connector" else sock.accept()[0]
        except _Ended:
            self._loop.remove_reader(sock.fileno())  # whoever asked for connections is gone
            return
        except OSError:
            return
        connection.setblocking(False)
        serves = {"dns": self._dns, "proxy": self._proxy, "direct": self._direct, "connector": self._proxy}
        serve = serves[what.kind]
        task = self._loop.create_task(self._serve(connection, what, serve))
        self._tasks.add(task)
        task.add_done_callback(self._served)
        if len(self._tasks) >= MAX_CONNECTIONS and not self._paused:
            self._paused = True
            self._unlisten()

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log(f"a connection broke: {type(error).__name__}: {error}")
        if self._paused and len(self._tasks) < MAX_CONNECTIONS and self in self._control.jails.values():
            self._paused = False
            self._listen()

    async def _serve(
        self,
        connection: socket.socket,
        what: Listener,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Listener], Awaitable[None]],
    ) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
        try:
            async with asyncio.timeout(TOTAL_S):
                await serve(reader, writer, what)
        except (_Ended, ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    # --- names

    async def _dns(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Listener) -> None:
        async with asyncio.timeout(HEAD_S):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                if size > protocols.MAX_QUERY:
                    return
                answer, refused = protocols.answer(await reader.readexactly(size), self.addresses.get)
                if refused is not None:
                    self.report(Denied(self.id, refused, 0, unheard(self.network, refused)))
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()

    # --- exact grants

    async def _direct(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Listener) -> None:
        try:
            upstream = await self._connect(Rule(what.host, what.port), what.host, what.port)
        except (Refused, Unreachable):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            return
        await self._relay(reader, writer, upstream)

    async def _connect(self, judged: Rule | str, host: str, port: int) -> socket.socket:
        """A connection upstream by a rule, or the reason why there is none; reported. Raises Refused, Unreachable."""
        try:
            if isinstance(judged, str):
                raise Refused(judged)
            made = await connect(judged, host, port)
        except Refused as error:
            self.report(Denied(self.id, host, port, str(error)))
            raise
        except Unreachable as error:
            self.report(Failed(self.id, host, port, str(error)))
            raise
        self.report(Reached(self.id, host, port))
        return made

    # --- the HTTP proxy

    async def _proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Listener) -> None:
        try:
            head, rest = await self._head(reader)
        except protocols.BadRequest as error:
            await _answer(writer, 400, "Bad Request", f"the request cannot be passed on: {error}")
            return
        rule, shown = judge(self.network, head.host, head.port), Rule(head.host, head.port)
        try:
            upstream = await self._connect(rule, head.host, head.port)
        except Refused as error:
            await _answer(writer, 403, "Forbidden", f"E_SANDBOX_DENIED: {shown}: {error}")
            return
        except Unreachable as error:
            await _answer(writer, 502, "Bad Gateway", f"{shown} could not be reached: {error}")
            return
        if head.method != "CONNECT":
            await self._relay(reader, writer, upstream, protocols.Body(head.length), head.forward, rest)
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        gate = protocols.Gate(head.host, must=isinstance(rule, str) or rule.confined)
        try:
            # A server may say nothing on a stream for as long as nothing changes.
            await self._relay(reader, writer, upstream, gate, rest=rest, may_be_silent=what.kind == "connector")
        except protocols.NoHello as error:
            self.report(Denied(self.id, head.host, head.port, str(error)))

    async def _head(self, reader: asyncio.StreamReader) -> tuple[protocols.Head, bytes]:
        data = b""
        async with asyncio.timeout(HEAD_S):
            while (end := protocols.find_end(data)) < 0:
                chunk = await reader.read(CHUNK)
                if not chunk:
                    raise _Ended
                data += chunk
        return protocols.parse_head(data[:end]), data[end:]

    # --- relaying

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: socket.socket,
        upwards: protocols.Body | protocols.Gate | None = None,
        first: bytes = b"",
        rest: bytes = b"",
        may_be_silent: bool = False,
    ) -> None:
        """Both directions until both have ended, or a limit is reached. Raises NoHello.

        `first` goes on as it is. `upwards` decides what of the client's other bytes goes on; `rest` are those that have
        been read already.
        """
        up_reader, up_writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
        left = MAX_BYTES
        idle_s = TOTAL_S if may_be_silent else IDLE_S
        one_request = isinstance(upwards, protocols.Body)
        try:
            async with asyncio.timeout(idle_s) as limit:

                def count(size: int) -> None:
                    nonlocal left
                    left -= size
                    if left < 0:
                        raise _Ended
                    limit.reschedule(self._loop.time() + idle_s)

                async def up() -> None:
                    while not (upwards is not None and upwards.done):
                        data = await reader.read(CHUNK)
                        if not data:
                            break
                        count(len(data))
                        up_writer.write(data if upwards is None else upwards.feed(data))
                        await up_writer.drain()
                    if not one_request:  # some servers take the end of what is sent for the end of the connection
                        with suppress(OSError):
                            up_writer.write_eof()

                async def down() -> None:
                    while data := await up_reader.read(CHUNK):
                        count(len(data))
                        writer.write(data)
                        await writer.drain()
                    with suppress(OSError):
                        writer.write_eof()

                up_writer.write(first if upwards is None else first + upwards.feed(rest))
                await _both(up(), down(), first_to_end=one_request)
        except protocols.BadRequest:
            pass
        finally:
            up_writer.close()


def _hand_over(connector: socket.socket) -> socket.socket:
    """Give an MCP worker the other end of a new connection, as it has asked. Raises OSError, and _Ended."""
    if not connector.recv(MAX_WISH):
        raise _Ended
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(connector, [b"socket"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


async def _both(up: Coroutine[None, None, None], down: Coroutine[None, None, None], *, first_to_end: bool) -> None:
    """Run both until both have ended or one has failed; with `first_to_end` until `down` has."""
    tasks = [asyncio.ensure_future(up), asyncio.ensure_future(down)]
    try:
        wanted = set(tasks)
        while wanted:
            done, wanted = await asyncio.wait(wanted, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if first_to_end and tasks[1].done():
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _answer(writer: asyncio.StreamWriter, status: int, reason: str, text: str) -> None:
    writer.write(protocols.response(status, reason, text))
    with suppress(ConnectionError):
        await writer.drain()


class Control:
    """The tool host's end of the proxy, and the jails it serves."""

    def __init__(self, channel: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self.jails: dict[int, JailSide] = {}
        self.ended = self.loop.create_future()
        self._channel = channel
        self._outbox: deque[bytes] = deque(maxlen=MAX_UNSENT)
        self._writing = False
        channel.setblocking(False)
        self.loop.add_reader(channel.fileno(), self._readable)

    def send(self, message: Message) -> None:
        """Send to the tool host, in order. When it does not read for long, the oldest messages are dropped."""
        self._outbox.append(messages.encode(message))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._channel.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outbox.clear()  # the reader finds out
        if bool(self._outbox) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self.loop.add_writer(self._channel.fileno(), self._flush)
            else:
                self.loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(
                self._channel, messages.MAX_MESSAGE, messages.MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self.loop.remove_reader(self._channel.fileno())
            if not self.ended.done():
                self.ended.set_result(None)
            return
        self._handle(messages.decode(data), fds)

    def _handle(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Open):
            for fd in fds:
                os.set_blocking(fd, False)
            self.jails[message.jail] = JailSide(self, message, fds)
            self.send(Settled(message.jail, 0))
        elif isinstance(message, Close):
            jail = self.jails.pop(message.jail, None)
            if jail is not None:
                jail.close()
        elif isinstance(message, Settle):
            known = self.jails.get(message.jail)
            if known is not None:
                known.settle()
            self.send(Settled(message.jail, message.number))


def _log(text: str) -> None:
    """One line for the log."""
    with suppress(OSError):
        os.write(2, f"egress: {text}\n".encode("utf-8", "replace"))


def main(fd: int, filter_fd: int) -> int:
    """Serve until the tool host closes its end. `filter_fd` holds the filter of system calls."""
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    confine(filter_fd)

    async def live() -> None:
        await Control(channel).ended

    asyncio.run(live())
    return 0


def confine(filter_fd: int) -> None:
    """Give everything up; `filter_fd` holds the filter, and is closed. Raises OSError when that is not possible."""
    asyncio.run(_warm_up())
    own_confinement.confine(filter_fd, _READABLE, descriptors=_DESCRIPTORS)


async def _warm_up() -> None:
    """Do once what the proxy does, so that modules and name services load what they need while they can read it."""
    import encodings.idna  # noqa: F401 # getaddrinfo encodes every name with it

    loop = asyncio.get_running_loop()
    with suppress(OSError):
        await loop.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.close()
    async with asyncio.timeout(1.0):
        await reader.read()
    writer.close()
