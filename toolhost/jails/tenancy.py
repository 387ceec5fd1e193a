"""What the host knows about one live jail beside the jail itself, and the news it gives of jails and tools."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from schemas.errors import tool_error
from schemas.frames import ToolError
from schemas.worker_frames import WorkerError
from toolhost.calls.denials import shown, without_network
from toolhost.calls.messages import SentMessages
from toolhost.calls.pending import Work
from toolhost.calls.receipts import Ledger
from toolhost.calls.taken import Call
from toolhost.jails.cells import Cell, Cells
from toolhost.jails.jail import Jail
from toolhost.jails.pool import Slot
from toolhost.jails.sized_workdirs import Claim
from toolhost.limits.decide import lacks_processes, limit_error, with_limit
from toolhost.network import JailNetwork
from toolhost.policy.hiding import Hiding
from toolhost.signalling import signal_all

#: A jail in which strays are still found after so many looks is ended.
STRAY_LOOKS: Final = 3
#: Ended calls of a jail by whose names it may still ask something, by mistake; whoever names an older one is lying.
ENDED_KNOWN: Final = 1024


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
    """A slot's jail and what the host knows about it. `abandoned` are calls whose results nobody waits for, `pending`
    the work that goes on after its call was answered, `ended` the last that are over; by the calls' names in the jail.
    `permissions` are what its tool was granted of the bus, `hiding` what it must not see. `cells` are the places of its
    calls, None for a jail that runs them in its worker.
    """

    __slots__ = (
        "abandoned", "background", "cells", "claim", "clean", "ended", "gone", "grace", "hiding", "jail", "ledger",
        "messages", "network", "pending", "permissions", "reason", "rerun", "slot", "strays",
    )  # fmt: skip

    def __init__(self, slot: Slot, jail: Jail, permissions: Sequence[str] = (), hiding: Hiding | None = None) -> None:
        self.slot = slot
        self.jail = jail
        self.permissions = list(permissions)
        self.hiding = hiding or Hiding([])
        self.ended: deque[str] = deque(maxlen=ENDED_KNOWN)
        self.ledger = Ledger(jail.plan)
        self.cells: Cells | None = None
        self.claim: Claim | None = None  # None: its workdir has no file system of its own
        self.abandoned: set[str] = set()
        self.pending: dict[str, Work] = {}
        self.messages = SentMessages()
        self.grace: asyncio.TimerHandle | None = None
        self.reason: ToolError | None = None  # why its calls fail, when that is not simply how it ended
        self.rerun = False  # the host ended it for another call's sake: idempotent calls run again
        self.background = False  # an export that may leave processes behind has run
        self.clean = True  # nothing has run since strays were looked for
        self.strays = 0
        self.gone = asyncio.Event()  # its jail's last process has ended
        self.network: JailNetwork | None = None  # None: it was granted none


def started(tenancy: Tenancy) -> WorkerNews | None:
    """News of a worker that has said `ready`; None when its process is not known."""
    jail, slot = tenancy.jail, tenancy.slot
    if jail.worker_pid is None:
        return None
    first = None if len(slot.key) == 2 else next(iter(slot.calls.values()), None)  # a shared jail is nobody's
    return WorkerNews(
        op="start",
        pid=jail.worker_pid,
        tool=jail.name,
        agent=None if first is None else first.agent,
        instance_key=None if first is None else first.instance_key,
        since=rfc3339(time.time()),
    )


def ending(tenancy: Tenancy, cause: str, cell: Cell | None = None) -> ToolError:
    """Why a call that was running in a jail which has ended has failed, or in this cell of it."""
    if tenancy.reason is not None:
        return tenancy.reason
    jail = tenancy.jail
    # The kernel may have ended a single call before anybody has looked at its jail.
    met = jail.account.met if cell is None else jail.account.limit_met()
    if met is not None:
        return limit_error(met, jail.account.limits)
    if cell is not None and cell.unmade is not None:
        if jail.account.refused():
            return limit_error("processes", jail.account.limits)
        message = f"the call could not be separated from others: {cell.unmade}"
        return tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable")
    words, live = (jail.last_words, jail.live) if cell is None else (cell.last_words, cell.live)
    if jail.was_replaced:
        hint = "Call again; see which program replaces it."
        return tool_error("E_SANDBOX_DENIED", words.removeprefix("boot: "), name="SandboxDenied", suggestion=hint)
    if not live and words.startswith(("bwrap: ", "launcher: ", "boot: ")):
        return tool_error("E_SANDBOX_UNAVAILABLE", f"the jail could not be made: {words}", name="SandboxUnavailable")
    while_ = "during the call" if live else "while the tool was being loaded"
    said = f"; it said last: {words}" if words else ""
    return tool_error("E_TOOL_CRASHED", f"the tool's process {cause} {while_}{said}", name="ToolCrashed")


def under_way(tenancy: Tenancy) -> list[str] | None:
    """What its jail's account must be watched for: calls by their names in the jail; None when there is nothing."""
    calls = [*list(tenancy.slot.calls), *list(tenancy.abandoned)]
    return calls if calls or tenancy.background else None


def explained(tenancy: Tenancy, error: WorkerError) -> WorkerError:
    """A handler's error, with the wall or the limit that it has met, as far as that can be told at once."""
    if tenancy.network is None:
        error = without_network(error)
    account = tenancy.jail.account
    refused = lacks_processes(error) and account.refused()
    full = tenancy.claim.limit_met() if error.code == "ENOSPC" and tenancy.claim is not None else None
    return with_limit(error, account.limits, refused=refused, counted=account.counts_processes, full=full)


def receipt(tenancy: Tenancy, call: Call, now: float, cause: str | None = None) -> Raw:
    """The receipt of a call that this jail has, or had, until now. `cause`: why it ended without a result."""
    ledger, call_s = tenancy.ledger, now - call.started
    if ledger.is_due(now, call_s):
        ledger.look(now, tenancy.jail.usage())
    network = tenancy.network
    if network is not None:
        reached = [shown(host, port) for host, port in network.reached]
        ledger.network(reached, list(dict.fromkeys(shown(news.host, news.port) for news in network.denied)))
    return ledger.receipt(call_s, cause)


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
    signal_all(tenancy.jail.strays, signal.SIGKILL)
    return True


def rfc3339(seconds: float) -> str:
    """UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"
