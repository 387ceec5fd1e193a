"""Responses: of OpenAI, and of every server that speaks Open Responses. Pure; http.py does the sending.

Stateless: nothing is stored at the vendor (`store: false`), and each request has the whole conversation as items.
Reasoning items that the vendor wants back are kept with the answer, where they were between its texts and calls, and
are sent back to the same model. One without content and without encrypted content names something that the vendor has
not stored, so it is left out. The ids of all other items are left out for the same reason.

Answer: output items; each is added, filled by deltas and done. Deltas count before what the done item repeats. Unknown
events and items are skipped.

Source: docs/design/turns.md section 6; OpenAI's API reference, "Responses"; the Open Responses specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from goondan.agentproc.providers.base import ModelAnswer, ModelRequest, Usage, asked_call
from goondan.agentproc.providers.body import SentFile
from goondan.agentproc.providers.history import EMPTY, HistoryEntry, Said, Written, blocks_text, kept_by
from goondan.agentproc.providers.offered_tools import OfferedTools
from goondan.agentproc.providers.output_format import ANSWER_TOOL, OutputWay, is_closed
from goondan.agentproc.providers.refusals import stream_fault
from goondan.agentproc.providers.sse import SseEvent
from goondan.agentproc.providers.vendor import (
    MAX_CALLS,
    AnswerReader,
    Fault,
    Vendor,
    WireRequest,
    decode_json,
    encode_json,
    error_words,
    headers_of,
    model_name,
    put_last,
    tokens,
)
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ToolChoice
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.blobs import PDF

#: What a vendor that stores nothing has to send, so that its reasoning can be sent back.
_INCLUDE: Final = ("reasoning.encrypted_content",)
#: Why an answer is incomplete that reached its limit of tokens.
_CUT: Final = "max_output_tokens"
#: How an answer ends that is whole.
_WHOLE: Final = "completed"
#: The longest item that has begun and holds no content yet (characters of JSON).
_EMPTY_ITEM: Final = 512


class Responses(Vendor):
    """The vendor's requests and answers."""

    name = "responses"
    server = BY_NAME["responses"].server

    def __init__(self) -> None:
        self._written = Written(self.name, Items)
        self._tools = OfferedTools(offer)
        self._output = OutputWay(lambda schema: True)
        self._include: tuple[str, ...] = _INCLUDE

    def request(self, request: ModelRequest) -> WireRequest:
        """POST /responses. The model's params are sent unchanged; input, tools and instructions come from us."""
        model = request.model
        include = {"include": self._include} if self._include else {}
        body = {"store": False, **include, **model.params, "model": model.model, "stream": True}
        if (schema := self._output.own_schema(request)) is not None:
            given = body.get("text")
            body["text"] = {**(given if isinstance(given, dict) else {}), "format": _format(schema)}
        if tools := self._output.tools(request):
            put_last(body, "tools", self._tools.of(tools))
        if request.system and request.system.strip():
            put_last(body, "instructions", request.system)
        put_last(body, "input", self._written.of(request).json(blocks_text(request.blocks)))
        if (choice := self._output.choice(request)) is not None:
            put_last(body, "tool_choice", _tool_choice(choice))
        return WireRequest(f"{self._base(model)}/responses", headers_of(model), encode_json(body))

    def reader(self, request: ModelRequest) -> Reader:
        """The reader for one answer."""
        limit = request.model.params.get(_CUT)
        return Reader(request.model.model, limit if isinstance(limit, int) else None)

    def gives_up(self, request: ModelRequest, words: str) -> bool:
        """Do without encrypted reasoning, where another server than the vendor's does not know of it; or without the
        form of the answer.
        """
        if self._output.gives_up(request, words):
            return True
        named = "include" in words or "encrypted_content" in words
        refused = bool(self._include) and request.model.endpoint is not None and named
        self._include = () if refused else self._include
        return refused


# --- the request ------------------------------------------------------------------------------------------------------


class Items:
    """The conversation as items. Every result is an item of its own behind its answer."""

    def __init__(self) -> None:
        self._items: list[bytes] = []
        self._only_rules = True

    def add(self, entry: HistoryEntry) -> None:
        """Add the next entry."""
        if not isinstance(entry, Said):
            self._only_rules = self._only_rules and entry.system
            content = content_of(entry.text, entry.files) if entry.files else entry.text
            self._add(_message("system" if entry.system else "user", content))
            return
        self._only_rules = False
        for item in items_of(entry):
            self._add(item)
        for call in entry.calls:
            output = content_of(call.result, call.files) if call.files else call.result
            self._add({"type": "function_call_output", "call_id": call.id, "output": output})

    def json(self, beside: str | None = None) -> Raw:
        """All items as a JSON array. `beside` is a text of the user at the end of this request only."""
        last = [encode_json(_message("user", beside or EMPTY))] if beside or self._only_rules else []
        return Raw(b"[%s]" % b",".join([*self._items, *last]))

    def _add(self, item: dict[str, Any]) -> None:
        self._items.append(encode_json(item))


def _message(role: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def content_of(text: str, files: list[SentFile]) -> list[dict[str, Any]]:
    """A text and files as the parts of a message, or of a result."""
    return [*([{"type": "input_text", "text": text}] if text.strip() else []), *[_file(file) for file in files]]


def _file(file: SentFile) -> dict[str, Any]:
    if file.media_type == PDF:
        return {"type": "input_file", "filename": file.name or "document.pdf", "file_data": file.data_url}
    return {"type": "input_image", "image_url": file.data_url, "detail": "auto"}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    strict = is_closed(schema, all_required=True)
    return {"type": "json_schema", "name": ANSWER_TOOL, "schema": schema, "strict": strict}


def _tool_choice(choice: ToolChoice) -> Any:
    return {"type": "function", "name": choice.tool} if isinstance(choice, ForcedTool) else choice


def items_of(said: Said) -> list[dict[str, Any]]:
    """An answer as the items that the vendor sent, because reasoning must keep its place. Without reasoning: text, then
    calls.
    """
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": encode_json(call.args).decode()}
        for call in said.calls
    ]
    order = said.kept.get("items")
    if isinstance(order, list) and _fits(order, said.text, len(calls)):
        return [calls[item] if isinstance(item, int) else _kept_item(item) for item in order]
    return [*([_text_item(said.text)] if said.text.strip() else []), *calls]


def _fits(order: list[Any], text: str, calls: int) -> bool:
    """Whether the kept items are those of this text and these calls."""
    texts = [item["text"] for item in order if isinstance(item, dict) and isinstance(item.get("text"), str)]
    return "".join(texts) == text and [item for item in order if isinstance(item, int)] == list(range(calls))


def _kept_item(item: dict[str, Any]) -> dict[str, Any]:
    return _text_item(item["text"], item.get("phase")) if isinstance(item.get("text"), str) else item


def _text_item(text: str, phase: Any = None) -> dict[str, Any]:
    item = _message("assistant", text)
    return {**item, "phase": phase} if isinstance(phase, str) else item


def offer(item: CatalogItem) -> dict[str, Any]:
    """A tool in the vendor's form. Not `strict`, which refuses most schemas and is the default."""
    tool: dict[str, Any] = {"type": "function", "name": item.name}
    if item.description is not None:
        tool["description"] = item.description
    parameters = {"type": "object", "properties": {}, **(item.parameters or {})}
    return {**tool, "parameters": parameters, "strict": False}


# --- the answer -------------------------------------------------------------------------------------------------------


class _InputDetails(Struct, frozen=True):
    #: How many came from a cache.
    cached_tokens: int | None = None
    #: How many were put into a cache.
    cache_write_tokens: int | None = None


class _OutputDetails(Struct, frozen=True):
    #: How many are reasoning.
    reasoning_tokens: int | None = None


class _Usage(Struct, frozen=True):
    #: Tokens of the request.
    input_tokens: int | None = None
    #: Tokens of the answer.
    output_tokens: int | None = None
    #: What the tokens of the request were.
    input_tokens_details: _InputDetails | None = None
    #: What the tokens of the answer were.
    output_tokens_details: _OutputDetails | None = None


class _Incomplete(Struct, frozen=True):
    #: Why an answer is not whole.
    reason: str | None = None


class _Response(Struct, frozen=True):
    #: `completed`, `incomplete`, `failed`, or that it goes on.
    status: str | None = None
    #: The items.
    output: list[dict[str, Any]] | None = None
    #: The tokens.
    usage: _Usage | None = None
    #: Why it is not whole.
    incomplete_details: _Incomplete | None = None
    #: Why it failed.
    error: Any = None
    #: The name of the model that answers.
    model: Any = None


class _Event(Struct, frozen=True):
    #: The kind of the event.
    type: str = ""
    #: The number of the item.
    output_index: int = 0
    #: The item.
    item: dict[str, Any] | None = None
    #: More of a text, of arguments or of reasoning.
    delta: Any = None
    #: The whole response, as far as it is known.
    response: _Response | None = None
    #: The error that ends the stream, as some servers write it.
    error: Any = None
    #: The text of such an error, as others write it.
    message: Any = None
    #: Its code.
    code: Any = None


_decode_event: Final = msgspec.json.Decoder(_Event)
_decode_response: Final = msgspec.json.Decoder(_Response)


class _Item:
    """An output item while it is filled."""

    __slots__ = ("call_id", "kind", "name", "phase", "pieces", "reasoned", "whole")

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.kind = _text(item.get("type"))
        self.call_id = _text(item.get("call_id"))
        self.name = _text(item.get("name"))
        self.phase = item.get("phase")
        #: Of a message: its text. Of a call: its arguments.
        self.pieces: list[str] = []
        #: Of reasoning: whether its text was heard.
        self.reasoned = False
        #: Of reasoning: the done item.
        self.whole: dict[str, Any] | None = None


class Reader(AnswerReader):
    """Reads one answer. `limit` are the most tokens that were asked for; None: no limit was named."""

    def __init__(self, model: str, limit: int | None = None) -> None:
        super().__init__(model)
        self._limit = limit
        #: By number and kind: some servers give every item the same number.
        self._items: dict[tuple[int, str], _Item] = {}
        self._usage: Usage | None = None

    def read(self, event: SseEvent) -> str:
        """Take the next event. Returns the text that it adds."""
        if event.data.strip() in ("", "[DONE]"):
            return ""
        said = decode_json(_decode_event, event.data)
        take = _TAKES.get(said.type or event.name)
        return "" if take is None else take(self, said)

    def read_whole(self, body: bytes) -> str:
        """Take the whole response of a server that does not stream."""
        return self._end(decode_json(_decode_response, body))

    def answer(self) -> ModelAnswer:
        """The answer. To be called after everything was read."""
        items = [self._items[key] for key in sorted(self._items, key=_number)]
        asked = [item for item in items if item.kind == "function_call"]
        return self._whole(
            "".join([piece for item in items if item.kind == "message" for piece in item.pieces]),
            [asked_call(item.call_id, item.name, "".join(item.pieces)) for item in asked],
            self._keep(items),
            usage=self._usage,
            usual=(_WHOLE,),
            cut=self._stop == _CUT,
            unwritten=bool(asked) and not any(asked[-1].pieces),
            reasoned=any(item.kind == "reasoning" for item in items),
        )

    # --- inside

    def _begin(self, said: _Event) -> str:
        if said.item is not None:
            self._size.count(max(0, len(encode_json(said.item)) - _EMPTY_ITEM))
            self._item(said.output_index, said.item)
        return ""

    def _item(self, index: int, first: Mapping[str, Any]) -> _Item:
        """The item of this number and kind. Its begin may be missing."""
        key = (index, _text(first.get("type")))
        known = self._items.get(key)
        if known is None:
            if len(self._items) >= MAX_CALLS:
                raise Fault("final", f"an answer of more than {MAX_CALLS} items")
            known = self._items[key] = _Item(first)
            if known.kind == "reasoning":
                self._thoughts.begin_part()
        return known

    def _add_text(self, said: _Event) -> str:
        piece = self._size.add(_text(said.delta))
        if piece:
            self._item(said.output_index, {"type": "message"}).pieces.append(piece)
        return piece

    def _add_arguments(self, said: _Event) -> str:
        piece = self._size.add(_text(said.delta))
        if piece:
            self._item(said.output_index, {"type": "function_call"}).pieces.append(piece)
        return ""

    def _add_thought(self, said: _Event) -> str:
        piece = self._size.add(_text(said.delta))
        if piece:
            self._item(said.output_index, {"type": "reasoning"}).reasoned = True
            self._thoughts.add(piece)
        return ""

    def _begin_thought(self, said: _Event) -> str:
        self._thoughts.begin_part()
        return ""

    def _finish(self, said: _Event) -> str:
        return "" if said.item is None else self._take_item(said.output_index, said.item)

    def _take_item(self, index: int, done: dict[str, Any]) -> str:
        """Take an item that is done. Returns its text if none of it was heard before."""
        item = self._item(index, done)
        match item.kind:
            case "message" if not item.pieces:
                text = self._size.add(_message_text(done.get("content")))
                item.pieces.append(text)
                item.phase = done.get("phase", item.phase)
                return text
            case "message":
                item.phase = done.get("phase", item.phase)
            case "function_call":
                item.call_id = _text(done.get("call_id")) or item.call_id
                item.name = _text(done.get("name")) or item.name
                if not item.pieces:
                    item.pieces.append(self._size.add(_text(done.get("arguments"))))
            case "reasoning" if item.whole is None:
                item.whole = {key: value for key, value in done.items() if key != "status" and value is not None}
                self._size.count(len(encode_json(item.whole)))
                if not item.reasoned:
                    self._thoughts.add(_reasoning_text(done))
        return ""

    def _meet(self, said: _Event) -> str:
        """The response has begun."""
        if said.response is not None and self._answered is None:
            self._answered = model_name(said.response.model)
        return ""

    def _finish_response(self, said: _Event) -> str:
        """The response has ended."""
        ended = said.response or _Response()
        return self._end(ended, (said.type or "").rpartition(".")[2])

    def _end(self, response: _Response, status: str = "") -> str:
        status = response.status or status or _WHOLE
        if response.error is not None or status in ("failed", "cancelled"):
            raise _failure(response.error, status)
        self.done = True
        self._answered = model_name(response.model) or self._answered
        if response.usage is not None:
            self._usage = _counted(response.usage)
        why = response.incomplete_details.reason if response.incomplete_details is not None else None
        self._stop = (why or _CUT) if status == "incomplete" else status
        # llama.cpp says `completed` of an answer that it has cut off.
        if status == _WHOLE and self._limit and self._usage is not None and self._usage.output_tokens >= self._limit:
            self._stop = _CUT
        # A server that does not stream its items has them here only.
        return "".join([self._take_item(index, item) for index, item in enumerate(response.output or [])])

    def _fail(self, said: _Event) -> str:
        raise _failure(said.error if said.error is not None else {"message": said.message, "code": said.code}, "error")

    def _keep(self, items: list[_Item]) -> dict[str, Any] | None:
        """The order of an answer with reasoning: its items, texts with their phases, and calls by their number."""
        order: list[Any] = []
        calls = 0
        for item in items:
            if item.kind == "reasoning" and item.whole is not None and _can_go_back(item.whole):
                order.append(item.whole)
            elif item.kind == "message":
                phase = {"phase": item.phase} if isinstance(item.phase, str) else {}
                order.append({"text": "".join(item.pieces), **phase})
            elif item.kind == "function_call":
                order.append(calls)
                calls += 1
        plain = all(isinstance(item, int) or (isinstance(item, dict) and set(item) == {"text"}) for item in order)
        return None if plain else kept_by("responses", self._model, items=order)


def _number(key: tuple[int, str]) -> int:
    return key[0]


def _can_go_back(reasoning: Mapping[str, Any]) -> bool:
    return bool(reasoning.get("encrypted_content") or reasoning.get("content"))


def _message_text(content: Any) -> str:
    """The text of a message, or of its refusal."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join([_text(part.get("text")) or _text(part.get("refusal")) for part in parts])


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: what the model thought, or the summary of it."""
    parts = item.get("content") or item.get("summary")
    parts = parts if isinstance(parts, list) else []
    return "\n\n".join([_text(part.get("text")) for part in parts if isinstance(part, dict)])


def _counted(usage: _Usage) -> Usage:
    read = usage.input_tokens_details or _InputDetails()
    wrote = usage.output_tokens_details or _OutputDetails()
    return Usage(
        tokens(usage.input_tokens),
        tokens(usage.output_tokens),
        tokens(read.cached_tokens),
        tokens(read.cache_write_tokens),
        tokens(wrote.reasoning_tokens),
    )


def _failure(error: Any, status: str) -> Fault:
    names = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return stream_fault(error, names, error_words(error) or f"it has {status[:80]}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


#: What takes each kind of event.
_TAKES: Final[Mapping[str, Callable[[Reader, _Event], str]]] = {
    "response.created": Reader._meet,
    "response.in_progress": Reader._meet,
    "response.output_item.added": Reader._begin,
    "response.output_item.done": Reader._finish,
    "response.output_text.delta": Reader._add_text,
    "response.refusal.delta": Reader._add_text,
    "response.function_call_arguments.delta": Reader._add_arguments,
    "response.reasoning_summary_part.added": Reader._begin_thought,
    "response.reasoning_summary_text.delta": Reader._add_thought,
    "response.reasoning_text.delta": Reader._add_thought,
    "response.completed": Reader._finish_response,
    "response.incomplete": Reader._finish_response,
    "response.failed": Reader._finish_response,
    "response.cancelled": Reader._finish_response,
    "error": Reader._fail,
}


#: The part that each provider's module has (agentproc/providers/choose.py). The streams are as the vendor writes them.
VENDOR: Final = Responses
REHEARSED: Final = (
    """\
event: response.output_item.added
data: {"type":"response.output_item.added","item":{"type":"function_call","call_id":"c1","name":"TOOL"}}

event: response.function_call_arguments.delta
data: {"type":"response.function_call_arguments.delta","delta":"{\\"a\\":\\"1\\"}"}

event: response.completed
data: {"type":"response.completed","response":{"status":"completed","usage":{"input_tokens":1,"output_tokens":1}}}

""",
    """\
event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"done"}

event: response.completed
data: {"type":"response.completed","response":{"status":"completed"}}

""",
)
