"""What an editor asks of `gdn acp`: the methods of the protocol, the sessions, and their turns.

A session is an instance: its id is what `gdn instance list` shows. A mode is the agent that answers in it; each agent
has a conversation of its own under the session's key.

Tools work in the editor's folder only after a yes, which is asked once for each folder of a bundle. Without one they
work in the folder of the instance.

Live events wait in a bounded queue. What a slow client leaves no room for is dropped, and comes from the stored
messages and the answer instead.

Source: docs/grants.md; docs/approvals.md; https://agentclientprotocol.com/protocol/session-setup and /prompt-turn.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import distributions
from itertools import chain
from typing import Any, Final

import msgspec
from acp import PROTOCOL_VERSION, RequestError
from acp.agent.router import build_agent_router
from acp.connection import Connection
from pydantic import ValidationError

from goondan.features.acp.command import records
from goondan.features.acp.command.rules import prompts, updates
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.cli.attach import Kernel, attach_or_start
from goondan.kernel.cli.console.questions import Questions, Waiting, questions
from goondan.kernel.cli.console.streams import LineStreams
from goondan.kernel.cli.joined import Joined
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules.plain import one_line
from goondan.kernel.cli.session import CANCEL_S, Session, check_together, opened_data, opened_files
from goondan.kernel.cli.state import BundleTarget, absolute_workdir
from goondan.kernel.traces.conversations import instances, messages, turn_messages
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.errors import CODES, GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_AGENT, FilePart
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.worker.grantable import within

#: The longest line that is read (bytes): the files of one message as base64, with its text.
MAX_LINE: Final = 32 << 20
#: The most sessions that are open at once.
MAX_SESSIONS: Final = 256
#: The most sessions in a list, and messages of an agent that are replayed: the newest.
MAX_LISTED, MAX_REPLAYED = 200, 10_000
#: The longest title, and the longest name in an error (characters).
SHOWN: Final = 160
#: The most live events that wait for the client. An agent sends some thirty a second.
MAX_WAITING: Final = 1024
#: The codes of JSON-RPC, and the protocol's for what is not there.
INVALID_PARAMS, INTERNAL_ERROR, NOT_FOUND = -32602, -32603, -32002
#: The answers to whether tools may work in a folder, and whether a call may be made: the protocol's kinds, with words.
FOLDER: Final = {"allow_always": "Always", "allow_once": "Only now", "reject_once": "Not now", "reject_always": "Never"}
CALL: Final = {"allow_once": "Allow this call", "reject_once": "Deny it"}

Result = dict[str, Any]


class Messages(LineStreams):
    """The streams of this process as a transport of the SDK."""

    async def receive(self) -> dict[str, Any] | None:
        """The next message. What is none is answered with an error. None at the end of the input."""
        while (line := await self.read()) is not None:
            try:
                if line.data is None or line.data.strip():
                    return prompts.read_message(line.data, line.size, MAX_LINE)
            except prompts.BadLine as bad:
                await self.send({"jsonrpc": "2.0", "id": None, "error": bad.args[0]})
        return None

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message, and wait until it is written."""
        await self.write(msgspec.json.encode(message))


class Agent:
    """The agent's side of the protocol. `only`: the one agent that answers."""

    def __init__(self, place: BundleTarget, only: str | None, transport: Messages) -> None:
        self.place = place
        self.swarm = Joined(self._find, self._follow)
        self.client = Connection(transport.working(self._handle), transport, listening=False)
        self._route = build_agent_router(self, use_unstable_protocol=True)  # type: ignore[arg-type]
        self._only = only
        self._agents: list[str] = []  # the one that answers first, and the others
        self._servers: set[str] = set()  # the Extensions that are MCP servers
        self._sessions: dict[str, Conversation] = {}
        self._questions = Questions()

    async def leave(self) -> None:
        """The client has gone: turns are cancelled, except those that wait for a person, who can still answer by a
        command.
        """
        asked = {event for waiting in self._questions.waiting() for event in waiting.events}
        await asyncio.gather(*(one.cancel() for one in self._sessions.values() if one.event_id not in asked))

    # --- methods of the protocol, as the SDK's router calls them

    async def initialize(self, **_: Any) -> Result:
        """Whatever version the client has: this one is spoken."""
        able = {"loadSession": True, "promptCapabilities": {"image": True, "embeddedContext": True}}
        able["sessionCapabilities"] = {"list": {}, "resume": {}, "close": {}}
        info = {"name": "goondan", "version": next((one.version for one in distributions(name="goondan-kernel")), "0")}
        return {"protocolVersion": PROTOCOL_VERSION, "agentInfo": info, "agentCapabilities": able, "authMethods": []}

    async def new_session(self, **given: Any) -> Result:
        """A new instance. Its first event makes it."""
        await self.swarm.session()
        session_id = f"{self._agents[0]}/acp-{os.urandom(6).hex()}"
        return {"sessionId": session_id, **self._open(session_id, self._agents[0], **given)}

    async def load_session(self, session_id: str, **given: Any) -> Result:
        """An instance that was there before, with what was said in it."""
        told = await self.resume_session(session_id, **given)
        session = self._session(session_id)
        where = [(self.place.state_dir, one, session.key) for one in {session_id.partition("/")[0], session.agent}]
        stored = [await asyncio.to_thread(messages, *of_agent, last=MAX_REPLAYED) for of_agent in where]
        for update in updates.replayed(sorted(chain(*stored), key=lambda one: str(one["createdAt"])), session.cwd):
            await session.tell(update)
        return told

    async def resume_session(self, session_id: str, **given: Any) -> Result:
        """An instance that was there before."""
        await self.swarm.session()
        agent, _, key = session_id.partition("/")
        known = records.read(self.place.state_dir)["sessions"].get(session_id)
        if agent not in self._agents or not (known or (key and instances(self.place.state_dir, agent, key))):
            raise RequestError(NOT_FOUND, f"there is no session {one_line(session_id, SHOWN)!r}")
        return self._open(session_id, known["agent"] if known and known["agent"] in self._agents else agent, **given)

    async def list_sessions(self, cwd: str | None = None, **_: Any) -> Result:
        """The instances of the agents, the one that was written last first."""
        await self.swarm.session()
        known, found = records.read(self.place.state_dir)["sessions"], []
        for one in await asyncio.to_thread(instances, self.place.state_dir):
            name = f"{one.agent}/{one.instance_key}"
            kept = known.get(name, {"cwd": f"{one.folder}/workspace"})
            if one.agent in self._agents and one.instance_key and cwd in (None, kept["cwd"]):
                title = kept.get("title") or name
                found.append({"sessionId": name, "cwd": kept["cwd"], "title": title, "updatedAt": rfc3339(one.written)})
        return {"sessions": found[:MAX_LISTED]}

    async def close_session(self, session_id: str, **_: Any) -> None:
        """Its turn is cancelled. The instance stays."""
        await self._session(session_id).cancel()
        self._sessions.pop(session_id, None)

    async def set_session_mode(self, session_id: str, mode_id: str, **_: Any) -> None:
        """Another agent answers from the next prompt on."""
        if mode_id not in self._agents:
            raise RequestError(INVALID_PARAMS, f"the modes are {', '.join(self._agents)}")
        self._session(session_id).agent = mode_id

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> Result:
        """One turn."""
        return await self._session(session_id).prompt([block.model_dump(by_alias=True) for block in prompt])

    async def cancel(self, session_id: str, **_: Any) -> None:
        """End the turn of a session, if it has one."""
        await self._session(session_id).cancel()

    # --- inside

    async def _handle(self, method: str, params: Any, is_notification: bool) -> Any:
        # The router would take what is in `_meta` for parameters.
        params = {**params, "_meta": None} if isinstance(params, dict) else params
        try:
            return await self._route(method, params, is_notification)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "params"
            raise RequestError(INVALID_PARAMS, one_line(f"{method}: {where}: {first['msg']}", 300)) from None
        except GoondanError as error:
            info = error.info
            code = INVALID_PARAMS if info.code in ("E_USAGE", "E_FILE_INVALID", "E_SANDBOX_DENIED") else INTERNAL_ERROR
            advice = f" {info.suggestion}" if info.suggestion and info.suggestion != CODES["E_USAGE"] else ""
            raise RequestError(code, f"{info.message} [{info.code}]{advice}", {"code": info.code}) from None

    def _find(self) -> Kernel:
        """A kernel, and what there is in its bundle."""
        place, kernel = self.place, attach_or_start(self.place, ())
        found = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy).checked
        names = sorted({*found.agents, kernel.entry_agent or ""} - {OPERATOR_AGENT, ""})
        first = self._only or kernel.entry_agent
        if first not in names:
            kernel.finish()
            raise fail("E_AGENT_NOT_FOUND", f"the bundle has no agent {first!r}; it has {', '.join(names)}")
        self._agents = [first, *(name for name in names if name != first and not self._only)]
        self._servers = {server.spec.extension for server in found.servers.values()}
        return kernel

    async def _follow(self, session: Session) -> None:
        """Ask the client what the swarm asks a person, as long as this connection to the kernel lasts."""
        self._questions = questions(session)
        await self._questions.follow(self._ask)

    def _ask(self, waiting: Waiting) -> None:
        for session in self._sessions.values():
            session.ask(waiting, self._questions)

    def _open(self, session_id: str, agent: str, cwd: str, mcp_servers: list[Any] | None = None, **_: Any) -> Result:
        """A session that is open from now on; its modes."""
        before = self._sessions.get(session_id)
        if len(self._sessions) >= MAX_SESSIONS if before is None else before.over is not None:
            raise RequestError(prompts.INVALID_REQUEST, f"a prompt is under way, or {MAX_SESSIONS} sessions are open")
        if not cwd.startswith("/"):
            raise fail("E_USAGE", f"the folder {one_line(cwd, SHOWN)!r} is no absolute path")
        session = self._sessions[session_id] = Conversation(self, session_id, agent, absolute_workdir(cwd, self.place))
        records.keep_session(self.place.state_dir, session_id, session.cwd, agent, "")
        if refused := {server.name for server in mcp_servers or ()} - self._servers:
            named = one_line(", ".join(sorted(refused)), SHOWN)
            session.notes.append(f"MCP servers of the editor are not used: {named}. To have them, use `gdn mcp add`.")
        modes = [{"id": name, "name": name} for name in self._agents]
        return {"modes": {"currentModeId": agent, "availableModes": modes}} if len(modes) > 1 else {}

    def _session(self, session_id: str) -> Conversation:
        if session_id not in self._sessions:
            raise RequestError(NOT_FOUND, f"no session {one_line(session_id, SHOWN)!r} is open")
        return self._sessions[session_id]


class Conversation:
    """A session that is open: an instance, and the agent that answers in it now."""

    def __init__(self, side: Agent, session_id: str, agent: str, cwd: str) -> None:
        self._side = side
        self._granted: dict[str, bool] = {}  # what was said of folders, each without links
        self._cancelled = False
        self._session: Session | None = None
        self._asking: dict[str, asyncio.Future[Any]] = {}  # what the client is asked, by a name
        self.id = session_id
        self.key = session_id.partition("/")[2]
        #: The agent that answers, and the editor's folder.
        self.agent = agent
        self.cwd = cwd
        #: What the client is told with the next prompt.
        self.notes: list[str] = []
        #: The prompt that is worked on, and its event once it was sent.
        self.over: asyncio.Future[None] | None = None
        self.event_id = ""

    async def tell(self, update: updates.Update) -> None:
        """Tell the client."""
        await self._side.client.send_notification("session/update", {"sessionId": self.id, "update": update})

    async def prompt(self, blocks: Sequence[dict[str, Any]]) -> Result:
        """One turn. Returns the result of the prompt. Raises GoondanError, RequestError."""
        if self.over is not None:
            raise RequestError(prompts.INVALID_REQUEST, f"{self.id} works on a prompt: wait for its end, or cancel it")
        self.over, self._cancelled = asyncio.get_running_loop().create_future(), False
        try:
            self._session = await self._side.swarm.session()
            told = await self._turn(self._session, blocks)
            return {**told, "stopReason": "cancelled"} if self._cancelled else told
        finally:
            while self._asking:
                self._asking.popitem()[1].cancel()
            self.over.set_result(None)
            self.over, self.event_id = None, ""

    async def cancel(self) -> None:
        """End the turn, if there is one. Returns when it has ended, or has not in time."""
        self._cancelled = True
        for asking in self._asking.values():
            asking.cancel()
        with suppress(GoondanError):  # it has just ended, or the prompt gets the error
            if self._session is not None and self.event_id:
                await self._session.cancel(self.event_id, CANCEL_S)
        if self.over is not None:
            await asyncio.wait({self.over}, timeout=CANCEL_S)

    def ask(self, waiting: Waiting, asked: Questions) -> None:
        """Something is asked in the swarm. If the turn waits for it, the client is asked, once."""
        if self.event_id in waiting.events and waiting.code not in self._asking:
            self._asking[waiting.code] = asyncio.ensure_future(self._permission(waiting, asked))

    # --- inside

    async def _turn(self, session: Session, blocks: Sequence[dict[str, Any]]) -> Result:
        state_dir, agent = self._side.place.state_dir, self.agent
        workdir = None if self._cancelled else await self._workdir(state_dir)
        if workdir is None and self._cancelled:
            return {}
        here = self.cwd if workdir else f"{instance_dir(state_dir, agent, self.key)}/workspace"  # with its links
        said = prompts.read_prompt(blocks, here)
        text = "\n".join(block.text for block in said if block.text)
        files = await asyncio.to_thread(_lay_down, session, said, workdir or os.path.realpath(here))
        records.keep_session(state_dir, self.id, self.cwd, agent, one_line(text, SHOWN))
        while self.notes:
            await self.tell(updates.chunk(updates.CHUNKS["text"], self.notes.pop(0) + "\n\n"))
        if self._cancelled:
            return {}
        self.event_id = event_id = session.new_id()  # from here to the question nothing is waited for
        telling = updates.Telling(event_id, here)
        stored = state_dir, agent, self.key, event_id
        news: asyncio.Queue[RuntimeEvent | None] = asyncio.Queue()

        def hear(event: RuntimeEvent) -> None:
            if news.qsize() < MAX_WAITING:  # else it comes from what is stored
                news.put_nowait(event)

        message = Message(agent, self.key, text, event_id=event_id, workdir=workdir, files=files)
        following = asyncio.ensure_future(self._follow(telling, news, stored))
        try:
            answer = await session.ask(message, listener=hear)
            news.put_nowait(None)
            await following
        finally:
            following.cancel()
        for update in telling.end(answer, await asyncio.to_thread(turn_messages, *stored)):
            await self.tell(update)
        return updates.outcome(answer)

    async def _follow(self, telling: updates.Telling, news: asyncio.Queue[RuntimeEvent | None], stored: Any) -> None:
        while (event := await news.get()) is not None:
            found = await asyncio.to_thread(turn_messages, *stored) if telling.wants_stored(event) else []
            for update in [*telling.stored(found), *telling.hear(event)]:
                await self.tell(update)

    async def _workdir(self, state_dir: str) -> str | None:
        """The editor's folder if tools may work in it, without links: a yes is for the folder that was shown, wherever
        a link leads later. A client that does not say means no. Raises GoondanError.
        """
        folder = absolute_workdir(os.path.realpath(self.cwd), self._side.place)
        granted, shown = {**records.read(state_dir)["folders"], **self._granted}.get(folder), one_line(folder, SHOWN)
        if granted is None:
            said = await self._choose("folder", {"title": f"Let tools work in {shown}?"}, FOLDER)
            granted = said in ("allow_always", "allow_once")
            if said in ("allow_always", "reject_always"):
                records.change(state_dir, lambda kept: kept["folders"].update({folder: granted}))
            if self._cancelled:
                return None
        if not (granted or folder in self._granted):
            self.notes.append(f"Tools do not work in {shown}, as you said. `gdn acp --ask-again` asks again.")
        self._granted[folder] = granted
        return folder if granted else None

    async def _choose(self, name: str, call: Result, answers: Mapping[str, str]) -> str | None:
        """Have a person choose one of the answers, by its kind. None: the client has cancelled, or cannot ask."""
        options = [{"optionId": kind, "name": words, "kind": kind} for kind, words in answers.items()]
        call = {"toolCallId": f"{name}-{os.urandom(4).hex()}", "kind": "other", "status": "pending", **call}
        asked = {"sessionId": self.id, "toolCall": call, "options": options}
        asking = asyncio.ensure_future(self._side.client.send_request("session/request_permission", asked))
        self._asking.setdefault(name, asking)
        await asyncio.wait({asking})
        with suppress(RequestError, LookupError, TypeError):
            said = {} if asking.cancelled() else asking.result()["outcome"]
            return said["optionId"] if said["outcome"] == "selected" and said["optionId"] in answers else None
        return None

    async def _permission(self, waiting: Waiting, asked: Questions) -> None:
        """Ask the client about a call. What it does not answer stays in the list, and is answered by a command."""
        with suppress(GoondanError):  # somebody was quicker, or its turn has ended
            lines = await asked.whole(waiting.code)
            kind = updates.kind_of(waiting.title.partition(" ")[0])
            call = {"title": waiting.title[:SHOWN], "kind": kind, "content": [updates.block("\n".join(lines))]}
            said = await self._choose(f"ask-{waiting.code}", call, CALL) if waiting.yes_or_no else None
            if said is not None:
                await asked.decide(waiting.code, yes=said == "allow_once")
            else:
                await self.tell(updates.chunk(updates.CHUNKS["text"], "\n".join(["", *lines, waiting.command, ""])))


def _lay_down(session: Session, said: Sequence[prompts.Said], folder: str) -> list[FilePart]:
    """The files of a prompt where its event names them: those in it, and the pictures and PDFs of `folder` that it
    names. Raises GoondanError.
    """
    with ExitStack() as closing:
        files = []
        for block in said:
            if block.data is not None:
                files.append(closing.enter_context(opened_data(block.data, block.name)))
            elif block.path is not None:
                with suppress(GoondanError):  # it is another file
                    [file] = closing.enter_context(opened_files([block.path]))
                    if within(os.readlink(f"/proc/self/fd/{file.descriptor}"), folder):  # a link may lead elsewhere
                        files.append(file)
            check_together(files)
        return session.lay_down(files)
