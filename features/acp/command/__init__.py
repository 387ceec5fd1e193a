"""The command `gdn acp`: an agent of a swarm for editors, on standard input and output.

The SDK is an extra, and this process alone imports it.

Source: docs/commands.md; https://agentclientprotocol.com.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from importlib.util import find_spec
from typing import Any, Final

import click

from goondan.features.acp.command import records
from goondan.kernel.cli import options
from goondan.kernel.cli.session import Interrupts
from goondan.kernel.cli.state import BundleTarget, locate, state_of
from goondan.schemas.wire.errors import fail


@click.command(epilog="An editor starts it: the command gdn with the arguments acp --bundle PATH.")
@click.option("--agent", metavar="NAME", help="Only this agent answers.  [default: the entry agent; others are modes]")
@options.bundle
@options.policy
@options.trust
@click.option("--ask-again", is_flag=True, help="Forget in which folders tools may work, and end.")
def acp(agent: str | None, bundle: str | None, policy: str | None, trust: bool, ask_again: bool) -> int:
    """Be an agent of an editor (Agent Client Protocol) on standard input and output."""
    place = locate(bundle, policy, trust=trust)
    if ask_again:
        records.change(state_of(place.bundle, make=True), lambda kept: kept["folders"].clear())
        return 0
    if find_spec("acp") is None:
        raise fail("E_USAGE", "gdn acp needs agent-client-protocol", suggestion="pip install 'goondan-kernel[acp]'")
    if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
        del sys.modules["typing_extensions"]
    logging.disable()  # what a client sends belongs in no log of ours
    return asyncio.run(_serve(place, agent))


async def _serve(place: BundleTarget, only: str | None) -> int:
    """Serve until the client closes our input, stops reading, or a signal comes. Returns the exit status."""
    from goondan.features.acp.command.agent import MAX_LINE, Agent, Messages

    transport = Messages(MAX_LINE)
    agent = Agent(place, only, transport)
    listening, left = asyncio.ensure_future(agent.client.main_loop()), asyncio.Event()

    async def until_signal(*ends: asyncio.Future[Any]) -> None:
        left.clear()
        await asyncio.wait({*ends, asyncio.ensure_future(left.wait())}, return_when=asyncio.FIRST_COMPLETED)

    with Interrupts(left.set, signal.SIGINT, signal.SIGTERM) as interrupts:
        await until_signal(listening, transport.broken)
        listening.cancel()
        await until_signal(asyncio.ensure_future(agent.leave()))
        await agent.client.close()
        await agent.swarm.leave()
    return interrupts.status


COMMANDS: Final = {"acp": acp}
