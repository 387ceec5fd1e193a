"""Responses: of OpenAI, and of every server that speaks Open Responses. Pure; agentproc/http does the sending.

Stateless: nothing is stored at the vendor (`store: false`), and each request has the whole conversation as items.
Reasoning items that the vendor wants back are kept with the answer, where they were between its texts and calls, and
are sent back to the same model. One without content and without encrypted content names something that the vendor has
not stored, so it is left out. The ids of all other items are left out for the same reason.

Answer: output items; each is added, filled by deltas and done. Deltas count before what the done item repeats. Unknown
events and items are skipped.

Source: docs/design/turns.md section 6; OpenAI's API reference, "Responses"; the Open Responses specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.agentproc.providers import faults, reader, vendor
from goondan.agentproc.providers.base import JsonItems, ModelRequest, encode_json
from goondan.agentproc.providers.history import EMPTY, HistoryEntry, Said, SentFile, blocks_text, in_kept_order
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ToolChoice
from goondan.schemas.wire.blobs import PDF

#: What a vendor that stores nothing has to send, so that its reasoning can be sent back.
_INCLUDE: Final = ("reasoning.encrypted_content",)
#: Why an answer is incomplete that reached its limit of tokens.
_CUT: Final = "max_output_tokens"
#: How an answer ends that is whole.
_WHOLE: Final = "completed"
#: The longest item that has begun and holds no content yet (characters of JSON).
_EMPTY_ITEM: Final = 512


class Responses(vendor.Vendor["Items"]):
    """The vendor's requests and answers."""

    name = "responses"

    def __init__(self) -> None:
        super().__init__(Items, offer)
        self._include: tuple[str, ...] = _INCLUDE

    def request(self, request: ModelRequest) -> vendor.WireRequest:
        """POST /responses. The model's params are sent unchanged; input, tools and instructions come from us."""
        items = self._written.of(request)
        last = items.last(blocks_text(request.blocks) if request.blocks else None)
        return self.frame(request).around(items.written, *last)

    def _make_frame(self, request: ModelRequest) -> vendor.Frame:
        model = request.model
        include = {"include": self._include} if self._include else {}
        body = {"store": False, **include, **model.params, "model": model.model, "stream": True}
        if (schema := self._output.own_schema(request)) is not None:
            given = body.get("text")
            body["text"] = {**(given if isinstance(given, dict) else {}), "format": _format(schema)}
        if tools := self._tools(request):
            vendor.put_last(body, "tools", tools)
        if request.system and request.system.strip():
            vendor.put_last(body, "instructions", request.system)
        choice = self._output.choice(request)
        last = {} if choice is None else {"tool_choice": _tool_choice(choice)}
        return vendor.frame_of(f"{self._base(model)}/responses", vendor.headers_of(model), body, "input", last)

    def reader(self, request: ModelRequest) -> Reader:
        """The reader for one answer."""
        limit = request.model.params.get(_CUT)
        return Reader(request.model.model, limit if isinstance(limit, int) else None)

    def _does_without(self, request: ModelRequest, words: str) -> bool:
        """Do without encrypted reasoning, where another server than the vendor's does not know of it."""
        named = "include" in words or "encrypted_content" in words
        refused = bool(self._include) and request.model.endpoint is not None and named
        self._include = () if refused else self._include
        return refused


# --- the request ------------------------------------------------------------------------------------------------------


class Items:
    """The conversation as items. Every result is an item of its own behind its answer."""

    def __init__(self) -> None:
        self.written = JsonItems()
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

    def last(self, beside: str | None = None) -> Sequence[bytes]:
        """What stands behind the written items. `beside` is a text of the user at the end of this request only."""
        return (encode_json(_message("user", beside or EMPTY)),) if beside or self._only_rules else ()

    def _add(self, item: dict[str, Any]) -> None:
        self.written.add(encode_json(item))


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
    strict = vendor.is_closed(schema, all_required=True)
    return {"type": "json_schema", "name": vendor.ANSWER_TOOL, "schema": schema, "strict": strict}


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
    order = in_kept_order(said, "items") if said.kept else None
    if order is None:
        return [*([_text_item(said.text)] if said.text.strip() else []), *calls]
    return [calls[item] if isinstance(item, int) else _kept_item(item) for item in order]


def _kept_item(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return _text_item(item)
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


class _Usage(Struct, frozen=True):
    #: Tokens of the request.
    input_tokens: int | None = None
    #: Tokens of the answer.
    output_tokens: int | None = None
    #: What the tokens of the request were.
    input_tokens_details: reader.TokenDetails | None = None
    #: What the tokens of the answer were.
    output_tokens_details: reader.TokenDetails | None = None


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


#: What is read of an answer, by the type of its item.
_KINDS: Final[Mapping[str, str]] = {"message": "text", "function_call": "call", "reasoning": "thought"}


class Reader(reader.AnswerReader):
    """Reads one answer. `limit` are the most tokens that were asked for; None: no limit was named."""

    provider = "responses"
    usual = (_WHOLE,)
    cut = (_CUT,)

    def __init__(self, model: str, limit: int | None = None) -> None:
        super().__init__(model)
        self._limit = limit

    def read(self, events: Sequence[reader.SseEvent]) -> str:
        """Take the next events. Returns the text that they add."""
        texts = ""
        documents = reader.decode_events(_decode_event, events)
        for (name, _), said in zip(events, documents, strict=True):
            if said is None:
                continue
            take = _TAKES.get(said.type or name.decode("utf-8", "replace"))
            if take is not None:
                texts += take(self, said)
        return texts

    def read_whole(self, body: bytes) -> str:
        """Take the whole response of a server that does not stream."""
        return self._end(reader.decode_json(_decode_response, body))

    # --- inside

    def _in_order(self) -> list[reader.Part]:
        return [self._parts[key] for key in sorted(self._parts, key=itemgetter(0))]

    def _begin(self, said: _Event) -> str:
        if said.item is not None:
            self._count(max(0, len(encode_json(said.item)) - _EMPTY_ITEM))
            self._update(self._item(said.output_index, reader.text_of(said.item.get("type"))), said.item)
        return ""

    def _item(self, index: int, kind: str) -> reader.Part:
        """The item of this number and type: some servers give every item the same number. Its begin may be missing."""
        known = len(self._parts)
        part = self._part((index, kind), _KINDS.get(kind, ""))
        if part.kind == "thought" and len(self._parts) > known:
            self._begin_thought()
        return part

    def _update(self, part: reader.Part, item: Mapping[str, Any]) -> None:
        part.id = reader.text_of(item.get("call_id")) or part.id
        part.name = reader.text_of(item.get("name")) or part.name
        if part.kind == "text" and isinstance(phase := item.get("phase"), str):
            part.extra = {"phase": phase}

    def _add_text(self, said: _Event) -> str:
        return self._add(said, "message")

    def _add_arguments(self, said: _Event) -> str:
        self._add(said, "function_call")
        return ""

    def _add_thought(self, said: _Event) -> str:
        self._think(self._add(said, "reasoning"))
        return ""

    def _add(self, said: _Event, kind: str) -> str:
        piece = self._sized(reader.text_of(said.delta))
        if piece:
            self._item(said.output_index, kind).pieces.append(piece)
        return piece

    def _begin_summary(self, said: _Event) -> str:
        self._begin_thought()
        return ""

    def _finish(self, said: _Event) -> str:
        return "" if said.item is None else self._take_item(said.output_index, said.item)

    def _take_item(self, index: int, done: dict[str, Any]) -> str:
        """Take an item that is done. Returns its text if none of it was heard before."""
        part = self._item(index, reader.text_of(done.get("type")))
        self._update(part, done)
        if part.kind == "text" and not part.pieces:
            part.pieces.append(self._sized(_message_text(done.get("content"))))
            return part.pieces[0]
        if part.kind == "call" and not part.pieces:
            part.pieces.append(self._sized(reader.text_of(done.get("arguments"))))
        if part.kind == "thought" and not part.extra:
            whole = {key: value for key, value in done.items() if key != "status" and value is not None}
            self._count(len(encode_json(whole)))
            part.extra = whole
            if not part.pieces:
                self._think(_reasoning_text(done))
        return ""

    def _meet(self, said: _Event) -> str:
        """The response has begun."""
        if said.response is not None and self._answered is None:
            self._answered = reader.name_of(said.response.model)
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
        self._answered = reader.name_of(response.model) or self._answered
        if response.usage is not None:
            used = response.usage
            self._usage = reader.counted(
                used.input_tokens, used.output_tokens, used.input_tokens_details, used.output_tokens_details
            )
        why = response.incomplete_details.reason if response.incomplete_details is not None else None
        self._stop = (why or _CUT) if status == "incomplete" else status
        # llama.cpp says `completed` of an answer that it has cut off.
        if status == _WHOLE and self._limit and self._usage is not None and self._usage.output_tokens >= self._limit:
            self._stop = _CUT
        # A server that does not stream its items has them here only.
        return "".join([self._take_item(index, item) for index, item in enumerate(response.output or [])])

    def _fail(self, said: _Event) -> str:
        raise _failure(said.error if said.error is not None else {"message": said.message, "code": said.code}, "error")

    def _kept(self, parts: list[reader.Part]) -> dict[str, Any]:
        """The order of an answer with reasoning that can go back, or with texts that have a phase."""
        order = self._order([part for part in parts if part.kind != "thought" or _can_go_back(part.extra)])
        return {"items": order} if order else {}


def _can_go_back(reasoning: Mapping[str, Any]) -> bool:
    return bool(reasoning.get("encrypted_content") or reasoning.get("content"))


def _message_text(content: Any) -> str:
    """The text of a message, or of its refusal."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join([reader.text_of(part.get("text")) or reader.text_of(part.get("refusal")) for part in parts])


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: what the model thought, or the summary of it."""
    parts = item.get("content") or item.get("summary")
    parts = parts if isinstance(parts, list) else []
    return "\n\n".join([reader.text_of(part.get("text")) for part in parts if isinstance(part, dict)])


def _failure(error: Any, status: str) -> faults.Fault:
    names = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return faults.stream_fault(error, names, faults.error_words(error) or f"it has {status[:80]}")


#: What takes each kind of event.
_TAKES: Final[Mapping[str, Callable[[Reader, _Event], str]]] = {
    "response.created": Reader._meet,
    "response.in_progress": Reader._meet,
    "response.output_item.added": Reader._begin,
    "response.output_item.done": Reader._finish,
    "response.output_text.delta": Reader._add_text,
    "response.refusal.delta": Reader._add_text,
    "response.function_call_arguments.delta": Reader._add_arguments,
    "response.reasoning_summary_part.added": Reader._begin_summary,
    "response.reasoning_summary_text.delta": Reader._add_thought,
    "response.reasoning_text.delta": Reader._add_thought,
    "response.completed": Reader._finish_response,
    "response.incomplete": Reader._finish_response,
    "response.failed": Reader._finish_response,
    "response.cancelled": Reader._finish_response,
    "error": Reader._fail,
}


#: The part that each provider's module has (agentproc/http/__init__.py). The streams are as the vendor writes them.
VENDOR: Final = Responses
REHEARSED: Final = (
    reader.event_stream(
        '{"type":"response.output_item.added","item":{"type":"function_call","call_id":"c1","name":"TOOL"}}',
        '{"type":"response.function_call_arguments.delta","delta":"{\\"a\\":\\"1\\"}"}',
        '{"type":"response.completed","response":{"status":"completed","usage":{"input_tokens":1,"output_tokens":1}}}',
    ),
    reader.event_stream(
        '{"type":"response.output_text.delta","delta":"done"}',
        '{"type":"response.completed","response":{"status":"completed"}}',
    ),
)
