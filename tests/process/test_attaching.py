"""How a jail gets its network, as the tool host sees it: the launcher and the egress proxy are played by this test."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from goondan.schemas.worker.hosts import read_network
from goondan.toolhost.jails.network import Egress, JailNetwork
from goondan.toolhost.traffic.messages import Open, Settled, decode, encode
from goondan.toolhost.traffic.rules import lay_out

JAIL = 7


class Launcher:
    """Starts programs that do nothing; the test says what they say."""

    def __init__(self) -> None:
        self.refuses = ""
        self.error: str | None = None
        self.proxy: socket.socket | None = None

    async def ask(self, program: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        if program["program"] == self.refuses:
            return {"error": "no room"}, []
        channel = socket.socket(fileno=os.dup(fds[0]))
        if program["program"] == "proxy":
            self.proxy = channel
        else:
            wanted = json.loads(channel.recv(65536))
            channel.send(json.dumps({"error": self.error, "made": [True] * len(wanted)}).encode())
            channel.close()
        return {"pid": os.posix_spawn("/bin/sleep", ["sleep", "60"], {})}, []


class Attaching:
    """One jail on its way to a network, and what became of it."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.lost: list[int] = []
        self.ready: list[str | None] = []
        linked: Any = launcher
        self.egress = Egress(asyncio.get_running_loop(), linked, self.lost.append, lambda jail, news: None)
        network = read_network("public")
        self.egress.attach(JAIL, os.getpid(), JailNetwork(network, lay_out(network)), self.ready.append)

    async def opened(self) -> socket.socket:
        """The proxy's end, once the jail was handed over to it."""
        while self.launcher.proxy is None:
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        self.launcher.proxy.setblocking(False)
        assert isinstance(decode(await loop.sock_recv(self.launcher.proxy, 65536)), Open)
        return self.launcher.proxy

    async def decided(self) -> str | None:
        """None when the network is there, else why it is not."""
        async with asyncio.timeout(20):
            while not self.ready:
                await asyncio.sleep(0.001)
        return self.ready[0]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    if made.proxy is not None:
        made.proxy.close()


async def test_it_is_there_when_the_proxy_says_so_and_gone_with_the_proxy(launcher: Launcher) -> None:
    attaching = Attaching(launcher)
    proxy = await attaching.opened()
    assert attaching.ready == []
    proxy.send(encode(Settled(JAIL, 0)))
    assert await attaching.decided() is None
    proxy.close()
    while not attaching.lost:
        await asyncio.sleep(0)
    assert (attaching.lost, attaching.ready) == ([JAIL], [None])
    attaching.egress.close()


async def test_a_proxy_that_ends_as_it_says_so_has_given_nothing(launcher: Launcher) -> None:
    attaching = Attaching(launcher)
    proxy = await attaching.opened()
    proxy.send(encode(Settled(JAIL, 0)))
    proxy.shutdown(socket.SHUT_RDWR)
    assert await attaching.decided() == "the egress proxy ended"
    assert attaching.lost == []
    attaching.egress.close()


@pytest.mark.parametrize(
    ("refuses", "error", "problem"),
    [
        ("proxy", None, "the egress proxy could not be started: no room"),
        ("listen", None, "its sockets could not be made: no room"),
        ("", "a route in the jail: no", "its sockets could not be made: a route in the jail: no"),
    ],
)
async def test_why_there_is_none(launcher: Launcher, refuses: str, error: str | None, problem: str) -> None:
    launcher.refuses, launcher.error = refuses, error
    attaching = Attaching(launcher)
    assert await attaching.decided() == problem
    attaching.egress.close()


async def test_a_jail_that_ends_on_the_way_is_told_nothing(launcher: Launcher) -> None:
    attaching = Attaching(launcher)
    proxy = await attaching.opened()
    attaching.egress.detach(JAIL)
    proxy.send(encode(Settled(JAIL, 0)))
    for _ in range(10):
        await asyncio.sleep(0)
    attaching.egress.close()
    assert (attaching.ready, attaching.lost) == ([], [])
