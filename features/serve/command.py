"""`gdn serve`: a swarm as an HTTP service, for whoever has a token.

It is an ordinary client of the kernel. It uses the kernel that runs, or starts one, as `gdn call` does. When the kernel
stops, the door stays, answers that there is none, and finds the next one. Started beside a kernel (`gdn run --serve`),
it ends with it.

Without --token-file it makes one token, in a file that goes when the command ends. The token itself is written nowhere
else.

Source: docs/commands.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click
from msgspec import Struct

from goondan.kernel.cli import attach, beside, options
from goondan.kernel.cli.output import wants_json, write, write_json
from goondan.kernel.cli.session import Interrupts
from goondan.kernel.cli.state import BundleTarget, locate
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.features.serve.api.gate import Gate
    from goondan.features.serve.api.http import HttpService
    from goondan.features.serve.api.rules.callers import Tokens

#: Where it listens if nothing is said: no other program is known by it.
PORT: Final = 7117
LOOPBACK: Final = "127.0.0.1"
#: What the one token is called that is made.
LOCAL: Final = "local"


@click.command(epilog='Example: curl -H "Authorization: Bearer $(cat FILE)" http://127.0.0.1:7117/api/v1/openapi.json')
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any port.")
@click.option("--address", metavar="ADDRESS", default=LOOPBACK, show_default=True, help="Needs --token-file.")
@click.option("--host", "hosts", metavar="NAME", multiple=True, help="Another name that clients use. Repeatable.")
@click.option(
    "--token-file",
    metavar="FILE",
    shell_complete=options.completed_path("file"),
    help="A line for each token: NAME look|talk|operate TOKEN AGENT...  [default: one token is made]",
)
@click.option("--log", is_flag=True, help="Write a line of JSON for each request to stderr.")
@click.option("--beside", "is_beside", is_flag=True, hidden=True)
@options.bundle
@options.policy
@options.trust
@options.json
def serve(
    port: int,
    address: str,
    hosts: tuple[str, ...],
    token_file: str | None,
    log: bool,
    is_beside: bool,
    bundle: str | None,
    policy: str | None,
    trust: bool,
) -> None:
    """Serve a swarm over HTTP, to whoever has a token."""
    if address not in (LOOPBACK, "::1", "localhost") and token_file is None:
        message = f"{address[:100]!r} can be reached from other machines, so the tokens have to be yours"
        raise fail("E_USAGE", message, suggestion="Give --token-file as well, or leave out --address.")
    target = locate(bundle, policy, trust=trust)
    door = _Door(target, port, address, hosts, token_file, log)
    _import_server()
    import uvloop

    with attach.attach(target) if is_beside else attach.attach_or_start(target, ()) as kernel:
        status = uvloop.run(door.run(kernel.pidfd if is_beside else None))
    if status:
        raise SystemExit(status)


def _import_server() -> None:
    """Import what serves, quiet: what a client sends belongs in no log. Raises GoondanError E_USAGE without it."""
    if sys.modules.get("typing_extensions", sys) is None:  # set aside for quicker starts (kernel/cli/__init__.py)
        del sys.modules["typing_extensions"]
    try:
        from goondan.features.serve.api import http  # noqa: F401 - now, while nothing else has happened
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is not installed"
        raise fail("E_USAGE", message, suggestion="Install goondan-kernel[serve].") from None
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class _Door(Struct):
    """One door, from its socket to its last answer."""

    #: Whose kernel it serves.
    target: BundleTarget
    #: The port; 0: any.
    port: int
    #: The address that it listens at.
    address: str
    #: Further names that clients know it by.
    hosts: tuple[str, ...]
    #: The file with the tokens. None: one is made.
    token_file: str | None
    #: A line for each request is written to stderr.
    log: bool
    #: The file of the token that was made.
    made: str | None = None

    async def run(self, pidfd: int | None) -> int:
        """Serve until a signal ends it, or until `pidfd` is readable. Returns the exit status. Raises GoondanError."""
        from goondan.features.serve.api.gate import Gate
        from goondan.features.serve.api.http import Bounds, HttpService, listen
        from goondan.features.serve.api.rules.heads import Names
        from goondan.features.serve.api.swarm import Swarm
        from goondan.features.serve.api.token_files import drop

        try:
            listening = listen(self.port, self.address)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise fail("E_USAGE", f"port {self.port} of {self.address[:100]}: {why}") from None
        with listening:
            try:
                port: int = listening.getsockname()[1]
                tokens = self._tokens(port)
                async with Swarm(self.target) as swarm:
                    doors = beside.doors()
                    ways = [way for door in doors for way in door.routes(swarm)]
                    forms = {prefix: form for door in doors for prefix, form in getattr(door, "FORMS", {}).items()}
                    names = Names(port, self.address, self.hosts)
                    gate = Gate(ways, names, tokens, Bounds(), forms, _write_line if self.log else None)
                    self._say(listening)
                    return await self._until_over(gate, HttpService(gate, listening, gate.bounds), pidfd)
            finally:
                if self.made is not None:
                    drop(self.made)

    def _tokens(self, port: int) -> Tokens:
        from goondan.features.serve.api.rules.callers import Caller, Tokens, parse
        from goondan.features.serve.api.token_files import drop, read_private, single_token

        if self.token_file is not None:
            return parse(read_private(self._token_path))
        self.made = f"{self.target.state_dir}/{LOCAL}{'6' if ':' in self.address else ''}-{port}.token"
        drop(self.made)
        return Tokens.single(single_token(self.made), Caller(LOCAL, "operate", ("*",)))

    @property
    def _token_path(self) -> str:
        return self.made or os.path.abspath(os.path.expanduser(self.token_file or ""))

    def _say(self, listening: socket.socket) -> None:
        address, port = listening.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        text = f"{url}   token: {self._token_path}"
        if wants_json():
            write_json({"url": url, "tokenFile": self._token_path, "pid": os.getpid(), "text": text})
        else:
            write(text, stream=sys.stderr)

    async def _until_over(self, gate: Gate, service: HttpService, pidfd: int | None) -> int:
        """Serve until there is a reason to end: the first signal ends new requests, the second those under way."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            service.stop(now=gate.ended)
            gate.end()

        def kernel_ended() -> None:
            loop.remove_reader(pidfd or -1)
            end()

        following = asyncio.ensure_future(self._follow(gate))
        if pidfd is not None:
            loop.add_reader(pidfd, kernel_ended)
        try:
            with Interrupts(end, signal.SIGINT, signal.SIGTERM) as interrupts:
                await service.serve()
            return interrupts.status
        finally:
            following.cancel()
            if pidfd is not None:
                loop.remove_reader(pidfd)

    async def _follow(self, gate: Gate) -> None:
        """Take over what the token file has become. While it cannot be read, nobody comes in."""
        if self.made is not None:
            return
        from goondan.features.serve.api.rules.callers import Tokens, parse
        from goondan.features.serve.api.token_files import Watched, read_private

        def changed() -> None:
            try:
                gate.replace(parse(read_private(self._token_path)))
                write("the token file was read again", stream=sys.stderr)
            except GoondanError as error:
                gate.replace(Tokens([]))
                write(f"nobody comes in any more: {error.info.message}", stream=sys.stderr)

        watched = Watched(self._token_path, changed)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, watched.look.set)
        try:
            await watched.follow()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)


def _write_line(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)


def _beside(value: str) -> Sequence[str]:
    """The words behind `gdn serve` for `gdn run --serve[=PORT]`. Raises GoondanError E_USAGE."""
    if value and not (value.isascii() and value.isdigit() and int(value) < 65536):
        raise fail("E_USAGE", f"--serve={value[:100]}: a port is a number below 65536")
    return ("--beside", "--port", value or str(PORT))


COMMANDS: Final[Mapping[str, click.Command]] = {"serve": serve}
#: What `gdn run` starts beside its kernel.
BESIDE: Final = {"serve": _beside}
