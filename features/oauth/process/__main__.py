"""`python -m goondan.features.oauth.process`: the process that holds OAuth tokens, under a supervisor or by hand.

It says hello on the control socket with a token of its own. The welcome has the apps of the bundle. The key is read
from `--key-file`. Tokens are stored encrypted in `oauth/` of `--state-dir`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from goondan.features.oauth import process, wire
from goondan.features.oauth.process import authority, vault
from goondan.kernel.paths import key_file, root_of
from goondan.schemas.system import secrecy, startup
from goondan.schemas.text.visible import visible_line
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame, Welcome

#: How long open requests may take when the process is told to leave (seconds). A refresh that is cut off may lose its
#: token.
LEAVE_S: Final = 0.7
#: How long queued frames may take to leave (seconds).
LINGER_S: Final = 0.2

_decode = msgspec.msgpack.Decoder(wire.Order).decode
log = logging.getLogger("oauth")


class Keeper:
    """Takes orders from the link, and answers them."""

    def __init__(
        self, endpoint: str, token: str, open_vault: Callable[[], vault.Vault], broker_uid: int | None
    ) -> None:
        self.authority = authority.Authority(open_vault, self._tell)
        self.link = Link(
            endpoint,
            token,
            on_frame=self._on_frame,
            on_welcome=self._welcomed,
            by_reference=False,
            broker_uid=broker_uid,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, ready: Callable[[], None]) -> int:
        """Serve until SIGTERM, or until the broker refuses us. Raises GoondanError without a welcome."""
        loop, leave = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave.set)
        await self.link.start()
        ready()
        told: asyncio.Future[Any] = asyncio.ensure_future(leave.wait())
        over: asyncio.Future[Any] = self.link.closed
        await asyncio.wait({told, over}, return_when=asyncio.FIRST_COMPLETED)
        left = self.link.closed.done()
        waiting = set(self._tasks)
        if waiting and not left:
            await asyncio.wait(waiting, timeout=LEAVE_S)
        told.cancel()
        await self.authority.close()
        await self.link.close(LINGER_S)
        return 1 if left else 0

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
    secrecy.close_memory()
    parser = argparse.ArgumentParser(
        prog="python -m goondan.features.oauth.process", description="Holds OAuth tokens for a kernel."
    )
    parser.add_argument("--endpoint", required=True, help="the broker's control socket, ipc://DIR/control.sock")
    parser.add_argument("--token-fd", type=int, help="descriptor to read the launch token from")
    parser.add_argument("--token-file", help="file to read the launch token from")
    parser.add_argument("--state-dir", required=True, help="the workspace's state directory")
    parser.add_argument("--key-file", help="the key that tokens are encrypted with (default: see docs/oauth.md)")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when the broker has welcomed us")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--broker-uid", type=int, help="user of the broker (default: ours)")
    options = parser.parse_args(arguments)
    startup.close_to_others()
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name("gdn-oauth")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s oauth %(message)s")
    for noisy in ("httpx2", "httpcore2", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    waiting: int | None = options.ready_fd
    key = options.key_file or key_file(os.environ, os.path.expanduser("~"), process.KEY_NAME)
    root = root_of(options.state_dir)

    def open_vault() -> vault.Vault:
        return vault.Vault(f"{options.state_dir}/oauth", root, vault.read_or_make(key, root))

    def ready() -> None:
        nonlocal waiting
        waiting = None
        startup.report_ready(options.ready_fd)

    async def life() -> int:
        return await Keeper(options.endpoint, token, open_vault, options.broker_uid).run(ready)

    try:
        token = startup.read_token(options.token_fd, options.token_file)
        return asyncio.run(life())
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        startup.report_failure(waiting, error.info)
        return 2 if error.info.code == "E_USAGE" else 1


if __name__ == "__main__":
    sys.exit(main())
