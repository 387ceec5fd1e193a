"""What a request to one of OpenAI's doors says: its messages in one form, with their files, and how it wants to hear.

Both doors have the same messages in different words. Files come as `data:` URLs only; nothing is fetched for a caller,
who could reach our network by it. What they are is told by their content.

Source: https://platform.openai.com/docs/api-reference; docs/files.md.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules import parameters
from goondan.features.openai_door.door.rules.faults import RefusedError, refused
from goondan.features.openai_door.door.rules.pieces import BETWEEN
from goondan.schemas.wire import blobs

#: The most messages of one request. A client sends its whole conversation each time; this is a year of one.
MAX_MESSAGES: Final = 20_000
#: The longest id of a response, name of a user or of an instance, and the most characters of a name that is repeated.
MAX_ID: Final = 256


class Attached(Struct, frozen=True):
    """A picture or PDF of a message."""

    #: Its content.
    data: bytes
    #: What it is called.
    name: str | None
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


class Asked(Struct, frozen=True, kw_only=True):
    """A request, as it was read."""

    #: The agent.
    agent: str
    #: The messages, the oldest first. The last one is of the user.
    said: tuple[Said, ...]
    #: What names the conversation: `user`.
    user: str | None = None
    #: The response that this one follows.
    previous: str | None = None
    #: Whether the answer is streamed.
    stream: bool = False
    #: Of a stream of chat completions: whether its last piece tells the usage.
    usage: bool = False
    #: Of a response: whether its turn goes on without its caller.
    background: bool = False
    #: Of a response: whether it can be asked for again.
    store: bool = True
    #: Of a response: what it shows again.
    metadata: Mapping[str, str] = {}
    #: Of a response: what it shows again.
    instructions: str | None = None
    #: The wanted form of the answer.
    format: Any = None


# --- as they are written ----------------------------------------------------------------------------------------------


class _Text(Struct, tag_field="type", tag="text"):
    #: What it says.
    text: str


class _InputText(Struct, tag_field="type", tag="input_text"):
    #: What it says.
    text: str


class _OutputText(Struct, tag_field="type", tag="output_text"):
    #: What it says.
    text: str


class _Refusal(Struct, tag_field="type", tag="refusal"):
    #: What it says.
    refusal: str


class _Url(Struct):
    #: Where the picture is, or the picture itself.
    url: str


class _Image(Struct, tag_field="type", tag="image_url"):
    #: Where it is, or the picture itself; some clients leave the object out.
    image_url: _Url | str


class _InputImage(Struct, tag_field="type", tag="input_image"):
    #: Where it is, or the picture itself.
    image_url: str | None = None
    #: Its id among kept files.
    file_id: str | None = None


class _FileData(Struct):
    #: The content.
    file_data: str | None = None
    #: What it is called.
    filename: str | None = None
    #: Its id among kept files.
    file_id: str | None = None


class _File(Struct, tag_field="type", tag="file"):
    #: The file.
    file: _FileData


class _InputFile(Struct, tag_field="type", tag="input_file"):
    #: The content.
    file_data: str | None = None
    #: What it is called.
    filename: str | None = None
    #: Its id among kept files.
    file_id: str | None = None
    #: Where it is.
    file_url: str | None = None


class _Audio(Struct, tag_field="type", tag="input_audio"):
    pass


_Part = _Text | _InputText | _OutputText | _Refusal | _Image | _InputImage | _File | _InputFile | _Audio


class _Message(Struct):
    #: Whose it is.
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    #: What it says. None: nothing.
    content: str | list[_Part] | None = None
    #: Calls of the caller's tools.
    tool_calls: list[Any] | None = None
    #: A call of a caller's function.
    function_call: Any = None


class _Item(Struct):
    #: What it is.
    type: str = "message"
    #: Whose message it is.
    role: Literal["system", "developer", "user", "assistant"] | None = None
    #: What it says. None: nothing.
    content: str | list[_Part] | None = None


def read_chat(given: Mapping[str, Any]) -> Asked:
    """A request for a chat completion. Raises RefusedError."""
    parameters.check(given, parameters.CHAT)
    options = _options(given)
    written = _converted(_of(given, "messages"), list[_Message], "messages")
    said = []
    for at, message in enumerate(written):
        if message.role in ("tool", "function") or message.tool_calls or message.function_call is not None:
            param = f"messages[{at}]"
            raise refused("A conversation with tool calls of another program cannot go on here.", param, "unsupported")
        said.append(_said(message.role, message.content, f"messages[{at}].content"))
    return Asked(
        agent=_of(given, "model"),
        said=_checked(said, "messages"),
        user=_name(given, "user"),
        stream=bool(given.get("stream")),
        usage=bool(options.get("include_usage")),
        format=given.get("response_format"),
    )


def read_response(given: Mapping[str, Any]) -> Asked:
    """A request for a response. Raises RefusedError."""
    parameters.check(given, parameters.RESPONSES)
    _options(given)
    asked = _of(given, "input")
    instructions = given.get("instructions")
    said = [Said("system", instructions)] if instructions else []
    if isinstance(asked, str):
        said.append(Said("user", asked))
    else:
        for at, item in enumerate(_converted(asked, list[_Item], "input")):
            if item.type == "reasoning":
                continue  # the agent has its own of it
            if item.type != "message" or item.role is None:
                message = f"An agent takes messages, not items of type `{item.type[: parameters.MAX_REPEATED]}`."
                raise refused(message, f"input[{at}]", "unsupported")
            said.append(_said(item.role, item.content, f"input[{at}].content"))
    store, background = given.get("store") is not False, bool(given.get("background"))
    if background and not store:
        raise refused("A response in the background has to be stored: nobody else could get it.", "store")
    text = given.get("text") or {}
    return Asked(
        agent=_of(given, "model"),
        said=_checked(said, "input"),
        user=_name(given, "user"),
        previous=_name(given, "previous_response_id"),
        stream=bool(given.get("stream")),
        background=background,
        store=store,
        metadata=given.get("metadata") or {},
        instructions=instructions,
        format=text.get("format"),
    )


def _of(given: Mapping[str, Any], name: str) -> Any:
    value = given.get(name)
    if value is None:
        raise refused(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return value


def _name(given: Mapping[str, Any], name: str) -> str | None:
    value: str | None = given.get(name)
    if value is not None and len(value) > MAX_ID:
        raise refused(f"'{name}' has at most {MAX_ID} characters.", name, "string_above_max_length")
    return value or None


def _options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = given.get("stream_options") or {}
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool | None):
            raise refused("`stream_options` has `include_usage` and `include_obfuscation`.", "stream_options")
    return options


def _converted(value: Any, form: Any, param: str) -> Any:
    if len(value) > MAX_MESSAGES:
        raise refused(f"{len(value)} messages, limit {MAX_MESSAGES}.", param, "array_above_max_length")
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise refused(f"'{param}' is wrong: {str(error).replace('`$', f'`{param}')}.", param, "invalid_type") from None


def _checked(said: list[Said], param: str) -> tuple[Said, ...]:
    """The messages, with those of the agent that follow each other as one: they are of one turn."""
    if not any(one.role == "user" for one in said):
        raise refused(f"'{param}' has no message of a user.", param, "empty_array")
    if said[-1].role == "assistant":
        raise refused("The last message has to be of the user: an agent does not go on with its own.", param)
    joined: list[Said] = []
    run: list[str] = []
    for at, one in enumerate(said):
        if one.role != "assistant":
            joined.append(one)
            continue
        run.append(one.text)
        if said[at + 1].role != "assistant":
            joined.append(Said("assistant", BETWEEN.join(run)))
            run = []
    return tuple(joined)


# --- contents ---------------------------------------------------------------------------------------------------------


def _said(role: str, content: str | Iterable[_Part] | None, param: str) -> Said:
    whose: Any = "system" if role == "developer" else role
    if content is None or isinstance(content, str):
        return Said(whose, content or "")
    texts: list[str] = []
    files = []
    for at, part in enumerate(content):
        match part:
            case _Text(text=text) | _InputText(text=text) | _OutputText(text=text) | _Refusal(refusal=text):
                texts.append(text)
            case _Audio():
                raise refused("An agent does not hear: write what was said.", f"{param}[{at}]", "unsupported")
            case _:
                files.append(_attached(part, f"{param}[{at}]"))
    if files and whose != "user":
        raise refused("Only a message of the user has files.", param, "unsupported")
    if len(files) > blobs.MAX_FILES:
        raise refused(f"{len(files)} files with one message, limit {blobs.MAX_FILES}.", param, "E_FILE_INVALID")
    return Said(whose, "\n".join(texts) if whose != "assistant" else "".join(texts), tuple(files))


def _attached(part: _Image | _InputImage | _File | _InputFile, param: str) -> Attached:
    match part:
        case _Image(image_url=_Url(url=url)) | _Image(image_url=str(url)):
            return _decoded(url, None, param)
        case _InputImage(image_url=str(url), file_id=None):
            return _decoded(url, None, param)
        case _File(file=_FileData(file_data=str(data), filename=name, file_id=None)):
            return _decoded(data, name, param)
        case _InputFile(file_data=str(data), filename=name, file_id=None, file_url=None):
            return _decoded(data, name, param)
        case _:
            raise _only_data(param)


def _only_data(param: str) -> RefusedError:
    message = "A file comes as a `data:` URL with base64: nothing is fetched, and no files are kept here."
    return refused(message, param, "unsupported")


def _decoded(url: str, name: str | None, param: str) -> Attached:
    data = url
    if url[:5].lower() == "data:":
        kind, comma, data = url.partition(",")
        if not comma or not kind.lower().endswith(";base64"):
            raise _only_data(param)
    elif "://" in url[:32] or isinstance(name, type(None)):
        raise _only_data(param)
    if len(data) > blobs.MAX_FILE_BYTES * 4 // 3 + 4:
        raise refused(f"A file has at most {blobs.MAX_FILE_BYTES} bytes.", param, "E_FILE_INVALID")
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError):
        raise refused("This is no base64.", param, "invalid_base64") from None
    if blobs.media_type_of(content) is None:
        message = (
            "A file is a png, jpeg, gif, webp or PDF by its content; put the text of other files into the message."
        )
        raise refused(message, param, "E_FILE_INVALID")
    if len(content) > blobs.MAX_FILE_BYTES:
        raise refused(f"A file has at most {blobs.MAX_FILE_BYTES} bytes.", param, "E_FILE_INVALID")
    kept = "".join(filter(str.isprintable, name or "")).replace("/", "_")[-blobs.MAX_NAME_CHARS :]
    return Attached(content, kept or None, hashlib.sha256(content).digest())
