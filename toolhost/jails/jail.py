"""One live jail: its socket, its processes, its end.

States: `starting` (the worker has not said `ready`) -> `live` -> `dying` (killed, or its process is ending) -> gone.
While it is being launched there is no Jail yet (launch.py).

Rules.
- A jail ends as a whole, by SIGKILL to the first process of its pid namespace. Linux then ends every other process
  there, and the first one is over only when all of them are. `gone` is reported after that, never before.
- Without namespaces (the tier reduced) the jail ends with every process of its process session instead.
- A refused frame ends the jail at once. worker.py reads the jail.

The host decides what a jail is for; this module knows no calls and no tools.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from goondan.schemas.system.trees import remove_tree
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.toolhost.jails import worker
from goondan.toolhost.jails.launch import Launched
from goondan.toolhost.limits.decide import Used, limit_error
from goondan.toolhost.policy.plan import has_namespaces
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.jail_usage import JailUsage
from goondan.toolhost.watch.processes import children, end_session, members, process_stat, process_status, signal_all

#: How long bubblewrap may take to name the jail's first process before it is killed without that (seconds).
STATUS_PATIENCE_S: Final = 2.0
#: bubblewrap's status lines have some hundred bytes; a longer line is not from bubblewrap (bytes).
MAX_STATUS: Final = 4096

#: The exit status of the boot stage when a place of the jail was replaced while it was made (inside/confine.py).
REPLACED: Final = 124

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class JailOwner(worker.WorkerOwner, Protocol):
    """The object that a jail reports to, in the loop."""

    def jail_found(self, jail: Jail, pid: int) -> None:
        """The first process of the jail is known: `pid` is its number on the host. Its namespaces are there."""


class Jail(worker.Worker):
    """One jail, from its launch to the end of its last process."""

    def __init__(
        self,
        launched: Launched,
        owner: JailOwner,
        powers: Powers,
        loop: asyncio.AbstractEventLoop,
        *,
        output_limit: int,
        name: str,
    ) -> None:
        super().__init__(launched.channel, launched.output, owner, loop, output_limit)
        plan = launched.plan
        #: The name of its tool.
        self.name = name
        self.plan = plan
        self._output.javascript = plan.request.tool.javascript is not None
        self.pid = launched.pid
        self.uid = launched.uid
        self.unmapped = launched.unmapped
        #: Whether its last process has ended.
        self.gone = False
        #: The worker's process here on the host, once it is known.
        self.worker_pid: int | None = None
        self._jail_owner = owner
        self._powers = powers
        self._reduced = not has_namespaces(plan.tier)
        limits = plan.request.tool.sandbox.limits
        self.usage = JailUsage(limits, plan.writable, launched.keeper, launched.niceness, powers, plan.trusted)
        if self._reduced:
            self.usage.view = procfs.View("/proc", members=lambda: members(launched.pid))
        self._pidfd = launched.pidfd
        self._init_pid = 0
        self._init_pidfd = -1
        #: Send a frame with descriptors at once.
        self.give = self._stream.give
        self._status = launched.status
        self._status_data = b""
        self._exit_code: int | None = None
        loop.add_reader(self._status, self._status_readable)
        loop.add_reader(self._pidfd, self._exited)

    # --- the worker

    def mark_live(self) -> None:
        """The worker has said `ready`; find out its process id on this host."""
        super().mark_live()
        if self._init_pidfd < 0 and self._status >= 0:
            self._status_readable()  # it came before `ready`, but the loop may see the two in any order
        if self._init_pidfd >= 0:
            self.worker_pid = next(iter(children(self._init_pid)), None)
        elif self._reduced:
            self.worker_pid = self.pid

    def orphans(self) -> list[int]:
        """Processes of the jail besides its first one and the worker, by their numbers on this host; children first.

        A few file reads: for idle jails only. A descendant shows once the processes above it are gone.
        """
        if self.worker_pid is None or self.dying:
            return []
        if self._reduced:
            return [pid for pid in members(self.pid) if pid != self.pid]
        if self._init_pidfd < 0:
            return []
        return [pid for pid in children(self._init_pid) if pid != self.worker_pid] + children(self.worker_pid)

    def processes(self) -> list[int]:
        """Every process of the jail, its first one included, as this host counts them."""
        if self._reduced:
            return members(self.pid)
        return [] if self.usage.view is None else procfs.outer_processes(self.usage.view)

    def used(self) -> Used:
        """What its processes have used: as Linux counts it, or else what was seen of them and what the worker says.

        A few file reads, because the loop asks. The watch looks at jails with many processes.
        """
        cpu_s, memory = self.usage.seen()
        ticks = kilobytes = 0
        if (cpu_s is None or memory is None) and self.worker_pid is not None:
            ticks = sum(map(int, process_stat(self.worker_pid)[11:15]))  # utime, stime, cutime, cstime
            kilobytes = int(process_status(self.worker_pid).get("VmHWM", "0 kB").removesuffix(" kB"))
        return Used(
            int(max(ticks / _TICKS_PER_S, self.usage.cpu.total_s) * 1000) if cpu_s is None else int(cpu_s * 1000),
            max(kilobytes, self.usage.peak >> 10) if memory is None else memory >> 10,
        )

    @property
    def was_replaced(self) -> bool:
        """Whether it ended before it ran anything, because one of its places was replaced."""
        return not self.live and self._exit_code == REPLACED and self.last_words.startswith("boot: ")

    # --- the end

    def _status_readable(self) -> None:
        try:
            data = os.read(self._status, MAX_STATUS)
        except (BlockingIOError, InterruptedError):
            return
        if data:
            *lines, rest = (self._status_data + data).split(b"\n")
            self._status_data = rest
            for line in lines:
                self._status_line(line)
        if not data or len(self._status_data) > MAX_STATUS:
            self._close_status()

    def _close_status(self) -> None:
        if self._status >= 0:
            self._loop.remove_reader(self._status)
            os.close(self._status)
            self._status = -1

    def _status_line(self, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=_BwrapStatus)
        except DECODE_ERRORS:
            return
        if told.exit_code is not None:
            self._exit_code = told.exit_code
        if told.child_pid is not None and self._init_pidfd < 0 and not self.gone:
            self._found_init(told.child_pid)

    def _found_init(self, pid: int) -> None:
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            if process_stat(pid)[1:2] != [b"%d" % self.pid]:
                os.close(pidfd)  # it has ended meanwhile, and the number may be somebody else's
                return
            self._init_pid, self._init_pidfd = pid, pidfd
            self.usage.view = procfs.by_namespace(pid)
            if self._reason is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            else:
                self._jail_owner.jail_found(self, pid)

    def kill(self, reason: str) -> None:
        """End the jail as a whole. The caller ends its calls. Safe to call again."""
        if self.gone or self._reason is not None:
            return
        self.dying = True
        self._reason = reason
        self._stream.close()
        with suppress(ProcessLookupError):
            if self._init_pidfd >= 0:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
                self.usage.hasten()
            elif self._status < 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                # Without its child's number: if bubblewrap were killed now, that child could wait for ever.
                self._set_timer(STATUS_PATIENCE_S, self._kill_outside)

    def _kill_outside(self) -> None:
        if self._init_pidfd < 0 and not self.gone:
            signal_all(lambda: children(self.pid)[:1], signal.SIGKILL)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self) -> None:
        """bubblewrap has ended. The jail has ended only when its first process has ended, too."""
        if self._status >= 0:
            self._status_readable()  # the exit code may still be there
        self._loop.remove_reader(self._pidfd)
        if self._reduced:
            end_session(self.pid)
        with suppress(ChildProcessError):  # somebody else in this process has reaped it
            _, wait_status = os.waitpid(self.pid, 0)
            if self._exit_code is None:
                code = os.waitstatus_to_exitcode(wait_status)
                self._exit_code = 128 - code if code < 0 else code
        self.dying = True
        if self._init_pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            self._loop.add_reader(self._init_pidfd, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self.gone:
            return
        self.gone = True
        if self.uid is not None:
            self._powers.uids.give_back(self.uid)
        self.usage.close()
        if (private := self.plan.private) is not None:
            self._powers.offload.remove(lambda: remove_tree(private))
        if self._init_pidfd >= 0:
            self._loop.remove_reader(self._init_pidfd)
            os.close(self._init_pidfd)
        os.close(self._pidfd)
        self._close_status()
        met = self.usage.met
        self._end(exit_cause(self._exit_code or 0) if met is None else limit_error(met, self.usage.limits).message)


class _BwrapStatus(msgspec.Struct, rename="kebab"):
    #: The first process of the jail.
    child_pid: int | None = None
    #: How it ended; None: it runs.
    exit_code: int | None = None


def exit_cause(code: int) -> str:
    """An exit status in words; bubblewrap reports a signal as 128 plus its number."""
    if code > 128:
        with suppress(ValueError):
            return f"ended by {signal.Signals(code - 128).name}"
    return f"exited with status {code}"
