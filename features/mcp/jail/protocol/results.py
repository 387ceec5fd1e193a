"""What a server answers, as ours: its lists, the outputs of calls, and what goes wrong between it and us. Pure.

Lists.
- A tool, resource or prompt whose name cannot be passed on as it is, is left out: by it, the server is asked.
- A tool whose schemas are larger than MAX_SCHEMA_BYTES, or nested too deep, is left out.
- The lists together have at most MAX_LISTING_BYTES; what comes after is left out.
- What is left out is named in `notes`, for the log.

What a call gives:
- structured content, alone when its texts only repeat it;
- the text, when there is nothing but text; several texts are lines of one;
- else a map: `content` with the blocks as the protocol has them, and `structuredContent` if there is any.
  Pictures, sound and files are in their blocks, as base64.

Source: docs/design/tools.md section 11; docs/errors.md, the codes E_MCP_*; requirements MCP-13 to MCP-18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
from pydantic import ValidationError

from goondan.features.mcp.jail.protocol import bounds
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker import servers, worker_frames

Item = TypeVar("Item", bound=msgspec.Struct)
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


class Room:
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


def tools(listed: Iterable[dict[str, Any]], longest_export: int, room: Room) -> list[servers.ServerTool]:
    """The tools of a server, from the maps that it lists, each with the export by which it is called."""
    kept = _kept(listed, "name", "tool", lambda name, item: _tool(name, item, room), room)
    exports = servers.export_names((tool.name for tool in kept), longest_export)
    return [msgspec.structs.replace(tool, export=exports[tool.name]) for tool in kept]


def _kept(
    listed: Iterable[dict[str, Any]],
    key: str,
    what: str,
    make: Callable[[str, dict[str, Any]], Item | None],
    room: Room,
) -> list[Item]:
    """What `make` makes of the maps, each of which has under `key` the name by which the server is asked for it."""
    kept: dict[str, Item] = {}
    called, longest = ("name", bounds.MAX_NAME) if key == "name" else ("URI", bounds.MAX_URI)
    for item in listed:
        name = item.get(key)
        if not isinstance(name, str) or not bounds.is_name(name, longest):
            room.note(f"a {what} was left out: its {called} is no text of one line, or too long")
            continue
        if name in kept:
            continue
        if len(kept) >= MAX_ITEMS:
            room.note(f"{what}s after the first {MAX_ITEMS} were left out")
            break
        made = make(name, item)
        if made is not None and room.admit(made, f"{what} {name[:200]}"):
            kept[name] = made
    return list(kept.values())


def offered(tools: list[servers.ServerTool], *, resources: bool, prompts: bool) -> list[servers.ServerTool]:
    """The exports that are no tools of the server: the ways to its resources and prompts."""
    taken = {tool.export for tool in tools}
    reads = "Reads a resource of this server. Its resources are listed in the context."
    gets = "Gets a prompt of this server: messages to go by. Its prompts are listed in the context."
    return [
        servers.ServerTool(export=name, name=name, description=text, input_schema=schema, offered=True)
        for has, name, text, schema in (
            (resources, servers.READ_RESOURCE, reads, _READ),
            (prompts, servers.GET_PROMPT, gets, _GET),
        )
        if has and name not in taken
    ]


def resources(listed: Iterable[dict[str, Any]], uri: str, room: Room) -> list[servers.ServerResource]:
    """Resources, or templates of them; `uri` names the field with their URI."""
    return _kept(listed, uri, "resource", _resource, room)


def _resource(uri: str, item: dict[str, Any]) -> servers.ServerResource:
    return servers.ServerResource(
        uri=uri,
        name=bounds.line(item.get("name"), bounds.MAX_NAME),
        mime_type=bounds.line(item.get("mimeType"), MAX_MEDIA_TYPE) or None,
        description=_description(item),
    )


def prompts(listed: Iterable[dict[str, Any]], room: Room) -> list[servers.ServerPrompt]:
    """Prompts."""
    return _kept(listed, "name", "prompt", _prompt, room)


def _prompt(name: str, item: dict[str, Any]) -> servers.ServerPrompt:
    return servers.ServerPrompt(name=name, description=_description(item), arguments=_arguments(item.get("arguments")))


def _tool(name: str, item: dict[str, Any], room: Room) -> servers.ServerTool | None:
    schemas: dict[str, dict[str, Any] | None] = {}
    for field in ("inputSchema", "outputSchema"):
        schema = item.get(field)
        fault = _schema_fault(schema)
        if fault is not None:
            room.note(f"tool {name} was left out: its {field} {fault}")
            return None
        schemas[field] = schema
    annotations = item.get("annotations")
    return servers.ServerTool(
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
    except bounds.Excess as error:
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
    said = bounds.text(item.get("description"), bounds.MAX_DESCRIPTION)
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


#: Fields of a block that are passed on. `_meta` is between programs.
_FIELDS: Final = {
    "text": ("text",),
    "image": ("mimeType", "data", "annotations"),
    "audio": ("mimeType", "data", "annotations"),
    "resource_link": ("uri", "name", "title", "description", "mimeType", "size", "annotations"),
    "resource": ("resource", "annotations"),
}
_RESOURCE_FIELDS: Final = ("uri", "mimeType", "text", "blob")
#: Characters of an error's message. The host cuts it to the tool's own limit.
MAX_MESSAGE: Final = 20_000


class TooLarge(Exception):
    """An output that is larger than a call's may be. `size` and `limit` in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the output has {size} bytes, limit {limit} (outputMb)")


def call_output(result: dict[str, Any]) -> Any:
    """The output of a tool call from a `CallToolResult` that is no error."""
    blocks = _blocks(result.get("content"))
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if "structuredContent" in result and result["structuredContent"] is not None:
        structured = result["structuredContent"]
        if len(texts) == len(blocks) and all(_repeats(text, structured) for text in texts):
            return structured
        return {"structuredContent": structured, "content": blocks}
    if len(texts) == len(blocks):
        return "\n".join(texts)
    return {"content": blocks}


def error_text(result: dict[str, Any]) -> str:
    """What a `CallToolResult` with `isError` says."""
    blocks = _blocks(result.get("content"))
    texts = [block["text"] for block in blocks if block["type"] == "text" and block["text"]]
    if texts:
        return "\n".join(texts)
    structured = result.get("structuredContent")
    if structured is not None:
        return msgspec.json.encode(structured).decode()
    return "the tool failed, and said nothing about it"


def resource_output(result: dict[str, Any]) -> dict[str, Any]:
    """The output of `read_resource` from a `ReadResourceResult`."""
    contents = result.get("contents")
    return (
        {"contents": [_only(item, _RESOURCE_FIELDS) for item in contents if isinstance(item, dict)]}
        if isinstance(contents, list)
        else {"contents": []}
    )


def prompt_output(result: dict[str, Any]) -> dict[str, Any]:
    """The output of `get_prompt` from a `GetPromptResult`."""
    messages = result.get("messages")
    shown: list[dict[str, Any]] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        blocks = _blocks(content if isinstance(content, list) else [content])
        if blocks:
            shown.append({"role": message.get("role"), "content": blocks[0] if len(blocks) == 1 else blocks})
    output: dict[str, Any] = {"messages": shown}
    if isinstance(result.get("description"), str):
        output = {"description": result["description"], **output}
    return output


def packed(output: Any, limit: int) -> msgspec.Raw:
    """An output as it travels. Raises TooLarge."""
    try:
        data = encode_value(output)
    except OverflowError:
        data = encode_value(_within_64_bits(output))
    if len(data) > limit:
        raise TooLarge(len(data), limit)
    return msgspec.Raw(data)


def _blocks(content: Any) -> list[dict[str, Any]]:
    """The blocks of a kind that the protocol has, with the fields that it has."""
    blocks: list[dict[str, Any]] = []
    for block in content if isinstance(content, list) else []:
        kind = block.get("type") if isinstance(block, dict) else None
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            continue
        shown = {"type": kind, **_only(block, fields)}
        if kind == "text" and not isinstance(shown.get("text"), str):
            continue
        if kind == "resource":
            inner = shown.get("resource")
            shown["resource"] = _only(inner, _RESOURCE_FIELDS) if isinstance(inner, dict) else {}
        blocks.append(shown)
    return blocks


def _only(block: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: block[field] for field in fields if block.get(field) is not None}


def _repeats(text: str, structured: Any) -> bool:
    """Whether a text says nothing but what the structured content says: it is its JSON, or its only value."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = text
    if value == structured:
        return True
    return isinstance(structured, dict) and len(structured) == 1 and next(iter(structured.values())) in (value, text)


def _within_64_bits(value: Any) -> Any:
    """The same value with doubles for integers that do not fit; its depth has been checked."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else _double(value)
    if isinstance(value, list):
        return [_within_64_bits(item) for item in value]
    if isinstance(value, dict):
        return {key: _within_64_bits(item) for key, item in value.items()}
    return value


def _double(value: int) -> float | str:
    try:
        return float(value)
    except OverflowError:
        return str(value) if value.bit_length() < _PRINTABLE_BITS else "a number of more than a thousand digits"


#: Python refuses to write much longer integers as decimals.
_PRINTABLE_BITS: Final = 3300


class Failure(Exception):
    """Something that a call, a listing or a connection fails with."""

    def __init__(self, code: str, message: str, *, name: str = "McpError") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


def error_of(error: BaseException) -> worker_frames.WorkerError:
    """Any exception of a call as the error of its result. Nothing of our own inside is shown."""
    failure = _failure(error)
    return worker_frames.WorkerError(
        name=failure.name,
        message=bounds.text(str(failure), MAX_MESSAGE),
        code=failure.code if failure.code != "E_TOOL" else None,
    )


def is_gone(error: MCPError) -> bool:
    """Whether an answer did not come because the connection has ended."""
    return error.code == bounds.GONE or (error.code == CONNECTION_CLOSED and error.message in _CLOSED)


#: What the SDK says of connections over HTTP that have ended.
_CLOSED: Final = (
    "Connection closed",
    "SSE stream ended without a response",
    "SSE stream ended and reconnection attempts were exhausted",
)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, BaseExceptionGroup):
        return _failure(error.exceptions[0])
    if isinstance(error, Failure):
        return error
    if isinstance(error, MCPError):
        return _answered(error)
    if isinstance(error, ValidationError):
        return Failure("E_MCP_PROTOCOL", f"the server's answer is not of the protocol: {_first(error)}")
    if isinstance(error, TooLarge):
        return Failure("E_TOOL_LIMIT", str(error), name="OutputTooLarge")
    if isinstance(error, TimeoutError):
        return Failure("E_TOOL_TIMEOUT", str(error) or "the server did not answer in time", name="TimeoutError")
    return Failure("E_MCP_PROTOCOL", f"the server could not be spoken with: {type(error).__name__}: {error}"[:2000])


def _answered(error: MCPError) -> Failure:
    message = bounds.text(error.message, MAX_MESSAGE)
    if is_gone(error):
        return Failure("E_MCP_GONE", message)
    if error.code == REQUEST_TIMEOUT:
        return Failure("E_TOOL_TIMEOUT", message, name="TimeoutError")
    if error.code == bounds.NOT_LET_THROUGH:
        return Failure("E_MCP_PROTOCOL", message)
    if error.code == bounds.NOT_REACHED:
        code = "E_SANDBOX_DENIED" if message.startswith("E_SANDBOX_DENIED") else "E_MCP_CONNECT"
        return Failure(code, f"the server could not be asked: {message}")
    return Failure("E_MCP_REFUSED", f"the server answered with error {error.code}: {message}")


def _first(error: ValidationError) -> str:
    """The first fault, without what the server sent."""
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"])
        return bounds.line(f"{place}: {fault['msg']}" if place else fault["msg"], 500)
    return "it has another shape"
