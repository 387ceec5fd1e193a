"""What a client sends, read: a line of JSON-RPC, and the blocks of a prompt. Pure.

A prompt is a text and files. A link to a file where tools work is said as its path there; the command sends pictures
and PDFs among them as files. What is said of anything else is its address.

Source: https://www.jsonrpc.org/specification; https://agentclientprotocol.com/protocol/content.
"""

from __future__ import annotations

import posixpath
import re
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType

from goondan.schemas.wire.blobs import MAX_NAME_CHARS
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within

#: The codes of errors of JSON-RPC.
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600


class BadLine(Exception):
    """A line that is no message, with the error of JSON-RPC for it."""


class _Message(Struct):
    """What is believed of a message before it is anything: nothing else may be where these fields are."""

    #: The protocol.
    jsonrpc: Literal["2.0"]
    #: Of a request and its response.
    id: int | str | None = None
    #: Of a request and a notification.
    method: str | UnsetType = UNSET
    #: Of a response.
    error: dict[str, Any] | UnsetType = UNSET


def read_message(line: bytes | None, size: int, limit: int) -> dict[str, Any]:
    """The message in a line: a request, a notification or a response. None: the line was longer than the limit. Raises
    BadLine.
    """
    if line is None:
        raise BadLine({"code": INVALID_REQUEST, "message": f"a message of {size} bytes; at most {limit}"})
    try:
        message: dict[str, Any] = msgspec.json.decode(line)
        msgspec.convert(message, _Message)
    except msgspec.ValidationError as error:
        raise BadLine({"code": INVALID_REQUEST, "message": f"no message of JSON-RPC: {error}"}) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine({"code": PARSE_ERROR, "message": "the line is no JSON"}) from None
    return message


class Said(NamedTuple):
    """A block of a prompt, read."""

    #: What is said.
    text: str = ""
    #: The content of a file that goes with the message.
    data: bytes | None = None
    #: The path of a file that goes with the message, if it is a picture or a PDF.
    path: str | None = None
    #: The file's name.
    name: str = ""


def read_prompt(blocks: Sequence[dict[str, Any]], workdir: str) -> list[Said]:
    """The blocks of a prompt, for an agent whose tools work in this folder.

    Raises GoondanError E_USAGE for what an agent cannot be told, E_FILE_INVALID for a file that is no base64.
    """
    said = [_read(block, workdir) for block in blocks]
    if not any(block.text.strip() or block.data for block in said):
        raise fail("E_USAGE", "the prompt says nothing")
    return said


def _read(block: dict[str, Any], workdir: str) -> Said:
    kind, of = block["type"], block.get("resource", block)
    if kind == "text":
        return Said(block["text"])
    if kind not in ("image", "resource", "resource_link"):
        raise fail("E_USAGE", f"an agent takes no {kind}: say it in words")
    place, path = _place_of(of.get("uri") or "picture", workdir)
    name = posixpath.basename(place.rstrip("/"))[-MAX_NAME_CHARS:] or "file"
    if kind == "resource_link":
        return Said(place, path=path, name=name)
    if "text" in of:  # between fences that it cannot end
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", of["text"])), default=0))
        return Said(f"{place}\n{fence}\n{of['text']}\n{fence}")
    try:
        return Said(data=b64decode(of["data"] if kind == "image" else of["blob"], validate=True), name=name)
    except ValueError:
        raise fail("E_FILE_INVALID", f"{name}: is no base64") from None


def _place_of(uri: str, workdir: str) -> tuple[str, str | None]:
    """How a resource is named, and its path if it lies where tools work. Links are not looked at."""
    parts = urlsplit(uri) if uri.startswith("file:///") else None
    path = posixpath.normpath(unquote(parts.path)) if parts is not None else ""
    if parts is None or "\0" in path:
        return uri, None
    if not within(path, workdir):
        return f"{path} (not in the folder where tools work)", None
    line = re.match(r"L?(\d+)", parts.fragment)
    return posixpath.relpath(path, workdir) + (f":{line[1]}" if line else ""), path
