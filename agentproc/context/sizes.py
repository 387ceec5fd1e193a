"""How long the parts of a request are (bytes of what the model reads). Pure.

A token is never counted here: each vendor counts in its own way. The bytes are those of the texts, without what JSON
and the form of a vendor add. estimate.py turns them into tokens.

Source: docs/design/turns.md section 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Final

import msgspec

from goondan.agentproc.conversation import REASONING, AssistantData, Message, TextPart, ToolData, files_of
from goondan.agentproc.providers.history import KEPT
from goondan.schemas.codec import encode_value
from goondan.schemas.frames import FilePart, ToolResult
from goondan.schemas.launch import CatalogItem

#: What stands around each message and each call in a vendor's form (bytes): the names of roles and the marks between
#: them.
AROUND: Final = 16
#: A picture has as many tokens as so many bytes of text: vendors make 1,600 tokens of a large one.
PICTURE: Final = 4800
#: A PDF has as many tokens as this part of its bytes. Vendors make 2,000 tokens of a page, which has some 50 kB.
PDF_PART: Final = 8


def text_size(text: str | None) -> int:
    """The bytes of a text."""
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def message_size(message: Message) -> int:
    """The bytes of a message, with what its vendor gets back, and with its files."""
    data = message.data
    if isinstance(data, ToolData):
        return sum([AROUND + result_size(part.result) for part in data.content]) + files_size(message)
    if not isinstance(data, AssistantData):
        return AROUND + text_size(data.content) + files_size(message)
    size = AROUND
    for part in data.content:
        if isinstance(part, TextPart):
            size += text_size(part.text)
        else:
            size += AROUND + len(part.tool_name) + len(encode_value(part.args))
    kept = message.metadata.get(KEPT)
    if kept is None:
        return size
    reasoning = message.metadata.get(REASONING)  # of chat completions, whose vendor gets it back under the kept name
    goes_back = isinstance(kept, dict) and "reasoning" in kept and isinstance(reasoning, str)
    return size + len(encode_value(kept)) + (text_size(reasoning) if goes_back else 0)


def files_size(message: Message) -> int:
    """The bytes of text that have as many tokens as the files of a message. They are shown whole, or not at all."""
    return sum([_file_size(file) for file in files_of(message)])


def _file_size(file: FilePart) -> int:
    return max(PICTURE, file.blob.size // PDF_PART) if file.media_type == "application/pdf" else PICTURE


def result_size(result: ToolResult) -> int:
    """The bytes of a result."""
    if result.status == "ok":
        return 0 if result.output is None else len(memoryview(result.output))
    return len(encode_value([result.handle, result.error]))


def blocks_size(blocks: Sequence[dict[str, Any]]) -> int:
    """The bytes of the blocks of a step."""
    return sum([AROUND + len(msgspec.json.encode(block, enc_hook=str)) for block in blocks])


class ToolSizes:
    """The bytes of the tools' definitions. They are counted again only when the tools have changed."""

    __slots__ = ("_items", "_size")

    def __init__(self) -> None:
        self._items: Sequence[CatalogItem] = []
        self._size = 0

    def of(self, items: Sequence[CatalogItem]) -> int:
        """The bytes of these. The list must not be changed afterwards."""
        known = self._items
        if len(items) != len(known) or not all(map(is_, items, known)):
            self._items = items
            self._size = sum(map(_item_size, items))
        return self._size


def _item_size(item: CatalogItem) -> int:
    parameters = 0 if item.parameters is None else len(msgspec.json.encode(item.parameters, enc_hook=str))
    return AROUND + len(item.name) + text_size(item.description) + parameters


class MessageSizes:
    """The bytes of a conversation's messages. Those that were counted before are not counted again."""

    __slots__ = ("_known", "_sizes")

    def __init__(self) -> None:
        self._known: list[Message] = []
        self._sizes: list[int] = []

    def of(self, messages: list[Message]) -> list[int]:
        """The bytes of each. Neither list may be changed afterwards."""
        same = 0
        if len(messages) >= len(self._known) and all(map(is_, self._known, messages)):
            same = len(self._known)
        sizes = self._sizes[:same]
        sizes += map(message_size, messages[same:] if same else messages)
        self._known, self._sizes = messages, sizes
        return sizes
