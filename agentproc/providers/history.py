"""The conversation in the form that a vendor accepts. Pure.

Our messages may contain parts that a vendor refuses: ids that repeat between turns or come from another vendor, tool
names that a model made up, empty texts. One bad message would make every later request fail, so they are changed here.
Each call comes with exactly one result. Ids are unique within the request. Names of the catalog stay as they are
(NAME-03), and only other names are rewritten.

Source: docs/design/turns.md section 5; requirements ERROR-08, NAME-03.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from operator import is_
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from goondan.agentproc.conversation import (
    REASONING,
    AssistantData,
    Message,
    SystemData,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    is_presentable,
    presentable,
)
from goondan.agentproc.providers.base import ModelRequest, storable
from goondan.agentproc.providers.body import FilesPlace, SentFile, sent_file
from goondan.schemas.wire.blobs import words_for
from goondan.schemas.wire.codec import check_depth, encode_value
from goondan.schemas.wire.errors import for_model
from goondan.schemas.wire.frames import FilePart, ToolResult

#: The key in an assistant message's metadata for data that only its vendor understands and wants back (see `kept_by`).
KEPT: Final = "vendor"
#: The deepest nesting of the kept data. It travels inside a message, whose frame has a limit of its own.
MAX_KEPT_DEPTH: Final = 32
#: The text in place of an empty text, which a vendor does not accept.
EMPTY: Final = "(empty message)"
#: Why words stand for a file.
NOT_SHOWN: Final = "not shown here"
#: The `<` of a tag that begins or ends a block.
_TAG: Final = re.compile(r"<(?=\s*/?\s*context\b)", re.IGNORECASE)
#: A tool name that every vendor takes.
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: A tool call id that every vendor takes.
_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,40}")


class AnsweredCall(Struct, frozen=True):
    """A tool call with its result as text."""

    #: The id of the call, unique within the request.
    id: str
    #: The name of the tool.
    name: str
    #: The arguments, an object.
    args: dict[str, Any]
    #: The result as text.
    result: str
    #: Whether the call failed.
    is_error: bool
    #: The pictures and PDFs of the result that are sent with it.
    files: list[SentFile] = []


class Said(Struct, frozen=True):
    """An answer of the model: text, then calls."""

    #: The text; it may be empty.
    text: str
    #: The calls; there may be none.
    calls: list[AnsweredCall]
    #: The data that `kept_by` stored.
    kept: dict[str, Any]
    #: The reasoning before it, if the model that is asked wrote it.
    reasoning: str = ""


class Told(Struct, frozen=True):
    """A message of the user, or (system) instructions inside the conversation."""

    #: The text.
    text: str
    #: It is instructions.
    system: bool = False
    #: The pictures and PDFs that are sent with it.
    files: list[SentFile] = []


HistoryEntry = Said | Told


def kept_by(provider: str, model: str, **values: Any) -> dict[str, Any] | None:
    """Metadata for an assistant message, from which `entries` restores `values` for this same model only.

    None when they could not be stored. Then the vendor has to do without them.
    """
    try:
        kept = {KEPT: {"provider": provider, "model": model, **storable(values)}}
        check_depth(encode_value(kept), MAX_KEPT_DEPTH)
    except (ValueError, OverflowError, RecursionError):
        return None
    return kept


def entries(messages: Sequence[Message], catalog: Collection[str], provider: str, model: str) -> list[HistoryEntry]:
    """The entries of the conversation, in order. An assistant message without text and calls is left out.

    `catalog` are the names of the tools in the request.
    """
    return Entries(catalog, provider, model).extend(presentable(messages))


class Entries:
    """Makes the entries of a conversation that comes in parts (see `entries`)."""

    def __init__(
        self,
        catalog: Collection[str],
        provider: str,
        model: str,
        hidden: Collection[str] = frozenset(),
        files: FilesPlace | None = None,
    ) -> None:
        """Words stand for the files that are `hidden` (by `blob.file`), and for all when there are no `files`."""
        self._catalog = catalog
        self._hidden = hidden
        self._files = files
        self._provider = provider
        self._model = model
        self._used: set[str] = set()
        self._calls = 0

    def extend(self, messages: Sequence[Message]) -> list[HistoryEntry]:
        """The entries of the next part. Each part keeps the conversation's invariant by itself."""
        results: list[ToolResultPart] = []
        for message in messages:
            if isinstance(message.data, ToolData):
                results += message.data.content
        found: list[HistoryEntry] = []
        rest = iter(results)
        for message in messages:
            data = message.data
            if isinstance(data, UserData | SystemData):
                if isinstance(data, UserData) and data.files:
                    found.append(Told(*self._beside(data.content, data.files)))
                else:
                    found.append(Told(data.content, system=isinstance(data, SystemData)))
            elif isinstance(data, AssistantData):
                parts, text = data.calls, data.text
                calls = [self._call(part, result) for part, result in zip(parts, rest, strict=False)]
                if calls or text.strip():
                    kept = _kept(message, self._provider, self._model)
                    reasoning = message.metadata.get(REASONING) if kept else None
                    found.append(Said(text, calls, kept, reasoning if isinstance(reasoning, str) else ""))
        return found

    def _beside(self, text: str, files: list[FilePart]) -> tuple[str, bool, list[SentFile]]:
        """The fields of a `Told` with files: the words of those that are not sent stand behind the text."""
        words, shown = self._split(files)
        return "\n".join([*([text] if text.strip() or not words else []), *words]), False, shown

    def _split(self, files: list[FilePart]) -> tuple[list[str], list[SentFile]]:
        """The words of the files that are not sent, and the files that are."""
        words: list[str] = []
        sent: list[SentFile] = []
        for file in files:
            if self._files is None or file.blob.file in self._hidden:
                words.append(words_for(file, NOT_SHOWN))
            else:
                sent.append(sent_file(file, self._files.mark))
        return words, sent

    def _call(self, part: ToolCallPart, answered: ToolResultPart) -> AnsweredCall:
        result = answered.result
        self._calls += 1
        # The number counts calls, so a message keeps its ids when the conversation grows.
        own = f"call_{self._calls}"
        call_id = part.tool_call_id if _ID.fullmatch(part.tool_call_id) else own
        copy = 1
        while call_id in self._used:
            call_id, copy = own if copy == 1 else f"{own}_{copy}", copy + 1
        self._used.add(call_id)
        name = tool_name(part.tool_name, self._catalog)
        text, (words, files) = result_text(result), self._split(answered.files)
        return AnsweredCall(call_id, name, part.args, "\n".join([text, *words]), result.status == "error", files)


class Writer(Protocol):
    """Writes a conversation in a vendor's form, entry by entry."""

    def add(self, entry: HistoryEntry) -> None:
        """Add the next entry."""


W = TypeVar("W", bound=Writer)


class Written(Generic[W]):
    """A conversation in a vendor's form, which grows from one request to the next. Only the new part is written.

    A turn of N steps asks N times with the same beginning. Writing all of it each time would cost N times N. The
    earlier part is used as long as the same message objects begin the request, with the same tools and model.
    """

    def __init__(self, provider: str, writer: Callable[[], W]) -> None:
        self._provider = provider
        self._make = writer
        self.forget()

    def forget(self) -> None:
        """Begin again with the next request. Until then this object holds no conversation."""
        self._messages: list[Message] = []
        self._offered: tuple[str, list[str], frozenset[str]] | None = None
        self._writer: W | None = None
        self._entries: Entries | None = None

    def of(self, request: ModelRequest) -> W:
        """The writer that has written the request's conversation."""
        messages, known = request.messages, self._messages
        offered = (request.model.model, [item.name for item in request.tools], request.hidden_files)
        writer, source = self._writer, self._entries
        if (
            writer is not None
            and source is not None
            and offered == self._offered
            and len(messages) >= len(known)
            and all(map(is_, known, messages))
            and is_presentable(new := messages[len(known) :])
        ):
            known += new
        else:
            self.forget()
            writer = self._make()
            source = Entries(
                frozenset(offered[1]), self._provider, request.model.model, request.hidden_files, request.files
            )
            new = presentable(messages)
            if is_presentable(messages):
                self._messages, self._offered, self._writer, self._entries = list(messages), offered, writer, source
        for entry in source.extend(new):
            writer.add(entry)
        return writer


def tool_name(name: str, catalog: Collection[str]) -> str:
    """The name of an earlier call. A name that is not in the catalog and that no vendor would accept is rewritten."""
    if name in catalog or _NAME.fullmatch(name):
        return name
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unnamed"


def result_text(result: ToolResult) -> str:
    """A result as the model reads it: a text as it is, other output as JSON, an error or a handle with all
    its fields.
    """
    if result.status != "ok":
        fields = {"status": result.status, "handle": result.handle, "error": result.error and for_model(result.error)}
        return _json({name: value for name, value in fields.items() if value is not None})
    output = msgspec.msgpack.decode(result.output) if result.output is not None else None
    return output if isinstance(output, str) else _json(output)


def blocks_text(blocks: Sequence[dict[str, Any]]) -> str | None:
    """The blocks of a step as the model reads them; None when there are none. Each stands between tags that name its
    type. Its `text` is written as it is, any other value as JSON. What is in a block may come from a stranger (the
    resources of an MCP server, a skill), so no such tag stands in it: its `<` is written in another way.
    """
    if not blocks:
        return None
    return "\n\n".join([_block_text(block) for block in blocks])


def _block_text(block: dict[str, Any]) -> str:
    fields = {name: value for name, value in block.items() if name != "type"}
    text = fields.get("text")
    if isinstance(text, str) and len(fields) == 1:
        inside = _TAG.sub("&lt;", text)
    else:
        inside = _TAG.sub(r"\\u003c", _json(fields.get("data", fields)))
    kind = str(block.get("type")).replace('"', "'")
    return f'<context type="{kind}">\n{inside}\n</context>'


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _kept(message: Message, provider: str, model: str) -> dict[str, Any]:
    kept = message.metadata.get(KEPT)
    if isinstance(kept, dict) and (kept.get("provider"), kept.get("model")) == (provider, model):
        return kept
    return {}
