"""The Messages API of Anthropic, and of servers that speak it. Pure; agentproc/http does the sending.

Request: what changes stands behind what does not, and marks (`cache_control`) say up to where the vendor is to remember
it: behind the tools, behind the system prompt, and behind the last two messages of the user. The first mark that a
request has in common with an earlier one is where that one's cache is read from. Roles alternate. The results of all
calls of an answer are in one user message directly behind it. No text is blank.

Answer: content blocks; each is begun, filled by deltas and ended. Unknown events and blocks are skipped.

Source: docs/design/turns.md section 6; Anthropic's API reference, "Messages" and "Streaming".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from goondan.agentproc.providers import faults, history, reader
from goondan.agentproc.providers.base import JsonItems, ModelRequest, Usage, encode_json
from goondan.agentproc.providers.vendor import (
    Frame,
    Vendor,
    WireRequest,
    frame_of,
    headers_of,
    is_closed,
    put_last,
)
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ModelSpec, ToolChoice
from goondan.schemas.models.model_providers import BY_NAME, DEFAULT_MAX_TOKENS
from goondan.schemas.wire.blobs import PDF

#: The version of the interface. It is the version of the vendor's own package at the time when its requests were
#: recorded (tests/contract/vendor_requests/), and there, too, the key is a bearer token. This version refuses
#: `temperature`, `top_p` and `top_k`.
VERSION: Final = BY_NAME["anthropic"].version


# --- the request ------------------------------------------------------------------------------------------------------


#: A content block.
Block = dict[str, Any]


class Anthropic(Vendor["Turns"]):
    """The vendor's requests and answers."""

    name = "anthropic"

    def __init__(self) -> None:
        super().__init__(Turns, offer, lambda schema: is_closed(schema, all_required=False))
        self._marks = True  # whether the server takes them

    def request(self, request: ModelRequest) -> WireRequest:
        """POST /v1/messages. The model's params are sent unchanged; messages, tools and system come from us."""
        turns = self._written.of(request)
        # Another request may begin with this one. What goes into the cache costs more than what does not.
        marks = self._marks and request.model.caching and (bool(request.tools) or len(request.messages) > 1)
        beside = history.blocks_text(request.blocks) if request.blocks else None
        return self.frame(request, turns.rules, marks).around(turns.written, *turns.last(beside, marks=marks))

    def _make_frame(self, request: ModelRequest, rules: tuple[str, ...] = (), marks: bool = False) -> Frame:
        model = request.model
        system = "\n\n".join([text for text in (request.system, *rules) if text and text.strip()])
        body = {"max_tokens": DEFAULT_MAX_TOKENS, **model.params, "model": model.model, "stream": True}
        if (schema := self._output.own_schema(request)) is not None:
            given = body.get("output_config")
            form = {"type": "json_schema", "schema": schema}
            body["output_config"] = {**(given if isinstance(given, dict) else {}), "format": form}
        if tools := self._tools(request):
            put_last(body, "tools", Raw(b"%s]" % marked(bytes(tools)[:-1])) if marks else tools)
        if system:
            block = encode_json(_text(system))
            put_last(body, "system", Raw(b"[%s]" % marked(block)) if marks else system)
        choice = self._output.choice(request)
        last = {} if choice is None or _thinks_freely(request) else {"tool_choice": _tool_choice(choice)}
        return frame_of(f"{self._base(model)}/v1/messages", _headers(model), body, "messages", last)

    def reader(self, request: ModelRequest) -> Reader:
        """The reader for one answer."""
        return Reader(request.model.model)

    def _does_without(self, request: ModelRequest, words: str) -> bool:
        """Leave the marks out, when a server that is not the vendor's refuses them."""
        refused = self._marks and request.model.endpoint is not None and "cache_control" in words
        self._marks = self._marks and not refused
        return refused

    def listing(self, request: ModelRequest) -> WireRequest:
        """GET /v1/models."""
        return WireRequest(f"{self._base(request.model)}/v1/models", _headers(request.model), ())


def _headers(model: ModelSpec) -> dict[str, str]:
    return headers_of(model, **{"anthropic-version": model.api_version or VERSION})


#: In a result without content. Inside a text its quotes would be escaped.
_NO_CONTENT: Final = b'"content":""'
#: The end of a block with a mark.
_MARK: Final = b',"cache_control":{"type":"ephemeral"}}'


def marked(block: bytes) -> bytes:
    """A JSON object, or a list of objects without its end, whose last object has a mark."""
    return block[:-1] + _MARK


#: What stands around the blocks of a message.
_USER, _ASSISTANT, _END, _NEXT = b'{"role":"user","content":[', b'{"role":"assistant","content":[', b"]}", b"]},"
#: A part of a list in JSON.
Part = bytes | bytearray | memoryview


class Turns:
    """The conversation as alternating messages; the first is the user's. `rules` are its system messages."""

    def __init__(self) -> None:
        self.rules: tuple[str, ...] = ()
        self.written = JsonItems()  # all but the next three
        self._user = bytearray()  # the blocks of the last whole message of the user
        self._user_mark = -1  # the end of the last of them that may have a mark
        self._behind: tuple[bytes, ...] = ()  # the whole answer behind it, and a comma
        self._role: Literal["user", "assistant"] = "user"
        self._blocks = bytearray()  # of the last message
        self._mark = -1

    def add(self, entry: history.HistoryEntry) -> None:
        """Add the next entry."""
        if not isinstance(entry, history.Said):
            if entry.system:
                self.rules = (*self.rules, entry.text)
            else:
                self._add("user", told_blocks(entry.text, entry.files))
            return
        if not self._blocks:
            self._add("user", [_text(history.EMPTY)])
        self._add("assistant", blocks_of(entry))
        self._add("user", list(map(_result, entry.calls)))

    def last(self, beside: str | None = None, *, marks: bool = False) -> Sequence[Part]:
        """The messages behind the written ones, in parts. `beside` is a text of the user at the end of this request
        only; no mark is behind it.
        """
        told = (encode_json(_text(beside)),) if beside else ()
        before = (_USER, *_parts(self._user, self._user_mark, marks), _NEXT, *self._behind) if self._user else ()
        if self._role == "assistant":
            after = (b",", _USER, *told, _END) if told else ()
            return *before, _ASSISTANT, self._blocks, _END, *after
        last = _parts(self._blocks, self._mark, marks)
        if not self._blocks:
            last = told or (encode_json(_text(history.EMPTY)),)
        elif told:
            last = (*last, b",", *told)
        return *before, _USER, *last, _END

    def _add(self, role: Literal["user", "assistant"], blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        if role != self._role:
            if role == "user":
                self._behind = b"%s%s]}" % (_ASSISTANT, self._blocks), b","
            else:
                if self._user:
                    self.written.add(b"%s%s]},%s" % (_USER, self._user, self._behind[0]))
                self._user, self._user_mark, self._behind = self._blocks, self._mark, ()
            self._role, self._blocks, self._mark = role, bytearray(), -1
        for block in blocks:
            written = encode_json(block)
            self._blocks += b"," + written if self._blocks else written
            if _NO_CONTENT not in written:
                self._mark = len(self._blocks)


def _parts(blocks: bytearray, at: int, marks: bool) -> tuple[Part, ...]:
    """The blocks. With `marks` one is on the block that ends `at` there: the last one that may have it, as the vendor
    takes none on a block without content.
    """
    if at < 0 or not marks:
        return (blocks,)
    seen = memoryview(blocks)
    return seen[: at - 1], _MARK, seen[at:]


def _thinks_freely(request: ModelRequest) -> bool:
    """Whether only the tool `answer` needs a choice, and the model thinks: the vendor forces no tool on such models."""
    thinking = request.model.params.get("thinking")
    thinks = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    return thinks and request.tool_choice in (None, "auto")


def _tool_choice(choice: ToolChoice) -> dict[str, str]:
    if isinstance(choice, ForcedTool):
        return {"type": "tool", "name": choice.tool}
    return {"type": "any" if choice == "required" else choice}


def told_blocks(text: str, files: list[history.SentFile]) -> list[Block]:
    """A text with files as content blocks. Files stand before the text, which mostly asks about them."""
    shown = [_file(file) for file in files]
    return [*shown, _text(text if text.strip() else history.EMPTY)] if text.strip() or not shown else shown


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _result(call: history.AnsweredCall) -> Block:
    content: Any = call.result
    if call.files:
        content = [_text(call.result), *[_file(file) for file in call.files]]
    failed = {"is_error": True} if call.is_error else {}
    return {"type": "tool_result", "tool_use_id": call.id, "content": content, **failed}


def _file(file: history.SentFile) -> Block:
    source = {"type": "base64", "media_type": file.media_type, "data": file.base64}
    return {"type": "document" if file.media_type == PDF else "image", "source": source}


def blocks_of(said: history.Said) -> list[Block]:
    """An answer as the vendor sent it, because thinking must keep its place. Without thinking: text, then calls."""
    uses: list[Block] = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.args} for call in said.calls
    ]
    order = history.in_kept_order(said, "blocks") if said.kept else None
    if order is None:
        return [*([_text(said.text)] if said.text.strip() else []), *uses]
    return [
        _text(item) if isinstance(item, str) else uses[item] if isinstance(item, int) else item
        for item in order
        if not isinstance(item, str) or item.strip()
    ]


def offer(item: CatalogItem) -> dict[str, Any]:
    """A tool in the vendor's form. Its schema must say that it is an object."""
    schema = {"type": "object", "properties": {}, **(item.parameters or {})}
    described = {} if item.description is None else {"description": item.description}
    return {"name": item.name, "input_schema": schema, **described}


# --- the answer -------------------------------------------------------------------------------------------------------


class _OutputDetails(Struct, frozen=True):
    #: How many are thinking.
    thinking_tokens: int | None = None


class _Usage(Struct, frozen=True):
    #: Tokens of the request that were not in a cache.
    input_tokens: int | None = None
    #: Tokens of the answer.
    output_tokens: int | None = None
    #: Tokens of the request that were written into the cache.
    cache_creation_input_tokens: int | None = None
    #: Tokens of the request that were read from the cache.
    cache_read_input_tokens: int | None = None
    #: What the tokens of the answer were.
    output_tokens_details: _OutputDetails | None = None


class _Message(Struct, frozen=True):
    #: `message`, or `error`.
    type: str = "message"
    #: Its blocks.
    content: list[dict[str, Any]] = []
    #: Why it ended.
    stop_reason: str | None = None
    #: The tokens.
    usage: _Usage | None = None
    #: The error of a failed request.
    error: Any = None
    #: The name of the model that answers.
    model: Any = None


class _Delta(Struct, frozen=True):
    #: The kind of the delta.
    type: str | None = None
    #: More of a text.
    text: str | None = None
    #: More of the arguments of a tool call.
    partial_json: str | None = None
    #: More of the thinking.
    thinking: str | None = None
    #: The signature of the thinking.
    signature: str | None = None
    #: Why the message ended.
    stop_reason: str | None = None


class _Event(Struct, frozen=True):
    #: The kind of the event.
    type: str = ""
    #: The number of the block.
    index: int = 0
    #: The message, at its start.
    message: _Message | None = None
    #: The block, at its start.
    content_block: dict[str, Any] | None = None
    #: The change.
    delta: _Delta | None = None
    #: The tokens so far.
    usage: _Usage | None = None
    #: The error that ends the stream.
    error: Any = None


#: The longest content block that has begun and holds no content yet (characters of JSON, id and name included).
_EMPTY_BLOCK: Final = 512

_decode_event: Final = msgspec.json.Decoder(_Event)
_decode_message: Final = msgspec.json.Decoder(_Message)


#: What is read of an answer, by the type of its block.
_KINDS: Final[Mapping[str, str]] = {
    "text": "text",
    "tool_use": "call",
    "thinking": "thought",
    "redacted_thinking": "thought",
}


class Reader(reader.AnswerReader):
    """Reads one answer. `extra` of a part is its block as it began."""

    provider = "anthropic"
    usual = ("end_turn", "stop_sequence", "tool_use")
    cut = ("max_tokens", "model_context_window_exceeded")

    _thinks = False  # it has thinking

    def read(self, events: Sequence[reader.SseEvent]) -> str:
        """Take the next events. Returns the text that they add."""
        texts = ""
        documents = reader.decode_events(_decode_event, events)
        for (name, data), said in zip(events, documents, strict=True):
            if said is None:  # `[DONE]` comes from servers that speak both interfaces
                continue
            kind, delta = said.type or name.decode("utf-8", "replace"), said.delta
            part = self._parts.get(said.index) if kind == "content_block_delta" else None
            if part is None or delta is None:
                texts += self._take(kind, said, data)
                continue
            if delta.signature:
                part.signature.append(self._sized(delta.signature))
            if piece := delta.text or delta.partial_json or delta.thinking or "":
                self.content += len(piece)
                if self.content > reader.MAX_ANSWER_CHARS:
                    self._count(0)
                part.pieces.append(piece)
                if part.kind == "text":
                    texts += piece
                elif part.extra.get("type") == "thinking":
                    self._think(piece)
        return texts

    def _take(self, kind: str, said: _Event, data: bytes) -> str:
        """Take an event that is no piece of a block. Returns the text that it adds."""
        match kind:
            case "content_block_start" if said.content_block is not None:
                if len(data) > _EMPTY_BLOCK:  # thoughts come whole, and are kept
                    self._count(max(0, len(data.decode("utf-8", "replace")) - _EMPTY_BLOCK))
                return self._begin(said.index, said.content_block)
            case "message_start" if said.message is not None:
                self._answered = reader.name_of(said.message.model)
                self._count_tokens(said.message.usage)
            case "message_delta":
                self._count_tokens(said.usage)
                if said.delta is not None and said.delta.stop_reason is not None:
                    self._stop = said.delta.stop_reason
            case "message_stop":
                self.done = True
            case "error":
                raise _stream_error(said.error)
        return ""

    def read_whole(self, body: bytes) -> str:
        """Take the whole message of a server that does not stream."""
        message = reader.decode_json(_decode_message, body)
        if message.error is not None:
            raise _stream_error(message.error)
        self._count_tokens(message.usage)
        self._stop, self.done, self._answered = message.stop_reason, True, reader.name_of(message.model)
        return "".join([self._begin(index, block) for index, block in enumerate(message.content)])

    # --- inside

    def _in_order(self) -> list[reader.Part]:
        return [*map(self._parts.__getitem__, sorted(self._parts))]

    def _arguments(self, call: reader.Part) -> str | dict[str, Any]:
        given = call.extra.get("input")
        return "".join(call.pieces) or (given if isinstance(given, dict) else "")

    def _begin(self, index: int, block: dict[str, Any]) -> str:
        self._parts.pop(index, None)
        kind = block.get("type")
        part = self._part(index, _KINDS.get(kind, "") if isinstance(kind, str) else "")
        if part.kind == "call":
            part.id, part.name = reader.text_of(block.get("id")), reader.text_of(block.get("name"))
        part.extra = block if part.kind != "text" else {}
        self._thinks = self._thinks or part.kind == "thought"
        if kind == "thinking":
            self._begin_thought()
            self._think(reader.text_of(block.get("thinking")))
        text = reader.text_of(block.get("text")) if part.kind == "text" else ""
        if text:
            part.pieces.append(self._sized(text))
        return text

    def _kept(self, parts: list[reader.Part]) -> dict[str, Any]:
        """The order of an answer with thinking. The vendor wants thinking back whole, with its signature."""
        if not self._thinks:
            return {}
        for part in parts:
            if part.extra.get("type") == "thinking":
                thought = "".join(part.pieces) or reader.text_of(part.extra.get("thinking"))
                signature = "".join(part.signature) or reader.text_of(part.extra.get("signature"))
                part.extra = {**part.extra, "thinking": thought, "signature": signature}
        order = self._order(parts)
        return {"blocks": order} if order else {}

    def _count_tokens(self, usage: _Usage | None) -> None:
        """Count every token of the input, also those that went into the vendor's cache or came from it."""
        if usage is None:
            return
        known = self._usage or Usage()
        *counts, details = msgspec.structs.astuple(usage)
        thinking = None if details is None else details.thinking_tokens
        read, said, written, cached, thought = reader.tokens(*counts, thinking)
        if self._usage is None or usage.input_tokens:
            read = min(read + cached + written, reader.MAX_TOKENS)
        else:
            read, cached, written = known.input_tokens, known.cached_tokens, known.cache_write_tokens
        self._usage = Usage(read, said or known.output_tokens, cached, written, thought or known.reasoning_tokens)


def _stream_error(error: Any) -> faults.Fault:
    name = reader.text_of(error.get("type")) if isinstance(error, dict) else ""
    return faults.stream_fault(error, [name], faults.error_words(error) or name[:80] or "no reason")


#: The part that each provider's module has (agentproc/http/__init__.py). The streams are as the vendor writes them.
VENDOR: Final = Anthropic
REHEARSED: Final = (
    reader.event_stream(
        '{"type":"message_start","message":{"content":[],"usage":{"input_tokens":1,"output_tokens":1}}}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"c1","name":"TOOL","input":{}}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\":\\"1\\"}"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":1}}',
        '{"type":"message_stop"}',
    ),
    reader.event_stream(
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"done"}}',
        '{"type":"message_stop"}',
    ),
)
