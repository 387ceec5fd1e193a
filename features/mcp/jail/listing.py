"""What a server offers, as far as it is passed on. Pure.

Rules.
- A tool, resource or prompt whose name cannot be passed on as it is, is left out: by it, the server is asked.
- A tool whose schemas are larger than MAX_SCHEMA_BYTES, or nested too deep, is left out.
- The lists together have at most MAX_LISTING_BYTES; what comes after is left out.
- What is left out is named in `notes`, for the log.

Source: docs/design/tools.md section 11; requirements MCP-13 to MCP-18.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from goondan.features.mcp.jail import bounds
from goondan.features.mcp.jail.bounds import MAX_DESCRIPTION, MAX_URI, Excess
from goondan.schemas.worker.servers import (
    GET_PROMPT,
    READ_RESOURCE,
    ServerPrompt,
    ServerResource,
    ServerTool,
    export_names,
)

#: Items of one list. The largest servers that are known have a few hundred tools.
MAX_ITEMS: Final = 5_000
#: Bytes of the schema of a tool's arguments, and of its result.
MAX_SCHEMA_BYTES: Final = 128 << 10
#: Levels of a schema: it travels inside of the catalog and of requests to models.
MAX_SCHEMA_DEPTH: Final = 40
#: Bytes of all lists of a server. A frame of a worker has little more (WORKER.md section 2).
MAX_LISTING_BYTES: Final = 900 << 10
#: Arguments of one prompt.
MAX_PROMPT_ARGUMENTS: Final = 100
#: Characters of a media type.
MAX_MEDIA_TYPE: Final = 256
#: Notes about what was left out.
MAX_NOTES: Final = 20

_READ: Final = {
    "type": "object",
    "properties": {"uri": {"type": "string", "description": "The URI of the resource."}},
    "required": ["uri"],
    "additionalProperties": False,
}
_GET: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The name of the prompt."},
        "arguments": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "The values of its arguments.",
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}


class Allowance:
    """What the lists of one server may still take, and what was left out of them."""

    def __init__(self, limit: int = MAX_LISTING_BYTES) -> None:
        self._left = limit
        #: Lines for the log.
        self.notes: list[str] = []
        self._unnamed = 0

    def admit(self, item: msgspec.Struct, what: str) -> bool:
        """Whether there is room for it."""
        self._left -= len(msgspec.msgpack.encode(item))
        if self._left >= 0:
            return True
        self.note(f"{what} was left out: the lists of a server have at most {MAX_LISTING_BYTES} bytes")
        return False

    def note(self, text: str) -> None:
        """Remember what was left out."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)
        else:
            self._unnamed += 1

    def told(self) -> list[str]:
        """All notes, the last of which says how many more there would be."""
        return [*self.notes, f"{self._unnamed} more were left out"] if self._unnamed else self.notes


def tools(listed: Iterable[dict[str, Any]], longest_export: int, allowance: Allowance) -> list[ServerTool]:
    """The tools of a server, from the maps that it lists, each with the export by which it is called."""
    kept: dict[str, ServerTool] = {}
    for item in listed:
        tool = _tool(item, allowance)
        if tool is None or tool.name in kept:
            continue
        if len(kept) >= MAX_ITEMS:
            allowance.note(f"tools after the first {MAX_ITEMS} were left out")
            break
        if allowance.admit(tool, f"tool {tool.name}"):
            kept[tool.name] = tool
    exports = export_names(kept, longest_export)
    return [msgspec.structs.replace(tool, export=exports[name]) for name, tool in kept.items()]


def offered(tools: list[ServerTool], *, resources: bool, prompts: bool) -> list[ServerTool]:
    """The exports that are no tools of the server: the ways to its resources and prompts."""
    taken = {tool.export for tool in tools}
    added: list[ServerTool] = []
    if resources and READ_RESOURCE not in taken:
        text = "Reads a resource of this server. Its resources are listed in the context."
        added.append(
            ServerTool(export=READ_RESOURCE, name=READ_RESOURCE, description=text, input_schema=_READ, offered=True)
        )
    if prompts and GET_PROMPT not in taken:
        text = "Gets a prompt of this server: messages to go by. Its prompts are listed in the context."
        added.append(ServerTool(export=GET_PROMPT, name=GET_PROMPT, description=text, input_schema=_GET, offered=True))
    return added


def resources(listed: Iterable[dict[str, Any]], uri: str, allowance: Allowance) -> list[ServerResource]:
    """Resources, or templates of them; `uri` names the field with their URI."""
    kept: dict[str, ServerResource] = {}
    for item in listed:
        place, name = item.get(uri), item.get("name")
        if not bounds.is_name(place, MAX_URI) or not isinstance(place, str):
            allowance.note("a resource was left out: its URI is no text of one line, or too long")
            continue
        if len(kept) >= MAX_ITEMS:
            allowance.note(f"resources after the first {MAX_ITEMS} were left out")
            break
        resource = ServerResource(
            uri=place,
            name=bounds.line(name, bounds.MAX_NAME),
            mime_type=bounds.line(item.get("mimeType"), MAX_MEDIA_TYPE) or None,
            description=_description(item),
        )
        if place not in kept and allowance.admit(resource, f"resource {place[:200]}"):
            kept[place] = resource
    return list(kept.values())


def prompts(listed: Iterable[dict[str, Any]], allowance: Allowance) -> list[ServerPrompt]:
    """Prompts."""
    kept: dict[str, ServerPrompt] = {}
    for item in listed:
        name = item.get("name")
        if not bounds.is_name(name) or not isinstance(name, str):
            allowance.note("a prompt was left out: its name is no text of one line, or too long")
            continue
        if len(kept) >= MAX_ITEMS:
            allowance.note(f"prompts after the first {MAX_ITEMS} were left out")
            break
        prompt = ServerPrompt(name=name, description=_description(item), arguments=_arguments(item.get("arguments")))
        if name not in kept and allowance.admit(prompt, f"prompt {name}"):
            kept[name] = prompt
    return list(kept.values())


def _tool(item: dict[str, Any], allowance: Allowance) -> ServerTool | None:
    name = item.get("name")
    if not bounds.is_name(name) or not isinstance(name, str):
        allowance.note("a tool was left out: its name is no text of one line, or too long")
        return None
    schemas: dict[str, dict[str, Any] | None] = {}
    for field in ("inputSchema", "outputSchema"):
        schema = item.get(field)
        fault = _schema_fault(schema)
        if fault is not None:
            allowance.note(f"tool {name} was left out: its {field} {fault}")
            return None
        schemas[field] = schema
    annotations = item.get("annotations")
    return ServerTool(
        export="",
        name=name,
        description=_description(item),
        input_schema=schemas["inputSchema"],
        output_schema=schemas["outputSchema"],
        annotations=_annotations(annotations) if isinstance(annotations, dict) else None,
    )


def _schema_fault(schema: Any) -> str | None:
    """Why a schema is not passed on."""
    if schema is None:
        return None
    if not isinstance(schema, dict):
        return "is no object"
    try:
        bounds.check(schema, depth=MAX_SCHEMA_DEPTH)
        size = len(msgspec.msgpack.encode(schema))
    except Excess as error:
        return f"is not passed on: {error}"
    except OverflowError:
        return "has an integer of more than 64 bits"
    return f"has {size} bytes, limit {MAX_SCHEMA_BYTES}" if size > MAX_SCHEMA_BYTES else None


def _annotations(given: dict[str, Any]) -> dict[str, Any] | None:
    """The hints that the protocol has."""
    hints: dict[str, Any] = {
        name: given[name]
        for name in ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
        if isinstance(given.get(name), bool)
    }
    title = bounds.line(given.get("title"), bounds.MAX_NAME)
    if title:
        hints["title"] = title
    return hints or None


def _description(item: dict[str, Any]) -> str | None:
    said = bounds.text(item.get("description"), MAX_DESCRIPTION)
    return said or bounds.line(item.get("title"), bounds.MAX_NAME) or None


def _arguments(given: Any) -> list[dict[str, Any]] | None:
    if not isinstance(given, list):
        return None
    arguments: list[dict[str, Any]] = []
    for item in given[:MAX_PROMPT_ARGUMENTS]:
        name = item.get("name") if isinstance(item, dict) else None
        if not bounds.is_name(name):
            continue
        argument: dict[str, Any] = {"name": name}
        description = _description(item)
        if description:
            argument["description"] = description
        if item.get("required") is True:
            argument["required"] = True
        arguments.append(argument)
    return arguments
