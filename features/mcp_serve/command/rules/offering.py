"""What an MCP client is told: tools and results as plain values in the protocol's form. Pure.

Source: docs/mcp.md, "Our tools for MCP clients".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.wire.frames import OperatorTool

#: The only path that is served.
PATH: Final = "/mcp"
#: Arguments of a call have at most 8 MiB; the rest is for what stands around them (bytes).
MAX_BODY: Final = 9 << 20

#: Keys of `_meta` in results, with the prefix that the protocol wants in names of others.
RECEIPT: Final = "goondan.ai/receipt"
ERROR: Final = "goondan.ai/error"
PENDING: Final = "goondan.ai/pending"
TURN: Final = "goondan.ai/turn"
#: The blocks that a result of an MCP server's tool has, with the fields that each needs.
_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri", "name"),
    "resource": ("resource",),
}


def offered(tools: Iterable[OperatorTool], patterns: Sequence[str]) -> list[OperatorTool]:
    """The tools whose full names fit one of the patterns (`*`, `?`, `[…]`). Without a pattern there are none."""
    return [tool for tool in tools if any(fnmatchcase(tool.name, pattern) for pattern in patterns)]


def named(tools: Iterable[OperatorTool], *, short: bool) -> dict[str, OperatorTool]:
    """The tools by the names that clients get: the full ones, or, with `short`, what stands behind the first `__` where
    no other tool is called so.
    """
    listed = list(tools)
    if not short:
        return {tool.name: tool for tool in listed}
    counted = Counter(_short(tool.name) for tool in listed)
    full = {tool.name for tool in listed}
    return {
        name if counted[name := _short(tool.name)] == 1 and name not in full else tool.name: tool for tool in listed
    }


def _short(name: str) -> str:
    return name.partition(SEPARATOR)[2] or name


def tool_entry(name: str, tool: OperatorTool) -> dict[str, Any]:
    """A tool in the answer to `tools/list`, under the name that clients get."""
    schema = dict(tool.parameters or {})
    if schema.get("type") != "object":  # the protocol wants it said; arguments are always an object
        schema = {"type": "object"} if not schema else {"type": "object", "allOf": [schema]}
    entry: dict[str, Any] = {"name": name, "inputSchema": schema}
    if tool.description:
        entry["description"] = tool.description
    if tool.idempotent:
        entry["annotations"] = {"idempotentHint": True}
    return entry


def has_files(result: Mapping[str, Any]) -> bool:
    """Whether a file may stand beside the output of a ToolResult, so that its conversation has to be read."""
    return result.get("status") == "ok" and b'"file":' in msgspec.json.encode(result.get("output"))


def call_result(
    result: Mapping[str, Any], turn: Mapping[str, Any] | None = None, files: Sequence[str] = ()
) -> dict[str, Any]:
    """A ToolResult as the answer to `tools/call`. `turn` names the turn and the trace of the call. `files` has those
    that stand beside the output, as base64 in the order of their numbers (docs/files.md).
    """
    meta: dict[str, Any] = {} if turn is None else {TURN: dict(turn)}
    if result.get("receipt") is not None:
        meta[RECEIPT] = result["receipt"]
    status = result.get("status")
    if status == "error":
        answer = failure(result.get("error") or {})
        return answer | {"_meta": {**answer["_meta"], **meta}}
    if status == "pending":
        handle = result.get("handle")
        text = f"The work goes on: {handle}. tool-result__get with this handle tells what it came to."
        value = {"status": "pending", "handle": handle}
        meta[PENDING] = {"handle": handle}
        return {"content": [_text(text)], "structuredContent": value, "_meta": meta}
    answer = _of_output(_with_files(result.get("output"), files))
    return answer | {"_meta": meta} if meta else answer


def failure(error: Mapping[str, Any]) -> dict[str, Any]:
    """An error as the answer to `tools/call`: its code stands in the text, which a model reads, and in `_meta`."""
    code = error.get("code") or "E_TOOL"
    text = f"{error.get('message') or 'the call failed'} [{code}]"
    if error.get("suggestion"):
        text += f"\n{error['suggestion']}"
    return {"content": [_text(text)], "isError": True, "_meta": {ERROR: {**error, "code": code}}}


def _of_output(output: Any) -> dict[str, Any]:
    if isinstance(output, str):
        return {"content": [_text(output)]}
    if isinstance(output, Mapping) and output.keys() <= {"content", "structuredContent"} and _blocks(output):
        return dict(output)
    answer: dict[str, Any] = {"content": [_text(_json(output))]}
    return answer | {"structuredContent": output} if isinstance(output, Mapping) else answer


def _with_files(output: Any, files: Sequence[str]) -> Any:
    """The output with the base64 of each file where its number stands, as the tool gave it."""
    if isinstance(output, list):
        return [_with_files(inner, files) for inner in output]
    if not isinstance(output, dict) or not files:
        return output
    number = output.get("file")
    key = "data" if output.get("type") in ("file", "image") else "blob" if isinstance(output.get("uri"), str) else None
    if key is not None and type(number) is int and 0 < number <= len(files):
        return {name: value for name, value in output.items() if name != "file"} | {key: files[number - 1]}
    return {name: _with_files(inner, files) for name, inner in output.items()}


def _blocks(output: Mapping[str, Any]) -> bool:
    """Whether it is what an MCP server's tool gives: a list of blocks of the protocol."""
    blocks = output.get("content")
    return isinstance(blocks, list) and all(
        isinstance(block, dict)
        and isinstance(kind := block.get("type"), str)
        and kind in _BLOCKS
        and all(block.get(field) is not None for field in _BLOCKS[kind])
        for block in blocks
    )


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
