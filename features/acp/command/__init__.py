"""The command `gdn acp`: an agent of a swarm for editors, on standard input and output.

The SDK is an extra, and this process alone imports it.

Source: docs/commands.md; https://agentclientprotocol.com.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.commands import import_session
from goondan.kernel.cli.session import Interrupts
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.schemas.bundle import address
from goondan.schemas.system import secrecy
from goondan.schemas.wire.errors import fail


@click.command(epilog="An editor starts it: in Zed, agent_servers with command gdn and args [acp, --bundle, PATH].")
@click.option("--agent", metavar="NAME", help="Only this agent answers.  [default: the entry agent; others are modes]")
@options.bundle
@options.policy
@options.trust
@click.option("--ask-again", is_flag=True, help="Forget in which folders tools may work, and end.")
def acp(agent: str | None, bundle: str | None, policy: str | None, trust: bool, ask_again: bool) -> int:
    """Be an agent of an editor (Agent Client Protocol) on standard input and output."""
    if agent is not None and not address.is_resource_name(agent):
        raise fail("E_USAGE", f"{agent[:100]!r} is not the name of an agent")
    place = locate(bundle, policy, trust=trust)
    if ask_again:
        from goondan.features.acp.command.records import forget_folders

        if os.path.isdir(place.state_dir):
            forget_folders(place.state_dir)
        return 0
    if find_spec("acp") is None:
        hint = "Install it: pip install 'goondan-kernel[acp]'"
        raise fail("E_USAGE", "gdn acp needs the package agent-client-protocol", suggestion=hint)
    secrecy.close_memory()
    import_session()
    return asyncio.run(_serve(place, agent))


async def _serve(place: BundleTarget, agent: str | None) -> int:
    """Serve until the client closes our input, stops reading, or a signal comes. Returns the exit status."""
    from goondan.features.acp.command.stdio import Stdio

    stdio = Stdio()
    _import_sdk()
    from acp.connection import Connection

    from goondan.features.acp.command.server import Server

    server = Server(place, agent, _version())
    connection = Connection(server.handle, stdio, listening=False)
    server.client = connection
    listening = asyncio.ensure_future(connection.main_loop())
    left = asyncio.Event()

    def end() -> None:
        if not listening.cancel():
            left.set()

    with Interrupts(end, signal.SIGINT, signal.SIGTERM) as interrupts:
        await asyncio.wait({listening, stdio.broken}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        closing, leaving = asyncio.ensure_future(server.close()), asyncio.ensure_future(left.wait())
        await asyncio.wait({closing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        await connection.close()
        await stdio.close()
        await server.let_go()
    for task in (closing, leaving):
        task.cancel()
    return interrupts.status


#: The loggers of the SDK: what a client sends belongs in no log of ours.
_LOGGERS: Final = ("", "acp", "asyncio")


def _import_sdk() -> None:
    """Make the SDK importable, and quiet."""
    if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
        del sys.modules["typing_extensions"]
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("goondan-kernel")
    return "0"


COMMANDS: Final = {"acp": acp}
