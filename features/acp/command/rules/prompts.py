"""What a client sends, read: a line of JSON-RPC, and the blocks of a prompt. Pure.

A prompt is a text and files. A link to a file where tools work is said as its path there; the command sends pictures
and PDFs among them as files. What is said of anything else is its address.

Source: https://www.jsonrpc.org/specification; https://agentclientprotocol.com/protocol/content.
"""

from __future__ import annotations

import binascii
import posixpath
import re
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from goondan.schemas.wire import blobs
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within

#: The codes of errors: of JSON-RPC, and of the protocol for what is not there.
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
NOT_FOUND: Final = -32002
#: The longest name of anything from outside in an error (characters).
SHOWN: Final = 200


class BadLine(Exception):
    """A line that is no message. `id` is the one to answer to, `code` the error's."""

    def __init__(self, code: int, text: str, id: Any = None) -> None:
        super().__init__(text)
        self.code = code
        self.id = id


def read_message(data: bytes) -> dict[str, Any]:
    """The message in a line: a request, a notification or a response. Raises BadLine."""
    try:
        message = msgspec.json.decode(data)
    except RecursionError:
        raise BadLine(PARSE_ERROR, "the line is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadLine(PARSE_ERROR, "the line is no JSON") from None
    if not isinstance(message, dict):
        raise BadLine(INVALID_REQUEST, "a message is one JSON object a line")
    told = message.get("id")
    if isinstance(told, bool) or not isinstance(told, int | str | None):
        raise BadLine(INVALID_REQUEST, "the id of a message is a text or an integer")
    if message.get("jsonrpc") != "2.0":
        raise BadLine(INVALID_REQUEST, 'a message has "jsonrpc": "2.0"', told)
    if "method" not in message:
        return _response(message)
    if not isinstance(message["method"], str):
        raise BadLine(INVALID_REQUEST, "the method of a request is a text", told)
    return message


def _response(message: dict[str, Any]) -> dict[str, Any]:
    """A response to a request of ours."""
    if "id" not in message or ("result" not in message and "error" not in message):
        raise BadLine(INVALID_REQUEST, "a message has a method, a result or an error")
    error = message.get("error")
    if error is None:
        return message
    known = error if isinstance(error, dict) else {}
    code, text = known.get("code"), known.get("message")
    told = {"code": code if type(code) is int else INTERNAL_ERROR, "message": str(text or "")[:SHOWN]}
    return {"jsonrpc": "2.0", "id": message["id"], "error": told}


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

    Raises GoondanError E_USAGE for what an agent cannot be told, E_FILE_INVALID for files that are too large.
    """
    said = [_read(block, workdir) for block in blocks]
    if sum(block.data is not None or block.path is not None for block in said) > blobs.MAX_FILES:
        said = [block if block.data is not None else block._replace(path=None) for block in said]
    if not any(block.text.strip() or block.data for block in said):
        raise fail("E_USAGE", "the prompt says nothing")
    return said


def _read(block: dict[str, Any], workdir: str) -> Said:
    kind = block["type"]
    if kind == "text":
        return Said(block["text"])
    if kind == "image":
        return Said(data=_bytes(block["data"]), name=name_of(block.get("uri") or "picture"))
    if kind == "resource_link":
        return _linked(block["uri"], block.get("name") or "", workdir)
    if kind == "resource":
        resource = block["resource"]
        if "text" in resource:
            return Said(_quoted(place_of(resource["uri"], workdir)[0], resource["text"]))
        return Said(data=_bytes(resource["blob"]), name=name_of(resource["uri"]))
    raise fail("E_USAGE", f"an agent takes no {kind[:SHOWN]}; say it in words")


def _linked(uri: str, name: str, workdir: str) -> Said:
    place, path = place_of(uri, workdir)
    what = f"[{name}] " if name and name not in place else ""
    return Said(f"{what}{place}", path=path, name=name_of(place))


def place_of(uri: str, workdir: str) -> tuple[str, str | None]:
    """How a resource is named, and its path if it lies where tools work. Links are not looked at."""
    parts = urlsplit(uri) if uri.startswith("file:") else None
    if parts is None or parts.netloc not in ("", "localhost"):
        return uri, None
    path = posixpath.normpath(unquote(parts.path) or "/")
    if "\0" in path or not path.startswith("/"):
        return uri, None
    if not within(path, workdir):
        return f"{path} (not in the folder where tools work)", None
    lines = re.match(r"L?(\d+)", parts.fragment)
    return posixpath.relpath(path, workdir) + (f":{lines[1]}" if lines else ""), path


def _quoted(place: str, text: str) -> str:
    """A text as it stands in a file, between fences that it cannot end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{place}\n{fence}\n{text}\n{fence}"


def name_of(place: str) -> str:
    """A short name for a file at this place."""
    return posixpath.basename(place.rstrip("/"))[-blobs.MAX_NAME_CHARS :] or "file"


def _bytes(data: str) -> bytes:
    if len(data) > blobs.MAX_FILE_BYTES // 3 * 4 + 4:
        raise fail("E_FILE_INVALID", f"a file of more than {blobs.MAX_FILE_BYTES} bytes with one message")
    try:
        return b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise fail("E_FILE_INVALID", "a file of the prompt is no base64") from None


def session_of(session_id: str) -> tuple[str, str]:
    """The agent and the instance key of a session's id."""
    agent, _, key = session_id.partition("/")
    return agent, key
