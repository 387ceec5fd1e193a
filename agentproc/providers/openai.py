"""Chat completions: of OpenAI, and of every server that speaks them (Ollama, vLLM, llama.cpp, …). Pure;
agentproc/http does the sending.

Servers leave out different parts, so little is required: indexes, ids, a `[DONE]` and usage may all be missing. Unknown
fields are skipped. Unknown fields inside a tool call are sent back with it, because some vendors sign their calls.
Reasoning is sent back with the answers of a turn that calls tools, in the field that it came in: some vendors refuse a
conversation without it. With other answers they would ignore it.

Source: docs/design/turns.md section 6; OpenAI's API reference, "Chat completions" and "Streaming".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.agentproc.providers import faults, reader, vendor
from goondan.agentproc.providers.base import JsonItems, ModelRequest, Usage, encode_json
from goondan.agentproc.providers.history import EMPTY, HistoryEntry, Said, SentFile, blocks_text
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ToolChoice
from goondan.schemas.wire.blobs import PDF

#: The longest name of a tool. Vendors accept 64 characters. The name arrives in pieces, so its length is limited here.
MAX_NAME_CHARS: Final = 1024
#: The names that servers give to reasoning. Some send both; the first one counts.
_REASONING: Final = ("reasoning_content", "reasoning")
#: A refusal that speaks of them, and not of `reasoning_effort`.
_NAMES_REASONING: Final = re.compile(r"\breasoning(?:_content)?\b")
#: The known fields of a tool call. All other fields are sent back as they came.
_KNOWN: Final = frozenset(("index", "id", "type", "function"))


class OpenAI(vendor.Vendor["Messages"]):
    """The vendor's requests and answers."""

    name = "openai"

    def __init__(self) -> None:
        super().__init__(lambda: Messages(reasons=self._reasons), offer)
        self._reasons = True  # whether the server takes reasoning back

    def request(self, request: ModelRequest) -> vendor.WireRequest:
        """POST /chat/completions. The model's params are sent unchanged (null removes `stream_options`); messages and
        tools come from us.
        """
        messages = self._written.of(request)
        last = messages.last(blocks_text(request.blocks) if request.blocks else None)
        return self.frame(request).around(messages.written, *last)

    def _make_frame(self, request: ModelRequest) -> vendor.Frame:
        model = request.model
        body = {"stream_options": {"include_usage": True}, **model.params, "model": model.model, "stream": True}
        if body["stream_options"] is None:
            del body["stream_options"]
        if (schema := self._output.own_schema(request)) is not None:
            body["response_format"] = _response_format(schema)
        if tools := self._tools(request):
            vendor.put_last(body, "tools", tools)
        choice = self._output.choice(request)
        last = {} if choice is None else {"tool_choice": _tool_choice(choice)}
        url = f"{self._base(model)}/chat/completions"
        frame = vendor.frame_of(url, vendor.headers_of(model), body, "messages", last)
        if not request.system or not request.system.strip():
            return frame
        system = encode_json({"role": "system", "content": request.system})
        return replace(frame, opening=b"%s%s," % (frame.opening, system))

    def reader(self, request: ModelRequest) -> Reader:
        """The reader for one answer."""
        return Reader(request.model.model)

    def _does_without(self, request: ModelRequest, words: str) -> bool:
        """Keep reasoning back."""
        refused = self._reasons and self._written.of(request).gives_reasoning and _NAMES_REASONING.search(words)
        if not refused:
            return False
        self._reasons = False
        self._written.forget()
        return True


# --- the request ------------------------------------------------------------------------------------------------------


class Messages:
    """The conversation. Every result is a message of its own directly behind its answer."""

    def __init__(self, *, reasons: bool = True) -> None:
        self._reasons = reasons
        #: Whether the conversation has reasoning in it.
        self.gives_reasoning = False
        self.written = JsonItems()
        self._only_rules = True
        self._acting = False  # the turn that is written has called tools
        self._reasoning = ""  # the name that the server gives to reasoning, once an answer had some

    def add(self, entry: HistoryEntry) -> None:
        """Add the next entry."""
        if not isinstance(entry, Said):
            self._acting = self._acting and entry.system
            content = content_of(entry.text, entry.files) if entry.files else entry.text
            self._add({"role": "system" if entry.system else "user", "content": content})
            return
        message: dict[str, Any] = {"role": "assistant", "content": entry.text or None}
        extras = entry.kept.get("calls")
        if entry.calls:
            message["tool_calls"] = [
                {
                    **_extra(extras, index),
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": encode_json(call.args).decode()},
                }
                for index, call in enumerate(entry.calls)
            ]
        self._acting = self._acting or bool(entry.calls)
        self._reasoning = next((name for name in _REASONING if name == entry.kept.get("reasoning")), self._reasoning)
        if self._acting and self._reasoning and self._reasons:
            message[self._reasoning] = entry.reasoning
            self.gives_reasoning = True
        self._add(message)
        for call in entry.calls:
            self._add({"role": "tool", "tool_call_id": call.id, "content": call.result})
        for call in entry.calls:
            if call.files:  # a result has text only, and nothing may stand between results
                self._add({"role": "user", "content": content_of(f"(Files of the result of {call.id}.)", call.files)})

    def last(self, beside: str | None = None) -> Sequence[bytes]:
        """What stands behind the written messages. `beside` is a text at the end of this request only.

        It is a message of the user, because many servers accept a system message only as the first one.
        """
        return (encode_json({"role": "user", "content": beside or EMPTY}),) if beside or self._only_rules else ()

    def _add(self, message: dict[str, Any]) -> None:
        self._only_rules = self._only_rules and message["role"] == "system"
        self.written.add(encode_json(message))


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    strict = vendor.is_closed(schema, all_required=True)
    return {"type": "json_schema", "json_schema": {"name": vendor.ANSWER_TOOL, "schema": schema, "strict": strict}}


def _tool_choice(choice: ToolChoice) -> Any:
    return {"type": "function", "function": {"name": choice.tool}} if isinstance(choice, ForcedTool) else choice


def content_of(text: str, files: list[SentFile]) -> list[dict[str, Any]]:
    """A text and files as the parts of a message."""
    return [*([{"type": "text", "text": text}] if text.strip() else []), *[_file(file) for file in files]]


def _file(file: SentFile) -> dict[str, Any]:
    if file.media_type == PDF:
        return {"type": "file", "file": {"filename": file.name or "document.pdf", "file_data": file.data_url}}
    return {"type": "image_url", "image_url": {"url": file.data_url}}


def _extra(extras: Any, index: int) -> dict[str, Any]:
    """The vendor's own fields of a call, besides its name and arguments."""
    extra = extras[index] if isinstance(extras, list) and index < len(extras) else None
    return extra if isinstance(extra, dict) else {}


def offer(item: CatalogItem) -> dict[str, Any]:
    """A tool in the vendor's form."""
    function: dict[str, Any] = {"name": item.name}
    if item.description is not None:
        function["description"] = item.description
    function["parameters"] = {"type": "object", "properties": {}, **(item.parameters or {})}
    return {"type": "function", "function": function}


# --- the answer -------------------------------------------------------------------------------------------------------


class _Usage(Struct, frozen=True):
    #: Tokens of the request.
    prompt_tokens: int | None = None
    #: Tokens of the answer.
    completion_tokens: int | None = None
    #: What the tokens of the request were.
    prompt_tokens_details: reader.TokenDetails | None = None
    #: What the tokens of the answer were.
    completion_tokens_details: reader.TokenDetails | None = None
    #: All tokens together.
    total_tokens: int | None = None


class _Delta(Struct, frozen=True):
    #: More of the text.
    content: Any = None
    #: More of a refusal.
    refusal: str | None = None
    #: More of the tool calls.
    tool_calls: list[dict[str, Any]] | None = None
    #: More of the reasoning, as some servers name it.
    reasoning_content: Any = None
    #: The same, as others name it.
    reasoning: Any = None


class _Choice(Struct, frozen=True):
    #: Its number. Only the first one is read.
    index: int | None = 0
    #: In a stream: the change.
    delta: _Delta | None = None
    #: Without a stream: the whole message.
    message: _Delta | None = None
    #: Why it ended.
    finish_reason: str | None = None


class _Chunk(Struct, frozen=True):
    #: The answers.
    choices: list[_Choice] | None = None
    #: The tokens.
    usage: _Usage | None = None
    #: The error in place of an answer.
    error: Any = None
    #: The kind of the document. `error`: the next two fields are the error.
    object: str | None = None
    #: The text of such an error.
    message: Any = None
    #: The code of such an error.
    code: Any = None
    #: The name of the model that answers.
    model: Any = None


_decode_chunk: Final = msgspec.json.Decoder(_Chunk)


class Reader(reader.AnswerReader):
    """Reads the first choice of one answer."""

    provider = "openai"
    usual = ("stop", "tool_calls", "function_call")
    cut = ("length",)

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._text = reader.Part("text")
        self._calls: list[tuple[int | None, reader.Part]] = []  # with the indexes that the server gives them
        self._reasoning = ""  # the name that the server gives to reasoning

    def read(self, events: Sequence[reader.SseEvent]) -> str:
        """Take the next events. Returns the text that they add."""
        texts = ""
        documents = reader.decode_events(_decode_chunk, events)
        for (_, data), chunk in zip(events, documents, strict=True):
            if chunk is None:
                self.done = self.done or b"[DONE]" in data
            else:
                texts += self._take(chunk)
        return texts

    def read_whole(self, body: bytes) -> str:
        """Take the whole completion of a server that does not stream."""
        text = self._take(reader.decode_json(_decode_chunk, body))
        self.done = True
        return text

    # --- inside

    def _take(self, chunk: _Chunk) -> str:
        if chunk.error is not None or chunk.object == "error":
            raise _stream_error(chunk)
        if chunk.usage is not None:
            self._usage = _counted(chunk.usage)
        if self._answered is None:
            self._answered = reader.name_of(chunk.model)
        text = ""
        for choice in chunk.choices or []:
            if choice.index:
                continue
            said = choice.delta or choice.message
            if said is not None:
                piece = (_content(said.content) if said.content else "") + (said.refusal or "")
                if said.reasoning_content or said.reasoning:
                    self._take_thought(said)
                if piece:
                    self._sized(piece)
                    self._text.pieces.append(piece)
                    text += piece
                for call in said.tool_calls or []:
                    self._take_call(call)
            self._stop = choice.finish_reason or self._stop
        return text

    def _take_thought(self, said: _Delta) -> None:
        for name in _REASONING:
            if thought := reader.text_of(getattr(said, name)):
                self._reasoning = name
                self._think(self._sized(thought))
                return

    def _take_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        given_id, given_name, arguments = delta.get("id"), function.get("name"), function.get("arguments")
        call_id = given_id if isinstance(given_id, str) else ""
        name = given_name if isinstance(given_name, str) else ""
        call = self._call(delta.get("index"), call_id, name)
        if call_id and not call.id:
            call.id = self._sized(call_id)
        if name != call.name and name:  # some servers repeat it with every piece
            call.name += self._sized(name)
            if len(call.name) > MAX_NAME_CHARS:
                raise faults.Fault("final", f"a tool call whose name has more than {MAX_NAME_CHARS} characters")
        if isinstance(arguments, str):
            call.pieces.append(self._sized(arguments))
        elif isinstance(arguments, dict):
            call.pieces = [self._sized(encode_json(arguments).decode())]
        if more := delta.keys() - _KNOWN:
            extra = {key: value for key, value in delta.items() if key in more}
            self._count(len(encode_json(extra)))  # it is kept with the answer
            call.extra.update(extra)

    def _call(self, index: Any, call_id: str, name: str) -> reader.Part:
        """The call that a piece belongs to. Some servers give no index, or the same one to every call."""
        calls = self._calls
        if isinstance(index, int) and calls and calls[-1][0] == index:
            known: reader.Part | None = calls[-1][1]
        elif isinstance(index, int):
            known = next((call for number, call in reversed(calls) if number == index), None)
        else:
            index = None
            known = calls[-1][1] if calls and not (name and call_id == "") else None
        if known is not None and not (name and call_id and known.id and call_id != known.id):
            return known
        call = self._part(len(calls), "call")
        calls.append((index, call))
        return call

    def _in_order(self) -> list[reader.Part]:
        return [self._text, *self._parts.values()]

    def _kept(self, parts: list[reader.Part]) -> dict[str, Any]:
        """The vendor's own fields of the calls, and the name of the reasoning."""
        extras = [call.extra for _, call in self._calls]
        named = {"reasoning": self._reasoning} if self._reasoning else {}
        return {**({"calls": extras} if any(extras) else {}), **named}


def _counted(used: _Usage) -> Usage:
    usage = reader.counted(
        used.prompt_tokens, used.completion_tokens, used.prompt_tokens_details, used.completion_tokens_details
    )
    both = usage.output_tokens + usage.reasoning_tokens
    if usage.reasoning_tokens and reader.tokens(used.total_tokens) == [usage.input_tokens + both]:
        return replace(usage, output_tokens=both)  # this server counts its reasoning beside the answer, not in it
    return usage


def _content(content: Any) -> str:
    """The text of `content`: the text itself, or the text parts of a list of parts."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join([reader.text_of(part.get("text")) for part in parts])
    return content if isinstance(content, str) else ""


def _stream_error(chunk: _Chunk) -> faults.Fault:
    error = chunk.error if chunk.error is not None else {"message": chunk.message, "code": chunk.code}
    names = [error.get("type"), error.get("code")] if isinstance(error, dict) else []
    return faults.stream_fault(error, names, faults.error_words(error) or "no reason")


#: The part that each provider's module has (agentproc/http/__init__.py). The streams are as the vendor writes them.
VENDOR: Final = OpenAI
REHEARSED: Final = (
    reader.event_stream(
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"TOOL","arguments":""}}]}}]}',
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":\\"1\\"}"}}]}}]}',
        '{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}',
        '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}',
        "[DONE]",
    ),
    reader.event_stream(
        '{"choices":[{"index":0,"delta":{"content":"done"}}]}',
        '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
        "[DONE]",
    ),
)
