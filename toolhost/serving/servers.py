"""The agents that are attached to MCP servers: what servers offer, and what agents are told of them.

The session of a server is held as long as somebody is attached (calls/machine.py). This module knows who that is,
passes on what servers say has changed, and remembers of which servers agents have lost the session. A call to such a
server fails until the agent attaches again: a new session knows nothing of the one before, and no call should begin one
unnoticed.

Rules.
- News of one kind goes to an agent at most once in NEWS_S. A server that says the same all the time costs nobody more.
- Whoever was attached when a session ended is told, with the server's last words.

Source: docs/design/tools.md section 11; docs/design/processes.md; docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import AttachedServer, Frame, ToolError
from goondan.schemas.worker import servers, worker_frames
from goondan.schemas.worker.servers import CONNECT_S, NewsKind, ServerListing, ServerNews
from goondan.schemas.worker.tool_host_reports import ServerPhase, ServerState, WorkerNews
from goondan.toolhost.calls import results, untrusted
from goondan.toolhost.calls.call_registry import Call, Listing
from goondan.toolhost.calls.machine import Action, Machine, Wait
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.serving.answers import Answers, Asking
from goondan.toolhost.serving.live import LiveSession

#: Seconds between two pieces of the same news: a model is asked some times a minute.
NEWS_S: Final = 0.25
#: News that waits for its time, of one session: one for each kind, and for so many resources.
MAX_NEWS: Final = 64
#: Lost sessions that are remembered.
MAX_LOST: Final = 4096
#: How long a worker may wait for a person who has to log in (seconds): longer than the page is good.
LOGIN_S: Final = 660.0
#: Characters of a reason that an agent or an operator is told.
MAX_MESSAGE: Final = 1000
#: An agent instance: its agent and its key.
Owner = tuple[str, str]


class Servers:
    """Everything about the servers of one tool host that goes beyond their sessions."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        machine: Machine,
        answers: Answers,
        send: Callable[[Frame], bool],
        on_worker: Callable[[WorkerNews], None],
        asking: Asking,
    ) -> None:
        self._loop = loop
        self._machine = machine
        self._pool = machine.pool
        self._asking = asking
        self._answers = answers
        self._send = send
        self._on_worker = on_worker
        self._listings: dict[int, ServerListing] = {}  # by the numbers of sessions
        self._waiting: dict[int, dict[tuple[NewsKind, str | None], None]] = {}  # news, by the numbers of sessions
        self._lost: dict[tuple[Owner, str], str] = {}  # why, by the agent instance and the prefix
        self._told: dict[int, ServerState] = {}  # the last report, by the numbers of sessions

    # --- attachments

    def refuses(self, call: Call) -> ToolError | None:
        """Why a call of a server cannot be made: the agent has lost its session with it. None: it can be."""
        if isinstance(call, Listing):
            return None
        why = self._lost.get((call.owner, call.tool.name))
        if why is None:
            return None
        return errors.tool_error(servers.GONE, why[:MAX_MESSAGE], name=servers.ERROR_NAME)

    def of(self, owner: Owner, prefix: str | None = None) -> list[JailSession]:
        """The sessions to which an agent instance is attached; of all servers, or of one."""
        return [
            session
            for session in self._pool.sessions()
            if owner in session.attached and prefix in (None, session.key[0])
        ]

    def attached(self) -> list[AttachedServer]:
        """Everybody who is attached, for `hello`."""
        return [
            AttachedServer(session.key[0], agent, instance_key)
            for session in self._pool.sessions()
            for agent, instance_key in session.attached
        ]

    def forget(self, owner: Owner, prefix: str | None = None) -> None:
        """The agent instance is detached: it needs not be told that it has lost a session."""
        for key in [key for key in self._lost if key[0] == owner and prefix in (None, key[1])]:
            del self._lost[key]

    # --- listings

    def run_listing(self, live: LiveSession, call: Listing, now: float) -> list[Action]:
        """A listing has its place. Before `ready` it is answered with that, later at once or by the server, which is
        asked anew only if somebody wants that.
        """
        session = live.session
        if session.login is not None and not live.jail.live:
            return self._has_to_log_in(session, call, session.login, now)
        if live.jail.live and call.attaches and session.number in self._listings:
            return self._listed(live, call, now)
        if live.jail.live:
            live.jail.send(worker_frames.List(int(call.worker_call_id)))
        return []

    def ready(self, live: LiveSession, frame: worker_frames.Ready, now: float) -> list[Action]:
        """A server has said what it offers: whoever asked is answered. Raises Violation."""
        if frame.listing is None:
            raise untrusted.Violation("the MCP worker said `ready` without a listing")
        session = live.session
        self.heard(session, frame.listing)
        self._pool.logged_in(session, now)
        self.report(live)
        calls = [call for call in session.calls.values() if isinstance(call, Listing)]
        return [action for call in calls for action in self._listed(live, call, now)]

    def said(self, live: LiveSession, frame: worker_frames.Listed | worker_frames.News, now: float) -> list[Action]:
        """A server says that something has changed, or what it offers, or why it does not. Raises Violation."""
        if isinstance(frame, worker_frames.News):
            self._changed(live.session, frame)
            return []
        call = live.session.calls.get(str(frame.list_id))
        if not isinstance(call, Listing):
            return []  # nobody waits for it any more
        if frame.listing is not None:
            self.heard(live.session, frame.listing)
            return self._listed(live, call, now)
        message = "the MCP server does not say what it offers"
        if frame.error is not None:
            message = f"{message}: {frame.error.message[:4096]}"
        error = errors.tool_error(servers.NOT_CONNECTED, message, name=servers.ERROR_NAME)
        self._answers.fail(call, error)
        return self._machine.listed(live.session, call, now)

    def heard(self, session: JailSession, listing: ServerListing) -> ServerListing:
        """A server has said what it offers. Returns it with the session's number, by which agents tell sessions
        apart. Raises Violation for what is not JSON: its schemas are somebody hostile's.
        """
        untrusted.check_json(bytes(codec.to_raw(listing)))
        known = self._listings[session.number] = msgspec.structs.replace(listing, session=session.number)
        return known

    def _listed(self, live: LiveSession, call: Listing, now: float) -> list[Action]:
        """Tell an agent what its server offers, and hold the session for it if it attaches."""
        session = live.session
        if call.attaches:
            self._lost.pop((call.owner, session.key[0]), None)
            if not session.once and not session.closed:
                self._pool.attach(session, call.owner)
        self._answers.listed(call, self._listings[session.number])
        actions = self._machine.listed(session, call, now)
        self.report(live)
        return actions

    # --- logins

    def login(self, live: LiveSession, told: worker_frames.LoginNeeded, now: float) -> list[Action]:
        """A person has to log in at a server, or has come back. While one has to, the session stays, and agents are
        told at once. When the person has come back, agents wait for the worker as for any other that connects.
        """
        session = live.session
        if told.error is None:
            self._pool.logged_in(session, now)
            self.report(live)
            return [] if live.jail.live else [Wait(session, CONNECT_S, "load")]
        error = results.completed(told.error)
        error = session.login = msgspec.structs.replace(error, message=error.message[:MAX_MESSAGE])
        self.report(live, last_error=error.message)
        actions: list[Action] = [] if live.jail.live else [Wait(session, LOGIN_S, "load")]
        for call in list(session.calls.values()):
            if isinstance(call, Listing):
                actions += self._has_to_log_in(session, call, error, now)
        return actions

    def _has_to_log_in(self, session: JailSession, call: Listing, error: ToolError, now: float) -> list[Action]:
        """Answer a listing: nothing can be said before somebody has logged in."""
        self._answers.fail(call, error)
        return self._machine.listed(session, call, now)

    # --- what has changed at a server

    def _changed(self, session: JailSession, news: worker_frames.News) -> None:
        """A server says that something of it has changed."""
        if news.kind == "tools":
            self._listings.pop(session.number, None)  # who attaches next is not told the old one
        waiting = self._waiting.get(session.number)
        if waiting is not None:
            if len(waiting) < MAX_NEWS:
                waiting[news.kind, news.uri] = None
            return
        self._waiting[session.number] = {}
        self._tell(session, [(news.kind, news.uri)])
        self._loop.call_later(NEWS_S, self._more_news, session)

    def _more_news(self, session: JailSession) -> None:
        waiting = self._waiting.pop(session.number, None)
        if waiting:
            self._waiting[session.number] = {}
            self._tell(session, waiting)
            self._loop.call_later(NEWS_S, self._more_news, session)

    def _tell(self, session: JailSession, news: Iterable[tuple[NewsKind, str | None]], why: str | None = None) -> None:
        for kind, uri in news:
            payload = codec.to_raw(ServerNews(server=session.key[0], kind=kind, uri=uri, message=why))
            for agent, instance_key in session.attached:
                self._send(Frame(servers.NEWS, to=agent, instance_key=instance_key, payload=payload))

    def lost(self, session: JailSession, why: str) -> None:
        """The session ends, or takes nothing new: who is attached has to attach again."""
        self._waiting.pop(session.number, None)
        self._listings.pop(session.number, None)
        self._asking.drop_server(session.number)
        session.attached = {owner for owner in session.attached if not self._has_another(owner, session)}
        self._tell(session, [("gone", None)], why[:MAX_MESSAGE])
        for owner in session.attached:
            self._lost[owner, session.key[0]] = why
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        session.attached = set()

    def _has_another(self, owner: Owner, session: JailSession) -> bool:
        """Whether an agent instance has attached to a newer session of the same server."""
        return any(other is not session for other in self.of(owner, session.key[0]))

    # --- reports for `gdn mcp list`

    def report(self, live: LiveSession, *, last_error: str | None = None, ended: bool = False) -> None:
        """Tell the supervisor how a server is, if that has changed."""
        session, server = live.session, live.tool.server
        if server is None:
            return
        before = self._told.get(session.number)
        instance = session.key[3]
        listing = self._listings.get(session.number)
        state = ServerState(
            server=session.key[0],
            extension=server.extension,
            transport=server.transport,
            agent=session.agent or None,
            state=_state(session, ended=ended),
            protocol_version=listing.protocol_version if listing is not None else _version(before),
            attached=len(session.attached),
            open_calls=len(session.calls),
            calls=live.calls_made,
            memory_kb=_memory(before) if ended else live.jail.used().memory_kb,
            last_error=last_error or (None if before is None else before.last_error),
        )
        if state == before:
            return
        self._told[session.number] = state
        pid = live.jail.worker_pid or 0
        self._on_worker(
            WorkerNews(
                op="server", pid=pid, tool=session.key[0], instance_key=instance, since=rfc3339(time.time()),
                agent=session.agent or None, server=state,
            )
        )  # fmt: skip
        if ended:
            del self._told[session.number]


def _state(session: JailSession, *, ended: bool) -> ServerPhase:
    if ended:
        return "ended"
    if session.state == "serving":
        return "connected"
    return "starting" if session.login is None else "login"


def _version(before: ServerState | None) -> str:
    return "" if before is None else before.protocol_version


def _memory(before: ServerState | None) -> int:
    return 0 if before is None else before.memory_kb
