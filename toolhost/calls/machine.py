"""Decides about sessions and the calls in them: inputs in, actions out. No jails, sockets, files, loops or clock.

The shell (serving/sessions.py) says what has happened, and performs the actions in their order. Each call is answered
by one action.

`JailPool` decides which session a call goes to, and which sessions there are. There are never more sessions than
`max_jails`, and never more of MCP servers than `max_servers`: the two are counted apart. Closed sessions count, because
their processes still live.

Rules of the pool.
- Calls with the same key share a session, up to MAX_CALLS_PER_JAIL at a time; MAX_CALLS where each call is forked. Work
  that goes on after its call was answered has MAX_PENDING_PER_JAIL places of its own; where each call is forked, it
  keeps the place of its call.
- A call that waits for a launch can be withdrawn like any waiting call. The jail is launched all the same, and serves
  the next call.
- When no session is left for a new key, the session that has been idle longest is closed; while none is idle, calls
  wait. The next session goes to the agent that has the fewest, and among equals to the call that came first: an agent
  with many instances does not keep another one out.
- A root (the message that all work began with) leaves an eighth of the sessions to others. It gets one of that eighth
  only while it has no more sessions in use than would be left. Calls may block for long, and pending work for an hour.
- A session to which agents are attached is never idle, so it is not closed for others.

Rules of the machine.
- A jail that is ended because of one call gives its other calls SIBLING_GRACE_S to finish. After that they run again if
  their export is idempotent; otherwise their outcome is unknown.
- The handler of a cancelled call is asked to stop. After CANCEL_GRACE_S its jail is ended in the same way.
- A call with processes of its own ends by ending these alone, and its jail goes on.
- A server is shared by more than one agent. A call of it that ran out of time is cancelled, and the server goes on,
  unless it does not stop. When a server is not needed any more, its standard input is closed; then it is asked by a
  signal; then its jail is ended.
- A worker that speaks of a call that its session does not run commits a Violation: the shell ends the jail, or that
  call's processes.

Source: docs/design/sandbox.md sections 1 and 5.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolError
from goondan.schemas.worker import servers, worker_frames
from goondan.schemas.worker.servers import CONNECT_S
from goondan.toolhost.calls import asks, results
from goondan.toolhost.calls.call_registry import Call, Listing
from goondan.toolhost.calls.session import MAX_CALLS_PER_JAIL, JailSession, Key, agent_of
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.policy.launch_plan import MAX_CALLS

# --- the pool ---------------------------------------------------------------------------------------------------------

#: A root that has sessions in use leaves one session in so many to others. It leaves none of fewer sessions than that.
LEFT_PART: Final = 8
#: Sessions of MCP servers. Each is a program that somebody else wrote, often with 50 MiB and more, and is held as long
#: as an agent is attached.
MAX_SERVERS: Final = 64


class OfSession(Struct, frozen=True):
    """An action about one session."""

    #: The session of the jail.
    session: JailSession


class OfCall(OfSession, frozen=True):
    """An action about one call in a session."""

    #: The call.
    call: Call


class Start(OfCall, frozen=True):
    """Launch a jail for this session, and then call `launched` or `failed`. `call` is one of those that need it."""


class Assign(OfCall, frozen=True):
    """Run this call in this session, whose jail is there."""


class End(OfSession, frozen=True):
    """End this session's jail; it runs nothing."""


PoolAction = Start | Assign | End


def _root(call: Call) -> str:
    """The root of a call; its agent where no root is known."""
    return call.root_event or call.agent


class JailPool:
    """All sessions, and the calls that wait for a place in one."""

    def __init__(self, max_jails: int, max_servers: int = MAX_SERVERS) -> None:
        self.max_jails = max(1, max_jails)
        self.max_servers = max_servers
        self._by_key: dict[Key, JailSession] = {}
        self._idle: dict[JailSession, None] = {}  # longest idle first
        self._waiting: dict[Key, deque[Call]] = {}  # in order of arrival
        self._sessions: dict[int, JailSession] = {}  # by their numbers
        self._count = 0

    def get(self, number: int) -> JailSession | None:
        """The session with that number; None when it is gone."""
        return self._sessions.get(number)

    # --- the hot path

    def find(self, key: Key) -> JailSession | None:
        """An open session of this key that has room; `enter` takes the room."""
        session = self._by_key.get(key)
        return session if session is not None and session.room > 0 else None

    def enter(self, session: JailSession, worker_call_id: str, call: Call) -> None:
        """The session's jail runs the call now."""
        session.calls[worker_call_id] = call
        if session.idle_since is not None:
            session.idle_since = None
            session.root = _root(call)
            self._idle.pop(session, None)

    def leave(self, session: JailSession, worker_call_id: str, now: float) -> list[PoolAction]:
        """The session's jail has finished with a call, whoever has answered it."""
        session.calls.pop(worker_call_id, None)
        session.pending.discard(worker_call_id)
        if not session.calls:
            if session.closed:
                return [End(session)]
            self._rest(session, now)
        return self._serve() if self._waiting else []

    # --- attachments

    def attach(self, session: JailSession, owner: tuple[str, str]) -> None:
        """An agent instance wants the session to stay."""
        session.attached.add(owner)
        session.idle_since = None
        self._idle.pop(session, None)

    def detach(self, session: JailSession, owner: tuple[str, str], now: float) -> list[PoolAction]:
        """An agent instance does not need the session any more."""
        session.attached.discard(owner)
        if not (session.attached or session.calls or session.launching or session.closed):
            self._rest(session, now)
        return self._serve()

    def logged_in(self, session: JailSession, now: float) -> None:
        """Nobody has to log in for the session any more."""
        session.login = None
        if not (session.attached or session.calls or session.launching or session.closed):
            self._rest(session, now)

    # --- the rest

    def launched(self, session: JailSession, now: float) -> list[PoolAction]:
        """The session's jail is there: its waiting calls may begin."""
        session.state = "loading"
        if session.closed:
            return [End(session)]
        if session.key not in self._waiting:  # they have all been withdrawn
            self._rest(session, now)
        return self._serve()

    def failed(self, session: JailSession) -> tuple[list[Call], list[PoolAction]]:
        """The session's jail could not be launched. Returns the calls that waited for it, for the host to answer."""
        calls = [] if session.closed else list(self._waiting.pop(session.key, ()))
        return calls, self.gone(session)

    def goes_on(self, session: JailSession, worker_call_id: str) -> list[PoolAction]:
        """A call was answered with `pending`, and its work goes on: its place among the calls is free."""
        session.pending.add(worker_call_id)
        return self._serve()

    def place(self, key: Key, call: Call) -> list[PoolAction]:
        """Find a place for a call after `find` found none."""
        self._waiting.setdefault(key, deque()).append(call)
        return self._serve()

    def withdraw(self, key: Key, call: Call) -> None:
        """The call needs no place any more. A call without a place is no error."""
        waiting = self._waiting.get(key)
        if waiting is not None and call in waiting:
            waiting.remove(call)
            if not waiting:
                del self._waiting[key]

    def close(self, session: JailSession) -> list[PoolAction]:
        """Nothing new goes to this session. It ends now if it is idle, and otherwise when its last call leaves."""
        if session.closed or session.number not in self._sessions:
            return []
        self._unlist(session)
        actions: list[PoolAction] = [] if session.calls or session.launching else [End(session)]
        return actions + self._serve()

    def gone(self, session: JailSession) -> list[PoolAction]:
        """The session's jail has ended for good. The host answers its calls."""
        self._unlist(session)
        self._sessions.pop(session.number, None)
        return self._serve()

    def retire(self, before: float) -> list[PoolAction]:
        """End the sessions that have been idle since `before` or longer."""
        actions: list[PoolAction] = []
        for session in list(self._idle):
            if session.idle_since is None or session.idle_since > before:
                break
            actions += self.close(session)
        return actions

    def sessions(self) -> list[JailSession]:
        """Every session, closed ones included."""
        return list(self._sessions.values())

    def idle(self) -> list[JailSession]:
        """The idle sessions, the one idle longest first."""
        return list(self._idle)

    def _serve(self) -> list[PoolAction]:
        """Give places to waiting calls, as far as there are any."""
        actions: list[PoolAction] = []
        if not self._waiting:
            return actions
        short: Counter[bool] = Counter()  # keys that need a session while there is none: of servers, or not
        held = Counter(session.agent for session in self._sessions.values())
        in_use = Counter(
            session.root for session in self._sessions.values() if session not in self._idle and not session.server
        )
        waiting = list(self._waiting)
        while waiting:
            key = min(waiting, key=lambda key: (key not in self._by_key, held[agent_of(key)]))  # the first of equals
            waiting.remove(key)
            calls = self._waiting[key]
            session = self._by_key.get(key)
            if session is None:
                serves = calls[0].tool.server is not None
                if not serves and not self._leaves_enough(in_use, _root(calls[0])):
                    continue
                if self._is_full(serves):
                    short[serves] += 1
                    continue
                session = self._new(key, calls[0])
                in_use[session.root] += not serves
                held[agent_of(key)] += 1
                actions.append(Start(session, calls[0]))
            room = session.room - sum(
                1 for action in actions if isinstance(action, Assign) and action.session is session
            )
            actions += [Assign(session, calls.popleft()) for _ in range(min(room, len(calls)))]
            if not calls:
                del self._waiting[key]
        # Sessions that are already ending make room for the first of these keys.
        for serves in short:
            leaving = sum(
                1 for there in self._sessions.values() if there.server == serves and there.closed and not there.calls
            )
            idle = [session for session in self._idle if session.server == serves]
            for session in idle[: max(0, short[serves] - leaving)]:
                self._unlist(session)
                actions.append(End(session))
        return actions

    def _new(self, key: Key, call: Call) -> JailSession:
        """A session for this key, whose jail is to be launched."""
        server = call.tool.server
        forked = server is None and call.tool.sandbox.isolation == "call"
        self._count += 1
        session = JailSession(key, MAX_CALLS if forked else MAX_CALLS_PER_JAIL, _root(call), self._count)
        if server is not None:
            session.server, session.once, session.background = True, server.mode == "stateless", True
        self._sessions[session.number] = self._by_key[key] = session
        return session

    def _is_full(self, serves: bool) -> bool:
        """Whether there are as many sessions as there may be: of servers, or of all others."""
        most = self.max_servers if serves else self.max_jails
        return sum(1 for session in self._sessions.values() if session.server == serves) >= most

    def _leaves_enough(self, in_use: Counter[str], root: str) -> bool:
        """Whether this root may have one more session in use."""
        left = self.max_jails - in_use.total() - 1
        return left >= self.max_jails // LEFT_PART or in_use[root] <= left

    def _rest(self, session: JailSession, now: float) -> None:
        """The session runs nothing."""
        if session.idle_since is None and not session.attached and session.login is None:
            session.idle_since = now
            self._idle[session] = None

    def _unlist(self, session: JailSession) -> None:
        session.closed = True
        self._idle.pop(session, None)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]


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
    work: results.Work | None = None


class Finish(Struct, frozen=True):
    """The call ends with `payload`, which its worker sent. Its work goes on."""

    #: The call.
    call: Call
    #: The result, as it was sent.
    payload: Raw


class Conclude(OfCall, frozen=True):
    """The call, or the work that went on after it, has ended with its worker's result."""

    #: The work that went on after the call; None when the call itself ends.
    work: results.Work | None
    #: What the worker sent.
    result: worker_frames.Result
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
Action = Answer | Finish | JailAction | Wait | WaitForStop | Again | Start | Assign | End


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
        if not asks.may_ask(op, session.permissions):
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

    def check_continues(self, session: JailSession, call: Call, result: worker_frames.Result) -> None:
        """Raise Violation unless a result that continues is the call's first `pending`."""
        if result.status != "pending" or call.worker_call_id in session.works:
            raise Violation("the worker sent a result that continues without being the first `pending`")

    def goes_on(
        self, session: JailSession, call: Call, begun: results.Work | ToolError, payload: Raw, now: float
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
        self, session: JailSession, call: Call, result: worker_frames.Result, payload: Raw, *, spent: bool, now: float
    ) -> tuple[Conclude, list[Action]]:
        """A call, or the work that went on after it, has ended. `spent`: the call has met a limit of the jail.

        Returns how it ends, and what follows from that. Raises Violation.
        """
        name = call.worker_call_id
        work = session.works.get(name)
        if work is not None and result.status == "pending":
            raise Violation("the worker said `pending` twice")
        session.works.pop(name, None)
        session.ended.append(name)
        freed: list[Action] = [*self.pool.leave(session, name, now)]
        if session.forks:
            freed = [LeaveCall(session, call), *freed]
        elif spent or session.once or (not session.server and call.tool.sandbox.isolation == "call"):
            # A jail that has met one of its own limits may hold something that no sweep can remove.
            freed += self.pool.close(session)
        return Conclude(session, call, work, result, payload), freed

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
