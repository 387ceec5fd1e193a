"""`gdn mcp serve`: offers the tools of one agent to MCP clients, on standard input and output or over HTTP on loopback.

Source: docs/mcp.md, "Our tools for MCP clients"; docs/design/commands.md section 12.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import click
from msgspec import Struct

from goondan.features.mcp_serve.command.rules import offering
from goondan.kernel.cli import attach, options
from goondan.kernel.cli.console.questions import questions
from goondan.kernel.cli.output import wants_json, write, write_json
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.session import Interrupts, Session, over_session
from goondan.kernel.cli.state import absolute_workdir, locate
from goondan.schemas.bundle import address
from goondan.schemas.wire.errors import fail

#: The instance that calls are made in, if none is named: not the one that people talk to, whose turns would wait.
INSTANCE: Final = "mcp"


@click.command(epilog="Without --tools nothing is offered. Patterns match full names: --tools 'bash__*'.")
@click.option("--agent", metavar="NAME", required=True, help="Its tools are offered, and its rules hold for each call.")
@click.option("--tools", metavar="PATTERN", multiple=True, help="Offer the tools whose names fit. Repeatable.")
@click.option("--short-names", is_flag=True, help="Offer bash__exec as exec, where nothing else is called so.")
@click.option(
    "--http", "port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve HTTP on loopback; 0: any port."
)
@click.option(
    "--token-file",
    metavar="FILE",
    shell_complete=options.completed_path("file"),
    help="With --http: the file of the token; made if it is not there.",
)
@options.bundle
@options.policy
@options.trust
@click.option(
    "--instance",
    metavar="KEY",
    default=INSTANCE,
    show_default=True,
    help="The instance of the agent that calls are made in.",
)
@options.workdir
@options.json
def serve(
    agent: str,
    tools: tuple[str, ...],
    short_names: bool,
    port: int | None,
    token_file: str | None,
    bundle: str | None,
    policy: str | None,
    trust: bool,
    instance: str,
    workdir: str | None,
) -> None:
    """Offer the tools of an agent to MCP clients."""
    if not address.is_resource_name(agent):
        raise fail("E_USAGE", f"{agent[:100]!r} is not the name of an agent")
    if port is None and token_file is not None:
        raise fail("E_USAGE", "--token-file belongs to --http")
    check_instance(instance)
    place = locate(bundle, policy, trust=trust)
    if workdir is not None:
        workdir = absolute_workdir(workdir, place)
    with attach.attach_or_start(place, ()) as kernel:
        serving = _Serving(kernel.place.state_dir, agent, tools, instance, workdir, short_names)
        over_session(kernel, lambda session: serving.run(session, port, token_file))


class _Serving(Struct, frozen=True):
    """One server, from the first look at the agent to the last answer."""

    #: Where the conversation of the instance lies.
    state_dir: str
    #: The agent whose tools are offered.
    agent: str
    #: Which of them.
    patterns: tuple[str, ...]
    #: The instance of the agent that calls are made in.
    instance: str
    #: Where tools work, instead of the instance's own.
    workdir: str | None
    #: Whether they are offered under short names.
    short: bool

    async def run(self, session: Session, port: int | None, token_file: str | None) -> None:
        """Serve until the client or a signal ends it: at this port, or on standard input. Raises GoondanError."""
        _import_sdk()
        from goondan.features.mcp_serve.command.server import Offer, make_server, serve_stdio

        offer = Offer(session, self.state_dir, self.agent, self.instance, self.patterns, self.workdir, short=self.short)
        self._say(await offer.everything())
        server = make_server(offer, self.agent, _version())
        asked = questions(session)
        watching = [asyncio.ensure_future(task) for task in (asked.watch(), asked.announce())]
        try:
            serving = serve_stdio(server) if port is None else self._http(server, port, token_file)
            await self._until_over(session, serving)
        finally:
            for task in watching:
                task.cancel()
            await offer.close()

    async def _until_over(self, session: Session, serving: Awaitable[None]) -> None:
        """Serve until it ends by itself, a signal comes, or the kernel is lost. Raises GoondanError E_KERNEL_LOST."""
        task = asyncio.ensure_future(serving)
        with Interrupts(task.cancel, signal.SIGINT, signal.SIGTERM) as interrupts:
            await asyncio.wait({task, session.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                raise session.lost_error()
        if interrupts.number == signal.SIGINT and task.cancelled():
            return
        if interrupts.number:
            raise SystemExit(interrupts.status)
        task.result()

    async def _http(self, server: Any, wanted: int, path: str | None) -> None:
        from goondan.features.mcp_serve.command.http import HttpServer
        from goondan.features.serve.api.http import listen
        from goondan.features.serve.api.token_files import single_token

        try:
            listening = listen(wanted)
        except OSError as error:
            raise fail("E_USAGE", f"port {wanted} of 127.0.0.1: {error.strerror}") from None
        port = listening.getsockname()[1]
        made = path is None
        if path is None:
            path = f"{self.state_dir}/mcp-{port}.token"
            Path(path).unlink(missing_ok=True)
        token = single_token(os.path.abspath(os.path.expanduser(path)))
        service = HttpServer(server, listening, token)
        url = f"http://127.0.0.1:{port}{offering.PATH}"
        if wants_json():
            write_json({"url": url, "tokenFile": os.path.abspath(path), "pid": os.getpid()})
        else:
            write(f"{url}   token: {os.path.abspath(path)}", stream=sys.stderr)
        try:
            await service.serve()
        finally:
            listening.close()
            if made:
                Path(path).unlink(missing_ok=True)

    def _say(self, tools: list[Any]) -> None:
        """Tell the operator what is offered."""
        names = [tool.name for tool in offering.offered(tools, self.patterns)]
        if names:
            write(f"offers {len(names)} tools of {self.agent}: {', '.join(names)}", stream=sys.stderr)
            return
        has = ", ".join(tool.name for tool in tools) or "none"
        why = "no tool fits --tools" if self.patterns else "nothing is offered without --tools PATTERN"
        write(f"{why}; tools of {self.agent}: {has}", stream=sys.stderr)


def _import_sdk() -> None:
    """Make the SDK importable, and quiet: what a client sends belongs in no log of ours."""
    if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
        del sys.modules["typing_extensions"]
    for name in ("mcp", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _version() -> str:
    try:
        return version("goondan-kernel")
    except PackageNotFoundError:
        return ""


COMMANDS: Final[Mapping[str, click.Command]] = {"mcp serve": serve}
