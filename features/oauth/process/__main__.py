"""`python -m goondan.features.oauth.process`: the process that holds OAuth tokens, under a supervisor or by hand.

It says hello on the control socket with a token of its own. The welcome has the apps of the bundle. The key is read
from `--key-file`. Tokens are stored encrypted in `oauth/` of `--state-dir`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from goondan.features.oauth import process, wire
from goondan.features.oauth.process import authority, vault
from goondan.kernel.paths import key_file, root_of
from goondan.kernel.supervisor import program_start
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame, Welcome

#: How long open requests may take when the process is told to leave (seconds). A refresh that is cut off may lose its
#: token.
LEAVE_S: Final = 0.7

_decode = msgspec.msgpack.Decoder(wire.Order).decode
log = logging.getLogger("oauth")


class Keeper:
    """Takes orders from the link, and answers them."""

    def __init__(self, options: argparse.Namespace, token: str, open_vault: Callable[[], vault.Vault]) -> None:
        self.authority = authority.Authority(open_vault, self._tell)
        self.link = program_start.link(options, token, self._welcomed, self._on_frame)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, options: argparse.Namespace) -> int:
        """Serve until SIGTERM, or until the broker refuses us. Raises GoondanError without a welcome."""
        await (await program_start.begin(self.link, options))
        if self._tasks and not self.link.closed.done():
            await asyncio.wait(set(self._tasks), timeout=LEAVE_S)
        await self.authority.close()
        return await program_start.end(self.link)

    def _welcomed(self, welcome: Welcome) -> None:
        self.authority.serve(from_raw(welcome.spec, wire.TokensSpec).apps)

    def _on_frame(self, frame: Frame) -> None:
        if frame.type != "oauth.order":
            return
        try:
            check_depth(bytes(frame.payload))
            order = _decode(frame.payload)
        except DECODE_ERRORS as error:
            self._fail(frame, error_payload("E_FRAME_INVALID", f"no order: {error}"))
            return
        task = asyncio.get_running_loop().create_task(self._serve(frame, order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, frame: Frame, order: wire.Order) -> None:
        try:
            answer = await self.authority.carry_out(order)
        except GoondanError as error:
            self._fail(frame, error.info)
        except Exception as error:
            # Without the text and the traceback of the error: they may contain what was sent to a server.
            log.error("%s: a fault of ours: %s", type(order).__name__, type(error).__name__)
            self._fail(frame, error_payload("E_INTERNAL", "the process that holds tokens failed on this"))
        else:
            self.link.send(Frame("reply", in_reply_to=frame.id, payload=to_raw(answer)))

    def _fail(self, frame: Frame, info: ErrorPayload) -> None:
        self.link.send(Frame("error", in_reply_to=frame.id, payload=to_raw(info)))

    def _tell(self, news: wire.GrantedNews) -> None:
        self.link.send(Frame("oauth.granted", payload=to_raw(news)))


def main(arguments: list[str] | None = None) -> int:
    """Serve until the end. Returns 0, 1 when the broker refused us, or 2 for bad usage."""
    parser = program_start.parser("goondan.features.oauth.process", "Holds OAuth tokens for a kernel.")
    parser.add_argument("--key-file", help="the key that tokens are encrypted with (default: see docs/oauth.md)")
    options = parser.parse_args(arguments)
    for noisy in ("httpx2", "httpcore2", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    key = options.key_file or key_file(os.environ, os.path.expanduser("~"), process.KEY_NAME)
    root = root_of(options.state_dir)

    def open_vault() -> vault.Vault:
        return vault.Vault(f"{options.state_dir}/oauth", root, vault.read_or_make(key, root))

    async def life(options: argparse.Namespace, token: str) -> int:
        return await Keeper(options, token, open_vault).run(options)

    return program_start.run(wire.OAUTH, options, life)


if __name__ == "__main__":
    sys.exit(main())
