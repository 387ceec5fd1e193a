"""Decides which session a call goes to, and which sessions there are. Pure, with the time as an argument.

There are never more sessions than `max_jails`, and never more of MCP servers than `max_servers`: the two are counted
apart. Closed sessions count, because their processes still live.

Rules.
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
- The host performs the returned actions: start a jail for a session, put calls into it, end it.

Source: docs/design/sandbox.md sections 1 and 5.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from msgspec import Struct

from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.policy.launch_plan import MAX_CALLS
from goondan.toolhost.sessions.session import MAX_CALLS_PER_JAIL, JailSession, Key, agent_of

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
