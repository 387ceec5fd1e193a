"""What the host knows about one live jail beside the jail itself, and the news it gives of jails and tools."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Final

import msgspec

from schemas.errors import tool_error
from schemas.frames import ToolError
from toolhost.jail import Jail
from toolhost.messages import SentMessages
from toolhost.network import JailNetwork
from toolhost.pool import Slot

#: A jail in which strays are still found after so many looks is ended.
STRAY_LOOKS: Final = 3


class LogLine(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One line of a tool, and whose it is as far as the host knows. `time` is seconds since 1970."""

    time: float
    level: str
    message: str
    tool: str
    agent: str | None = None
    instance_key: str | None = None
    call_id: str | None = None


class WorkerNews(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One line on the status descriptor: a worker has started or ended. `since`: RFC 3339, UTC."""

    op: str
    pid: int
    tool: str
    agent: str | None = None
    instance_key: str | None = None
    since: str | None = None
    cause: str | None = None


class Tenancy:
    """A slot's jail and what the host knows about it. `abandoned` are calls whose results nobody waits for."""

    __slots__ = (
        "abandoned", "background", "clean", "grace", "jail", "messages", "network", "reason", "rerun", "slot", "strays",
    )  # fmt: skip

    def __init__(self, slot: Slot, jail: Jail) -> None:
        self.slot = slot
        self.jail = jail
        self.abandoned: set[str] = set()
        self.messages = SentMessages()
        self.grace: asyncio.TimerHandle | None = None
        self.reason: ToolError | None = None  # why its calls fail, when that is not simply how it ended
        self.rerun = False  # the host ended it for another call's sake: idempotent calls run again
        self.background = False  # an export that may leave processes behind has run
        self.clean = True  # nothing has run since strays were looked for
        self.strays = 0
        self.network: JailNetwork | None = None  # None: it was granted none


def ending(tenancy: Tenancy, cause: str) -> ToolError:
    """Why a call that was running in a jail which has ended has failed."""
    if tenancy.reason is not None:
        return tenancy.reason
    jail = tenancy.jail
    words = jail.last_words
    if not jail.live and words.startswith(("bwrap: ", "launcher: ", "boot: ")):
        return tool_error("E_SANDBOX_UNAVAILABLE", f"the jail could not be made: {words}", name="SandboxUnavailable")
    while_ = "during the call" if jail.live else "while the tool was being loaded"
    said = f"; it said last: {words}" if words else ""
    return tool_error("E_TOOL_CRASHED", f"the tool's process {cause} {while_}{said}", name="ToolCrashed")


def sweep(tenancy: Tenancy) -> bool:
    """Kill what calls have left behind in an idle jail. False: it comes back, so the jail must end.

    The worker sweeps after its calls; a hostile one may not. So this looks from outside while nothing runs.
    """
    strays = tenancy.jail.strays()
    if not strays:
        tenancy.clean, tenancy.strays = True, 0
        return True
    tenancy.strays += 1
    if tenancy.strays > STRAY_LOOKS:
        return False
    for pid in strays:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def rfc3339(seconds: float) -> str:
    """UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"
