"""The interface of a vendor: it makes requests and reads answers. Pure; http.py does the sending.

A model's server may send any data. Every bad answer is a `Fault`. It gives the reason in the vendor's words, and says
whether asking again may help.

Source: docs/design/turns.md section 6.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from goondan.agentproc.providers.base import ModelAnswer, ModelRequest, Usage
from goondan.agentproc.providers.history import Written
from goondan.agentproc.providers.overflow import Overflow
from goondan.agentproc.providers.sse import SseEvent
from goondan.agentproc.turn import AskedCall
from goondan.schemas.bundle.launch import ModelSpec, key_headers
from goondan.schemas.wire.codec import describe_decode_error, replace_surrogates

#: The most characters of text, arguments and thinking of one answer together. The longest answers that models can give
#: (128 000 tokens) are half of it, and more would not fit into a frame.
MAX_ANSWER_CHARS: Final = 1 << 20
#: The most tool calls of one answer. Each becomes a process's work and a message of the conversation.
MAX_CALLS: Final = 1024
#: The most tokens that a server can be believed to have counted. JSON readers everywhere can hold it.
MAX_TOKENS: Final = (1 << 53) - 1
#: The longest name of a model that is kept (characters).
MAX_MODEL_NAME: Final = 200
#: How much of a vendor's own text is shown (characters).
MAX_WORDS: Final = 500

#: `busy`: the server may answer later. `limited`: it refuses because too much is asked of it, by us or by all.
#: `loading`: it loads the model. `broken`: an answer began and was not valid. `silent`: nothing came for too long.
#: `quota`: what the account may use is used up. `final`: asking again would end the same way.
FaultKind = Literal["busy", "limited", "loading", "broken", "silent", "quota", "final"]

_NO_HEADERS: Final[Mapping[str, str]] = {}

T = TypeVar("T")


class Fault(Exception):
    """Why one try has no answer. `retry_after_s` is the wait that the vendor asks for. `status` is the HTTP status of a
    refusal. `overflow` is set when the request is longer than the model's context. `usage` are the tokens of an answer
    that is none. `suggestion` is what a person can do, where it is more than what the status says.
    """

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        retry_after_s: float | None = None,
        status: int | None = None,
        overflow: Overflow | None = None,
        usage: Usage | None = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status
        self.overflow = overflow
        self.usage = usage
        self.suggestion = suggestion


class WireRequest(Struct, frozen=True):
    """One HTTP request."""

    #: The URL.
    url: str
    #: The headers. They contain the key.
    headers: dict[str, str]
    #: The body. A mark stands for the base64 of each file (body.py).
    body: bytes


class AnswerReader(ABC):
    """Reads one answer: events of a stream, or one whole document. Every method raises Fault when the answer is not
    valid.
    """

    def __init__(self, model: str) -> None:
        """`model` is the name of the model that was asked."""
        #: Whether the stream has said that it is complete.
        self.done = False
        self._model = model
        self._size = AnswerSize()
        self._thoughts = Thoughts()
        self._answered: str | None = None  # the name of the model that answers
        self._stop: str | None = None  # why the model stopped

    @property
    def content(self) -> int:
        """How much the model has said so far (characters): text, arguments, thinking. Data that a server sends to keep
        a connection alive does not count.
        """
        return self._size.chars

    @abstractmethod
    def read(self, event: SseEvent) -> str:
        """Take the next event. Returns the text that it adds."""

    @abstractmethod
    def read_whole(self, body: bytes) -> str:
        """Take the whole answer of a server that does not stream. Returns its text."""

    def take_reasoning(self) -> str:
        """The reasoning that was read since the last call."""
        return self._thoughts.take()

    @abstractmethod
    def answer(self) -> ModelAnswer:
        """The answer. To be called after everything was read."""

    def _whole(
        self,
        text: str,
        calls: list[AskedCall],
        metadata: dict[str, Any] | None,
        *,
        usage: Usage | None,
        usual: tuple[str, ...],
        cut: bool,
        unwritten: bool,
        reasoned: bool,
    ) -> ModelAnswer:
        """The answer with this text and these calls. `usual` are the words of a model that has stopped by itself.
        `cut`: it has reached its limit of tokens; then a last call that was not written to its end is dropped.
        `unwritten`: nothing was written of the last call's arguments. `reasoned`: the answer has reasoning.
        Raises Fault when its end is missing, and when there are neither text nor calls.
        """
        if not self.done and self._stop is None:
            raise Fault("broken", "half an answer: its end is missing")
        if cut and calls and (calls[-1].broken is not None or unwritten):
            last = calls[-1]
            reason = "they were cut off, because the answer reached its token limit"
            calls = [*calls[:-1], AskedCall(last.id, last.name, {}, reason)]
        if not calls and not text.strip():
            raise _empty(self._stop, usual, cut=cut, reasoned=reasoned, usage=usage)
        return ModelAnswer(
            text=text,
            calls=calls,
            finish_reason=self._stop,
            usage=usage,
            metadata=metadata,
            reasoning=self._thoughts.text,
            cut_off=cut,
            model=self._answered,
        )


class Vendor(Protocol):
    """One vendor's interface."""

    name: str
    server: str
    """Base URL when the model names none."""
    _written: Written[Any]

    def request(self, request: ModelRequest) -> WireRequest:
        """The request to send. The written conversation is kept for the next request, until `forget`."""

    def forget(self) -> None:
        """Drop the conversation: the next request belongs to another turn."""
        self._written.forget()

    def reader(self, request: ModelRequest) -> AnswerReader:
        """A reader for one answer to the request."""

    def gives_up(self, request: ModelRequest, words: str) -> bool:
        """The server has refused the request with these words. Whether requests are without what they name from now on,
        so that this one may be sent again.
        """

    def listing(self, request: ModelRequest) -> WireRequest:
        """The GET request for the names of the server's models; `first_model` reads the answer."""
        return WireRequest(f"{self._base(request.model)}/models", headers_of(request.model), b"")

    def _base(self, model: ModelSpec) -> str:
        return (model.endpoint or self.server).rstrip("/")


def headers_of(model: ModelSpec, vendors: Mapping[str, str] = _NO_HEADERS) -> dict[str, str]:
    """The headers of a request: those that the Model adds, the vendor's own, and the key."""
    return {**model.headers, **vendors, **key_headers(model)}


def put_last(body: dict[str, Any], name: str, value: Any) -> None:
    """Make a field the last one of a request's body. A server's cache knows how a request begins, so what changes from
    request to request stands last.
    """
    body.pop(name, None)
    body[name] = value


encode_json = msgspec.json.Encoder(enc_hook=str).encode
"""A request's body; what JSON cannot hold becomes text."""


def decode_json(decoder: msgspec.json.Decoder[T], data: str | bytes) -> T:
    """Decode JSON to a struct. Raises Fault `broken`. Half a surrogate pair, which msgspec refuses, becomes U+FFFD."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise Fault("broken", f"an answer of an unexpected form: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return msgspec.convert(replace_surrogates(json.loads(data)), decoder.type)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        shown = plain(data if isinstance(data, str) else data[:200].decode("utf-8", "replace"))[:80]
        raise Fault("broken", f"an answer that is no JSON ({describe_decode_error(error)}): {shown}") from None


def first_model(body: bytes) -> str:
    """The first name in a server's list of models, `{"data": [{"id": NAME}, …]}`. Raises Fault when there is none."""
    listed = decode_json(_decode_listing, body).data
    name = next((model.id for model in listed or [] if model.id.strip()), None)
    if name is None:
        raise Fault("final", "a list without a model")
    return name


class _Listed(Struct, frozen=True):
    #: The name of the model.
    id: str = ""


class _Listing(Struct, frozen=True):
    #: The models.
    data: list[_Listed] | None = None


_decode_listing: Final = msgspec.json.Decoder(_Listing)


class AnswerSize:
    """Counts the size of an answer, with the limit MAX_ANSWER_CHARS."""

    __slots__ = ("_chars",)  # what is stored of an answer is counted, whatever field it came in

    def __init__(self) -> None:
        self._chars = 0

    @property
    def chars(self) -> int:
        """Characters so far."""
        return self._chars

    def add(self, text: str) -> str:
        """Count `text` and return it. Raises Fault `final` when the answer has become too long."""
        self.count(len(text))
        return text

    def count(self, chars: int) -> None:
        """Count so many more characters. Raises the errors of `add`."""
        self._chars += chars
        if self._chars > MAX_ANSWER_CHARS:
            raise Fault("final", f"an answer of more than {MAX_ANSWER_CHARS} characters")


class Thoughts:
    """The reasoning of an answer while it is read. Its size is counted by the reader."""

    __slots__ = ("_apart", "_new", "_read")

    def __init__(self) -> None:
        self._read: list[str] = []
        self._new = 0
        self._apart = False

    def add(self, text: str) -> None:
        """Add a piece."""
        if text:
            self._read.append(f"\n\n{text}" if self._apart else text)
            self._apart = False

    def begin_part(self) -> None:
        """The next piece begins another part. An empty line stands between two parts."""
        self._apart = bool(self._read)

    def take(self) -> str:
        """What was added since the last call."""
        new, self._new = self._read[self._new :], len(self._read)
        return "".join(new)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._read)


def tokens(count: int | None) -> int:
    """A number of tokens that a server reports, as a number that can be stored."""
    return max(0, min(count or 0, MAX_TOKENS))


def _empty(stop: str | None, usual: tuple[str, ...], *, cut: bool, reasoned: bool, usage: Usage | None) -> Fault:
    """The fault of an answer without text and calls. `stop` is why the model stopped, and another try is worth it when
    that is one of `usual`. `cut`: it has reached its limit of tokens. `reasoned`: the answer has reasoning.
    """
    kind: FaultKind = "broken" if stop is None or stop in usual else "final"
    what, suggestion = "an empty answer", None
    if reasoned or (usage is not None and usage.reasoning_tokens):
        spent = f" ({usage.output_tokens} tokens)" if usage is not None and usage.output_tokens else ""
        what, suggestion = f"an answer of reasoning only{spent}", _LESS_REASONING
    if cut:
        return Fault(
            "final",
            f"{what}; it was cut off at its limit of tokens ({plain(stop or '')[:80]})",
            usage=usage,
            suggestion=_MORE_TOKENS,
        )
    reason = "" if kind == "broken" else f"; it stopped because of {plain(stop or '')[:80]}"
    return Fault(kind, f"{what}{reason}", usage=usage, suggestion=suggestion)


#: What a person can do about an answer that has no text.
_MORE_TOKENS: Final = "Raise the limit in the Model's params (max_tokens), or ask for less reasoning there."
_LESS_REASONING: Final = "Send it again; if it stays so, ask for less reasoning in the Model's params."


#: How much of a page's title is shown (characters).
MAX_TITLE: Final = 120
_PAGE: Final = re.compile(r"\s*(?:<!--.{0,500}?-->\s*)?<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_TITLE: Final = re.compile(r"<title[^<>]{0,200}>([^<]{0,1000})", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\s]+")


def model_name(value: Any) -> str | None:
    """The name of the model that answered, from a field of the answer. None when it is no name."""
    return plain(value)[:MAX_MODEL_NAME] or None if isinstance(value, str) else None


def plain(text: str) -> str:
    """Text from outside as one line without control characters."""
    return _CONTROL.sub(" ", text).strip()


def page_title(text: str) -> str:
    """The title of an HTML page in quotes, as one line; "" when the text is no page. A page without a title is `a
    page`.

    A page comes from what stands before a server, or from a server that is no model's: its text says nothing more.
    """
    if not _PAGE.match(text):
        return ""
    from html import unescape  # its tables are worth a megabyte, and few agents ever see a page

    found = _TITLE.search(text)
    title = plain(unescape(found[1]))[:MAX_TITLE] if found is not None else ""
    return f"an HTML page, “{title}”" if title else "an HTML page"


def error_words(body: Any) -> str:
    """The text of an error document, at most MAX_WORDS characters; "" when there is none."""
    found = _find_words(body, 0)
    return plain(found[: MAX_WORDS * 4])[:MAX_WORDS]


def _find_words(value: Any, depth: int) -> str:
    """The message of `{"error": {"message"}}`, `{"error": "…"}`, `{"message"}`, `{"detail"}` and similar documents."""
    if isinstance(value, str):
        return value
    if depth > 4:
        return ""
    if isinstance(value, list):
        return next((words for item in value[:4] if (words := _find_words(item, depth + 1))), "")
    if isinstance(value, dict):
        for key in ("error", "message", "detail", "msg", "title"):
            if words := _find_words(value.get(key), depth + 1):
                return words
    return ""
