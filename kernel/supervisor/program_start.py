"""How a program of a feature starts and ends, under the supervisor or by hand: its arguments, its token, its log, and
what is said when its start fails.

Source: docs/design/features.md section 7.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame, Welcome

#: How long queued frames may take to leave (seconds).
LINGER_S: Final = 0.2


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """The arguments that the supervisor gives to each program. The program's own are added."""
    made = startup.option_parser(module, description)
    made.add_argument("--endpoint", required=True, help="the broker's control socket, ipc://DIR/control.sock")
    made.add_argument("--token-fd", type=int, help="descriptor to read the launch token from")
    made.add_argument("--token-file", help="file to read the launch token from")
    made.add_argument("--secrets-fd", type=int, help="descriptor to read secret variables from (msgpack)")
    made.add_argument("--state-dir", required=True, help="the workspace's state directory")
    made.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when the broker has welcomed us")
    made.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    made.add_argument("--broker-uid", type=int, help="user of the broker (default: ours)")
    return made


#: What a program does: it gets its arguments and its token, and returns its status.
Life = Callable[[argparse.Namespace, str], Coroutine[Any, Any, int]]


def run(name: str, options: argparse.Namespace, life: Life) -> int:
    """Be the program of this name. Its secret variables (Program.secrets) are in our environment then. Returns what
    `life` returns; else 1 when the broker refused us, or 2 for bad usage.
    """
    secrecy.close_memory()
    startup.close_to_others()
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name(f"gdn-{name}")
    begin_log(name)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s %(levelname)s {name} %(message)s")
    if options.secrets_fd is not None:
        with open(options.secrets_fd, "rb") as source:
            os.environb.update(msgspec.msgpack.decode(source.read(), type=dict[bytes, bytes]))
    try:
        return asyncio.run(life(options, startup.read_token(options.token_fd, options.token_file)))
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        startup.report_failure(options.ready_fd, error.info)
        return 2 if error.info.code == "E_USAGE" else 1


def link(
    options: argparse.Namespace,
    token: str,
    on_welcome: Callable[[Welcome], None],
    on_frame: Callable[[Frame], None] = lambda frame: None,
) -> Link:
    """The link of a program to the broker."""
    return Link(
        options.endpoint,
        token,
        on_frame=on_frame,
        on_welcome=on_welcome,
        by_reference=False,
        broker_uid=options.broker_uid,
    )


async def begin(link: Link, options: argparse.Namespace) -> asyncio.Future[None]:
    """Say hello, and then that the program is ready. The future is done when the program has to leave: after SIGTERM,
    or because the broker refuses it. Raises GoondanError without a welcome.
    """
    leave = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _settle, leave)
    await link.start()
    link.closed.add_done_callback(lambda _: _settle(leave))
    startup.report_ready(options.ready_fd)
    options.ready_fd = None
    return leave


async def end(link: Link) -> int:
    """Say goodbye. Returns the status of the program: 1 if the broker has refused us."""
    left = link.closed.done()
    await link.close(LINGER_S)
    return 1 if left else 0


def _settle(leave: asyncio.Future[Any]) -> None:
    with suppress(asyncio.InvalidStateError):
        leave.set_result(None)
