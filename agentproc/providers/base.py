"""What the turn loop needs of a model: one question, one answer. A provider knows neither the bus nor the store.

Source: docs/design/turns.md section 6; requirements NAME-03 (tool names go to the vendor and come back unchanged).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from agentproc.conversation import Message
from agentproc.turn import AskedCall
from schemas.codec import replace_surrogates
from schemas.errors import GoondanError, fail
from schemas.launch import CatalogItem, ModelSpec
from schemas.redaction import Redactor


class ModelRequest(Struct, frozen=True, kw_only=True):
    """One model call. `messages` keep the invariant of conversation.py; `tools` are the step's catalog, in order.

    `step` counts the turn's model calls from 1; `timeout_s` is what is left of the turn, None when nothing bounds it.
    `blocks` are what extensions add to this request alone (EXT-13): they stand behind the conversation, so that what
    comes before them is the same in every request.
    """

    agent: str
    model: ModelSpec
    messages: list[Message]
    tools: list[CatalogItem]
    step: int
    system: str | None = None
    timeout_s: float | None = None
    blocks: list[dict[str, Any]] = []


class Usage(Struct, frozen=True):
    """Tokens as the vendor counted them. `input_tokens` are all that were read; of these came `cached_tokens` from its
    cache, and `cache_write_tokens` were put into it.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ModelAnswer(Struct, frozen=True, kw_only=True):
    """What the model said: text, tool calls in order, and why it stopped (the vendor's word).

    `metadata` goes into the stored message's: what the vendor wants to see again (history.py, `kept_by`).
    """

    text: str = ""
    calls: list[AskedCall] = []
    finish_reason: str | None = None
    usage: Usage | None = None
    metadata: dict[str, Any] | None = None


class TextDelta(Struct, frozen=True):
    """A piece of text while the answer is still being made. `again`: the pieces before are void, it begins anew."""

    text: str
    again: bool = False


#: What a provider tells while a request runs. `asking`: a try goes out. `content`: the model has said more (text,
#: arguments, thinking; nothing that only keeps a connection alive). `waiting`: no try is out until the next one is due.
ModelNews = Literal["asking", "content", "waiting"]


class Provider(Protocol):
    """A model. Made when the first turn needs it, closed when the process ends.

    `needs_history`: whether a request holds the whole conversation, or (a console) the messages of this turn only.
    """

    needs_history: bool

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """Ask the model; `on_delta` gets pieces of text early, from providers that stream, and `on_news` hears whether
        the model is at work. A provider that tells nothing counts as asking.

        Raises GoondanError E_MODEL_FAILED when there is no answer after the provider's own retries. Cancelling the
        task ends the request.
        """

    async def close(self) -> None:
        """Give connections back."""


def redactor_of(model: ModelSpec) -> Redactor:
    """Takes what is secret of a model out of texts: its key, and the password of its endpoint."""
    try:
        password = urlsplit(model.endpoint or "").password
    except ValueError:
        password = None
    return Redactor(model.api_key, password, unquote(password) if password else None)


def model_failed(message: str, *, suggestion: str | None = None) -> GoondanError:
    """The error of a model call that has no answer."""
    return fail("E_MODEL_FAILED", message, suggestion=suggestion)


def asked_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> AskedCall:
    """A tool call from a vendor's answer, fit for storing and sending.

    Arguments as JSON text are read strictly (a blank text means {}); what cannot be read makes a call that is
    answered with an error instead of being sent. Lone surrogates become U+FFFD, integers beyond 64 bits doubles.
    """
    name, call_id = replace_surrogates(name), replace_surrogates(call_id)
    try:
        value = read_json(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        args = storable(replace_surrogates(value))
    except ValueError as error:
        return AskedCall(call_id, name, {}, f"they are no JSON: {str(error)[:200]}")
    except RecursionError:
        return AskedCall(call_id, name, {}, "they are nested too deep")
    except OverflowError:
        return AskedCall(call_id, name, {}, "a number is too large")
    return AskedCall(call_id, name, args, None if isinstance(args, dict) else "they are no JSON object")


def read_json(text: str) -> Any:
    """JSON text to a value; NaN and infinity are refused, in any spelling. Raises ValueError, RecursionError."""
    return _json.decode(text)


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends. Raises ValueError, RecursionError."""
    return _json.raw_decode(text, start)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


_json: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def storable(value: Any) -> Any:
    """A JSON value with integers that the wire cannot carry as doubles (docs/design/wire.md section 2). Raises
    OverflowError.
    """
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(value)
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    return value
