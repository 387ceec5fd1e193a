"""`gdn mcp serve`: the tools of one agent for MCP clients, on standard input and output or over HTTP on loopback.

Source: docs/mcp.md, "Our tools for MCP clients"; docs/design/commands.md section 12.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import sys
from collections.abc import Awaitable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import click

from goondan.features.mcp.command.rules.offering import PATH, Gate, offered
from goondan.kernel.cli import options
from goondan.kernel.cli.attach import attach_or_start
from goondan.kernel.cli.console.questions import questions
from goondan.kernel.cli.output import wants_json, write, write_json
from goondan.kernel.cli.session import Interrupts, Session, over_session
from goondan.kernel.cli.state import absolute_workdir, locate
from goondan.kernel.cli.texts.batch import check_instance
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.wire.errors import fail

#: The instance that calls are made in, if none is named: not the one that people talk to, whose turns would wait.
INSTANCE: Final = "mcp"
#: A token that is given has at least so many characters.
MIN_TOKEN: Final = 16
MAX_TOKEN: Final = 4096


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
    if not is_resource_name(agent):
        raise fail("E_USAGE", f"{agent[:100]!r} is not the name of an agent")
    if port is None and token_file is not None:
        raise fail("E_USAGE", "--token-file belongs to --http")
    check_instance(instance)
    place = locate(bundle, policy, trust=trust)
    if workdir is not None:
        workdir = absolute_workdir(workdir, place)
    with attach_or_start(place, ()) as kernel:
        serving = _Serving(kernel.place.state_dir, agent, tools, instance, workdir, short_names)
        over_session(kernel, lambda session: serving.run(session, port, token_file))


class _Serving:
    """One server, from the first look at the agent to the last answer."""

    def __init__(
        self,
        state_dir: str,
        agent: str,
        patterns: tuple[str, ...],
        instance: str,
        workdir: str | None,
        short: bool,
    ) -> None:
        self._short = short
        self._state_dir = state_dir
        self._agent = agent
        self._patterns = patterns
        self._instance = instance
        self._workdir = workdir

    async def run(self, session: Session, port: int | None, token_file: str | None) -> None:
        """Serve until the client or a signal ends it: at this port, or on standard input. Raises GoondanError."""
        _import_sdk()
        from goondan.features.mcp.command.server import Offer, make_server, serve_stdio

        offer = Offer(session, self._agent, self._instance, self._patterns, self._workdir, short=self._short)
        self._say(await offer.everything())
        server = make_server(offer, self._agent, _version())
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
        from goondan.features.mcp.command.server import HttpService, listen

        try:
            listening = listen(wanted)
        except OSError as error:
            raise fail("E_USAGE", f"port {wanted} of 127.0.0.1: {error.strerror}") from None
        port = listening.getsockname()[1]
        made = path is None
        if path is None:
            path = f"{self._state_dir}/mcp-{port}.token"
            _drop(path)
        token = _token(os.path.abspath(os.path.expanduser(path)))
        service = HttpService(server, listening, Gate(port, token))
        url = f"http://127.0.0.1:{port}{PATH}"
        if wants_json():
            write_json({"url": url, "tokenFile": os.path.abspath(path), "pid": os.getpid()})
        else:
            write(f"{url}   token: {os.path.abspath(path)}", stream=sys.stderr)
        try:
            await service.serve()
        finally:
            listening.close()
            if made:
                _drop(path)

    def _say(self, tools: list[Any]) -> None:
        """Tell the operator what is offered."""
        names = [tool.name for tool in offered(tools, self._patterns)]
        if names:
            write(f"offers {len(names)} tools of {self._agent}: {', '.join(names)}", stream=sys.stderr)
            return
        has = ", ".join(tool.name for tool in tools) or "none"
        why = "no tool fits --tools" if self._patterns else "nothing is offered without --tools PATTERN"
        write(f"{why}; tools of {self._agent}: {has}", stream=sys.stderr)


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


def _token(path: str) -> str:
    """The token in a file, which is made with a fresh one if it is not there. Raises GoondanError E_USAGE."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise fail("E_USAGE", f"{path}: {error.strerror}") from None
    else:
        token = os.urandom(32).hex()
        with open(fd, "w") as file:
            file.write(token + "\n")
        return token
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
            state, data = os.fstat(opened.fileno()), opened.read(MAX_TOKEN + 2)
    except OSError as error:
        raise fail("E_USAGE", f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise fail("E_USAGE", f"{path}: others can read or write it", suggestion="chmod 600 it, or name a new file.")
    text = data.decode("ascii", "replace").strip()
    if not MIN_TOKEN <= len(text) <= MAX_TOKEN or not text.isprintable() or " " in text or not text.isascii():
        raise fail("E_USAGE", f"{path}: a token is one word of {MIN_TOKEN} to {MAX_TOKEN} characters of ASCII")
    return text


def _drop(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
