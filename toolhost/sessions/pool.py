"""Which session a call goes to, and which sessions there are: pure, with the time as an argument.

There are never more sessions than `max_jails`, closed ones included, because their processes still live.

Rules.
- Calls with the same key share a session, up to MAX_CALLS_PER_JAIL at a time; MAX_CALLS where each is forked. Work that
  goes on after its call was answered has places of its own, MAX_PENDING_PER_JAIL of them; where each is forked it
  stays in its own.
- A call that waits for a launch is an ordinary waiting call: it can be withdrawn for nothing. The jail comes anyway,
  and is there for the next one.
- When no session is left for a new key, the idle session that was used longest ago is closed; while none is idle,
  calls wait. The next session goes to the agent that has the fewest, and among equals to who came first: an agent with
  many instances does not keep another one out.
- One root (the message that it all began with) leaves an eighth of the sessions: there, nobody gets a further one who
  has more in use than would be left. Calls may block for long, and pending work for an hour.
- The host performs what is returned: start a jail for a session, put calls into it, end it.

Source: docs/design/sandbox.md sections 1 and 5.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from msgspec import Struct

from toolhost.calls.call_registry import Call
from toolhost.policy.nested import MAX_CALLS
from toolhost.sessions.session import MAX_CALLS_PER_JAIL, JailSession, Key, agent_of

#: One session in so many is left by whoever has some in use. Of fewer sessions than that none is.
LEFT_PART: Final = 8


class Start(Struct, frozen=True):
    """Launch a jail for this session, and say `launched` or `failed`. `call` is one of those that need it."""

    session: JailSession
    call: Call


class Assign(Struct, frozen=True):
    """Run this call in this session, which has been launched."""

    session: JailSession
    call: Call


class End(Struct, frozen=True):
    """End this session's jail; it runs nothing."""

    session: JailSession


PoolAction = Start | Assign | End


def _root(call: Call) -> str:
    """Whose work a call is: what it began with, or its agent where nobody said that."""
    return call.root_event or call.agent


class Pool:
    """All sessions, and the calls that wait for one."""

    def __init__(self, max_jails: int) -> None:
        self.max_jails = max(1, max_jails)
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
        """An open session of this key with room; mark it with `enter`."""
        session = self._by_key.get(key)
        return session if session is not None and session.room > 0 else None

    def enter(self, session: JailSession, worker_call_id: str, call: Call) -> None:
        """The call is now run by the session's jail."""
        session.calls[worker_call_id] = call
        if session.idle_since is not None:
            session.idle_since = None
            session.root = _root(call)
            self._idle.pop(session, None)

    def leave(self, session: JailSession, worker_call_id: str, now: float) -> list[PoolAction]:
        """The session's jail is through with a call (whoever has answered it)."""
        session.calls.pop(worker_call_id, None)
        session.pending.discard(worker_call_id)
        if not session.calls:
            if session.closed:
                return [End(session)]
            self._rest(session, now)
        return self._serve()

    # --- the rest

    def launched(self, session: JailSession, now: float) -> list[PoolAction]:
        """The session's jail is there: its calls may begin."""
        session.state = "loading"
        if session.closed:
            return [End(session)]
        if session.key not in self._waiting:  # they have all been withdrawn
            self._rest(session, now)
        return self._serve()

    def failed(self, session: JailSession) -> tuple[list[Call], list[PoolAction]]:
        """The session's jail could not be launched: the calls that have waited for it, which are the host's affair."""
        calls = [] if session.closed else list(self._waiting.pop(session.key, ()))
        return calls, self.gone(session)

    def goes_on(self, session: JailSession, worker_call_id: str) -> list[PoolAction]:
        """A call was answered with `pending`, and its work goes on: its place among the calls is free."""
        session.pending.add(worker_call_id)
        return self._serve()

    def place(self, key: Key, call: Call) -> list[PoolAction]:
        """Find a place for a call that `find` had none for."""
        self._waiting.setdefault(key, deque()).append(call)
        return self._serve()

    def withdraw(self, key: Key, call: Call) -> None:
        """The call needs no place any more. No matter if it has none."""
        waiting = self._waiting.get(key)
        if waiting is not None and call in waiting:
            waiting.remove(call)
            if not waiting:
                del self._waiting[key]

    def close(self, session: JailSession) -> list[PoolAction]:
        """Nothing new goes to this session. End it now if it is idle; else `leave` does with its last call."""
        if session.closed or session.number not in self._sessions:
            return []
        self._unlist(session)
        actions: list[PoolAction] = [] if session.calls or session.launching else [End(session)]
        return actions + self._serve()

    def gone(self, session: JailSession) -> list[PoolAction]:
        """The session's jail has ended for good; its calls are the host's affair."""
        self._unlist(session)
        self._sessions.pop(session.number, None)
        return self._serve()

    def retire(self, before: float) -> list[PoolAction]:
        """End what has been idle since `before` or longer."""
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
        """The idle ones, longest idle first."""
        return list(self._idle)

    @property
    def waiting_count(self) -> int:
        """Calls without a place."""
        return sum(map(len, self._waiting.values()))

    def _serve(self) -> list[PoolAction]:
        """Give waiting calls what places there are."""
        actions: list[PoolAction] = []
        if not self._waiting:
            return actions
        short = 0  # keys that need a session while there is none
        held = Counter(session.agent for session in self._sessions.values())
        in_use = Counter(session.root for session in self._sessions.values() if session not in self._idle)
        waiting = list(self._waiting)
        while waiting:
            key = min(waiting, key=lambda key: (key not in self._by_key, held[agent_of(key)]))  # the first of equals
            waiting.remove(key)
            calls = self._waiting[key]
            session = self._by_key.get(key)
            if session is None:
                root = _root(calls[0])
                if not self._leaves_enough(in_use, root):
                    continue
                if len(self._sessions) >= self.max_jails:
                    short += 1
                    continue
                of_a_call = calls[0].tool.sandbox.isolation == "call"
                self._count += 1
                session = JailSession(key, MAX_CALLS if of_a_call else MAX_CALLS_PER_JAIL, root, self._count)
                self._sessions[session.number] = session
                in_use[root] += 1
                held[agent_of(key)] += 1
                self._by_key[key] = session
                actions.append(Start(session, calls[0]))
            room = session.room - sum(
                1 for action in actions if isinstance(action, Assign) and action.session is session
            )
            actions += [Assign(session, calls.popleft()) for _ in range(min(room, len(calls)))]
            if not calls:
                del self._waiting[key]
        # Sessions that are being ended already will serve the first of them.
        leaving = sum(1 for session in self._sessions.values() if session.closed and not session.calls)
        for session in list(self._idle)[: max(0, short - leaving)]:
            self._unlist(session)
            actions.append(End(session))
        return actions

    def _leaves_enough(self, in_use: Counter[str], root: str) -> bool:
        """Whether this root may have one more session in use."""
        left = self.max_jails - in_use.total() - 1
        return left >= self.max_jails // LEFT_PART or in_use[root] <= left

    def _rest(self, session: JailSession, now: float) -> None:
        """The session runs nothing."""
        if session.idle_since is None:
            session.idle_since = now
            self._idle[session] = None

    def _unlist(self, session: JailSession) -> None:
        session.closed = True
        self._idle.pop(session, None)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
