"""What workers say: results become answers, questions go to the bus, news to the log.

Everything here comes from a jail, so each frame is checked against what that jail was given: a Violation ends it, or
only the cell of the call that it came from.

Source: sandbox.md section 5 ("Worker frames are hostile"); schemas/WORKER.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from schemas.errors import tool_error
from schemas.frames import Frame, ToolError
from schemas.worker_frames import (
    WORKER_PROTOCOL,
    Answer,
    Ask,
    Cancel,
    Ended,
    Forked,
    LoadFailed,
    Log,
    Progress,
    Ready,
    Result,
    WorkerFrame,
)
from toolhost.calls.answers import Answers
from toolhost.calls.asking import Asking
from toolhost.calls.asks import ended
from toolhost.calls.completions import too_much_pending
from toolhost.calls.denials import with_denial
from toolhost.calls.pending import Work
from toolhost.calls.results import shape
from toolhost.calls.taken import Call
from toolhost.calls.wording import load_error, log_line, progress_frame
from toolhost.jails.cells import Cell, Cells
from toolhost.jails.channel import Violation
from toolhost.jails.pool import MAX_PENDING_PER_JAIL, Action, Pool, Slot
from toolhost.jails.tenancy import LogLine, Tenancy, WorkerNews, explained, receipt, started

#: Results up to this size wait for news of the network; larger ones would be looked through twice (bytes).
SETTLED_BYTES: Final = 65536
#: Progress frames of one call that are passed on (seconds between two).
PROGRESS_S: Final = 0.05
#: Answers that may wait for a worker which does not read (bytes): four of the largest.
MAX_UNREAD: Final = 16 << 20


class Reports:
    """Hears the workers of one tool host's jails. Use from the loop's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        answers: Answers,
        asking: Asking,
        *,
        settle: Callable[[int, Callable[[], None]], None],
        perform: Callable[[list[Action]], None],
        abandon: Callable[[Slot, Call], None],
        end: Callable[[Tenancy, ToolError, str], None],
        send: Callable[[Frame], bool],
        on_log: Callable[[LogLine], None],
        on_worker: Callable[[WorkerNews], None],
    ) -> None:
        """`settle` calls back when the network's news of a jail (by its pid) are here. `perform` does what the pool
        decided, `abandon` lets go of a call whose handler still runs, `end` ends a jail with an error for its calls.
        """
        self._loop = loop
        self._pool = pool
        self._answers = answers
        self._asking = asking
        self._settle = settle
        self._perform = perform
        self._abandon = abandon
        self._break = end
        self._send_frame = send
        self._on_log = on_log
        self._on_worker = on_worker

    def hear(self, tenancy: Tenancy, frame: WorkerFrame) -> None:
        """One frame of a jail's first worker. Raises Violation."""
        if tenancy.cells is not None:
            self._server(tenancy, tenancy.cells, frame)
        elif type(frame) is Result:
            self.result(tenancy, frame)
        else:
            self._worker(tenancy, frame)

    def result(self, tenancy: Tenancy, result: Result) -> None:
        """A call has ended, or goes on after its answer. Raises Violation."""
        slot = tenancy.slot
        call = slot.calls.get(result.call_id)
        if call is None:
            if result.call_id not in tenancy.abandoned:
                raise Violation("the worker sent a result for a call that it does not run")
            tenancy.abandoned.discard(result.call_id)
            tenancy.ended.append(result.call_id)
            if not slot.calls and not tenancy.abandoned and slot.closed:
                tenancy.jail.kill("not needed any more")
            return
        said = result.error
        if said is not None:
            result = msgspec.structs.replace(result, error=explained(tenancy, said))
        now = self._loop.time()
        payload = shape(result, receipt(tenancy, call, now), call.tool)
        work = tenancy.pending.get(result.call_id)
        if result.continues:
            self._go_on(tenancy, call, result, payload, work)
            return
        if work is not None and result.status == "pending":
            raise Violation("the worker said `pending` twice")
        tenancy.pending.pop(result.call_id, None)
        tenancy.ended.append(result.call_id)
        tenancy.jail.account.answered = True
        actions = self._pool.leave(slot, result.call_id, now)
        if tenancy.network is not None and (result.error is not None or memoryview(payload).nbytes <= SETTLED_BYTES):
            # What was reached, and whether it was the sandbox that refused, the proxy says after the fact.
            self._settle(tenancy.jail.pid, lambda: self._explained(tenancy, call, work, result))
        else:
            self._answers.conclude(call, work, payload)
        # A jail that has met one of its own limits may hold what nobody can sweep; a large output harms nobody.
        spent = said is not result.error and result.error is not None and result.error.code == "E_TOOL_LIMIT"
        if call.cell is not None:
            call.cell.leave()  # with all that it has left behind
        elif spent or call.tool.sandbox.isolation == "call":
            actions += self._pool.close(slot)
        if actions:
            self._perform(actions)

    def _go_on(self, tenancy: Tenancy, call: Call, result: Result, payload: Raw, work: Work | None) -> None:
        """The call is answered with `pending`, and stays in its jail until its work has ended."""
        if result.status != "pending" or work is not None:
            raise Violation("the worker sent a result that continues without being the first `pending`")
        slot = tenancy.slot
        begun: Work | ToolError
        if slot.is_full_of_pending:
            begun = too_much_pending(f"this tool's jail, limit {MAX_PENDING_PER_JAIL}")
        else:
            begun = self._answers.completions.begin(call, result.handle or "")
        if isinstance(begun, ToolError):
            self._answers.fail(call, begun)
            (call.cell or tenancy.jail).send(Cancel(call.jail_id))  # nobody will hear of its work
            self._abandon(slot, call)
            if call.cell is not None:
                call.cell.kill("its work has no name")
            return
        tenancy.pending[result.call_id] = begun
        self._answers.finish(call, payload)
        if tenancy.cells is None:  # else it keeps its cell, of which there are so many
            self._perform(self._pool.goes_on(slot, result.call_id))

    def _explained(self, tenancy: Tenancy, call: Call, work: Work | None, result: Result) -> None:
        """Finish a call in a jail with a network, now that everything reached and denied there is known."""
        if result.error is not None and tenancy.network is not None:
            denied = tenancy.network.denied_since(call.denied_before)
            result = msgspec.structs.replace(result, error=with_denial(result.error, denied))
        self._answers.conclude(call, work, shape(result, receipt(tenancy, call, self._loop.time()), call.tool))

    def _worker(self, tenancy: Tenancy, frame: WorkerFrame) -> None:
        jail = tenancy.jail
        if isinstance(frame, Log | Progress):
            call = tenancy.slot.calls.get(frame.call_id or "")
            if isinstance(frame, Progress):
                if call is not None:
                    self.progress(call, frame)
                return
            self._on_log(log_line(tenancy, call, frame))
        elif isinstance(frame, Ask):
            self.ask(tenancy, frame)
        elif isinstance(frame, Ready):
            if jail.live or frame.protocol != WORKER_PROTOCOL:
                raise Violation("the worker said `ready` twice, or for another protocol")
            self._ready(tenancy)
        elif isinstance(frame, LoadFailed):
            if jail.live:
                raise Violation("the worker said `load_failed` after `ready`")
            self._break(tenancy, load_error(jail.name, frame), "could not be loaded")
        else:
            raise Violation("the worker sent a frame that is none of its")

    def _server(self, tenancy: Tenancy, cells: Cells, frame: WorkerFrame) -> None:
        """From the fork server of a jail."""
        if isinstance(frame, Ended):
            cells.ended(frame)
        elif isinstance(frame, Forked):
            cells.forked(frame)
        elif isinstance(frame, Ready) and not tenancy.jail.live and frame.protocol == WORKER_PROTOCOL:
            self._ready(tenancy)
        else:
            raise Violation("the fork server sent a frame that is none of its")

    def ask(self, tenancy: Tenancy, ask: Ask, cell: Cell | None = None) -> None:
        """A handler asks something of the bus; one with a cell of its own, in the name of its own call.

        Raises Violation.
        """
        if "agents" not in tenancy.permissions:
            raise Violation("the worker asked agents, and its tool has not the permission")
        name, slot = ask.call_id, tenancy.slot
        call = slot.calls.get(name)
        if cell is not None and name != cell.call.jail_id:
            raise Violation("the worker asked in the name of a call that it does not run")
        if call is not None and call.state == "running":
            self._asking.ask(call, ask, partial(self._answer, tenancy, cell))
        elif call is not None or name in tenancy.abandoned or name in tenancy.ended:
            self._answer(tenancy, cell, ended(ask))
        else:
            raise Violation("the worker asked in the name of a call that it does not run")

    def _answer(self, tenancy: Tenancy, cell: Cell | None, answer: Answer) -> None:
        jail, worker = tenancy.jail, cell or tenancy.jail
        if jail.dying or worker.dying:
            return
        if worker.unread > MAX_UNREAD:
            message = "the worker does not read what it has asked for"
            if cell is not None:
                cell.broken(Violation(message))
                return
            self._break(tenancy, tool_error("E_TOOL_CRASHED", message, name="ToolProtocolError"), message)
            return
        worker.send(answer)

    def _ready(self, tenancy: Tenancy) -> None:
        tenancy.jail.mark_live()
        if tenancy.grace is not None:
            tenancy.grace.cancel()
            tenancy.grace = None
        if (news := started(tenancy)) is not None:
            self._on_worker(news)

    def progress(self, call: Call, progress: Progress) -> None:
        """A call is under way; not every report is passed on."""
        now = self._loop.time()
        if now - call.progress_at < PROGRESS_S:
            return
        call.progress_at = now
        self._send_frame(progress_frame(call, progress))
