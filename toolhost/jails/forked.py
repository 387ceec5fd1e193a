"""What the calls of a jail that forks them report, each for itself: results, news, and their ends.

The same as reports.py does for the worker of a whole jail, but what one call does wrong ends that call alone.

Source: sandbox.md section 5; docs/decisions/030.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas.frames import ToolError
from schemas.worker_frames import WORKER_PROTOCOL, Ask, LoadFailed, Log, Progress, Ready, Result, WorkerFrame
from toolhost.calls.answers import Answers
from toolhost.calls.results import error_result
from toolhost.calls.taken import Call
from toolhost.calls.wording import load_error, log_line, printed_lines, protocol_error
from toolhost.jails.cells import Cell
from toolhost.jails.channel import Violation
from toolhost.jails.pool import Action, Pool
from toolhost.jails.tenancy import LogLine, Tenancy, ending, receipt


class ForkedCalls:
    """The owner of all cells (cells.Owner). Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        answers: Answers,
        *,
        on_log: Callable[[LogLine], None],
        perform: Callable[[list[Action]], None],
        result: Callable[[Tenancy, Result], None],
        ask: Callable[[Tenancy, Ask, Cell], None],
        progress: Callable[[Call, Progress], None],
    ) -> None:
        """`perform` does what the pool decides; `result`, `ask` and `progress` are for what is honest."""
        self._loop = loop
        self._pool = pool
        self._answers = answers
        self._on_log = on_log
        self._perform = perform
        self._result = result
        self._ask = ask
        self._progress = progress

    def cell_frames(self, cell: Cell, frames: list[WorkerFrame]) -> None:
        """Frames of the worker of one call (cells.Owner)."""
        tenancy: Tenancy = cell.jail.tenant
        for frame in frames:
            try:
                if type(frame) is Result:
                    if cell.call is None or frame.call_id != cell.call.jail_id:
                        raise Violation("the worker sent a result for a call that it does not run")
                    if frame.call_id in tenancy.abandoned:
                        cell.leave()
                        return
                    self._result(tenancy, frame)
                else:
                    self._news(tenancy, cell, frame)
            except Violation as violation:
                cell.broken(violation)
                return

    def cell_broken(self, cell: Cell, violation: Violation) -> None:
        """The worker of one call broke the protocol: that call ends here and now (cells.Owner)."""
        self._fail(cell, protocol_error(violation, "its processes were ended"), str(violation))

    def cell_printed(self, cell: Cell, text: str) -> None:
        """Something came over the standard output or error of one call (cells.Owner)."""
        for line in printed_lines(cell.jail.tenant, text, cell.call):
            self._on_log(line)

    def cell_gone(self, cell: Cell, cause: str) -> None:
        """The last process of one call has ended (cells.Owner)."""
        tenancy: Tenancy = cell.jail.tenant
        call = cell.call
        if call is None:
            return
        tenancy.abandoned.discard(call.jail_id)
        if not cell.jail.dying:  # else all of its calls end alike
            self._fail(cell, ending(tenancy, cause, cell), cause)

    def _fail(self, cell: Cell, error: ToolError, cause: str) -> None:
        """End a call with `error` unless it has its result, and all of its processes; its jail goes on."""
        tenancy: Tenancy = cell.jail.tenant
        call = cell.call
        cell.kill(cause)
        if call is None or call.jail_id not in tenancy.slot.calls:
            return
        work = tenancy.pending.pop(call.jail_id, None)
        told = receipt(tenancy, call, self._loop.time(), cause)
        self._answers.conclude(call, work, error_result(error, call.tool.error_message_limit, told))
        self._perform(self._pool.leave(tenancy.slot, call.jail_id, self._loop.time()))

    def _news(self, tenancy: Tenancy, cell: Cell, frame: WorkerFrame) -> None:
        """From the worker of one call. Whatever it names, it can only speak of that one."""
        if isinstance(frame, Log):
            self._on_log(log_line(tenancy, cell.call, frame))
        elif isinstance(frame, Progress):
            if cell.call is not None and cell.call.jail_id in tenancy.slot.calls:
                self._progress(cell.call, frame)
        elif isinstance(frame, Ask):
            self._ask(tenancy, frame, cell)
        elif isinstance(frame, Ready):
            if cell.live or frame.protocol != WORKER_PROTOCOL:
                raise Violation("the worker said `ready` twice, or for another protocol")
            cell.live = True
        elif isinstance(frame, LoadFailed) and not cell.live:
            self._fail(cell, load_error(cell.jail.name, frame), "could not be loaded")
        else:
            raise Violation("the worker sent a frame that is none of its")
