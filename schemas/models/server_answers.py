"""What model servers say of themselves: how many tokens a context holds, and their limits. Contexts of well-known
models of vendors are in a table. Pure.

A server's word is taken before the table. What the words mean differs: llama.cpp lists the context that a model was
trained with, which may be more than what the server gives to a request; `/props` has that.

Source: docs/design/turns.md sections 10 and 13.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

#: Numbers outside of these are no size of a context (tokens).
LEAST_WINDOW: Final = 64
MOST_WINDOW: Final = 1 << 31

#: The beginning of a model's name -> the tokens of its context. The longest that fits counts. Of models that allow
#: fewer tokens for a request than for both, the request's.
_BY_NAME: Final[dict[str, int]] = {
    "claude-": 200_000,
    "gpt-3.5-turbo": 16_385,
    "gpt-4": 8_192,
    "gpt-4-32k": 32_768,
    "gpt-4-turbo": 128_000,
    "gpt-4.1": 1_047_576,
    "gpt-4o": 128_000,
    "gpt-5": 272_000,
    "o1": 200_000,
    "o1-mini": 128_000,
    "o3": 200_000,
    "o4-mini": 200_000,
    "gemini-": 1_048_576,
}
#: The fields of a listed model that give its context, in this order. Source: the listings of vLLM, LM Studio, Groq,
#: OpenRouter, Anthropic.
_FIELDS: Final = (
    "max_model_len",
    "loaded_context_length",
    "context_window",
    "context_length",
    "max_input_tokens",
    "max_context_length",
)
#: What a server is asked besides its listing: paths from the root of the server.
PROPS: Final = "/props"
RUNNING: Final = "/api/ps"
MODEL_INFO: Final = "/model/info"


class ListedModel(Struct, frozen=True):
    """A model in the list of its server."""

    #: The tokens of its context; None: the list does not say.
    window: int | None = None
    #: A path from the server's root that says more; None: there is none.
    ask: str | None = None


def known_window(model: str) -> int | None:
    """The context of a vendor's model by its name (tokens); None for a name that is not known. A name may stand behind
    that of a vendor, as proxies write it (`openai/gpt-4o`).
    """
    name = model.rpartition("/")[2].lower()
    found = [begin for begin in _BY_NAME if name.startswith(begin)]
    return _BY_NAME[max(found, key=len)] if found else None


def in_listing(body: bytes, model: str) -> ListedModel:
    """What a server's list of models, `{"data": [{"id": NAME, …}, …]}`, says of one of them. The first is taken when
    none has the name: some servers have one model and ignore the name.
    """
    listed = [item for item in _list(_document(body), "data") if isinstance(item, dict)]
    item = next((item for item in listed if item.get("id") == model), listed[0] if listed else {})
    window = next((size for name in _FIELDS if (size := _size(item.get(name))) is not None), None)
    meta, owner = item.get("meta"), item.get("owned_by")
    if window is None and isinstance(meta, dict):
        window = _size(meta.get("n_ctx"))
    if window is not None:
        return ListedModel(window)
    if isinstance(meta, dict) or owner == "llamacpp":
        return ListedModel(_size(meta.get("n_ctx_train")) if isinstance(meta, dict) else None, PROPS)
    return ListedModel(None, RUNNING if owner == "library" else MODEL_INFO)


def in_answer(path: str, body: bytes, model: str) -> int | None:
    """The context (tokens) in a server's answer to `path`, one of those above; None: it does not say."""
    document = _document(body)
    if path == PROPS:
        settings = document.get("default_generation_settings") if isinstance(document, dict) else None
        return _size(settings.get("n_ctx")) if isinstance(settings, dict) else None
    if path == RUNNING:
        models = _list(document, "models")
        named = [item for item in models if isinstance(item, dict) and model in (item.get("name"), item.get("model"))]
        return _size(named[0].get("context_length")) if named else None
    for item in _list(document, "data"):
        if isinstance(item, dict) and item.get("model_name") == model:
            info = item.get("model_info")
            return _size(info.get("max_input_tokens")) if isinstance(info, dict) else None
    return None


def server_root(base: str) -> str:
    """The root of a server from the base URL of its interface."""
    return base.rstrip("/").removesuffix("/v1")


def _document(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _list(document: Any, name: str) -> list[Any]:
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, list) else []


def _size(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and LEAST_WINDOW <= value < MOST_WINDOW else None


#: The most tokens, requests or milliseconds that are named.
MAX_NAMED: Final = 10**9

Amount = Annotated[int, Meta(ge=0, le=MAX_NAMED)]


class RateLimits(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a server says in the headers of an answer about its limits."""

    #: Requests that it still accepts.
    requests_left: Amount | None = None
    #: In how many milliseconds it accepts more of them.
    requests_reset_ms: Amount | None = None
    #: Tokens that it still accepts.
    tokens_left: Amount | None = None
    #: In how many milliseconds it accepts more of them.
    tokens_reset_ms: Amount | None = None
