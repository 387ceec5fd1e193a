"""A conversation as text, for the model that summarises it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from goondan.agentproc.machine.messages import AssistantData, Message, ToolData
from goondan.schemas.wire.codec import from_raw

#: How much of one tool's result, or of one call's arguments, goes into the text to summarise (characters). Longer ones
#: are files and listings, and their content can be read again.
MAX_VALUE_CHARS: Final = 4000


def pieces(messages: list[Message], most: int) -> Iterator[str]:
    """The conversation as texts of at most `most` bytes each. A message that is longer than that is cut."""
    piece, size = "", 0
    for message in messages:
        text = within(render(message), most)
        length = len(text.encode("utf-8", "replace")) + 1
        if piece and size + length > most:
            yield piece
            piece, size = "", 0
        piece, size = f"{piece}\n{text}" if piece else text, size + length
    if piece:
        yield piece


def within(text: str, most: int) -> str:
    """The beginning of a text, in at most `most` bytes."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def render(message: Message) -> str:
    """One message as lines: first the speaker, then the content."""
    data = message.data
    if isinstance(data, ToolData):
        lines = []
        for part in data.content:
            result = part.result
            said = "" if result.output is None else _json(from_raw(result.output, object))
            if result.error is not None:
                said = f"{result.error.code}: {result.error.message}"
            lines.append(f"{part.tool_name} gave ({result.status}): {_cut(said, MAX_VALUE_CHARS)}")
        return "\n".join(lines)
    if isinstance(data, AssistantData):
        calls = [f"Assistant calls {call.tool_name} {_cut(_json(call.args), MAX_VALUE_CHARS)}" for call in data.calls]
        return "\n".join([*([f"Assistant: {data.text}"] if data.text else []), *calls])
    return f"{data.__class__.__name__.removesuffix('Data')}: {data.content}"


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
