"""What one connection through the egress proxy may carry and how long it may last, and which addresses it leads to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from goondan.schemas.worker.hosts import parse_rule, read_network
from goondan.toolhost.egress import proxy
from goondan.toolhost.egress.proxy import JailSide
from goondan.toolhost.traffic.messages import Denied, Failed, Message, Open, Reached
from goondan.toolhost.traffic.rules import Listener


class Control:
    """Stands for the link to the tool host: what the proxy says of one jail."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.jails: dict[int, JailSide] = {}
        self.said: list[Message] = []

    def send(self, message: Message) -> None:
        self.said.append(message)


@asynccontextmanager
async def jail(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[tuple[int, Control]]:
    """A jail whose listener leads to a server on loopback; the listener's port."""
    handlers: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with suppress(ConnectionError, asyncio.CancelledError):
            await serve(reader, writer)
        await ended(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    control: Any = Control()
    network = read_network({"allow": [f"127.0.0.1:{port}"]})
    what = Listener("direct", "127.0.0.1", port, "127.0.0.1")
    side = control.jails[1] = JailSide(control, Open(1, network, (what,), {}), [listening.detach()])
    try:
        yield side._listeners[0][0].getsockname()[1], control
    finally:
        tasks = list(side._tasks)
        side.close()
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*tasks, *handlers, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # the proxy's transports


async def ended(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 4096)
        await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def received(port: int) -> int:
    """How many bytes come before the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(20):
            while data := await reader.read(65536):
                count += len(data)
    await ended(writer)
    return count


async def test_a_connection_carries_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_BYTES", 300_000)
    async with jail(endless) as (port, control):
        assert 0 < await received(port) <= 300_000
        assert [type(message) for message in control.said] == [Reached]


@pytest.mark.parametrize(("limit", "serve"), [("IDLE_S", silent), ("TOTAL_S", trickle)])
async def test_a_connection_lasts_so_long(monkeypatch: pytest.MonkeyPatch, limit: str, serve: Any) -> None:
    monkeypatch.setattr(proxy, limit, 0.1)
    async with jail(serve) as (port, _):
        await received(port)


async def test_a_jail_has_so_many_connections_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_CONNECTIONS", 2)
    async with jail(silent) as (port, control):
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]  # the kernel takes them all
        async with asyncio.timeout(20):
            while len(control.said) < 2:
                await asyncio.sleep(0.005)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(control.said) == 2, "the others wait"
        await ended(ends[0][1])
        async with asyncio.timeout(20):
            while len(control.said) < 3:
                await asyncio.sleep(0.005)
        for _, writer in ends:
            await ended(writer)


# --- addresses


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """A name service that answers so, one after the other; who was asked for."""
    asked: list[str] = []
    left = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return left.pop(0)

    monkeypatch.setattr(proxy, "_resolve", resolve)
    return asked


@pytest.mark.parametrize(
    ("rule", "address", "why"),
    [
        ("*.example.org:80", "8.8.8.8", "is this machine itself"),
        ("www.example.org:80", "10.9.8.7", "is this machine itself"),
        ("www.example.org:80", "127.0.0.1", "is this machine itself"),
        ("www.example.org:80", "169.254.169.254", "is a link-local address"),
        ("*.example.org:80", "10.9.8.7", "is a private address"),
        ("*.example.org:80", "64:ff9b::7f00:1", "carries the IPv4 address 127.0.0.1"),
    ],
)
async def test_a_name_that_leads_to_the_host_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, rule: str, address: str, why: str
) -> None:
    resolving(monkeypatch, [address])
    monkeypatch.setattr(proxy, "_is_own", lambda address: True)
    with pytest.raises(proxy.Refused, match=f"it resolves to {address}, which {why}"):
        await proxy.connect(parse_rule(rule), "www.example.org", 80)


def test_the_hosts_own_addresses_are_known() -> None:
    assert proxy._is_own("127.0.0.1")
    assert not proxy._is_own("192.0.2.1")
    assert not proxy._is_own("2001:db8::1")


async def test_the_address_that_was_judged_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers otherwise when asked again changes nothing: the name is asked for once for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        made = await proxy.connect(parse_rule(f"db.test:{port}"), "db.test", port)
        assert made.getpeername() == ("127.0.0.1", port)
        made.close()
        assert asked == ["db.test"]


async def test_of_several_addresses_the_refused_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        resolving(monkeypatch, ["0.0.0.0", "127.0.0.1"])
        made = await proxy.connect(parse_rule(f"db.test:{port}"), "db.test", port)
        assert made.getpeername()[0] == "127.0.0.1"
        made.close()


def test_what_the_tool_host_hears_has_a_budget() -> None:
    async def flood() -> int:
        control: Any = Control()
        side = JailSide(control, Open(1, read_network("public"), (), {}), [])
        for number in range(proxy.REPORT_BURST * 4):
            side.report(Denied(1, f"h{number}.test", 80, "no") if number % 2 else Failed(1, "h", 80, "no"))
        side.close()
        return len(control.said)

    assert proxy.REPORT_BURST <= asyncio.run(flood()) < proxy.REPORT_BURST + proxy.REPORTS_PER_S
