"""The interface between the turn loop and a model: one question, one answer. A provider uses neither the bus nor the
store.

Source: docs/design/turns.md section 6; requirements NAME-03 (tool names go to the vendor and come back unchanged).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from goondan.agentproc.machine.messages import Message
from goondan.agentproc.machine.turn import AskedCall
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec, OutputSpec, ToolChoice
from goondan.schemas.models.model_providers import DEFAULT_MAX_TOKENS, LIMIT_PARAMS, limit_param
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire import codec, errors

#: The shortest value of a header that is taken for a secret (characters). Shorter ones, such as `true`, are words of
#: any text.
SHORTEST_HEADER: Final = 8
#: The shortest secret that is taken out of what a model says (characters). Shorter keys are words that servers without
#: keys are given, such as `ollama`, and models write such words into files.
SHORTEST_SAID: Final = 16


class Permit(Protocol):
    """The way of one request out of this process. It enters; then it is refused, and enters again, or it is over."""

    def passes(self) -> bool:
        """Let the request out at once, if nothing limits it. Whether it is out."""

    async def enter(self, size: int, on_news: Callable[[ModelNews], None]) -> None:
        """Wait until the request may go out. `size` is that of its body (bytes). `on_news` hears `queued` if it waits.
        Raises Fault when the server has refused everybody for too long, GoondanError when the broker refuses.
        """

    def refused(self, wait_s: float | None) -> None:
        """The server has refused it because too much is asked. `wait_s` is the wait that it asks for (seconds)."""

    def over(self, headers: dict[str, str] | None, *, accepted: bool, tokens: int | None = None) -> None:
        """It is over. `headers` are those of its answer, if there is one. `accepted`: the server has answered it.
        `tokens` are those that it used; None: not known.
        """


class FilesPlace(Struct, frozen=True):
    """Where the files of a conversation are, and how a body marks their places."""

    #: The folder.
    folder: str
    #: Random digits that never leave the process: no text of a conversation can contain them.
    mark: str


class ModelRequest(Struct, frozen=True, kw_only=True):
    """One model call."""

    #: The name of the agent.
    agent: str
    #: The model to ask.
    model: ModelSpec
    #: The conversation. It keeps the invariant of machine/messages.py.
    messages: list[Message]
    #: The catalog of the step, in order.
    tools: list[CatalogItem]
    #: The number of the turn's model call, from 1.
    step: int
    #: The system prompt.
    system: str | None = None
    #: The time that the turn has left (seconds); None when there is no limit.
    timeout_s: float | None = None
    #: Blocks that extensions add to this request only (EXT-13). They stand behind the conversation, so the part before
    #: them is the same in every request.
    blocks: list[dict[str, Any]] = []
    #: The most tokens of the answer, because no more fit beside the request; None: as many as the model's params say.
    max_tokens: int | None = None
    #: How many messages of the conversation are left out of `messages`, for traces.
    left_out: int = 0
    #: How many messages with results are shown shortened, for traces.
    shortened: int = 0
    #: The id of the turn. Files of its own user messages have to be seen; older ones may become words.
    turn_id: str = ""
    #: The form of the answer; None: any text.
    output: OutputSpec | None = None
    #: Which tools the model has to call; None: as it likes.
    tool_choice: ToolChoice | None = None
    #: The conversation's pictures and PDFs; None: it has none.
    files: FilesPlace | None = None
    #: The files (by `blob.file`) that are not sent; a line of words stands for each. The provider decides it.
    hidden_files: frozenset[str] = frozenset()
    #: Words stand for every file, whatever the model sees: of a fallback that cannot see.
    files_as_words: bool = False
    #: It stands outside of the conversation.
    aside: bool = False
    #: Its way out. None: it goes out at once.
    permit: Permit | None = None
    #: The trace that it belongs to.
    trace_id: str = ""


class Usage(Struct, frozen=True):
    """Tokens as the vendor counted them."""

    #: All tokens that the model read.
    input_tokens: int = 0
    #: The tokens that the model wrote.
    output_tokens: int = 0
    #: The part of `input_tokens` that came from the vendor's cache.
    cached_tokens: int = 0
    #: The part of `input_tokens` that was put into the vendor's cache.
    cache_write_tokens: int = 0
    #: The part of `output_tokens` that the model wrote as reasoning.
    reasoning_tokens: int = 0


class ModelAnswer(Struct, frozen=True, kw_only=True):
    """The answer of the model."""

    #: The text.
    text: str = ""
    #: The tool calls, in order.
    calls: list[AskedCall] = []
    #: Why the model stopped, in the vendor's word.
    finish_reason: str | None = None
    #: The tokens; None when the vendor did not count them.
    usage: Usage | None = None
    #: Data that the vendor wants to get back (history.py, `kept_by`). It goes into the metadata of the stored message.
    metadata: dict[str, Any] | None = None
    #: The reasoning as text, as far as the vendor shows it. It is no part of the answer.
    reasoning: str = ""
    #: Whether the answer ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: The name that the server gives to the model that answered; None when it gives none.
    model: str | None = None


class TextDelta(Struct, frozen=True):
    """A piece of an answer that is not complete yet."""

    #: The piece.
    text: str
    #: All earlier pieces are void, and the answer begins again.
    again: bool = False
    #: It is a piece of the reasoning, not of the text.
    reasoning: bool = False


class OnDelta(Protocol):
    """Gets pieces of an answer early."""

    @property
    def wanted(self) -> int:
        """0: nobody listens now. Else another number each time that somebody begins to, also while a request runs: the
        first piece is all that was said then.
        """

    def __call__(self, delta: TextDelta) -> None:
        """Take a piece."""


class FailedTry(Struct, frozen=True):
    """A try that failed, and is followed by another one."""

    #: Why, in the server's words, without secrets.
    error: str
    #: How long the server asks to wait, or we chose to (seconds).
    wait_s: float


#: A provider's news while a request runs. `asking`: a try goes out. `content`: the model has sent more text, arguments
#: or thinking; data that only keeps a connection alive does not count. `waiting`: no try is out until the next one is
#: due. `queued`: the request waits for its permit. `held`: it did, and no other request was before it.
#: FailedTry: the last try failed; `waiting` or `queued` follows.
ModelNews = Literal["asking", "content", "waiting", "queued", "held"] | FailedTry


class Provider(Protocol):
    """A model. It is made when the first turn needs it, and closed when the process ends."""

    @property
    def needs_history(self) -> bool:
        """Whether a request has the whole conversation, or (for a console) only the messages of this turn."""

    async def complete(
        self,
        request: ModelRequest,
        on_delta: OnDelta | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """Ask the model. `on_delta` gets pieces of text early, from providers that stream. `on_news` gets the
        provider's news; a provider without news counts as asking.

        Raises GoondanError when there is no answer after the provider's own retries: E_MODEL_QUOTA when the account may
        use no more, ContextOverflow when the request is longer than the model's context, otherwise E_MODEL_FAILED.
        Cancelling the task ends the request.
        """

    async def window(self, request: ModelRequest) -> int | None:
        """How many tokens the model's context holds, as its server says; None when it does not say. Raises nothing."""

    def forget(self) -> None:
        """Drop what is kept of the conversation: the next turn reads it anew."""

    async def close(self) -> None:
        """Close connections."""


def redactor_of(*models: ModelSpec, shortest: int = 0) -> Redactor:
    """Removes the secrets of models from texts: their keys, their headers, and the passwords of their endpoints. Of
    those only what has `shortest` characters.
    """
    secrets: list[str | None] = []
    for model in models:
        try:
            password = urlsplit(model.endpoint or "").password
        except ValueError:
            password = None
        secrets += [model.api_key, password, unquote(password) if password else None]
        secrets += [value for value in model.headers.values() if len(value) >= SHORTEST_HEADER]
    return Redactor(*[secret for secret in secrets if len(secret or "") >= shortest])


class Overflow(Struct, frozen=True):
    """What a server said of a request that is too long. None: it did not say."""

    #: The tokens of the request, without an answer.
    tokens: int | None = None
    #: The most tokens of the model's context, request and answer together.
    window: int | None = None


class ContextOverflow(errors.GoondanError):
    """E_CONTEXT_OVERFLOW: a server has refused a request because it is longer than the model's context. `overflow` has
    the numbers that it gave, `model` is the one that was asked; None: the one that the step has.
    """

    def __init__(self, message: str, overflow: Overflow, model: ModelSpec | None = None) -> None:
        super().__init__(errors.error_payload("E_CONTEXT_OVERFLOW", message))
        self.overflow = overflow
        self.model = model


class ModelFailure(errors.GoondanError):
    """E_MODEL_FAILED: a model call has no answer. `usage` are the tokens of what came in its place, if a server said
    them.
    """

    def __init__(self, message: str, *, suggestion: str | None = None, usage: Usage | None = None) -> None:
        super().__init__(errors.error_payload("E_MODEL_FAILED", message, suggestion=suggestion))
        self.usage = usage


def output_limit(model: ModelSpec) -> int:
    """The most tokens of an answer; a guess when the params of the model give no limit. 0 for a provider that is no
    model and counts no tokens.
    """
    if model.provider == "embedded":
        return 0
    return next((value for name in LIMIT_PARAMS if (value := _number(model, name)) is not None), DEFAULT_MAX_TOKENS)


def limited_output(model: ModelSpec, tokens: int) -> ModelSpec:
    """The model with answers of at most so many tokens."""
    name = next((name for name in LIMIT_PARAMS if name in model.params), limit_param(model.provider, model.endpoint))
    return msgspec.structs.replace(model, params={**model.params, name: tokens})


def _number(model: ModelSpec, name: str) -> int | None:
    value = model.params.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def asked_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> AskedCall:
    """A tool call from a vendor's answer, in a form that can be stored and sent.

    Arguments as JSON text are read strictly; a blank text means {}. A call with unreadable arguments is not sent, it is
    answered with an error. Lone surrogates become U+FFFD, integers beyond 64 bits become doubles.
    """
    if not (name.isascii() and call_id.isascii()):
        name, call_id = codec.replace_surrogates(name), codec.replace_surrogates(call_id)
    if isinstance(arguments, str) and _LONG_NUMBER.search(arguments) is None:
        try:
            if arguments.count("[") + arguments.count("{") <= FLAT:
                return AskedCall(call_id, name, _decode_object(arguments))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # what is wrong with it is said below, and what can be read is read
    try:
        value = read_json(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        if not (isinstance(arguments, str) and arguments.isascii() and "\\u" not in arguments):
            value = codec.replace_surrogates(value)
        args = storable(value)
    except ValueError as error:
        return AskedCall(call_id, name, {}, f"they are no JSON: {str(error)[:200]}")
    except RecursionError:
        return AskedCall(call_id, name, {}, "they are nested too deep")
    except OverflowError:
        return AskedCall(call_id, name, {}, "a number is too large")
    return AskedCall(call_id, name, args, None if isinstance(args, dict) else "they are no JSON object")


#: A number that may have more than 64 bits.
_LONG_NUMBER: Final = re.compile(r"\d{19}")
#: Arguments with so many lists and objects are not nested too deep.
FLAT: Final = 64
_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode

#: JSON for a vendor; what JSON cannot hold becomes text.
encode_json: Final = msgspec.json.Encoder(enc_hook=str).encode


#: How long a piece of `JsonItems` is at least (bytes). A request copies less than this of what was sent before. Above
#: 128 KiB the C library would map each copy anew, and every page of it costs more than its bytes.
PIECE_BYTES: Final = 32 << 10


class JsonItems:
    """Items of a JSON list, which grow at the end. Their pieces never change: a request has them as they are, so that
    a long list is neither joined nor copied.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._end = bytearray()  # behind the pieces

    def add(self, item: bytes) -> None:
        """Add the next item."""
        end = self._end
        if end or self._pieces:
            end += b","
        end += item
        if len(end) >= PIECE_BYTES:
            self._pieces.append(bytes(end))
            end.clear()

    def closed(self, last: Sequence[bytes | bytearray | memoryview], closing: bytes) -> list[bytes]:
        """The pieces of a list that ends with the `last` items, which this object does not keep, and what closes it."""
        comma = b"," if last and (self._end or self._pieces) else b""
        return [*self._pieces, b"".join((self._end, comma, *last, closing))]


def read_json(text: str) -> Any:
    """The value of a JSON text. NaN and infinity are refused in any spelling. Raises ValueError, RecursionError."""
    return _json.decode(text)


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and the position of its end. Raises ValueError, RecursionError."""
    return _json.raw_decode(text, start)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


_json: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def storable(value: Any) -> Any:
    """A JSON value in which integers that the wire cannot carry are doubles (docs/design/wire.md section 2). Raises
    OverflowError.
    """
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(value)
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    return value
