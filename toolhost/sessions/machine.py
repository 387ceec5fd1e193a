"""Decides about sessions and the calls in them: inputs in, actions out. No jails, sockets, files, loops or clock.

The shell (sessions.py) says what has happened, and performs the actions in their order. pool.py decides which call goes
where. Each call is answered by one action.

Rules.
- A jail that is ended because of one call gives its other calls SIBLING_GRACE_S to finish. After that they run again if
  their export is idempotent; otherwise their outcome is unknown.
- The handler of a cancelled call is asked to stop. After CANCEL_GRACE_S its jail is ended in the same way.
- A call with processes of its own ends by ending these alone, and its jail goes on.
- A server is shared by more than one agent. A call of it that ran out of time is cancelled, and the server goes on,
  unless it does not stop. When a server is not needed any more, its standard input is closed; then it is asked by a
  signal; then its jail is ended.
- A worker that speaks of a call that its session does not run commits a Violation: the shell ends the jail, or that
  call's processes.

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolError
from goondan.schemas.worker import servers
from goondan.schemas.worker.servers import CONNECT_S
from goondan.schemas.worker.worker_frames import Result
from goondan.toolhost.calls.asks import may_ask
from goondan.toolhost.calls.call_registry import Call, Listing
from goondan.toolhost.calls.results import Work
from goondan.toolhost.sessions.pool import Assign, End, JailPool, OfCall, OfSession, Start
from goondan.toolhost.sessions.session import JailSession
from goondan.toolhost.untrusted import Violation

#: How long the other calls of a jail may go on when one ran out of time (seconds): most calls take less.
SIBLING_GRACE_S: Final = 5.0
#: How long a cancelled handler may take to stop before its jail is ended (seconds).
CANCEL_GRACE_S: Final = 2.0
#: How long a worker that was told to leave may take (seconds): enough for exit handlers, and short for those who wait.
EXIT_GRACE_S: Final = 0.3
#: How long a server may take to end when its standard input is closed, and then after a signal (seconds). A server that
#: has something to write down does it in this time.
SERVER_EXIT_S: Final = 2.0
SERVER_TERM_S: Final = 1.0
#: How long a tool's module may take to load when none of its calls has a deadline (seconds).
LOAD_TIMEOUT_S: Final = 60.0
#: How often a call gets a new jail because a place of the last one was replaced while the jail was made. An editor that
#: saves replaces a place once, a hostile neighbour for ever.
MAX_MADE: Final = 3

_NOT_NEEDED: Final = "not needed any more"


# --- actions --------------------------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """The call, or the work that went on after it, ends with this error."""

    #: Where it ran; None for a call that has waited.
    session: JailSession | None
    #: The call.
    call: Call
    #: The error.
    error: ToolError
    #: Why its processes end, for the receipt.
    cause: str | None = None
    #: The work that went on after the call; None when the call itself ends.
    work: Work | None = None


class Finish(Struct, frozen=True):
    """The call ends with `payload`, which its worker sent. Its work goes on."""

    #: The call.
    call: Call
    #: The result, as it was sent.
    payload: Raw


class Conclude(OfCall, frozen=True):
    """The call, or the work that went on after it, has ended with its worker's result."""

    #: The work that went on after the call; None when the call itself ends.
    work: Work | None
    #: What the worker sent.
    result: Result
    #: The answer that is made from `result`.
    payload: Raw


class AskToStop(OfCall, frozen=True):
    """Ask the handler of a call to stop."""


class LeaveCall(OfCall, frozen=True):
    """Let the own processes of a call end, together with everything that the call has left behind."""


class EndCall(OfCall, frozen=True):
    """End the own processes of a call."""

    #: Why, for the receipt.
    reason: str


class Leave(OfSession, frozen=True):
    """Ask the worker to leave."""


class Terminate(OfSession, frozen=True):
    """Ask the program of a server to end, by a signal."""


class Kill(OfSession, frozen=True):
    """End the jail. From now on receipts name `reason` as the cause of its end."""

    #: The cause of its end, for receipts.
    reason: str


class Wait(OfSession, frozen=True):
    """Call `waited` after some time. A session waits for one thing at a time; the last request counts."""

    #: How long to wait.
    seconds: float
    #: What the session waits for.
    then: Waiting


class WaitForStop(OfCall, frozen=True):
    """Call `did_not_stop` after so many seconds."""

    #: How long to wait.
    seconds: float


class Again(Struct, frozen=True):
    """Place the call once more."""

    #: The call.
    call: Call


Waiting = Literal["load", "leave", "siblings", "server", "signal"]
#: What is done to one jail, or to the processes of one call in it.
JailAction = AskToStop | LeaveCall | EndCall | Leave | Terminate | Kill
Action = Answer | Finish | Conclude | JailAction | Wait | WaitForStop | Again | Start | Assign | End


class Machine:
    """All sessions of one tool host. `now` is seconds on any one clock."""

    def __init__(self, max_jails: int) -> None:
        self.pool = JailPool(max_jails)
        self._names = 0

    def session_of(self, call: Call) -> JailSession | None:
        """The session in which a call runs; None when it does not run."""
        return self.pool.get(call.session) if call.state == "running" else None

    # --- a call's way in

    def enter(self, session: JailSession, call: Call, now: float) -> None:
        """The session's jail is about to get the call, under the name `call.worker_call_id` that is set here."""
        self._names += 1
        call.worker_call_id = str(self._names)
        call.session = session.number
        call.state = "running"
        call.attempts += 1
        call.started = now
        self.pool.enter(session, call.worker_call_id, call)
        if session.forks:
            session.own[call.worker_call_id] = call
        else:
            session.clean = False
            session.background = session.background or call.export.background

    def not_started(self, session: JailSession, call: Call, why: str, now: float) -> list[Action]:
        """The jail could not get the call."""
        session.own.pop(call.worker_call_id, None)
        message = f"the call could not be started: {why}"
        error = tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable")
        return [Answer(session, call, error), *self.pool.leave(session, call.worker_call_id, now)]

    # --- from workers

    def ready(self, session: JailSession) -> None:
        """Its worker has loaded the tool."""
        session.state = "serving"

    def asker(self, session: JailSession, op: str, name: str, own: Call | None) -> Call | None:
        """The call in whose name a worker asks for `op`; None for a call that is over. `own`: the call whose own
        processes ask.

        Raises Violation.
        """
        if not may_ask(op, session.permissions):
            raise Violation(f"the worker asked for {op!r}, and its tool has not the permission")
        call = session.calls.get(name)
        if own is None or name == own.worker_call_id:
            if call is not None and call.state == "running":
                return call
            if call is not None or name in session.abandoned or name in session.ended:
                return None
        raise Violation("the worker asked in the name of a call that it does not run")

    def late_result(self, session: JailSession, name: str) -> list[Action]:
        """Take a result that nobody waits for. Raises Violation when the session never had such a call."""
        if name not in session.abandoned:
            raise Violation("the worker sent a result for a call that it does not run")
        session.abandoned.discard(name)
        session.ended.append(name)
        if session.closed and not session.calls and not session.abandoned:
            return [Kill(session, _NOT_NEEDED)]
        return []

    def check_continues(self, session: JailSession, call: Call, result: Result) -> None:
        """Raise Violation unless a result that continues is the call's first `pending`."""
        if result.status != "pending" or call.worker_call_id in session.works:
            raise Violation("the worker sent a result that continues without being the first `pending`")

    def goes_on(
        self, session: JailSession, call: Call, begun: Work | ToolError, payload: Raw, now: float
    ) -> list[Action]:
        """A call is answered with `pending`. `begun` is the work that goes on, or why nobody will hear of it."""
        name = call.worker_call_id
        if isinstance(begun, ToolError):
            actions: list[Action] = [
                Answer(session, call, begun),
                AskToStop(session, call),
                *self._abandon(session, call, now),
            ]
            return [*actions, EndCall(session, call, "its work has no name")] if session.forks else actions
        session.works[name] = begun
        if session.forks:  # it keeps its place, of which there are so many
            return [Finish(call, payload)]
        return [Finish(call, payload), *self.pool.goes_on(session, name)]

    def result(
        self, session: JailSession, call: Call, result: Result, payload: Raw, *, spent: bool, now: float
    ) -> list[Action]:
        """A call, or the work that went on after it, has ended. `spent`: the call has met a limit of the jail.

        Raises Violation.
        """
        name = call.worker_call_id
        work = session.works.get(name)
        if work is not None and result.status == "pending":
            raise Violation("the worker said `pending` twice")
        session.works.pop(name, None)
        session.ended.append(name)
        freed = self.pool.leave(session, name, now)
        actions: list[Action] = [Conclude(session, call, work, result, payload)]
        if session.forks:
            actions.append(LeaveCall(session, call))
        elif spent or session.once or (not session.server and call.tool.sandbox.isolation == "call"):
            # A jail that has met one of its own limits may hold something that no sweep can remove.
            freed += self.pool.close(session)
        return [*actions, *freed] if freed else actions

    # --- calls that end before their handlers do

    def run_out(self, call: Call, now: float, *, dying: bool = False) -> list[Action]:
        """The call has reached its deadline. `dying`: its jail is ending anyway."""
        session = self.session_of(call)
        error = tool_error("E_TOOL_TIMEOUT", _ran_out(call, session), name="ToolTimeout")
        if session is None:
            self.pool.withdraw(call.key, call)
            return [Answer(None, call, error)]
        if isinstance(call, Listing):
            return [Answer(session, call, error), *self.listed(session, call, now)]
        if session.server and not dying:
            left = self._abandon(session, call, now)
            return [
                Answer(session, call, error), AskToStop(session, call), *left,
                WaitForStop(session, call, CANCEL_GRACE_S),
            ]  # fmt: skip
        cause = "it ran out of time" if session.forks else "a call ran out of time"
        told = [Answer(session, call, error, cause), *self._abandon(session, call, now)]
        return told if dying else [*told, *self._give_up(session, [call])]

    def cancel(self, call: Call, now: float) -> list[Action]:
        """Nobody wants the call any more: answer it, ask its handler to stop, and make sure that it stops."""
        session = self.session_of(call)
        answer = Answer(session, call, tool_error("E_CANCELLED", "the call was cancelled", name="ToolCancelled"))
        if session is None:
            self.pool.withdraw(call.key, call)
            return [answer]
        left = self._abandon(session, call, now)
        return [answer, AskToStop(session, call), *left, WaitForStop(session, call, CANCEL_GRACE_S)]

    def did_not_stop(self, session: JailSession, call: Call) -> list[Action]:
        """The handler has had CANCEL_GRACE_S to stop."""
        return self._give_up(session, [call]) if call.worker_call_id in session.abandoned else []

    def calls_over_limit(
        self, session: JailSession, error: ToolError, names: Iterable[str], now: float
    ) -> list[Action]:
        """These calls have reached a limit that holds for each call alone."""
        actions: list[Action] = []
        calls = [session.calls[name] for name in names if name in session.calls]
        for call in calls:
            work = session.works.pop(call.worker_call_id, None)
            actions.append(Answer(session, call, error, error.message, work))
            actions += self._abandon(session, call, now)
        return actions + self._give_up(session, calls)

    def call_failed(self, session: JailSession, call: Call, error: ToolError, cause: str, now: float) -> list[Action]:
        """The own processes of a call are of no use any more. The call ends with `error`, unless it has its result."""
        actions: list[Action] = [EndCall(session, call, cause)]
        if call.worker_call_id not in session.calls:
            return actions
        actions.append(Answer(session, call, error, cause, session.works.pop(call.worker_call_id, None)))
        return [*actions, *self.pool.leave(session, call.worker_call_id, now)]

    def _abandon(self, session: JailSession, call: Call, now: float) -> list[Action]:
        """Nobody waits for this call any more, but its handler still runs."""
        session.abandoned.add(call.worker_call_id)
        return [*self.pool.leave(session, call.worker_call_id, now)]

    def _give_up(self, session: JailSession, calls: Sequence[Call]) -> list[Action]:
        """Handlers do not end: end their own processes, or else their jail after a last chance for its other calls."""
        if session.forks:
            return [EndCall(session, call, "it did not end") for call in calls]
        session.rerun = True
        session.reason = tool_error(
            "E_TOOL_OUTCOME_UNKNOWN",
            "the jail was ended because another call in it did not end",
            name="ToolInterrupted",
        )
        closed = self.pool.close(session)
        if session.calls:
            return [*closed, Wait(session, SIBLING_GRACE_S, "siblings")]
        return [*closed, Kill(session, "a call did not end")]

    # --- listings

    def listed(self, session: JailSession, call: Call, now: float) -> list[Action]:
        """A listing of the session has its answer, or nobody waits for it any more."""
        session.ended.append(call.worker_call_id)
        freed = self.pool.leave(session, call.worker_call_id, now)
        return [*freed, *self.pool.close(session)] if session.once else [*freed]

    # --- the end of sessions

    def end(self, session: JailSession) -> list[Action]:
        """End a session that runs nothing and is not needed. A serving worker may run exit handlers."""
        if session.server and session.state == "serving":
            return [Leave(session), Wait(session, SERVER_EXIT_S, "server")]
        if session.abandoned or session.state != "serving":
            return [Kill(session, _NOT_NEEDED)]
        return [Leave(session), Wait(session, EXIT_GRACE_S, "leave")]

    def waited(self, session: JailSession, then: Waiting, tool: str) -> list[Action]:
        """The time that `Wait` named is over."""
        if then == "server":
            return [Terminate(session), Wait(session, SERVER_TERM_S, "signal")]
        if then == "load" and session.server:
            message = f"the MCP server {tool} has not said what it offers in {CONNECT_S:g} s"
            return self.break_off(
                session, tool_error(servers.NOT_CONNECTED, message, name=servers.ERROR_NAME), "was silent"
            )
        if then == "load":
            message = f"the tool {tool} did not load in {LOAD_TIMEOUT_S:g} s"
            return self.break_off(
                session, tool_error("E_TOOL_TIMEOUT", message, name="ToolTimeout"), "did not load in time"
            )
        return [Kill(session, "a call did not end" if then == "siblings" else _NOT_NEEDED)]

    def break_off(self, session: JailSession, error: ToolError, reason: str) -> list[Action]:
        """The session is of no use: all its calls get `error`, and new calls get another jail."""
        failed = self._fail_all(session, error)
        return [Kill(session, reason), *failed, *self.pool.close(session)]

    def gone(
        self, session: JailSession, error: ToolError, *, replaced: bool = False, closing: bool = False
    ) -> list[Action]:
        """The last process of its jail has ended: calls that still run end with `error`, or run again.

        `replaced`: it has run nothing, because one of its places was replaced while the jail was made. `closing`: the
        tool host ends and answers nobody.
        """
        session.state = "gone"
        running = [call for call in session.calls.values() if call.state == "running"]
        if replaced:
            again = [call for call in running if call.attempts < MAX_MADE]
        else:
            again = [call for call in running if session.rerun and call.export.idempotent]
        for call in again:
            call.state = "waiting"
            del session.calls[call.worker_call_id]
        failed = self._fail_all(session, session.reason or error)
        freed = self.pool.gone(session)
        return failed if closing else [*failed, *freed, *(Again(call) for call in again)]

    def _fail_all(self, session: JailSession, error: ToolError) -> list[Action]:
        calls, works = list(session.calls.values()), session.works
        session.calls, session.pending, session.works = {}, set(), {}
        return [Answer(session, call, error, None, works.get(call.worker_call_id)) for call in calls]


def _ran_out(call: Call, session: JailSession | None) -> str:
    """What is said of a call that has reached its deadline."""
    if session is None:
        return f"the call ran out of its {call.allowed_ms} ms before it could start"
    if session.server:
        silent = call.total is not None and call.deadline is not None and call.deadline < call.total
        up = f"it was given up, and the MCP server {call.tool.name} was told"
        if silent:
            return f"there was no news of the call for {call.idle_s:g} s; {up}"
        return f"the call ran out of its {call.allowed_ms} ms; {up}"
    ended = "its processes were" if session.forks else "its jail was"
    return f"the call ran out of its {call.allowed_ms} ms and {ended} ended"
