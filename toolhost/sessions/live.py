"""What a tool host has of one session beside its calls: its jail and all that came with it."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final

from msgspec import Raw

from schemas.errors import tool_error
from schemas.frames import ToolError
from schemas.times import rfc3339
from schemas.worker_frames import WorkerError
from toolhost.calls.call_registry import Call
from toolhost.calls.denials import shown, without_network
from toolhost.calls.messages import SentMessages
from toolhost.jails.cells import Cell, Cells
from toolhost.jails.jail import Jail
from toolhost.jails.network import JailNetwork
from toolhost.jails.sized_workdirs import Claim
from toolhost.limits.decide import lacks_processes, limit_error, with_limit
from toolhost.news import WorkerNews
from toolhost.policy.hiding import Hiding
from toolhost.sessions.receipts import Ledger
from toolhost.sessions.session import Session
from toolhost.signalling import signal_all

#: A jail in which strays are still found after so many looks is ended.
STRAY_LOOKS: Final = 3


class LiveSession:
    """A session with its jail. `hiding` is what its tool must not see, `cells` are the places of its calls, None for a
    jail that runs them in its worker. `claim` is what it may take in its workdir, None where that has no file system of
    its own, `network` what is known of its connections, None where none were granted. `gone` is set when its jail's
    last process has ended.
    """

    __slots__ = (
        "cells", "claim", "gone", "hiding", "jail", "ledger", "messages", "network", "session", "strays", "timer",
    )  # fmt: skip

    def __init__(self, session: Session, jail: Jail, hiding: Hiding, claim: Claim | None = None) -> None:
        self.session = session
        self.jail = jail
        self.hiding = hiding
        self.claim = claim
        self.ledger = Ledger(jail.plan)
        self.cells: Cells | None = None
        self.network: JailNetwork | None = None
        self.messages = SentMessages()
        self.gone = asyncio.Event()
        self.strays = 0
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Wait for nothing any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def started(self) -> WorkerNews | None:
        """News of a worker that has said `ready`; None when its process is not known."""
        jail, session = self.jail, self.session
        if jail.worker_pid is None:
            return None
        first = None if len(session.key) == 2 else next(iter(session.calls.values()), None)  # a shared one is nobody's
        return WorkerNews(
            op="start",
            pid=jail.worker_pid,
            tool=jail.name,
            agent=None if first is None else first.agent,
            instance_key=None if first is None else first.instance_key,
            since=rfc3339(time.time()),
        )

    def ended(self, cause: str) -> WorkerNews | None:
        """News of a worker that is gone; None when its process was never known."""
        pid = self.jail.worker_pid
        return None if pid is None else WorkerNews(op="exit", pid=pid, tool=self.jail.name, cause=cause)

    def ending(self, cause: str, cell: Cell | None = None) -> ToolError:
        """Why a call that was running has failed when its jail has ended, or its cell."""
        jail = self.jail
        # The kernel may have ended a single call before anybody has looked at its jail.
        met = jail.usage.met if cell is None else jail.usage.limit_met()
        if met is not None:
            return limit_error(met, jail.usage.limits)
        if cell is not None and cell.unmade is not None:
            if jail.usage.refused():
                return limit_error("processes", jail.usage.limits)
            message = f"the call could not be separated from others: {cell.unmade}"
            return tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable")
        words, live = (jail.last_words, jail.live) if cell is None else (cell.last_words, cell.live)
        if jail.was_replaced:
            hint = "Call again; see which program replaces it."
            return tool_error("E_SANDBOX_DENIED", words.removeprefix("boot: "), name="SandboxDenied", suggestion=hint)
        if not live and words.startswith(("bwrap: ", "launcher: ", "boot: ")):
            return tool_error(
                "E_SANDBOX_UNAVAILABLE", f"the jail could not be made: {words}", name="SandboxUnavailable"
            )
        while_ = "during the call" if live else "while the tool was being loaded"
        said = f"; it said last: {words}" if words else ""
        return tool_error("E_TOOL_CRASHED", f"the tool's process {cause} {while_}{said}", name="ToolCrashed")

    def explained(self, error: WorkerError) -> WorkerError:
        """A handler's error, with the wall or the limit that it has met, as far as that can be told at once."""
        if self.network is None:
            error = without_network(error)
        usage = self.jail.usage
        refused = lacks_processes(error) and usage.refused()
        full = self.claim.limit_met() if error.code == "ENOSPC" and self.claim is not None else None
        return with_limit(error, usage.limits, refused=refused, counted=usage.keeper.counts_processes, full=full)

    def receipt(self, call: Call, now: float, cause: str | None = None) -> Raw:
        """The receipt of a call that this jail has, or had, until now. `cause`: why it ended without a result."""
        ledger, call_s = self.ledger, now - call.started
        if ledger.is_due(now, call_s):
            ledger.look(now, self.jail.used())
        network = self.network
        if network is not None:
            reached = [shown(host, port) for host, port in network.reached]
            ledger.network(reached, list(dict.fromkeys(shown(news.host, news.port) for news in network.denied)))
        return ledger.receipt(call_s, cause)

    def sweep(self) -> bool:
        """Kill what calls have left behind in an idle jail. False: it comes back, so the jail must end.

        The worker sweeps after its calls; a hostile one may not. So this looks from outside while nothing runs.
        """
        session = self.session
        if session.clean or session.background or session.state != "serving":
            return True
        strays = self.jail.strays()
        if not strays:
            session.clean, self.strays = True, 0
            return True
        self.strays += 1
        if self.strays > STRAY_LOOKS:
            return False
        signal_all(self.jail.strays, signal.SIGKILL)
        return True
