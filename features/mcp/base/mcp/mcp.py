"""The bundled extension `mcp`: an agent's end of one MCP server. It talks to the tool host; the server is in a jail.

- A stateful server is attached to when the extension is registered, and held until it is unloaded. A stateless one is
  asked at each step what it has. A server that cannot be reached costs its tools, and never the agent.
- What the server says has changed is asked for anew when the next step begins, and so is what is older than the server
  says it is good for.
- A server that has ended is attached to once more when the next step begins. After failures in a row it is left alone
  for a while, which doubles each time. That a person has to log in first is no failure.

Source: docs/mcp.md; requirements MCP-01, MCP-10 to MCP-22, MCP-24.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import Struct

from goondan.agentproc.extensions.dynamic_tools import ServedTool
from goondan.schemas.bundle import address, launch
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker import servers

#: How long a server has when the extension is registered (seconds): less than the extension has itself.
REGISTER_S: Final = 25.0
#: The same when a step begins. A handler may take a minute.
STEP_S: Final = 40.0
#: For how long a server is left alone after a second failure in a row, and at most (seconds).
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 120.0
#: Resources and prompts that the model is told of. All others can still be read by their names.
MAX_TOLD: Final = 200
#: Characters of what a server says about its use, and about one resource or prompt.
MAX_INSTRUCTIONS: Final = 16_000
MAX_TEXT: Final = 1_000
#: How long a call may take when the config does not say (seconds); as in extension.yaml.
TOTAL_S: Final = 600.0
#: It runs before handlers that look at the catalog: they see what the server has now.
FIRST: Final = -1_000_000
#: What a server says has changed, and that is in its lists.
_LISTS: Final = ("tools", "resources", "prompts")


async def register(api: Any, config: dict[str, Any]) -> None:
    """Attach to the server, and offer what it has."""
    if "transport" not in config:
        api.logger.warn("MCP Extension: config is missing")
        return
    settings = read_settings(config)
    server = Server(api, settings)
    api.server.on_news(server.heard)
    api.events.on("extension.cleanup", server.clean_up)
    if settings.stateful:
        await server.refresh(REGISTER_S)
    api.pipelines.mutate("step.tools", server.step_tools, priority=FIRST)
    api.pipelines.mutate("step.blocks", server.step_blocks)


class Settings(Struct, frozen=True):
    """The config, with what it leaves out."""

    #: One session is kept.
    stateful: bool
    #: Whether tools are offered, or patterns of their names.
    tools: bool | list[str]
    #: Whether the model is told the resources.
    resources: bool
    #: Whether the model is told the prompts.
    prompts: bool
    #: Whether the model is told what the server says about its use.
    instructions: bool
    #: How long one call may take (seconds).
    call_s: float


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings of a config that fits its schema."""
    exposed = config.get("expose", {})
    return Settings(
        stateful=servers.holds_server(config),
        tools=exposed.get("tools", False),
        resources=exposed.get("resources", False),
        prompts=exposed.get("prompts", False),
        instructions=config.get("instructions", True),
        call_s=float(config.get("deadlines", {}).get("totalSeconds", TOTAL_S)),
    )


class Server:
    """One server, as this agent knows it."""

    def __init__(self, api: Any, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._name: str = api.extension.metadata.name
        self._listing: servers.ServerListing | None = None
        self._tools: dict[str, tuple[servers.ServerTool, ServedTool]] = {}
        self._blocks: list[dict[str, Any]] = []
        #: Whether this agent holds the server.
        self._attached = False
        #: Whether the server has said that a list has changed.
        self._changed = False
        #: When the list was fetched (the clock's seconds).
        self._fetched = 0.0
        #: Why the server cannot be asked; None while it can.
        self._away: str | None = None
        #: Failures in a row, and when the next try may be made.
        self._failures = 0
        self._not_before = 0.0

    # --- events

    def heard(self, news: servers.ServerNews) -> None:
        """Handle news of the server."""
        if news.kind == "gone":
            self._attached = False
            self._away = news.message or "it has ended"
            self._api.server.gone(self._away)
            self._api.logger.warn(
                f"MCP server {self._api.server.name} has ended: {news.message or 'no reason is known'}"
            )
        elif news.kind in _LISTS:
            self._changed = True
        elif news.uri is not None:
            self._api.events.emit("mcp.resource", {"server": self._name, "uri": news.uri})

    async def clean_up(self, payload: Any) -> None:
        """The extension is unloaded: leave the server."""
        self._api.instance.shared.get(servers.SHARED_RESOURCES, {}).pop(self._api.server.name, None)
        if self._attached:
            self._attached = False
            await self._api.server.detach()

    # --- steps

    async def step_tools(self, ctx: Any) -> Any:
        """Handle `step.tools`: ask the server anew when that is due, and bring the catalog in line with its answer."""
        if self._is_due() and await self.refresh(STEP_S):
            others = [item for item in ctx.tool_catalog if not self._is_own(item)]
            return ctx.replace(tool_catalog=[*others, *(served.item for _, served in self._tools.values())])
        return ctx

    def step_blocks(self, ctx: Any) -> Any:
        """Handle `step.blocks`."""
        blocks = self._blocks
        if self._away is not None:
            text = (
                f"The MCP server {self._api.server.name} cannot be used now, and its tools are not there: {self._away}"
            )
            blocks = [*blocks, {"type": "mcp.unavailable", "text": text[:MAX_TEXT], "source": self._name}]
        return ctx.replace(blocks=[*ctx.blocks, *blocks]) if blocks else ctx

    def _is_own(self, item: Any) -> bool:
        return isinstance(item, launch.CatalogItem) and item.source.type == "mcp" and item.source.name == self._name

    def _is_due(self) -> bool:
        now = self._clock()
        if now < self._not_before:
            return False
        if self._changed or (self._settings.stateful and not self._attached):
            return True
        ttl_ms = None if self._listing is None else self._listing.ttl_ms
        if ttl_ms is None:
            return not self._settings.stateful
        return now - self._fetched >= ttl_ms / 1000

    # --- the server

    async def refresh(self, timeout_s: float) -> bool:
        """Attach if that is due, and get the lists. False when the server could not be asked, or nothing is new."""
        mcp, self._changed = self._api.server, False
        try:
            attaches = self._settings.stateful and not self._attached
            listing = await (mcp.attach(timeout_s) if attaches else mcp.list(timeout_s))
        except GoondanError as error:
            self._failed(error)
            return False
        self._failures, self._not_before, self._fetched, self._away = 0, 0.0, self._clock(), None
        if self._settings.stateful and not self._attached:
            self._attached = True
            mcp.gone(None)
            self._api.logger.info(f"MCP connected: {mcp.name} ({listing.server_name} {listing.server_version})")
        if listing == self._listing:
            return False
        self._listing = listing
        self._offer(listing)
        return True

    def _failed(self, error: GoondanError) -> None:
        """Try again at the next step; after more than one failure not before some time has passed."""
        # The tool host says so at once, and the person who has logged in wants the tools in the next step.
        waits = error.info.code == "E_OAUTH_LOGIN"
        self._failures = 0 if waits else self._failures + 1
        self._not_before, self._away = 0.0, error.info.message
        if self._failures > 1:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._failures - 2))
            self._not_before = self._clock() + pause_s
        self._api.logger.warn(f"MCP server {self._api.server.name}: {error.info.code}: {error.info.message}")

    def _offer(self, listing: servers.ServerListing) -> None:
        """Offer the tools of a listing. A tool that is as it was keeps its item, and so its compiled schema."""
        known, self._tools = self._tools, {}
        for tool in listing.tools:
            name = address.build_tool_name(self._api.server.name, tool.export)
            if not address.is_shown_name(name) or not self._is_wanted(tool):
                continue
            before = known.get(name)
            if before is None or before[0] != tool:
                before = (tool, self._served(name, tool, listing.server_name))
            self._tools[name] = before
        self._api.server.offer([served for _, served in self._tools.values()])
        self._blocks = blocks_of(listing, self._settings, self._name)
        if self._settings.resources:
            self._api.instance.shared.setdefault(servers.SHARED_RESOURCES, {})[self._api.server.name] = (
                listing.resources
            )

    def _is_wanted(self, tool: servers.ServerTool) -> bool:
        """Whether `expose` lets the tool through. Reading resources and getting prompts is offered with these."""
        tools = self._settings.tools
        if tool.offered or tools is True:
            return True
        return tools is not False and any(fnmatchcase(tool.name, pattern) for pattern in tools)

    def _served(self, name: str, tool: servers.ServerTool, server_name: str) -> ServedTool:
        item = launch.CatalogItem(
            name=name,
            description=tool.description,
            parameters=parameters_of(tool.input_schema),
            source=launch.ToolSource("mcp", self._name, launch.ServerSource(self._name, server_name or None)),
            call_s=self._settings.call_s,
        )
        return ServedTool(item, tool.name, {"source": "mcp", "mcpServer": self._name})


def parameters_of(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object. One that says something else is not used."""
    if schema is None or schema.get("type", "object") != "object":
        return {"type": "object"}
    return schema if "type" in schema else {"type": "object", **schema}


def blocks_of(listing: servers.ServerListing, settings: Settings, source: str) -> list[dict[str, Any]]:
    """The blocks that tell the model of a listing (MCP-17, MCP-18), each only if it has something to say."""
    blocks: list[dict[str, Any]] = []
    if settings.instructions and listing.instructions:
        text = listing.instructions[:MAX_INSTRUCTIONS]
        blocks.append({"type": "mcp.instructions", "text": text, "source": source})
    if settings.resources and (listing.resources or listing.resource_templates):
        block: dict[str, Any] = {"type": "mcp.resources", "items": _told(listing.resources, resource_item)}
        if listing.resource_templates:
            block["templates"] = _told(listing.resource_templates, template_item)
        blocks.append(_with_rest(block, len(listing.resources), source))
    if settings.prompts and listing.prompts:
        prompts = {"type": "mcp.prompts", "items": _told(listing.prompts, prompt_item)}
        blocks.append(_with_rest(prompts, len(listing.prompts), source))
    return blocks


def resource_item(resource: servers.ServerResource) -> dict[str, Any]:
    """A resource as the model is told it."""
    item: dict[str, Any] = {"uri": resource.uri, "name": resource.name}
    if resource.mime_type is not None:
        item["mimeType"] = resource.mime_type
    return item


def template_item(resource: servers.ServerResource) -> dict[str, Any]:
    """A template of resources as the model is told it."""
    item = resource_item(resource)
    return {"uriTemplate": item.pop("uri"), **item}


def prompt_item(prompt: servers.ServerPrompt) -> dict[str, Any]:
    """A prompt as the model is told it."""
    item: dict[str, Any] = {"name": prompt.name}
    if prompt.description is not None:
        item["description"] = prompt.description[:MAX_TEXT]
    if prompt.arguments is not None:
        item["arguments"] = prompt.arguments
    return item


def _told(things: list[Any], shown: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    return [shown(thing) for thing in things[:MAX_TOLD]]


def _with_rest(block: dict[str, Any], count: int, source: str) -> dict[str, Any]:
    """The block with its source, and with the number of items that it does not name."""
    return {**block, "source": source} | ({"more": count - MAX_TOLD} if count > MAX_TOLD else {})
