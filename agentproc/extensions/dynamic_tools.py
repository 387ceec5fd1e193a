"""The registry of the tools that extensions bring: registered ones, brought ones, and those of MCP servers.

Rules.
- A name belongs to one extension. Registering it again replaces the tool. A name of another extension or of the bundle
  is refused. A dotted name (`skills.list`) is shown to the model as `skills__list`.
- A tool is in the catalog of the next step, not of the running one. The tools of v0.9 extensions are in the registry
  only, unless the extension is annotated `goondan.ai/expose-tools: auto`.
- The bundled extension `mcp` offers the tools of an MCP server. Their calls go over the bus like those of any Tool.
  `mcp.<name>` and `mcp__<name>` are other names of such a tool, with the name that its server has for it, as long as no
  two servers have a tool of this name.
- A bundled extension may bring tools whose handlers run in jails (kernel/bundle/documents.py). It shows them with
  `bring`. Their calls go over the bus like those of any Tool.
- Handlers of registered tools run in the agent's process (local_calls.py).

Source: docs/design/tools.md section 8; requirements DYNAMIC-01 to DYNAMIC-08, ITEM-05, CATALOG-06, CATALOG-09,
HANDLER-02.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.agentproc.extensions.points.results import output_of, source_of, tool_error_of
from goondan.agentproc.machine.turn import AskedCall
from goondan.schemas.bundle.address import SEPARATOR, is_shown_name, parse_tool_name, shown_tool_name
from goondan.schemas.bundle.arguments import compile_arguments
from goondan.schemas.bundle.launch import CatalogItem, ToolSource
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import fail, tool_error
from goondan.schemas.worker import servers

Handler = Callable[[Any, Any], Any]
#: Gets the arguments of a call and returns an absolute path. What it raises is the call's error.
Folder = Callable[[dict[str, Any]], str]

log = logging.getLogger("agentproc")


class DynamicTool(Struct, frozen=True):
    """A registered tool."""

    #: The catalog item.
    item: CatalogItem
    #: The function that runs a call.
    handler: Handler
    #: The name of the extension that registered the tool.
    extension: str
    #: Whether the catalog of each step has the tool.
    exposed: bool = True
    #: The extension's own data about the tool. It is never sent to a model.
    metadata: dict[str, Any] = {}
    #: The name with a dot that the extension gave it; "" when the name has no dot.
    named: str = ""
    #: Its calls run in a replay as well: the handler touches nothing but what its extension remembers.
    in_replay: bool = False


class BroughtTool(Struct, frozen=True):
    """A tool of the bundled package that an extension shows. Its handler runs in a jail."""

    #: The name of the extension that brings the tool.
    extension: str
    #: Whether the catalog of each step has the tool.
    exposed: bool = True
    #: The name with a dot that the extension gave it; "" when the name has no dot.
    named: str = ""
    #: Says by its arguments which folder a call works in. None: calls name no folder.
    folder: Folder | None = None


#: What stands before the own name of a tool in its other name.
ALIAS: Final = servers.ALIAS + SEPARATOR


class ServedTool(Struct, frozen=True):
    """A tool of an MCP server."""

    #: The catalog item.
    item: CatalogItem
    #: The server's own name of the tool.
    own_name: str
    #: What the registration says about the tool, for people: `source` and `mcpServer`. No model is sent it.
    metadata: dict[str, Any] = {}


class DynamicTools:
    """The tools of one agent's extensions. `taken` is the agent's registry, whose names extensions cannot register."""

    def __init__(self, taken: Mapping[str, CatalogItem] = MappingProxyType({})) -> None:
        self._taken = taken
        self._tools: dict[str, DynamicTool] = {}
        self._brought: dict[str, BroughtTool] = {}
        self._of_servers: dict[str, Sequence[ServedTool]] = {}  # by extension
        self._gone: dict[str, str] = {}  # why the server of an extension has ended
        self._served: dict[str, tuple[str, ServedTool]] = {}  # by name, each with its extension
        self._aliases: dict[str, str] = {}

    @property
    def dotted(self) -> dict[str, str]:
        """The names with a dot that extensions gave, by the names that models are shown."""
        all_tools: dict[str, DynamicTool | BroughtTool] = {**self._tools, **self._brought}
        return {shown: tool.named for shown, tool in all_tools.items() if tool.named}

    @property
    def names(self) -> list[str]:
        """Every name by which a configuration may refer to a tool here."""
        return [*self._tools, *self._brought, *self._served, *self.dotted.values()]

    @property
    def exposed(self) -> list[CatalogItem]:
        """The tools that the next step's catalog has besides the agent's own tools: those that were registered, then
        those that were brought, each in their order.
        """
        if not (self._tools or self._brought or self._served):
            return []
        brought = [self._taken[name] for name, tool in self._brought.items() if tool.exposed and name in self._taken]
        own = [tool.item for tool in self._tools.values() if tool.exposed]
        return [*own, *brought, *(tool.item for _, tool in self._served.values())]

    def spelt(self, call: AskedCall) -> AskedCall:
        """A call with the name that models are shown. A model may also write the name with its dot, which means the
        same tool.
        """
        if not (self._tools or self._brought or self._served):
            return call
        shown = shown_tool_name(call.name)
        if shown not in self._tools and shown not in self._brought:
            shown = self._aliases.get(shown, shown)
            if shown not in self._served:
                return call
        return msgspec.structs.replace(call, name=shown) if shown != call.name else call

    def get(self, name: str) -> DynamicTool | None:
        """The tool of this name, in the form that a model writes, whose handler runs here."""
        return self._tools.get(name)

    def find(self, name: str) -> CatalogItem | None:
        """The item of the tool of this name."""
        tool = self._tools.get(name)
        if tool is not None:
            return tool.item
        if name in self._brought:
            return self._taken.get(name)
        served = self.served(name)
        return None if served is None else served.item

    def served(self, name: str) -> ServedTool | None:
        """The tool of a server of this name, or of this other name."""
        found = self._served.get(self._aliases.get(name, name))
        return None if found is None else found[1]

    def canonical(self, name: str) -> str:
        """The name of a tool that has several; any other name is given back."""
        return name if name in self._tools or name in self._brought else self._aliases.get(name, name)

    def serve(self, tools: Sequence[ServedTool], *, extension: str) -> None:
        """The MCP server of this extension has these tools now. A name that another extension has is left out."""
        others = {name for name, tool in self._tools.items() if tool.extension != extension}
        kept: list[ServedTool] = []
        for tool in tools:
            if tool.item.name in self._taken or tool.item.name in others:
                message = "extension %s: the tool name %s belongs to somebody else, so it is not offered"
                log.warning(message, extension, tool.item.name)
            else:
                kept.append(tool)
        if kept or extension in self._of_servers:
            self._of_servers[extension] = kept
            self._index_served()

    def server_gone(self, extension: str, why: str | None) -> None:
        """The server of the extension has ended, or is there again (None)."""
        if why is None:
            self._gone.pop(extension, None)
        else:
            self._gone[extension] = why

    def refusal(self, name: str) -> frames.ToolError | None:
        """Why a call of this tool of a server need not be made; None when it is to be made."""
        extension, _ = self._served.get(name, ("", None))
        why = self._gone.get(extension)
        if why is None:
            return None
        return tool_error(servers.GONE, f"Tool '{name}': the MCP server has ended: {why}", name=servers.ERROR_NAME)

    def _index_served(self) -> None:
        every = [(extension, tool) for extension, tools in self._of_servers.items() for tool in tools]
        self._served = {tool.item.name: (extension, tool) for extension, tool in every}
        names = Counter(tool.own_name for _, tool in every)
        aliases = {ALIAS + tool.own_name: tool.item.name for _, tool in every if names[tool.own_name] == 1}
        self._aliases = {alias: name for alias, name in aliases.items() if alias not in self._served}

    def reserve(self, taken: Mapping[str, CatalogItem]) -> None:
        """From now on this is the agent's registry."""
        self._taken = taken

    def clashes(self, extension: str) -> bool:
        """Whether the bundle has taken the name of a tool of this extension since it was registered."""
        return any(tool.extension == extension and name in self._taken for name, tool in self._tools.items())

    def register(self, item: Any, handler: Any, *, extension: str, exposed: bool = True) -> None:
        """Add or replace a tool. `item` is a mapping or an object with name, description, parameters and, when
        `handler` is None, the handler and metadata.

        Raises GoondanError E_USAGE for an invalid item, E_CONFIG_SCHEMA for parameters that are no JSON Schema, and
        E_TOOL_NAME_CONFLICT for a name that belongs to another extension or to the bundle.
        """
        fields = _fields(item)
        if handler is None:
            handler = fields.get("handler")
            for name in ("name", "description", "handler"):
                if not fields.get(name):
                    raise fail("E_USAGE", f"a tool of extension {extension} has no {name}")
        if not callable(handler):
            raise fail("E_USAGE", f"the handler of a tool of extension {extension} is no function")
        shown = _shown_name(fields.get("name"), extension)
        known = self._tools.get(shown)
        if shown in self._taken or shown in self._served or (known is not None and known.extension != extension):
            whose = "the bundle" if shown in self._taken else "an MCP server"
            whose = f"extension {known.extension}" if known is not None else whose
            raise fail("E_TOOL_NAME_CONFLICT", f"extension {extension}: the tool name {shown} belongs to {whose}")
        metadata = fields.get("metadata") or {}
        metadata = metadata if isinstance(metadata, dict) else {}
        named = fields["name"] if "." in fields["name"] else ""
        in_replay = fields.get("inReplay") is True
        made = DynamicTool(_item(fields, shown, extension), handler, extension, exposed, metadata, named, in_replay)
        self._tools[shown] = made

    def bring(self, name: Any, folder: Folder | None = None, *, extension: str, exposed: bool = True) -> None:
        """Show a tool that the manifest of a bundled extension names, by its full name (`skills.run`, `skills__run`).
        `folder` says which folder each call works in.

        Raises GoondanError E_USAGE for a tool that this extension does not bring.
        """
        shown = shown_tool_name(name) if isinstance(name, str) else ""
        item = self._taken.get(shown)
        if item is None or item.source != ToolSource("extension", extension):
            message = f"extension {extension} brings no tool {str(name)[:80]!r}"
            raise fail(
                "E_USAGE", message, suggestion="Only bundled extensions bring tools; register it with a handler."
            )
        self._brought[shown] = BroughtTool(extension, exposed, name if "." in name else "", folder)

    def folder_of(self, name: str, args: dict[str, Any]) -> str | frames.ToolError | None:
        """The folder that a call of a brought tool works in, or why there is none. None: its calls name no folder."""
        brought = self._brought.get(name)
        if brought is None or brought.folder is None:
            return None
        try:
            return brought.folder(copy.deepcopy(args))
        except Exception as error:
            return tool_error_of(error, "E_TOOL")

    def unregister(self, name: str, *, extension: str) -> None:
        """Remove a tool of this extension. An unknown name is ignored. The dotted name and the shown name are both
        accepted.
        """
        shown = shown_tool_name(str(name))
        known = self._tools.get(shown)
        if known is not None and known.extension == extension:
            del self._tools[shown]
        brought = self._brought.get(shown)
        if brought is not None and brought.extension == extension:
            del self._brought[shown]

    def unregister_all(self, extension: str) -> None:
        """Remove all tools of an extension."""
        self._tools = {name: tool for name, tool in self._tools.items() if tool.extension != extension}
        self._brought = {name: tool for name, tool in self._brought.items() if tool.extension != extension}
        self._gone.pop(extension, None)
        if self._of_servers.pop(extension, None) is not None:
            self._index_served()


_FIELDS: Final = (
    *("name", "description", "parameters", "handler", "metadata"),
    *("source", "tool", "export", "idempotent", "deferred", "inReplay"),
)
#: Those that the item has. Its name is the shown one.
_OF_ITEM: Final = ("description", "parameters", "errorMessageLimit", "tool", "export", "idempotent", "deferred")


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, CatalogItem):
        given = {"name": item.name, "description": item.description, "parameters": item.parameters}
        return {**given, "idempotent": item.idempotent, "deferred": item.deferred}
    if isinstance(item, Mapping):
        return dict(item)
    return {name: getattr(item, name) for name in _FIELDS if hasattr(item, name)}


def _shown_name(name: Any, extension: str) -> str:
    shown = shown_tool_name(name) if isinstance(name, str) else ""
    if not is_shown_name(shown):
        message = f"extension {extension}: {str(name)[:80]!r} cannot be a tool's name"
        hint = "Use 1 to 64 letters, digits, - and _, with __ or one dot in between."
        raise fail("E_USAGE", message, suggestion=hint)
    halves = parse_tool_name(shown)
    if halves is None or not all(halves):
        message = f"extension {extension}: the tool name {name!r} does not say whose it is"
        bare = shown.strip("_") or "tool"
        raise fail("E_USAGE", message, suggestion=f"Name it {extension}.{bare}, or with __ in between.")
    return shown


def _item(fields: Mapping[str, Any], shown: str, extension: str) -> CatalogItem:
    given = {name: fields[name] for name in _OF_ITEM if fields.get(name) is not None}
    try:
        # A copy: the item goes to vendors as JSON, and the extension may change its own object later.
        own = codec.from_raw(output_of({**given, "name": shown}), dict)
        item = msgspec.convert(own, CatalogItem)
    except (msgspec.ValidationError, ValueError) as error:
        raise fail("E_USAGE", f"extension {extension}: tool {shown}: {error}") from None
    if item.parameters is not None and item.parameters.get("type", "object") != "object":
        kind = str(item.parameters["type"])[:80]
        message = f"extension {extension}: tool {shown}: parameters have the type {kind!r}, arguments are an object"
        raise fail("E_CONFIG_SCHEMA", message)
    compile_arguments(item.parameters, item.aliases).compile()
    return msgspec.structs.replace(item, source=source_of(fields.get("source"), extension))
