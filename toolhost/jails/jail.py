"""Live jails: the socket, the processes and the end of one, the sandboxes of its calls where it forks them, and one
that answers a single question.

States: `starting` (the worker has not said `ready`) -> `live` -> `dying` (killed, or its process is ending) -> gone.
While it is being launched there is no Jail yet (launch.py).

Rules.
- A jail ends as a whole, by SIGKILL to the first process of its pid namespace. Linux then ends every other process
  there, and the first one is over only when all of them are. `gone` is reported after that, never before.
- Without namespaces (the tier reduced) the jail ends with every process of its process session instead.
- A refused frame ends the jail at once. worker.py reads the jail.

The host decides what a jail is for; a `Jail` knows no calls and no tools.

A call sandbox is a process namespace inside the jail, made by the jail's fork server. Its worker speaks the same
protocol as any other, over a socket that belongs to it alone, so nothing that it says can be about another call.
States: spare (made ahead, was told nothing) -> entered (it has its call) -> dying -> ended (its last process is gone).

Rules.
- A call sandbox runs one call and is told to leave when the call has its result. If it stays, it is ended.
- The fork server ends call sandboxes, and is trusted. If it does not end one, it is broken, and its jail is ended.
- A sandbox is made ahead while a jail is in use. Making one takes milliseconds, and a call does not wait for them.

Source: docs/design/sandbox.md section 5; docs/decisions/030.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from goondan.schemas.bundle.launch import ToolHostSpec, ToolSpec
from goondan.schemas.system.directories import remove_tree
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.worker.worker_frames import WORKER_PROTOCOL, Ended, Exit, Fork, Forked, Init, Kill, WorkerFrame
from goondan.toolhost.calls.untrusted import Violation, output_limit
from goondan.toolhost.jails import worker
from goondan.toolhost.jails.launch import Launched, launch
from goondan.toolhost.jails.worker import Granted, Worker, WorkerOwner
from goondan.toolhost.lookup.jail_request import look_up
from goondan.toolhost.policy import limits, subject
from goondan.toolhost.policy.plan import has_namespaces, plan
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.watch import jail_usage, procfs
from goondan.toolhost.watch.procfs import children, end_session, members, process_stat, process_status, signal_all

#: How long bubblewrap may take to name the jail's first process before it is killed without that (seconds).
STATUS_PATIENCE_S: Final = 2.0
#: bubblewrap's status lines have some hundred bytes; a longer line is not from bubblewrap (bytes).
MAX_STATUS: Final = 4096

#: The exit status of the boot stage when a place of the jail was replaced while it was made (inside/confine.py).
REPLACED: Final = 124


class JailOwner(worker.WorkerOwner, Protocol):
    """The object that a jail reports to, in the loop."""

    def jail_found(self, jail: Jail, pid: int) -> None:
        """The first process of the jail is known: `pid` is its number on the host. Its namespaces are there."""


class Jail(worker.Worker):
    """One jail, from its launch to the end of its last process."""

    def __init__(
        self, launched: Launched, owner: JailOwner, powers: Powers, loop: asyncio.AbstractEventLoop, most: int = 0
    ) -> None:
        """`most` bounds an output (bytes); 0: what the tool is allowed."""
        plan, tool = launched.plan, launched.plan.request.tool
        most = most or output_limit(tool.sandbox.limits.output_mb)
        super().__init__(launched.channel, launched.output, owner, loop, most)
        #: The name of its tool.
        self.name = tool.name
        self.plan = plan
        self._output.javascript = tool.javascript is not None
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
        self.usage = jail_usage.JailUsage(
            tool.sandbox.limits, plan.writable, launched.keeper, launched.niceness, powers, plan.trusted
        )
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

    def used(self) -> limits.Used:
        """What its processes have used: as Linux counts it, or else what was seen of them and what the worker says.

        A few file reads, because the loop asks. The watch looks at jails with many processes.
        """
        cpu_s, memory = self.usage.seen()
        ticks = kilobytes = 0
        if (cpu_s is None or memory is None) and self.worker_pid is not None:
            ticks = sum(map(int, process_stat(self.worker_pid)[11:15]))  # utime, stime, cutime, cstime
            kilobytes = int(process_status(self.worker_pid).get("VmHWM", "0 kB").removesuffix(" kB"))
        return limits.Used(
            int(max(ticks / procfs.TICKS_PER_S, self.usage.cpu.total_s) * 1000) if cpu_s is None else int(cpu_s * 1000),
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
        self._end(
            exit_cause(self._exit_code or 0) if met is None else limits.limit_error(met, self.usage.limits).message
        )


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


# --- the sandboxes of calls -------------------------------------------------------------------------------------------

#: How long a worker that was told to leave may take (seconds): enough for exit handlers.
LEAVE_S: Final = 0.3
#: How long the fork server may take to end a sandbox (seconds): it is one system call, but jails yield to others.
KILL_S: Final = 20.0


class CallSandbox(Worker):
    """The sandbox of one call."""

    def __init__(self, number: int, jail: Jail, owner: WorkerOwner, loop: asyncio.AbstractEventLoop, most: int) -> None:
        """Ask the jail's fork server for a sandbox. Raises OSError when there are no descriptors left."""
        self.number = number
        self.jail = jail
        #: The worker call id of its call; None while it is spare.
        self.name: str | None = None
        #: Why it could not be made.
        self.unmade: str | None = None
        #: Its first process, by its number in the jail; 0 until it is known.
        self.pid = 0
        ours, theirs = socket.socketpair()
        with theirs:
            output, written = os.pipe()
            try:
                ours.setblocking(False)
                os.set_blocking(output, False)
                jail.give(Fork(number), [theirs.fileno(), written])
            except OSError:
                ours.close()
                os.close(output)
                raise
            finally:
                os.close(written)
        super().__init__(ours, output, owner, loop, most)

    def _frames(self, frames: list[WorkerFrame]) -> None:
        if self.name is None:
            self.broken(Violation("a worker spoke before it had a call"))
        else:
            super()._frames(frames)

    def leave(self) -> None:
        """Its call has its result: let it run its exit handlers and end. Safe to call again."""
        if self._reason is None and not self._stream.closed:
            self.send(Exit())
            self._set_timer(LEAVE_S, self.kill, "not needed any more")

    def kill(self, reason: str) -> None:
        """End all its processes. The caller ends its call. Safe to call again."""
        if self._reason is None:
            self.dying, self._reason = True, reason
            self._stream.close()
            self.jail.send(Kill(self.number))
            self._set_timer(KILL_S, self.jail.kill, "did not end a call")

    def ended(self, cause: str, unmade: str | None = None) -> None:
        """Its last process has ended. `unmade`: why it never existed, if it did not."""
        self.dying, self.unmade = True, unmade
        self._end(cause)


class CallSandboxes:
    """All call sandboxes of one jail."""

    def __init__(self, jail: Jail, owner: WorkerOwner, loop: asyncio.AbstractEventLoop, init: Init) -> None:
        """`init` is the first frame of every worker."""
        self._jail = jail
        self._owner = owner
        self._loop = loop
        self._init = init
        self._sandboxes: dict[int, CallSandbox] = {}
        #: The sandboxes of calls, by the names of their calls.
        self.by_name: dict[str, CallSandbox] = {}
        self._spare: CallSandbox | None = None
        self._count = 0
        self._held = False
        #: The secrets that the workers get; None: they get none.
        self.granted: Granted | None = None

    def hold(self) -> None:
        """Let no worker begin until `release`."""
        self._held = True

    def release(self) -> None:
        """The workers may begin."""
        self._held = False
        for sandbox in self._sandboxes.values():
            sandbox.release()

    def enter(self, name: str) -> CallSandbox:
        """A sandbox for the call of this name. Raises OSError when none can be asked for."""
        sandbox, self._spare = self._spare or self._make(), None
        sandbox.name = name
        self.by_name[name] = sandbox
        sandbox.send(self._init)
        return sandbox

    def prepare(self) -> None:
        """Have a sandbox made for the next call, if there is none. Raises OSError when none can be asked for."""
        if self._spare is None:
            self._spare = self._make()

    def processes(self) -> dict[str, int]:
        """The first process of each running call, by the call's name in the jail. Called from any thread."""
        sandboxes = list(self._sandboxes.values())
        return {sandbox.name: sandbox.pid for sandbox in sandboxes if sandbox.name is not None and sandbox.pid}

    def heard(self, frame: WorkerFrame) -> None:
        """The fork server says that a sandbox exists, or is gone. Raises Violation for anything else."""
        if not isinstance(frame, Forked | Ended) or frame.cell not in self._sandboxes:
            raise Violation("the fork server sent a frame that is none of its, or told of a call that it does not run")
        sandbox = self._sandboxes[frame.cell]
        if isinstance(frame, Forked):
            sandbox.pid = frame.pid
            return
        del self._sandboxes[frame.cell]
        if sandbox is self._spare:
            self._spare = None
        self.by_name.pop(sandbox.name or "", None)
        cause = f"could not be started: {frame.message}" if frame.message else exit_cause(frame.status)
        sandbox.ended(cause, frame.message)

    def close(self, cause: str) -> None:
        """The jail is gone, and so is every call sandbox."""
        self._spare = None
        self.by_name.clear()
        self._jail.usage.sandboxes = dict
        while self._sandboxes:
            self._sandboxes.popitem()[1].ended(cause)

    def _make(self) -> CallSandbox:
        self._count += 1
        made = CallSandbox(self._count, self._jail, self._owner, self._loop, self._init.output_limit)
        if self._held:
            made.hold()
        if self.granted is not None:
            made.grant(self.granted)
        self._sandboxes[self._count] = made
        return made


# --- a jail that answers one question ---------------------------------------------------------------------------------

#: What its worker may send (bytes): one answer.
OUTPUT_LIMIT: Final = 1 << 20
Told = TypeVar("Told")


class Visit(ABC, Generic[Told]):
    """The object that such a jail reports to (jail.JailOwner)."""

    def __init__(self) -> None:
        #: The jail, once it is there.
        self.jail: Jail | None = None
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[Told | str] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    async def answer(
        self, tool: ToolSpec, spec: ToolHostSpec, host: subject.HostFacts, powers: Powers, timeout_s: float
    ) -> tuple[Jail, Told | str]:
        """The jail of the tool, which is gone by then, and its answer, or in words why there is none.

        Raises GoondanError when no such jail can be made, TimeoutError, and what `ask` raises.
        """
        launched = await launch(lambda: plan(look_up(tool, None, spec, host, powers), host), powers)
        loop = asyncio.get_running_loop()
        jail = self.jail = Jail(launched, self, powers, loop, OUTPUT_LIMIT)
        try:
            async with asyncio.timeout(timeout_s):
                self.ask(jail, tool)
                return jail, await self._told
        finally:
            jail.kill("the visit is over")
            await self._over

    @abstractmethod
    def ask(self, jail: Jail, tool: ToolSpec) -> None:
        """Tell the worker what to do. May raise OSError."""

    def init(self, jail: Jail, tool: ToolSpec, granted: dict[str, str]) -> Init:
        """The worker's first frame. `granted` are variables."""
        paths = jail.plan.request.import_paths
        return Init(WORKER_PROTOCOL, tool.name, jail.plan.request.entry, granted, import_paths=paths, jailed=True)

    @abstractmethod
    def hear(self, jail: Jail, frame: WorkerFrame) -> None:
        """Handle a frame of the jail's worker, or of the worker of a call in it; `tell` the answer."""

    @abstractmethod
    def describe_end(self, jail: Jail, cause: str) -> str:
        """In words: how the jail ended without an answer."""

    def tell(self, what: Told | str) -> None:
        """Take this as the answer, unless there is one already."""
        if not self._told.done():
            self._told.set_result(what)

    def jail_found(self, jail: Jail, pid: int) -> None:
        """It has no network."""

    def worker_frames(self, worker: Worker, frames: list[WorkerFrame]) -> None:
        if self.jail is not None:
            for frame in frames:
                self.hear(self.jail, frame)

    def worker_broken(self, worker: Worker, violation: Violation) -> None:
        self.tell(str(violation))

    def worker_printed(self, worker: Worker, text: str) -> None:
        """Nothing to do: the worker's last words hold the last line, and nobody needs the others."""

    def worker_gone(self, worker: Worker, cause: str) -> None:
        if isinstance(worker, Jail):
            self.tell(self.describe_end(worker, cause))
            self._over.set_result(None)
        elif worker.last_words:
            self.tell(f"{worker.last_words} ({cause})")
