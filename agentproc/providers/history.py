"""What of a conversation a request to a model shows, in a form that vendors accept. Pure.

Our messages may contain parts that a vendor refuses: ids that repeat between turns or come from another vendor, tool
names that a model made up, empty texts. One bad message would make every later request fail, so they are changed here.
Each call comes with exactly one result. Ids are unique within the request. Names of the catalog stay as they are
(NAME-03), and only other names are rewritten.

Rules for the files of a conversation: which ones a request has, and which are lines of words there.
- What a model sees is what its Model says (`sees`). Where it says nothing, files are sent, and a refusal teaches it.
- The files of the turn's own user message have to be seen, otherwise the turn fails with E_MODEL_CANNOT_SEE: a person
  asks about them. All others (of earlier turns, of results) become words, so no conversation gets stuck by a file.
- A request has MAX_SHOWN files and MAX_SHOWN_BYTES at most: the newest ones. The older ones become words in groups, so
  that the beginning of the requests stays the same for as long as possible.

Source: docs/design/turns.md section 5; docs/design/files.md sections 4 and 5; requirements ERROR-08, NAME-03.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.agentproc.machine.messages import (
    REASONING,
    AssistantData,
    Message,
    SystemData,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    begins_with,
    files_of,
    is_presentable,
    presentable,
)
from goondan.agentproc.providers.base import JsonItems, ModelRequest, encode_json, storable
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire import blobs, codec, errors
from goondan.schemas.wire.frames import FilePart, ToolResult

#: The key in an assistant message's metadata for data that only its vendor understands and wants back (see `kept_by`).
KEPT: Final = "vendor"
#: The deepest nesting of the kept data. It travels inside a message, whose frame has a limit of its own.
MAX_KEPT_DEPTH: Final = 32
#: The text in place of an empty text, which a vendor does not accept.
EMPTY: Final = "(empty message)"
#: Why words stand for a file.
NOT_SHOWN: Final = "not shown here"
#: So many files become words at a time.
GROUP: Final = 8
#: The statuses of a server that does not take a request.
_REFUSALS: Final = frozenset((400, 404, 413, 415, 422, 500, 501))
_WHAT: Final = r"(?:image|vision|picture|multi-?modal|pdf|document|file)"
#: A server says that its model sees nothing of the kind. The words of the usual servers, in lower case.
_CANNOT: Final = (
    rf"not support[^.]{{0,60}}{_WHAT}|{_WHAT}[^.]{{0,60}}(?:not support|not enabled|only supported by)"
    rf"|not a multi-?modal|at most 0 {_WHAT}|mmproj|unknown variant `(?:image_url|file|image|document)`"
    rf"|content must be a string|no endpoints found that support|missing data required for {_WHAT}"
)
#: A server does not take this very file.
_BAD: Final = r"format|media.?type|mime|too large|too big|exceed|dimension|could not process|decode|base64|corrupt"
_ABOUT_PDF: Final = r"pdf|document|`file`|file (?:input|content)"
_ABOUT_IMAGE: Final = r"image|vision|picture|modal|mmproj"
#: The `<` of a tag that begins or ends a block.
_TAG: Final = re.compile(r"<(?=\s*/?\s*context\b)", re.IGNORECASE)
#: A tool name that every vendor takes.
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: A tool call id that every vendor takes.
_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,40}")


class SentFile(Struct, frozen=True):
    """A file that goes to a model."""

    #: What it is.
    media_type: str
    #: Its name, if it has one.
    name: str | None
    #: What stands for its base64 until the body is cut.
    base64: str

    @property
    def data_url(self) -> str:
        """The file as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


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
    """Metadata for an assistant message, from which `Entries` restores `values` for this same model only.

    None when they could not be stored. Then the vendor has to do without them.
    """
    try:
        kept = {KEPT: {"provider": provider, "model": model, **storable(values)}}
        codec.check_depth(codec.encode_value(kept), MAX_KEPT_DEPTH)
    except (ValueError, OverflowError, RecursionError):
        return None
    return kept


def in_kept_order(said: Said, name: str) -> list[Any] | None:
    """What `kept_by` stored of the order of an answer under this name: texts, numbers of calls, and what the vendor
    wants back. None when it is not that of this text and these calls.
    """
    order = said.kept.get(name)
    if not isinstance(order, list):
        return None
    texts = [item.get("text") if isinstance(item, dict) else item for item in order]
    calls = [item for item in order if isinstance(item, int)]
    fits = "".join([text for text in texts if isinstance(text, str)]) == said.text
    return order if fits and calls == list(range(len(said.calls))) else None


class Entries:
    """Makes the entries of a conversation that comes in parts. An assistant message without text and calls is left out.
    `request` is the first one with this conversation.
    """

    def __init__(self, provider: str, request: ModelRequest) -> None:
        #: The tools of the last request.
        self.tools = request.tools
        self._hidden = request.hidden_files
        self._files = request.files
        self._provider = provider
        self._model = request.model.model
        self._used: set[str] = set()
        self._calls = 0
        self._odd = False  # a call has a name that only some catalogs take

    def fits(self, request: ModelRequest) -> bool:
        """Whether a request shows what it begins with in the same way: the files, what the model gets back of its own
        answers, and odd names of tools.
        """
        return (
            request.model.model == self._model
            and request.files == self._files
            and request.hidden_files == self._hidden
            and (not self._odd or _names(request.tools) == _names(self.tools))
        )

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
                    found.append(self._beside(data.content, data.files))
                else:
                    found.append(Told(data.content, system=isinstance(data, SystemData)))
            elif isinstance(data, AssistantData):
                text = data.text
                calls = list(map(self._call, data.calls, rest))
                if calls or text.strip():
                    kept = _kept(message, self._provider, self._model) if KEPT in message.metadata else {}
                    reasoning = message.metadata.get(REASONING) if kept else None
                    found.append(Said(text, calls, kept, reasoning if isinstance(reasoning, str) else ""))
        return found

    def _beside(self, text: str, files: list[FilePart]) -> Told:
        """A message of the user with files: the words of those that are not sent stand behind the text."""
        words, shown = self._split(files)
        return Told("\n".join([*([text] if text.strip() or not words else []), *words]), files=shown)

    def _split(self, files: list[FilePart]) -> tuple[list[str], list[SentFile]]:
        """The words of the files that are not sent, and the files that are."""
        words: list[str] = []
        sent: list[SentFile] = []
        for file in files:
            if self._files is None or file.blob.file in self._hidden:
                words.append(blobs.words_for(file, NOT_SHOWN))
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
        name = part.tool_name
        if not _NAME.fullmatch(name):
            self._odd, name = True, tool_name(name, _names(self.tools))
        text = result_text(result)
        files: list[SentFile] = []
        if answered.files:
            words, files = self._split(answered.files)
            text = "\n".join([text, *words])
        return AnsweredCall(call_id, name, part.args, text, result.status == "error", files)


class Writer(Protocol):
    """Writes a conversation in a vendor's form, entry by entry."""

    #: What is written for good.
    written: JsonItems

    def add(self, entry: HistoryEntry) -> None:
        """Add the next entry."""


W = TypeVar("W", bound=Writer)


class Written(Generic[W]):
    """A conversation in a vendor's form, which grows from one request to the next. Only the new part is written.

    A turn of N steps asks N times with the same beginning, and the next turn goes on with it. The earlier part is used
    as long as the same message objects begin the request, and `Entries.fits`. So all of it is written anew

    - where the conversation was cut, a result was shortened, a message was taken out or replaced, or a view of an
      extension shows other messages;
    - after a change of the model, of the files that become words, or of the tools if the conversation has odd names;
    - when the vendor's module has learned that a server refuses something;
    - in the next turn, where the process has dropped its messages as well (`ContextMemory.end_turn`): of a conversation
      that is too long to be kept, of an agent with extensions of its own, after a turn that was given back.

    What stands before or behind it in a request (system prompt, tools, blocks, marks) is no part of it. A question
    aside is written by itself.
    """

    def __init__(self, provider: str, writer: Callable[[], W]) -> None:
        self._provider = provider
        self._make = writer
        self.forget()

    def forget(self) -> None:
        """Begin again with the next request. Until then this object holds no conversation."""
        self._messages: list[Message] = []
        self._writer: W | None = None
        self._entries: Entries | None = None

    def of(self, request: ModelRequest) -> W:
        """The writer that has written the request's conversation."""
        messages, known = request.messages, self._messages
        writer, source = self._writer, self._entries
        if (
            writer is not None
            and source is not None
            and begins_with(messages, known)
            and source.fits(request)
            and is_presentable(new := messages[len(known) :])
        ):
            self._messages, source.tools = messages, request.tools
        else:
            writer, source, whole = self._make(), Entries(self._provider, request), is_presentable(messages)
            new = messages if whole else presentable(messages)
            if not request.aside:
                self.forget()
                if whole:
                    self._messages, self._writer, self._entries = messages, writer, source
        try:
            for entry in source.extend(new):
                writer.add(entry)
        except Exception:
            self.forget()  # it may have been written in part
            raise
        return writer


def _names(tools: Sequence[CatalogItem]) -> list[str]:
    return [item.name for item in tools]


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
        fields = {
            "status": result.status,
            "handle": result.handle,
            "error": result.error and errors.for_model(result.error),
        }
        return _json({name: value for name, value in fields.items() if value is not None})
    output = msgspec.msgpack.decode(result.output) if result.output is not None else None
    return output if isinstance(output, str) else _json(output)


def blocks_text(blocks: Sequence[dict[str, Any]]) -> str:
    """The blocks of a step as the model reads them; "" when there are none. Each stands between tags that name its
    type. Its `text` is written as it is, any other value as JSON. What is in a block may come from a stranger (the
    resources of an MCP server, a skill), so no such tag stands in it: its `<` is written in another way.
    """
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
        return encode_json(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _kept(message: Message, provider: str, model: str) -> dict[str, Any]:
    kept = message.metadata.get(KEPT)
    if isinstance(kept, dict) and (kept.get("provider"), kept.get("model")) == (provider, model):
        return kept
    return {}


# --- files ------------------------------------------------------------------------------------------------------------


def sent_file(file: FilePart, mark: str) -> SentFile:
    """The file as a vendor's module writes it. Raises GoondanError E_FILE_INVALID."""
    blob = file.blob
    if not blobs.is_reference(blob) or blob.size > blobs.MAX_FILE_BYTES:
        raise errors.fail("E_FILE_INVALID", "a message refers to a file in a way that is none")
    return SentFile(file.media_type, file.name, f"{mark}{blob.file}{blob.size}{mark}")


class Seeing:
    """What the models of one agent see. `is_there` tells whether the file at a path has this size (bytes)."""

    def __init__(self, is_there: Callable[[str, int], bool]) -> None:
        self._is_there = is_there
        #: (endpoint, model) -> the kinds that its server has refused.
        self._unseen: dict[tuple[str | None, str], set[str]] = {}
        #: Files that a server did not take, by `blob.file`.
        self._refused: set[str] = set()

    def ready(self, request: ModelRequest) -> ModelRequest:
        """The request with the files that are to be words. Raises GoondanError E_MODEL_CANNOT_SEE."""
        if request.files is None:
            return request
        files, asked = _files(request)
        if not files:
            return request
        if request.files_as_words:
            return replace(request, hidden_files=frozenset(file.blob.file for file in files))
        unseen = self._kinds_unseen(request)
        blind = next((file for file in asked if blobs.kind_of(file.media_type) in unseen), None)
        if blind is not None:
            raise cannot_see(request, blind)
        hidden = {file.blob.file for file in files if self._is_hidden(file, unseen, request.files.folder)}
        shown = [file for file in files if file.blob.file not in hidden]
        hidden.update(file.blob.file for file in _too_many(shown))
        return replace(request, hidden_files=frozenset(hidden))

    def learn(self, request: ModelRequest, status: int | None, words: str) -> ModelRequest | None:
        """What a refusal, with this status and these words, says about the files of a request that `ready` returned:
        the request to send in its place, None when the refusal is about something else. Raises GoondanError
        E_MODEL_CANNOT_SEE.

        Each time, at least one file more becomes words. So a request is sent again at most once for each kind of file,
        and once for files that the server does not take.
        """
        if request.files is None or status not in _REFUSALS:
            return None
        files, asked = _files(request)
        shown = [file for file in files if file.blob.file not in request.hidden_files]
        words = words.lower()
        cannot = re.search(_CANNOT, words) is not None and re.search(_BAD, words) is None
        if not shown or not (cannot or status == 413 or re.search(_WHAT, words)):
            return None
        if cannot:
            kinds = {kind for file in shown if (kind := blobs.kind_of(file.media_type)) is not None}
            named = {kind for kind, about in (("pdf", _ABOUT_PDF), ("image", _ABOUT_IMAGE)) if re.search(about, words)}
            self._unseen.setdefault(_model(request), set()).update(kinds & named or kinds)
        elif any(file in shown for file in asked):
            return None  # the server's words are the error of the turn
        else:
            self._refused.update(file.blob.file for file in shown)
        return self.ready(request)

    # --- inside

    def _kinds_unseen(self, request: ModelRequest) -> set[str]:
        sees = request.model.sees
        unseen = set() if sees is None else {"image", "pdf"} - set(sees)
        return unseen | self._unseen.get(_model(request), set())

    def _is_hidden(self, file: FilePart, unseen: set[str], folder: str) -> bool:
        if blobs.kind_of(file.media_type) in unseen or file.blob.file in self._refused:
            return True
        return not self._is_there(f"{folder}/{file.blob.file}", file.blob.size)


def cannot_see(request: ModelRequest, file: FilePart) -> errors.GoondanError:
    """The error of a turn whose message has a file that the model cannot see."""
    what = "PDFs" if file.media_type == blobs.PDF else "pictures"
    model = f"{request.model.provider}/{request.model.model}".rstrip("/")
    return errors.fail(
        "E_MODEL_CANNOT_SEE", f"the model {model} cannot see {what}; the message has {file.name or 'one'}"
    )


def _model(request: ModelRequest) -> tuple[str | None, str]:
    return request.model.endpoint, request.model.model


def _files(request: ModelRequest) -> tuple[list[FilePart], list[FilePart]]:
    """All files of the conversation, in order; and those of the turn's own user messages."""
    files: list[FilePart] = []
    asked: list[FilePart] = []
    own = f"{request.turn_id}."
    for message in request.messages:
        found = files_of(message)
        files += found
        if found and isinstance(message.data, UserData) and message.id.startswith(own):
            asked += found
    return files, asked


def _too_many(files: Sequence[FilePart]) -> Sequence[FilePart]:
    """The oldest files, without which the rest is within the limits of a request."""
    cut = 0
    while len(files) - cut > blobs.MAX_SHOWN or blobs.size_of_files(files[cut:]) > blobs.MAX_SHOWN_BYTES:
        cut += GROUP if len(files) - cut > 2 * GROUP else 1  # one message's own files always fit
    return files[:cut]
