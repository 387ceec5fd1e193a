"""A kernel that is found when it is needed, and found again."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Self

import pytest

from goondan.kernel.cli import joined
from goondan.kernel.cli.joined import Joined
from goondan.schemas.wire.errors import GoondanError, fail

#: A descriptor of a program that has many.
HIGH = 1500


class Kernel:
    """A kernel of which nothing but its process is there."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-IS", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        low = os.pidfd_open(self.process.pid)
        self.pidfd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH)
        os.close(low)
        self.finished = 0

    def end(self) -> None:
        self.process.communicate(b"")
        self.process.wait()

    def finish(self) -> None:
        self.finished += 1


class Session:
    """A session with it. `refuses`: the next one cannot be opened."""

    over = False
    refuses = False

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.left = False

    async def __aenter__(self) -> Self:
        if Session.refuses:
            raise fail("E_KERNEL_LOST", "it went away")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.left = True


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Those that were found, in order."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] <= HIGH + 10:
        pytest.skip("no descriptor may have such a number")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], HIGH + 10), limits[1]))
    monkeypatch.setattr(joined, "Session", Session)
    monkeypatch.setattr(Session, "refuses", False)
    found: list[Kernel] = []
    yield found
    for kernel in found:
        kernel.end()
        os.close(kernel.pidfd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def finder(kernels: list[Kernel]) -> Any:
    def find() -> Kernel:
        kernels.append(Kernel())
        return kernels[-1]

    return find


async def test_it_is_found_once_and_again_when_it_has_ended(kernels: list[Kernel]) -> None:
    followed: list[Any] = []

    async def follow(session: Any) -> None:
        followed.append(session.kernel)
        try:
            await asyncio.Event().wait()
        finally:
            followed.append(None)

    holding = Joined(finder(kernels), follow)
    assert holding.kernel is None
    one, other = await asyncio.gather(holding.session(), holding.session())
    assert one is other is await holding.session()
    assert [holding.kernel] == kernels
    kernels[0].end()
    again = await holding.session()
    assert again is not one and holding.kernel is kernels[1] and len(kernels) == 2
    assert vars(one)["left"] and kernels[0].finished == 1
    await asyncio.sleep(0)
    assert followed == [kernels[0], None, kernels[1]]
    await holding.leave()
    assert holding.kernel is None and kernels[1].finished == 1
    await asyncio.sleep(0)
    assert followed[-1] is None


async def test_one_that_refuses_is_let_go_and_the_next_may_be_asked(kernels: list[Kernel]) -> None:
    holding = Joined(finder(kernels))
    Session.refuses = True
    with pytest.raises(GoondanError, match="it went away"):
        await holding.session()
    assert holding.kernel is None and kernels[0].finished == 1
    Session.refuses = False
    assert vars(await holding.session())["kernel"] is kernels[1]
    await holding.leave()


async def test_one_that_is_just_being_found_is_let_go(kernels: list[Kernel]) -> None:
    holding = Joined(finder(kernels))
    waiting = asyncio.create_task(holding.session())
    await asyncio.sleep(0)
    await holding.leave()
    await waiting
    assert holding.kernel is None and kernels[0].finished == 1
