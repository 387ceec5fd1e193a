"""What a server answers, and what goes wrong between it and us, as the outputs and errors of our calls. Pure.

What a call gives:
- structured content, alone when its texts only repeat it;
- the text, when there is nothing but text; several texts are lines of one;
- else a map: `content` with the blocks as the protocol has them, and `structuredContent` if there is any.
  Pictures, sound and files are in their blocks, as base64.

Source: docs/design/tools.md section 11; docs/errors.md, the codes E_MCP_*; requirement MCP-16.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
from pydantic import ValidationError

from goondan.features.mcp.jail import bounds
from goondan.features.mcp.jail.lines import GONE, NOT_LET_THROUGH, NOT_REACHED
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker.worker_frames import WorkerError

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
        self.size = size
        self.limit = limit


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


def error_of(error: BaseException) -> WorkerError:
    """Any exception of a call as the error of its result. Nothing of our own inside is shown."""
    failure = _failure(error)
    return WorkerError(
        name=failure.name,
        message=bounds.text(str(failure), MAX_MESSAGE),
        code=failure.code if failure.code != "E_TOOL" else None,
    )


def is_gone(error: MCPError) -> bool:
    """Whether an answer did not come because the connection has ended."""
    return error.code == GONE or (error.code == CONNECTION_CLOSED and error.message in _CLOSED)


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
    if error.code == NOT_LET_THROUGH:
        return Failure("E_MCP_PROTOCOL", message)
    if error.code == NOT_REACHED:
        code = "E_SANDBOX_DENIED" if message.startswith("E_SANDBOX_DENIED") else "E_MCP_CONNECT"
        return Failure(code, f"the server could not be asked: {message}")
    return Failure("E_MCP_REFUSED", f"the server answered with error {error.code}: {message}")


def _first(error: ValidationError) -> str:
    """The first fault, without what the server sent."""
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"])
        return bounds.line(f"{place}: {fault['msg']}" if place else fault["msg"], 500)
    return "it has another shape"
