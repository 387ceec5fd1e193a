"""Prints on stderr what the kernel of `gdn run --watch` says about its bundle."""

from __future__ import annotations

import sys
import threading

from goondan.kernel.cli.output import write
from goondan.kernel.cli.terminal import printable
from goondan.kernel.supervisor_client import SupervisorClient
from goondan.schemas.wire.errors import GoondanError


def tell_news(state_dir: str) -> None:
    """Begin to print the news. It ends with the kernel or with this process."""
    # A thread, because the conversation reads its lines in its own way. The thread holds nothing that has to be
    # released.
    threading.Thread(target=_tell, args=(state_dir,), daemon=True).start()


def _tell(state_dir: str) -> None:
    told = 0
    try:
        client = SupervisorClient.connect(state_dir)
        while client is not None:
            reply = client.ask("news", None, after=told)
            told = reply.told
            write(*(f"gdn: {printable(line)}" for line in reply.news or []), stream=sys.stderr)
    except (GoondanError, OSError, ValueError):
        return  # the kernel has ended, and the conversation reports that
