"""What an editor asks of `gdn acp`: the methods of the protocol, and the sessions.

A session is an instance: its id is what `gdn instance list` shows. A mode is the agent that answers in it; each agent
has a conversation of its own under the session's key.

Source: https://agentclientprotocol.com/protocol/session-setup, /session-list, /session-modes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import acp
from acp import schema
from acp.connection import Connection
from pydantic import BaseModel, ValidationError

from goondan.features.acp.command import records
from goondan.features.acp.command.rules import prompts, updates
from goondan.features.acp.command.swarm import Swarm
from goondan.features.acp.command.turns import Conversation, Turn
from goondan.kernel.cli.console.questions import Questions, questions
from goondan.kernel.cli.output import write
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import Session
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.traces.conversations import instances, messages
from goondan.schemas.bundle import address
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.errors import CODES, GoondanError, fail

#: The most sessions that are open at once. Of more, the one that was used least recently is closed if it is idle.
MAX_SESSIONS: Final = 64
#: The most requests that are worked on at once.
MAX_REQUESTS: Final = 2 * MAX_SESSIONS
#: Sessions in one answer of a list, and messages that are replayed: the newest.
PAGE: Final = 50
MAX_REPLAYED: Final = 10_000

Params = Any
_Handler = Callable[["Server", Params], Awaitable[dict[str, Any] | None]]


class Server:
    """The agent's side of the protocol."""

    def __init__(self, place: BundleTarget, agent: str | None, version: str) -> None:
        self._version = version
        self._swarm = Swarm(place, agent, self._follow)
        self._state_dir = place.state_dir
        self._sessions: dict[str, Conversation] = {}
        self._requests = 0
        self._ending = False
        self._asked: Questions = Questions()
        #: The connection to the client; whoever makes it sets it.
        self.client: Connection

    async def handle(self, method: str, params: Any, is_notification: bool) -> dict[str, Any] | None:
        """Work on a request or a notification. Raises acp.RequestError with what was wrong, in words."""
        model, work = METHODS.get(method, (None, None))
        if model is None or work is None or is_notification is not (method in NOTIFICATIONS):
            if is_notification:
                return None
            raise acp.RequestError(prompts.METHOD_NOT_FOUND, f"there is no method {one_line(method, 100)!r}")
        if self._requests >= MAX_REQUESTS:
            raise acp.RequestError(prompts.INVALID_REQUEST, f"{MAX_REQUESTS} requests are open, and no more may be")
        self._requests += 1
        try:
            return await work(self, model.model_validate({} if params is None else params))
        except ValidationError as error:
            raise acp.RequestError(prompts.INVALID_PARAMS, _problem(method, error)) from None
        except GoondanError as error:
            raise _refusal(error) from None
        except (acp.RequestError, ConnectionError):
            raise
        except Exception as error:
            write(f"gdn acp: {method}: {type(error).__name__}: {one_line(str(error), 300)}", stream=sys.stderr)
            raise acp.RequestError(prompts.INTERNAL_ERROR, f"{method} failed by a mistake of gdn acp") from None
        finally:
            self._requests -= 1

    async def close(self) -> None:
        """End: turns are cancelled, except those that wait for a person. Then the kernel is let go."""
        self._ending = True
        turns = [session.turn for session in self._sessions.values() if session.turn is not None]
        await asyncio.gather(*(turn.leave(self._asked) for turn in turns))

    async def let_go(self) -> None:
        """Let the kernel go."""
        await self._swarm.close()

    # --- methods

    async def initialize(self, params: schema.InitializeRequest) -> dict[str, Any]:
        """Whatever version the client has: this one is spoken."""
        return {
            "protocolVersion": acp.PROTOCOL_VERSION,
            "agentInfo": {"name": "goondan", "title": "Goondan", "version": self._version},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": False, "sse": False},
                "sessionCapabilities": {"list": {}, "resume": {}, "close": {}},
            },
            "authMethods": [],
        }

    async def authenticate(self, params: schema.AuthenticateRequest) -> None:
        """There are no methods."""
        raise fail("E_USAGE", "there is nothing to log in to")

    async def new_session(self, params: schema.NewSessionRequest) -> dict[str, Any]:
        """A new instance. Its first event makes it."""
        agents = await self._swarm.agents()
        session_id = f"{agents[0]}/acp-{os.urandom(6).hex()}"
        session = await self._opened(session_id, agents[0], params)
        await asyncio.to_thread(records.remember_session, self._state_dir, session_id, session.cwd, session.agent)
        return {"sessionId": session_id, **_modes(agents, session.agent)}

    async def load_session(self, params: schema.LoadSessionRequest) -> dict[str, Any]:
        """An instance that was there before, with what was said in it."""
        told = await self.resume_session(params)
        session = self._sessions[params.session_id]
        for update in await asyncio.to_thread(self._replay, session):
            await self._tell(session.id, update)
        return told

    async def resume_session(self, params: schema.LoadSessionRequest | schema.ResumeSessionRequest) -> dict[str, Any]:
        """An instance that was there before."""
        agents = await self._swarm.agents()
        name, key = prompts.session_of(params.session_id)
        known = records.read(self._state_dir).sessions.get(params.session_id)
        there = name in agents and address.is_instance_key(key)
        if not there or (known is None and not instances(self._state_dir, name, key)):
            raise _unknown(params.session_id)
        agent = known.agents[-1] if known is not None and known.agents[-1] in agents else name
        await self._opened(params.session_id, agent, params)
        return _modes(agents, agent)

    async def list_sessions(self, params: schema.ListSessionsRequest) -> dict[str, Any]:
        """The instances of the agents, the one that was written last first."""
        agents = await self._swarm.agents()
        cursor = params.cursor or "0"
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
            raise fail("E_USAGE", "the cursor is none of this list")
        found = [
            one
            for one in await asyncio.to_thread(self._listed, agents)
            if params.cwd is None or one["cwd"] == os.path.normpath(params.cwd)
        ]
        begin = int(cursor)
        more = {"nextCursor": str(begin + PAGE)} if len(found) > begin + PAGE else {}
        return {"sessions": found[begin : begin + PAGE], **more}

    async def close_session(self, params: schema.CloseSessionRequest) -> dict[str, Any]:
        """Its turn is cancelled. The instance stays."""
        session = self._session(params.session_id)
        if session.turn is not None:
            await session.turn.cancel()
        self._sessions.pop(params.session_id, None)
        return {}

    async def set_mode(self, params: schema.SetSessionModeRequest) -> dict[str, Any]:
        """Another agent answers from the next prompt on."""
        session = self._session(params.session_id)
        agents = await self._swarm.agents()
        if params.mode_id not in agents:
            raise fail(
                "E_AGENT_NOT_FOUND", f"no agent {one_line(params.mode_id, 100)!r}; there are {', '.join(agents)}"
            )
        session.agent = params.mode_id
        return {}

    async def prompt(self, params: schema.PromptRequest) -> dict[str, Any]:
        """One turn."""
        session = self._session(params.session_id)
        if self._ending:
            raise fail("E_CANCELLED", "gdn acp is about to end")
        if session.turn is not None:
            message = f"the session {session.id} works on a prompt already: wait for its end, or cancel it"
            raise acp.RequestError(prompts.INVALID_REQUEST, message)
        turn = session.turn = Turn(session, self._swarm, self.client, self._state_dir)
        try:
            blocks = [block.model_dump(by_alias=True, exclude_none=True) for block in params.prompt]
            return await turn.run(blocks)
        finally:
            session.turn = None

    async def cancel(self, params: schema.CancelNotification) -> None:
        """End the turn of a session, if it has one."""
        session = self._sessions.get(params.session_id)
        if session is not None and session.turn is not None:
            await session.turn.cancel()

    # --- inside

    async def _tell(self, session_id: str, update: updates.Update) -> None:
        await self.client.send_notification("session/update", {"sessionId": session_id, "update": update})

    async def _follow(self, session: Session) -> None:
        """Ask the client what the swarm asks a person, as long as this connection to the kernel lasts."""
        self._asked = asked = questions(session)
        watching = asyncio.ensure_future(asked.watch())
        try:
            while True:
                await asked.next_change()
                for waiting in asked.waiting():
                    for one in self._sessions.values():
                        if one.turn is not None:
                            one.turn.asked(waiting, asked)
        finally:
            watching.cancel()

    async def _opened(self, session_id: str, agent: str, params: Any) -> Conversation:
        """A session that is open from now on. Raises GoondanError."""
        if not os.path.isabs(params.cwd) or "\0" in params.cwd:
            raise fail("E_USAGE", "the cwd of a session is an absolute path")
        before = self._sessions.get(session_id)
        if before is not None and before.turn is not None:
            raise fail("E_INSTANCE_BUSY", f"the session {session_id} works on a prompt")
        session = Conversation(session_id, agent, os.path.normpath(params.cwd))
        given = [server.name for server in params.mcp_servers or []]
        refused = [name for name in given if name not in await self._swarm.servers()] if given else []
        if refused:
            named = ", ".join(one_line(name, 60) for name in refused[:10])
            session.notes.append(
                f"The editor's MCP servers are not used ({named}): servers belong to the bundle, where they have their "
                "grants. `gdn mcp add NAME -- COMMAND` adds one."
            )
        self._sessions.pop(session_id, None)
        if len(self._sessions) >= MAX_SESSIONS:
            idle = next((name for name, one in self._sessions.items() if one.turn is None), None)
            if idle is None:
                raise fail("E_OVERLOADED", f"{MAX_SESSIONS} sessions work, and no more may be open")
            del self._sessions[idle]
        self._sessions[session_id] = session
        return session

    def _session(self, session_id: str) -> Conversation:
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise _unknown(session_id)
        self._sessions[session_id] = session  # the last one that was used
        return session

    def _replay(self, session: Conversation) -> list[updates.Update]:
        known = records.read(self._state_dir).sessions.get(session.id)
        agents = dict.fromkeys([prompts.session_of(session.id)[0], *(known.agents if known is not None else [])])
        found = [
            (str(message.get("createdAt")), message)
            for agent in agents
            for message in messages(self._state_dir, agent, session.key, last=MAX_REPLAYED)
        ]
        if len(agents) > 1:
            found.sort(key=lambda one: one[0])
        return list(updates.replayed([message for _, message in found], session.cwd))

    def _listed(self, agents: list[str]) -> list[dict[str, Any]]:
        known = records.read(self._state_dir).sessions
        found = [one for one in instances(self._state_dir) if one.agent in agents and one.instance_key is not None]
        told = []
        for one in found:
            session_id = f"{one.agent}/{one.instance_key}"
            record = known.get(session_id)
            cwd = record.cwd if record is not None else f"{one.folder}/workspace"
            title = {"title": record.title} if record is not None and record.title else {}
            told.append({"sessionId": session_id, "cwd": cwd, "updatedAt": rfc3339(one.written), **title})
        return told


def _modes(agents: list[str], current: str) -> dict[str, Any]:
    """The agents as modes. One agent needs none."""
    if len(agents) == 1:
        return {}
    modes = [{"id": name, "name": name, "description": f"The agent {name} answers"} for name in agents]
    return {"modes": {"currentModeId": current, "availableModes": modes}}


def _unknown(session_id: str) -> acp.RequestError:
    return acp.RequestError(prompts.NOT_FOUND, f"there is no session {one_line(session_id, prompts.SHOWN)!r}")


def _refusal(error: GoondanError) -> acp.RequestError:
    """An error of ours for the client: the words, and what to do."""
    info = error.info
    code = prompts.INVALID_PARAMS if info.code in ("E_USAGE", "E_FILE_INVALID") else prompts.INTERNAL_ERROR
    advice = f" {info.suggestion}" if info.suggestion and info.suggestion != CODES["E_USAGE"] else ""
    text = f"{info.message} [{info.code}]{advice}"
    return acp.RequestError(code, text, {"code": info.code, "helpUrl": info.help_url})


def _problem(method: str, error: ValidationError) -> str:
    """What is wrong with parameters, without what they are."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return one_line(f"{method}: {where}: {first['msg']}" if where else f"{method}: {first['msg']}", 300)


METHODS: Final[Mapping[str, tuple[type[BaseModel], _Handler]]] = {
    "initialize": (schema.InitializeRequest, Server.initialize),
    "authenticate": (schema.AuthenticateRequest, Server.authenticate),
    "session/new": (schema.NewSessionRequest, Server.new_session),
    "session/load": (schema.LoadSessionRequest, Server.load_session),
    "session/resume": (schema.ResumeSessionRequest, Server.resume_session),
    "session/list": (schema.ListSessionsRequest, Server.list_sessions),
    "session/close": (schema.CloseSessionRequest, Server.close_session),
    "session/set_mode": (schema.SetSessionModeRequest, Server.set_mode),
    "session/prompt": (schema.PromptRequest, Server.prompt),
    "session/cancel": (schema.CancelNotification, Server.cancel),
}
NOTIFICATIONS: Final = frozenset({"session/cancel"})
