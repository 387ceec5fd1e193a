"""What is written to a socket: in order and whole, whatever room the other end leaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from goondan.toolhost.socket_end import READ_BYTES, SocketEnd


def _pair() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return near, far


def _end(near: socket.socket, on_broken: Callable[[], None] = lambda: None) -> SocketEnd:
    loop = asyncio.get_running_loop()
    return SocketEnd(near, loop, on_data=lambda data: None, on_left=lambda: None, on_broken=on_broken)


async def test_what_has_no_room_is_written_later_in_order() -> None:
    near, far = _pair()
    loop = asyncio.get_running_loop()
    end = _end(near)
    said = [bytes([number]) * 10_000 for number in range(40)]
    for data in said:
        end.put(data)
    end.flush()
    assert end.is_blocked
    assert 0 < end.unwritten < 400_000
    end.put(b"end")
    far.setblocking(False)
    heard = b""
    while len(heard) < 400_003:
        heard += await loop.sock_recv(far, 65536)
    assert heard == b"".join(said) + b"end"
    assert (end.is_blocked, end.unwritten) == (False, 0)
    end.close()
    far.close()


async def test_who_cannot_be_written_to_is_told_of_once_and_nothing_waits() -> None:
    near, far = _pair()
    told: list[str] = []
    end = _end(near, on_broken=lambda: told.append("broken"))
    far.close()
    for _ in range(3):
        end.put(b"x" * 100)
        end.flush()
    assert told == ["broken"]
    assert end.unwritten == 0
    end.close()


async def test_a_closed_end_watches_nothing() -> None:
    near, far = _pair()
    loop = asyncio.get_running_loop()
    end = _end(near)
    end.put(b"x" * 1_000_000)
    end.flush()
    assert end.is_blocked
    number = near.fileno()
    end.close()
    end.close()
    assert not loop.remove_writer(number)
    assert (end.is_blocked, end.unwritten, end.closed) == (False, 0, True)
    far.close()


async def test_what_is_held_is_written_at_its_release() -> None:
    near, far = _pair()
    far.setblocking(False)
    end = _end(near)
    end.hold()
    end.put(b"first")
    end.flush()
    with pytest.raises(BlockingIOError):
        far.recv(10)
    end.put(b" second")
    end.release()
    assert far.recv(20) == b"first second"
    end.close()
    far.close()


async def test_one_read_for_each_wake_up_and_the_end_is_told() -> None:
    near, far = socket.socketpair()
    heard: list[int] = []
    left = asyncio.Event()
    end = SocketEnd(near, asyncio.get_running_loop(), on_data=lambda data: heard.append(len(data)), on_left=left.set)
    far.send(b"x" * (READ_BYTES + 10))
    far.close()
    assert heard == []
    end.read()
    async with asyncio.timeout(5):
        await left.wait()
    assert heard == [READ_BYTES, 10]
    end.close()
