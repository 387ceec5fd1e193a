"""One server: how it is connected, asked for what it offers, and watched for what changes.

`Client.run` is one task from the connection to its end: the SDK's session belongs to the task that opened it.

Source: docs/design/tools.md section 11; requirements MCP-13 to MCP-18.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote

import mcp_types as types
import msgspec
from mcp.client import subscriptions
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.dispatcher import Dispatcher
from mcp.shared.exceptions import MCPError
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, FileUrl, ValidationError

from goondan.features.mcp.jail.protocol import bounds, results
from goondan.features.mcp.jail.protocol.results import Failure, is_gone
from goondan.schemas.bundle.arguments import TOO_MUCH, ArgumentChecker, compile_arguments
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker import servers

#: Pages of one list. A server whose list has no end is cut off here.
MAX_PAGES: Final = 200
#: A list may take so long, all of its pages together (seconds).
LIST_S: Final = 30.0
#: How long a server may take to confirm that it will tell about changes (seconds).
LISTEN_S: Final = 5.0
#: Waits before changes are asked for again, after a server has ended that (seconds).
LISTEN_AGAIN_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
#: The name of the protocol's extension for tasks (calling.py).
TASKS: Final = "io.modelcontextprotocol/tasks"
#: Characters of what a server says about its use.
MAX_INSTRUCTIONS: Final = 16_384

_LISTS: Final[tuple[servers.NewsKind, ...]] = ("tools", "resources", "prompts")
_INFO: Final = types.Implementation(name="goondan", version="1")
_CHANGED: Final[dict[type[BaseModel], servers.NewsKind]] = {
    types.ToolListChangedNotification: "tools",
    types.ResourceListChangedNotification: "resources",
    types.PromptListChangedNotification: "prompts",
}
_EVENTS: Final[dict[type[Any], servers.NewsKind]] = {
    subscriptions.ToolsListChanged: "tools",
    subscriptions.ResourcesListChanged: "resources",
    subscriptions.PromptsListChanged: "prompts",
}


#: A way to the server: a dispatcher of the SDK for as long as the context lasts.
Way = Callable[[], AbstractAsyncContextManager[Dispatcher[Any]]]


class Events(Protocol):
    """What a client tells, and asks of, the worker around it."""

    def changed(self, kind: servers.NewsKind, uri: str | None = None) -> None:
        """Something of the server has changed."""

    def log(self, level: str, message: str) -> None:
        """A line for the log."""

    def login(self, message: str | None) -> None:
        """A person has to log in, or (None) has come back."""

    async def elicit(self, params: types.ElicitRequestParams) -> types.ElicitResult | types.ErrorData:
        """The server asks a person."""

    async def sample(self, params: types.CreateMessageRequestParams) -> types.CreateMessageResult | types.ErrorData:
        """The server asks a model."""


class Client:
    """The connection with one server."""

    def __init__(self, init: servers.ServerInit, events: Events) -> None:
        self._init = init
        self._events = events
        self._session: ClientSession | None = None
        #: How long connecting may take.
        self._connecting: asyncio.Timeout | None = None
        #: Which kinds of lists the server tells about when they change.
        self._watched: set[servers.NewsKind] = set()
        #: The tools of the last listing, by their exports.
        self.exports: dict[str, servers.ServerTool] = {}
        self._of_tasks: set[str] = set()
        self._dispatcher: Dispatcher[Any] | None = None
        self._checkers: dict[str, ArgumentChecker] = {}

    @property
    def session(self) -> ClientSession:
        """The SDK's session. Raises Failure while there is none."""
        if self._session is None:
            raise Failure("E_MCP_GONE", "the server is not connected")
        return self._session

    @property
    def modern(self) -> bool:
        """Whether the server speaks a version without handshake and session."""
        return self.session.protocol_version in MODERN_PROTOCOL_VERSIONS

    def only_as_task(self, tool: servers.ServerTool) -> bool:
        """Whether a tool of a server of the handshake era must be called as a task."""
        capabilities = self.session.server_capabilities
        if tool.name not in self._of_tasks:
            return False
        if self.modern or capabilities is None or capabilities.tasks is None:
            return False
        requests = capabilities.tasks.requests
        return requests is not None and requests.tools is not None and requests.tools.call is not None

    async def call_as_task(self, tool: servers.ServerTool, arguments: dict[str, Any], ttl_ms: int) -> dict[str, Any]:
        """Begin a call that the server is to go on with by itself, and keep the outcome of for `ttl_ms`; the answer,
        which makes a task. Raises MCPError.
        """
        assert self._dispatcher is not None
        params = {"name": tool.name, "arguments": arguments, "task": {"ttl": ttl_ms}}
        # Past the session: it takes nothing but a finished result for an answer to a call.
        return await self._dispatcher.send_raw_request("tools/call", params)

    def check_structured(self, tool: servers.ServerTool, result: dict[str, Any]) -> None:
        """Raise Failure when a result does not fit what its tool has declared."""
        if tool.output_schema is None:
            return
        structured = result.get("structuredContent")
        if structured is None:
            raise Failure("E_MCP_PROTOCOL", f"{tool.name} declares structured content, and returned none")
        if not isinstance(structured, dict):
            return  # only newer versions have other kinds of values, and the session has checked that it may
        checker = self._checkers.get(tool.name) or self._new_checker(tool)
        _, issues = checker.apply(structured)
        if issues and issues[0] != TOO_MUCH:
            told = "; ".join(issues[:3]).replace("args", "the result")
            raise Failure("E_MCP_PROTOCOL", f"{tool.name} returned what does not fit its own schema: {told}")

    def _new_checker(self, tool: servers.ServerTool) -> ArgumentChecker:
        """The checker of a tool's results. A schema that cannot be used refuses none of them."""
        checker = compile_arguments(tool.output_schema, {})
        try:
            checker.compile()
        except GoondanError as error:
            self._events.log("warn", f"results of {tool.name} are not checked: {error.info.message}")
            checker = compile_arguments(None, {})
        for place in checker.unchecked:
            self._events.log("warn", f"results of {tool.name}: the pattern at {place} is not checked: look-around")
        self._checkers[tool.name] = checker
        return checker

    async def run(self, way: Way, connected: Callable[[servers.ServerListing], None]) -> None:
        """Connect, list, and stay until this is cancelled. Raises what the connection fails with."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(servers.CONNECT_S) as self._connecting:
                dispatcher = self._dispatcher = await stack.enter_async_context(way())
                session = await stack.enter_async_context(self._opened(dispatcher))
                await negotiate(session, handshake=self._init.handshake)
                self._session = session
                watcher = await self._watch()
                found = await self.look()
            try:
                connected(found)
                await asyncio.Event().wait()
            finally:
                if watcher is not None:
                    watcher.cancel()

    def hold(self, message: str) -> None:
        """A person is asked: the time to connect stands still (login.Clock)."""
        self._let_connecting_take(None)
        self._events.login(message)

    def go_on(self) -> None:
        """The person has come back: connecting may take its time anew (login.Clock)."""
        self._let_connecting_take(servers.CONNECT_S)
        self._events.login(None)

    def _let_connecting_take(self, seconds: float | None) -> None:
        limit = self._connecting
        if limit is None or self._session is not None or limit.expired():
            return
        limit.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def _opened(self, dispatcher: Dispatcher[Any]) -> ClientSession:
        granted = self._init.grants
        return ClientSession(
            dispatcher=dispatcher,
            client_info=_INFO,
            log_level="info",
            extensions={TASKS: {}},
            elicitation_callback=lambda _, params: self._events.elicit(params),
            sampling_callback=(lambda _, params: self._events.sample(params)) if "sampling" in granted else None,
            list_roots_callback=self._roots if "roots" in granted else None,
            logging_callback=self._logged,
            message_handler=self._told,
        )

    # --- lists

    async def look(self) -> servers.ServerListing:
        """Ask for everything that is wanted. Raises Failure, MCPError, ValidationError, TimeoutError."""
        async with asyncio.timeout(LIST_S):
            return await self._look()

    async def _look(self) -> servers.ServerListing:
        session, init = self.session, self._init
        capabilities = session.server_capabilities or types.ServerCapabilities()
        room = results.Room()
        ttls: list[int] = []
        tools: list[servers.ServerTool] = []
        has_tools = init.tools and capabilities.tools is not None
        has_resources = init.resources and capabilities.resources is not None
        has_prompts = init.prompts and capabilities.prompts is not None
        if has_tools:
            raw = [tool async for page in self._pages(session.list_tools, "tools", ttls) for tool in page.tools]
            tools = results.tools(map(_dumped, raw), init.longest_export, room)
            self._of_tasks = {it.name for it in raw if it.execution and it.execution.task_support == "required"}
        resources: list[servers.ServerResource] = []
        templates: list[servers.ServerResource] = []
        prompts: list[servers.ServerPrompt] = []
        if has_resources:
            pages = self._pages(session.list_resources, "resources", ttls)
            resources = results.resources([_dumped(it) async for page in pages for it in page.resources], "uri", room)
            pages = self._pages(session.list_resource_templates, "resources", ttls)
            found = [_dumped(it) async for page in pages for it in page.resource_templates]
            templates = results.resources(found, "uriTemplate", room)
        if has_prompts:
            pages = self._pages(session.list_prompts, "prompts", ttls)
            prompts = results.prompts([_dumped(it) async for page in pages for it in page.prompts], room)
        # Servers say that they have resources and prompts when they only could: what is empty is not offered.
        tools += results.offered(tools, resources=bool(resources or templates), prompts=bool(prompts))
        for note in room.told():
            self._events.log("warn", note)
        self.exports = {tool.export: tool for tool in tools}
        self._checkers.clear()
        info = session.server_info
        return servers.ServerListing(
            server_name=bounds.line(info.name, bounds.MAX_NAME) if info is not None else "",
            server_version=bounds.line(info.version, bounds.MAX_NAME) if info is not None else "",
            protocol_version=session.protocol_version or "",
            era="modern" if self.modern else "handshake",
            instructions=bounds.text(session.instructions, MAX_INSTRUCTIONS) or None,
            tools=tools,
            resources=resources,
            resource_templates=templates,
            prompts=prompts,
            ttl_ms=min(ttls, default=None),
        )

    async def _pages(self, ask: Callable[..., Any], kind: servers.NewsKind, ttls: list[int]) -> AsyncIterator[Any]:
        """The pages of one list. `ttls` gets for how long each is good, unless changes of it are told."""
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            try:
                page = await ask(params=types.PaginatedRequestParams(cursor=cursor) if cursor is not None else None)
            except MCPError as error:
                # A server that says it has resources need not have templates of them.
                if error.code == types.METHOD_NOT_FOUND and cursor is None:
                    return
                raise
            if self.modern and kind not in self._watched:
                ttls.append(page.ttl_ms)
            yield page
            cursor = page.next_cursor
            if not cursor:
                return
            if cursor in seen:
                self._events.log("warn", "a list of the server repeats itself; it was cut off there")
                return
            seen.add(cursor)
        self._events.log("warn", f"a list of the server has more than {MAX_PAGES} pages; it was cut off there")

    # --- what changes

    async def _watch(self) -> asyncio.Task[None] | None:
        """Have changes told. In the handshake era the server tells by itself."""
        capabilities = self.session.server_capabilities or types.ServerCapabilities()
        offered: set[servers.NewsKind] = set()
        for kind in _LISTS:
            told = getattr(capabilities, kind)
            if getattr(self._init, kind) and told is not None and told.list_changed:
                offered.add(kind)
        if not self.modern or not offered:
            return None
        confirmed = asyncio.Event()
        watcher = asyncio.create_task(self._listen(offered, confirmed))
        try:
            async with asyncio.timeout(LISTEN_S):
                await confirmed.wait()
        except TimeoutError:
            self._events.log("warn", "the server did not confirm that it will tell about changes")
        except asyncio.CancelledError:
            watcher.cancel()
            raise
        return watcher

    async def _listen(self, offered: set[servers.NewsKind], confirmed: asyncio.Event) -> None:
        """Listen, and listen again when the server has ended it."""
        failed = 0
        while True:
            try:
                async with subscriptions.listen(
                    self.session,
                    tools_list_changed="tools" in offered,
                    resources_list_changed="resources" in offered,
                    prompts_list_changed="prompts" in offered,
                ) as subscription:
                    self._watched = {it for it in _LISTS if getattr(subscription.honored, f"{it}_list_changed")}
                    if confirmed.is_set():
                        for kind in sorted(self._watched):  # what happened meanwhile, nobody was told
                            self._events.changed(kind)
                    confirmed.set()
                    async for event in subscription:
                        failed = 0
                        self._changed(event)
            except (MCPError, subscriptions.SubscriptionLost, TimeoutError) as error:
                self._events.log("debug", f"the server does not tell about changes: {bounds.line(str(error), 300)}")
                if isinstance(error, MCPError) and (error.code == types.METHOD_NOT_FOUND or is_gone(error)):
                    return
            finally:
                self._watched = set()
                confirmed.set()
            await asyncio.sleep(LISTEN_AGAIN_S[min(failed, len(LISTEN_AGAIN_S) - 1)])
            failed += 1

    def _changed(self, event: subscriptions.ServerEvent) -> None:
        if isinstance(event, subscriptions.ResourceUpdated):
            self._resource(event.uri)
        else:
            self._events.changed(_EVENTS[type(event)])

    async def _told(self, message: types.ServerNotification | Exception) -> None:
        """A notification outside of a subscription."""
        if isinstance(message, Exception):
            self._events.log("warn", f"a message could not be read: {type(message).__name__}")
        elif isinstance(message, types.ResourceUpdatedNotification):
            self._resource(message.params.uri)
        elif not self.modern:
            kind = _CHANGED.get(type(message))
            if kind is not None:
                self._events.changed(kind)

    def _resource(self, uri: str) -> None:
        if bounds.is_name(uri, bounds.MAX_URI):
            self._events.changed("resource", uri)

    async def _logged(self, params: types.LoggingMessageNotificationParams) -> None:
        data = params.data if isinstance(params.data, str) else _as_json(params.data)
        name = f"{bounds.line(params.logger, 100)}: " if params.logger else ""
        self._events.log(_LEVELS.get(params.level, "info"), f"{name}{bounds.line(data)}")

    def check_granted(self, what: Literal["sampling", "roots"]) -> None:
        """Raise Failure unless the server may ask for it."""
        if what not in self._init.grants:
            raise Failure("E_MCP_INPUT", f"the server asks for {what}, which was not granted")

    def roots(self) -> types.ListRootsResult:
        """The folders that the server is told. Raises Failure when that was not granted."""
        self.check_granted("roots")
        root = self._init.root
        listed = [] if root is None else [types.Root(uri=FileUrl(f"file://{quote(root)}"), name="workdir")]
        return types.ListRootsResult(roots=listed)

    async def _roots(self, context: ClientRequestContext) -> types.ListRootsResult:
        return self.roots()


async def negotiate(session: ClientSession, *, handshake: bool = False) -> None:
    """Find the newest version that both sides speak: without a handshake, else with one. `handshake`: the other way
    round. Raises MCPError, Failure.
    """
    if handshake:
        await _negotiate_old_first(session)
        return
    try:
        await session.discover()
    except MCPError as error:
        if error.code == UNSUPPORTED_PROTOCOL_VERSION and not _speaks_handshake(error):
            raise
        if is_gone(error):
            raise
    except (RuntimeError, ValidationError):
        pass  # it names no version that we speak, or answers something else: no server of the new kind
    else:
        return
    try:
        await session.initialize()
    except MCPError as error:
        if error.code != UNSUPPORTED_PROTOCOL_VERSION:
            raise
        # It answered the question above when we had given up on it, and now speaks as it was asked there.
        await session.discover()
    except RuntimeError as error:
        raise Failure("E_MCP_CONNECT", bounds.line(str(error), 300)) from None


async def _negotiate_old_first(session: ClientSession) -> None:
    try:
        await session.initialize()
    except MCPError as error:
        if is_gone(error):
            raise
    except (RuntimeError, ValidationError):
        pass  # it speaks no version of that kind
    else:
        return
    await session.discover()


def _speaks_handshake(error: MCPError) -> bool:
    supported = error.data.get("supported") if isinstance(error.data, dict) else None
    return not isinstance(supported, list) or any(version in HANDSHAKE_PROTOCOL_VERSIONS for version in supported)


def _as_json(value: Any) -> str:
    """A value of a log line as JSON."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return "(a value that is no JSON)"


def _dumped(item: BaseModel) -> dict[str, Any]:
    return item.model_dump(by_alias=True, exclude_none=True)


_LEVELS: Final = {
    "debug": "debug",
    "info": "info",
    "notice": "info",
    "warning": "warn",
    "error": "error",
    "critical": "error",
    "alert": "error",
    "emergency": "error",
}
