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
from typing import Final

import click

from goondan.features.acp.command import records
from goondan.kernel.cli import options
from goondan.kernel.cli.commands import import_session
from goondan.kernel.cli.session import Interrupts
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.schemas.system import secrecy
from goondan.schemas.wire.errors import fail


@click.command(
    epilog="An editor starts it. For Zed: agent_servers with the command gdn and the args acp, --bundle, PATH."
)
@click.option("--agent", metavar="NAME", help="Only this agent answers.  [default: the entry agent; others are modes]")
@options.bundle
@options.policy
@options.trust
@click.option("--ask-again", is_flag=True, help="Forget in which folders tools may work, and end.")
def acp(agent: str | None, bundle: str | None, policy: str | None, trust: bool, ask_again: bool) -> int:
    """Be an agent of an editor (Agent Client Protocol) on standard input and output."""
    place = locate(bundle, policy, trust=trust)
    if ask_again:
        records.change(place.state_dir, lambda kept: kept["folders"].clear())
        return 0
    if find_spec("acp") is None:
        hint = "Install it: pip install 'goondan-kernel[acp]'"
        raise fail("E_USAGE", "gdn acp needs the package agent-client-protocol", suggestion=hint)
    secrecy.close_memory()
    import_session()
    if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
        del sys.modules["typing_extensions"]
    logging.disable()  # what a client sends belongs in no log of ours
    return asyncio.run(_serve(place, agent))


async def _serve(place: BundleTarget, only: str | None) -> int:
    """Serve until the client closes our input, stops reading, or a signal comes. Returns the exit status."""
    from goondan.features.acp.command.agent import Agent, Messages

    transport = Messages()
    agent = Agent(place, only, transport)
    listening, left = asyncio.ensure_future(agent.client.main_loop()), asyncio.Event()

    def end() -> None:
        if not listening.cancel():
            left.set()

    with Interrupts(end, signal.SIGINT, signal.SIGTERM) as interrupts:
        await asyncio.wait({listening, transport.streams.broken}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        leaving = [asyncio.ensure_future(agent.leave()), asyncio.ensure_future(left.wait())]
        await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        await agent.client.close()
        await agent.swarm.leave()
    return interrupts.status


COMMANDS: Final = {"acp": acp}
