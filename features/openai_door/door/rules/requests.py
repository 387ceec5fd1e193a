"""What a request to one of OpenAI's doors says: its messages in one form, with their files, and how it wants to hear.

Both doors have the same messages in different words. Files come as `data:` URLs only; nothing is fetched for a caller,
who could reach our network by it. What they are is told by their content.

Source: https://platform.openai.com/docs/api-reference; docs/files.md.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules import parameters
from goondan.features.openai_door.door.rules.faults import refused
from goondan.features.openai_door.door.rules.pieces import BETWEEN
from goondan.schemas.wire import blobs
from goondan.schemas.wire.codec import DECODE_ERRORS

#: The most messages of one request. A client sends its whole conversation each time; this is a year of one.
MAX_MESSAGES: Final = 20_000


class Attached(Struct, frozen=True):
    """A picture or PDF of a message."""

    #: Its content.
    data: bytes
    #: What it is called; "": nothing.
    name: str
    #: SHA-256 of its content.
    digest: bytes


class Said(Struct, frozen=True):
    """One message."""

    #: Whose it is. `system`: instructions of the program that asks.
    role: Literal["system", "user", "assistant"]
    #: The text.
    text: str
    #: Its files.
    files: tuple[Attached, ...] = ()


class Asked(Struct, frozen=True):
    """A request, as it was read."""

    #: The agent.
    agent: str
    #: The messages, the oldest first.
    said: tuple[Said, ...]
    #: The wanted form of the answer.
    format: Any
    #: The request itself, of which every value has its form.
    given: Mapping[str, Any]
    #: How large it was (bytes).
    size: int


def read(body: bytes, table: parameters.Table) -> Asked:
    """A request to the door that has these parameters. Raises RefusedError."""
    given = None
    with suppress(*DECODE_ERRORS):
        given = msgspec.json.decode(body)
    if not isinstance(given, dict):
        raise refused("The body has to be a JSON object.", code="invalid_json")
    parameters.check(given, table)
    where = "messages" if "messages" in table else "input"
    for name in ("model", where):
        if given.get(name) is None:
            raise refused(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    asked, instructions = given[where], given.get("instructions")
    said = [Said("system", instructions)] if instructions else []
    if isinstance(asked, str):
        said.append(Said("user", asked))
    elif len(asked) > MAX_MESSAGES:
        raise refused(f"{len(asked)} messages, limit {MAX_MESSAGES}.", where, "array_above_max_length")
    else:
        said += filter(None, [_message(item, f"{where}[{at}]") for at, item in enumerate(asked)])
    if not any(one.role == "user" for one in said) or said[-1].role == "assistant":
        raise refused(f"The last of '{where}' has to be a message of the user.", where, "invalid_value")
    wanted = given.get("response_format") or (given.get("text") or {}).get("format")
    return Asked(given["model"], _joined(said), wanted, given, len(body))


def _joined(said: list[Said]) -> tuple[Said, ...]:
    """The messages, with those of the agent that follow each other as one: they are of one turn."""
    joined: list[Said] = []
    for role, run in groupby(said, lambda one: one.role):
        those = [*run]
        joined += [Said(role, BETWEEN.join([one.text for one in those]))] if role == "assistant" else those
    return tuple(joined)


def _message(item: Any, where: str) -> Said | None:
    """One message. None for one that says nothing to an agent."""
    match item:
        case {"type": "reasoning"}:  # the agent keeps its own
            return None
        case {"tool_calls": [_, *_]} | {"function_call": {}} | {"role": "tool" | "function"}:
            raise refused("A conversation with tool calls of another program cannot go on here.", where, "unsupported")
        case {"role": "system" | "developer" | "user" | "assistant" as role} if item.get("type") in (None, "message"):
            content = item.get("content")
        case _:
            raise refused("An agent takes messages of a system, developer, user or assistant.", where, "invalid_value")
    parts = [content] if isinstance(content, str) else [] if content is None else content
    if not isinstance(parts, list):
        raise refused("A content is a text, or a list of parts.", where, "invalid_type")
    read = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(parts)]
    texts = [part for part in read if isinstance(part, str)]
    files = tuple([part for part in read if isinstance(part, Attached)])
    if files and role != "user":
        raise refused("Only a message of the user has files.", where, "unsupported")
    if role == "assistant":
        return Said("assistant", "".join(texts))
    return Said("user" if role == "user" else "system", "\n".join(texts), files)


def _part(part: Any, where: str) -> str | Attached:
    """One part of a content: a text or a file."""
    match part:
        case str(text) | {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "image_url" | "input_image", "image_url": {"url": str(url)} | str(url)}:
            return _attached(url, "", where)
        case {"type": "file", "file": {"file_data": str(url)} as file}:
            return _attached(url, str(file.get("filename") or ""), where)
        case {"type": "input_file", "file_data": str(url)}:
            return _attached(url, str(part.get("filename") or ""), where)
        case _:
            message = "A part is a text, or a file whose content comes with it: nothing is fetched or kept here."
            raise refused(message, where, "unsupported")


def _attached(url: str, name: str, where: str) -> Attached:
    """The file in a `data:` URL; of one with a name, its base64 alone will do."""
    kind, comma, data = url.partition(",")
    if not comma and name:
        kind, data = "data:;base64", url
    if not (kind[:5].lower() == "data:" and kind.lower().endswith(";base64")):
        raise refused("A file comes as a `data:` URL with base64: nothing is fetched.", where, "unsupported")
    if len(data) > blobs.MAX_FILE_BYTES * 4 // 3 + 4:
        raise refused(f"A file has at most {blobs.MAX_FILE_BYTES} bytes.", where, "E_FILE_INVALID")
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise refused("This is no base64.", where, "invalid_base64") from None
    if blobs.media_type_of(content) is None:
        message = (
            "A file is a png, jpeg, gif, webp or PDF by its content; put the text of other files into the message."
        )
        raise refused(message, where, "E_FILE_INVALID")
    name = "".join(filter(str.isprintable, name)).replace("/", "_")[-blobs.MAX_NAME_CHARS :]
    return Attached(content, name, hashlib.sha256(content).digest())
