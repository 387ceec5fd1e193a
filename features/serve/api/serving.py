"""One door, from its socket to its last answer: the ways of all features behind the gate, over the kernel of a bundle.

Without a file of tokens it makes one token, in a file that goes when it ends. The token itself is written nowhere else.

Source: docs/serve.md, "Who may come in".
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvloop
from msgspec import Struct

from goondan.features.serve.api.gate import Gate
from goondan.features.serve.api.http import Bounds, HttpService, listen
from goondan.features.serve.api.routing import ways
from goondan.features.serve.api.rules.callers import Caller, Tokens, parse
from goondan.features.serve.api.rules.heads import Names
from goondan.features.serve.api.swarm import Swarm
from goondan.features.serve.api.token_files import read_private, single_token, state_of
from goondan.features.serve.wire import LOOPBACK
from goondan.kernel.cli import attach, beside
from goondan.kernel.cli.output import write
from goondan.kernel.cli.session import Interrupts
from goondan.kernel.cli.state import BundleTarget
from goondan.schemas.wire.errors import GoondanError, fail

#: What the one token is called that is made.
LOCAL: Final = "local"
#: How often a token file is looked at for a change (seconds).
LOOK_S: Final = 1.0


class Door(Struct):
    """One door."""

    #: Whose kernel it serves.
    target: BundleTarget
    #: The port; 0: any.
    port: int
    #: Told where it listens (URL), and where its tokens are (file).
    say: Callable[[str, str], None]
    #: The address that it listens at.
    address: str = LOOPBACK
    #: Further names that clients know it by.
    hosts: tuple[str, ...] = ()
    #: The file with the tokens. None: one is made.
    token_file: str | None = None
    #: A line for each request is written to stderr.
    log: bool = False
    #: Where the tokens are, when it serves.
    path: str = ""

    def serve(self, is_beside: bool) -> None:
        """Serve until a signal ends it; `is_beside`: or until the kernel ends that runs, and else one is started.
        Raises GoondanError, SystemExit.
        """
        for name in ("uvicorn", "asyncio"):  # what a client sends belongs in no log
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        with attach.attach(self.target) if is_beside else attach.attach_or_start(self.target, ()) as kernel:
            status = uvloop.run(self._run(kernel.pidfd if is_beside else None))
        if status:
            raise SystemExit(status)

    async def _run(self, pidfd: int | None) -> int:
        """Serve until a signal ends it, or until `pidfd` is readable. Returns the exit status. Raises GoondanError."""
        try:
            listening = listen(self.port, self.address)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise fail("E_USAGE", f"port {self.port} of {self.address[:100]}: {why}") from None
        with listening:
            try:
                address, port = listening.getsockname()[:2]
                tokens = self._tokens(port)
                async with Swarm(self.target) as swarm:
                    doors = beside.doors()
                    swarm.ways = ways(doors, swarm)
                    forms = {prefix: form for door in doors for prefix, form in getattr(door, "FORMS", {}).items()}
                    names, log = Names(port, self.address, self.hosts), _write_line if self.log else None
                    gate = Gate(swarm.ways, names, tokens, Bounds(), forms, log, swarm.callers)
                    self.say(f"http://{f'[{address}]' if ':' in address else address}:{port}", self.path)
                    return await self._until_over(gate, HttpService(gate.begin, listening, gate.bounds), pidfd)
            finally:
                if self.token_file is None:
                    Path(self.path).unlink(missing_ok=True)

    def _tokens(self, port: int) -> Tokens:
        if self.token_file is not None:
            self.path = os.path.abspath(os.path.expanduser(self.token_file))
            return parse(read_private(self.path))
        self.path = f"{self.target.state_dir}/{LOCAL}{'6' if ':' in self.address else ''}-{port}.token"
        Path(self.path).unlink(missing_ok=True)
        return Tokens.single(single_token(self.path), Caller(LOCAL, "operate", ("*",)))

    async def _until_over(self, gate: Gate, service: HttpService, pidfd: int | None) -> int:
        """Serve until there is a reason to end: the first signal ends new requests, the second those under way."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            if pidfd is not None:
                loop.remove_reader(pidfd)
            service.stop(now=gate.ended)
            gate.end()

        following = asyncio.ensure_future(self._follow(gate))
        if pidfd is not None:
            loop.add_reader(pidfd, end)
        try:
            with Interrupts(end, signal.SIGINT, signal.SIGTERM) as interrupts:
                await service.serve()
            return interrupts.status
        finally:
            following.cancel()

    async def _follow(self, gate: Gate) -> None:
        """Take over what the token file has become. While it cannot be read, nobody comes in."""
        if self.token_file is None:
            return
        look, seen, loop = asyncio.Event(), state_of(self.path), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, look.set)
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(look.wait(), LOOK_S)
                before, seen = seen, state_of(self.path)
                if seen != before or look.is_set():
                    self._read_again(gate)
                look.clear()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _read_again(self, gate: Gate) -> None:
        try:
            gate.replace(parse(read_private(self.path)))
            write("the token file was read again", stream=sys.stderr)
        except GoondanError as error:
            gate.replace(Tokens([]))
            write(f"nobody comes in any more: {error.info.message}", stream=sys.stderr)


def found(state_dir: str) -> Iterator[tuple[str, str]]:
    """Where doors of a workspace may run whose tokens were made: URLs and files. One that was killed leaves its."""
    for path in Path(state_dir).glob(f"{LOCAL}*-*.token"):
        address = "[::1]" if path.name.startswith(f"{LOCAL}6") else LOOPBACK
        yield f"http://{address}:{path.stem.rpartition('-')[2]}", str(path)


def _write_line(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)
