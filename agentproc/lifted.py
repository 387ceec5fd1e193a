"""Finds pictures and PDFs in the output of a tool, and puts numbers in their places. Pure.

The forms that are known:
- `{"type": "file", "data": BASE64, "mediaType"?, "name"?}`, as the bundled tools return a file;
- `{"type": "image", "data": BASE64, "mimeType"}`, a block of MCP;
- `{"blob": BASE64, "mimeType"?, "uri"}`, the contents of an MCP resource.

In the place of `data` and `blob` stands `file`: the number of the file in the result, from 1. The rest stays.

Source: docs/design/files.md section 3; requirement MCP-16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.schemas.wire.blobs import MAX_FILES, MAX_MESSAGE_BYTES, MAX_NAME_CHARS
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.frames import FilePart, ToolResult

#: How deep a file may lie in an output: `{"messages": [{"content": [{"resource": {…}}]}]}` is the deepest of MCP's.
MAX_DEPTH: Final = 6
#: How many values of an output are looked at.
MAX_LOOKED_AT: Final = 10_000
#: A shorter base64 is none of a picture.
_LEAST: Final = 16


class Lifted(Struct, frozen=True):
    """A file that was found."""

    #: The object that it stands in, and the key of its base64 there.
    holder: dict[str, Any]
    #: The key of its blob.
    key: str
    #: Its base64.
    base64: str
    #: Its name, if it has one.
    name: str | None


class LiftedFiles:
    """The files in one output."""

    def __init__(self, output: Any, found: list[Lifted]) -> None:
        self._output = output
        self._found = found

    def settle(
        self, result: ToolResult, keep: Callable[[Lifted], FilePart | None]
    ) -> tuple[ToolResult, list[FilePart]]:
        """The result with numbers in the places of the files that `keep` keeps, and these files."""
        files: list[FilePart] = []
        size = 0
        for one in self._found:
            if len(files) == MAX_FILES or size + len(one.base64) * 3 // 4 > MAX_MESSAGE_BYTES:
                break
            file = keep(one)
            if file is None:
                continue
            files.append(file)
            size += file.blob.size
            del one.holder[one.key]
            one.holder["file"] = len(files)
        return (replace(result, output=Raw(encode_value(self._output))), files) if files else (result, [])


def lift_files(output: Raw | None) -> LiftedFiles | None:
    """The files in an output; None when there are none."""
    if output is None:
        return None
    value = msgspec.msgpack.decode(output)
    found: list[Lifted] = []
    left = MAX_LOOKED_AT
    todo: deque[tuple[Any, int]] = deque([(value, 0)])
    while todo and left:
        item, depth = todo.popleft()
        left -= 1
        if isinstance(item, dict):
            one = _file_in(item)
            if one is not None:
                found.append(one)
            elif depth < MAX_DEPTH:
                todo += [(inner, depth + 1) for inner in item.values() if isinstance(inner, dict | list)]
        elif isinstance(item, list) and depth < MAX_DEPTH:
            todo += [(inner, depth + 1) for inner in item[:left] if isinstance(inner, dict | list)]
    return LiftedFiles(value, found) if found else None


def _file_in(item: dict[str, Any]) -> Lifted | None:
    """The file that an object is."""
    key = "data" if item.get("type") in ("file", "image") else "blob" if isinstance(item.get("uri"), str) else None
    base64 = None if key is None else item.get(key)
    if key is None or not isinstance(base64, str) or len(base64) < _LEAST or "file" in item:
        return None
    name = item.get("name") or item.get("uri")
    return Lifted(item, key, base64, name[-MAX_NAME_CHARS:] if isinstance(name, str) and name else None)
