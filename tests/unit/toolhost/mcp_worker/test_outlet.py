"""What an MCP worker writes: in order and whole, whatever room the other end leaves."""

from __future__ import annotations

import asyncio
import socket

from goondan.toolhost.mcp_worker.outlet import Outlet


def _pair() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    near.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return near, far


async def test_what_has_no_room_is_written_later_in_order() -> None:
    near, far = _pair()
    loop = asyncio.get_running_loop()
    outlet = Outlet(near, loop, on_broken=lambda: None)
    said = [bytes([number]) * 10_000 for number in range(40)]
    for data in said:
        outlet.put(data)
    outlet.flush()
    assert outlet.is_blocked
    assert 0 < outlet.unwritten < 400_000
    outlet.put(b"end")
    far.setblocking(False)
    heard = b""
    while len(heard) < 400_003:
        heard += await loop.sock_recv(far, 65536)
    assert heard == b"".join(said) + b"end"
    assert (outlet.is_blocked, outlet.unwritten) == (False, 0)
    outlet.close()
    near.close()
    far.close()


async def test_who_cannot_be_written_to_is_told_of_once_and_nothing_waits() -> None:
    near, far = _pair()
    told: list[str] = []
    outlet = Outlet(near, asyncio.get_running_loop(), on_broken=lambda: told.append("broken"))
    far.close()
    for _ in range(3):
        outlet.put(b"x" * 100)
        outlet.flush()
    assert told == ["broken"]
    assert outlet.unwritten == 0
    near.close()


async def test_a_closed_outlet_watches_nothing() -> None:
    near, far = _pair()
    loop = asyncio.get_running_loop()
    outlet = Outlet(near, loop, on_broken=lambda: None)
    outlet.put(b"x" * 1_000_000)
    outlet.flush()
    assert outlet.is_blocked
    outlet.close()
    outlet.close()
    assert not loop.remove_writer(near)
    assert (outlet.is_blocked, outlet.unwritten) == (False, 0)
    near.close()
    far.close()
