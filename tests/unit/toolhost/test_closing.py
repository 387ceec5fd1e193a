"""The end of a tool host that is cancelled in the very moment in which its last jail has ended.

`asyncio.wait_for` of Python 3.11 returns what it waited for then, and forgets the cancellation.
"""

from __future__ import annotations

import asyncio

import pytest

from goondan.schemas.bundle.launch import ToolHostSpec
from goondan.toolhost.calls.machine import Start
from goondan.toolhost.host import Host
from tests.toolhost_fixture import POWERS
from tests.unit.toolhost.test_calls import call


async def test_a_cancellation_that_comes_with_the_end_of_the_last_jail_counts() -> None:
    host = Host(ToolHostSpec(tools=[], state_dir="/nonexistent", revision="1"), POWERS, send=lambda frame: True)
    (start,) = host.sessions.pool.place(("t",), call("1"))
    assert isinstance(start, Start)
    closing = asyncio.ensure_future(host.close())
    await asyncio.sleep(0)
    _, actions = host.sessions.pool.failed(start.session)
    assert actions == []
    host.sessions._note_gone()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await host.close()
