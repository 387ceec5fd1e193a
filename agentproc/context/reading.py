"""The tool `tool-result__read`: a model reads a part of a result that it was shown shortened. Pure.

It is offered from the first step to every agent that has tools, so that the list of tools does not change when a result
is shortened for the first time. It reads nothing but the agent's own conversation.

Source: docs/design/turns.md section 10; docs/context.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from goondan.agentproc.context.shape import within
from goondan.agentproc.machine.messages import Message, ToolData, error_result
from goondan.agentproc.providers.history import result_text
from goondan.schemas.bundle.arguments import compile_arguments, invalid_arguments
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolResult

NAME: Final = "tool-result__read"
ITEM: Final = CatalogItem(
    name=NAME,
    description="Read a part of an earlier tool result that is shown shortened. The mark in it says the id.",
    parameters={
        "type": "object",
        "properties": {
            "id": {"type": "string", "minLength": 1, "maxLength": 512, "description": "The id in the mark."},
            "from": {"type": "integer", "minimum": 0, "description": "The first character, from 0 (default 0)."},
            "length": {
                "type": "integer",
                "minimum": 1,
                "description": "How many characters. At most as many are given as fit.",
            },
        },
        "required": ["id"],
        "additionalProperties": False,
    },
    idempotent=True,
)
#: Where the context is not known: the most of one answer (bytes).
USUAL_BYTES: Final = 16_000
#: The room for the line above the characters (bytes).
HEAD_LINE: Final = 80


def read(messages: Iterable[Message], args: Any, most: int) -> ToolResult:
    """The characters that `args` name, of a result in `messages`: as many as fit into `most` bytes."""
    checked, issues = compile_arguments(ITEM.parameters, {}).apply(args)
    if issues:
        return error_result(invalid_arguments(NAME, issues, ITEM.parameters))
    found = next((m for m in messages if m.id == checked["id"] and isinstance(m.data, ToolData)), None)
    if found is None or not isinstance(found.data, ToolData):
        error = tool_error("E_TOOL_INVALID_ARGS", "no result of this conversation has this id", name="NotFound")
        return error_result(error)
    text = "\n".join([result_text(part.result) for part in found.data.content])
    begin = min(checked.get("from", 0), len(text))
    piece = within(text[begin : begin + checked.get("length", len(text))], max(1, most - HEAD_LINE))
    line = f"[characters {begin} to {begin + len(piece)} of {len(text)}]\n"
    return ToolResult(status="ok", output=to_raw(line + piece))
