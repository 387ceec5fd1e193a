"""Whether a server refuses a request because it is longer than the model's context, and with which numbers. Pure.

Every server says it in words of its own, and most of them with numbers. The words here are those of the servers that
are named beside them. A limit of tokens a minute is no overflow, whatever words it has: its status is 429.

Source: docs/design/turns.md section 10.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct

#: Statuses that a server refuses too long a request with. Some proxies say 500 for every error of the server behind
#: them.
_STATUSES: Final = frozenset((400, 413, 422, 500, 503))
#: A number of tokens beyond this is none (tokens).
MAX_TOKENS: Final = 1 << 31
#: How much of a refusal is searched (characters).
_SEARCHED_CHARS: Final = 8192
#: How deep a document of an error is searched.
_MAX_DEPTH: Final = 6

_NUMBER: Final = r"(\d[\d,]{0,14})"
#: Words that mean an overflow and nothing else.
_SAYS: Final = (
    r"exceed_context_size|exceeds the available context size"  # llama.cpp
    r"|context_length_exceeded|context_window_exceeded|contextwindowexceeded"  # OpenAI, LiteLLM
    r"|maximum context length|exceeds? the (?:model's |maximum )?context (?:window|length)"  # OpenAI, vLLM, OpenRouter
    r"|longer than the (?:maximum model length|model's (?:maximum )?context length)"  # vLLM, SGLang
    r"|(?:prompt|input) is too long|exceeds? (?:the )?context limit"  # Anthropic, Bedrock
    r"|(?:input|prompt) length exceeds|greater than the context length|context the overflows"  # Ollama, LM Studio
    r"|model_context_window_exceeded|context window exceeds limit"  # Anthropic, MiniMax
    r"|input token count.{0,40}exceeds the maximum"  # Gemini
    r"|too large for model with \d+ maximum context|exceeded model token limit"  # Mistral, Kimi
    r"|maximum prompt length is|number of tokens in the prompt cannot exceed"  # xAI, Cohere
    r"|`inputs` (?:tokens \+|must have less than)"  # TGI
    r"|reduce the length of the (?:messages|input)"  # Groq
)
#: Where the context's size stands, the surest first.
_WINDOW: Final = (
    rf"context (?:size|length|window)(?: is| of)?(?: only)? \(?{_NUMBER}",
    rf"model length of {_NUMBER}|prompt length is {_NUMBER}|context length \({_NUMBER}",
    rf"tokens? > {_NUMBER}(?: maximum)?|\d \+ \d+ > {_NUMBER}|\d > {_NUMBER} - \d",
    rf"model with {_NUMBER} maximum|number of tokens allowed \({_NUMBER}|token limit: {_NUMBER}",
    rf"must be <= {_NUMBER}|must have less than {_NUMBER}|cannot exceed {_NUMBER}",
)
#: Where the tokens of the request stand, without those that were asked for as an answer.
_TOKENS: Final = (
    rf"{_NUMBER} (?:tokens )?(?:in|from) (?:the|your) (?:messages|prompt|input)|{_NUMBER} of text input",
    rf"{_NUMBER} (?:input|prompt) tokens|request \({_NUMBER} tokens|input \({_NUMBER} tokens",
    rf"resulted in {_NUMBER}|too long: {_NUMBER}|context limit: {_NUMBER}|prompt \(length {_NUMBER}",
    rf"token count \({_NUMBER}|request contains {_NUMBER}|prompt contains {_NUMBER}|\(requested: {_NUMBER}",
    rf"given: {_NUMBER}|received {_NUMBER}|first {_NUMBER} tokens|requested (?:about |a total of )?{_NUMBER}",
)
#: Tokens of functions, which some servers count beside those of the messages.
_FUNCTIONS: Final = rf"{_NUMBER} in the functions"


class Overflow(Struct, frozen=True):
    """What a server said of a request that is too long. None: it did not say."""

    #: The tokens of the request, without an answer.
    tokens: int | None = None
    #: The most tokens of the model's context, request and answer together.
    window: int | None = None


def overflow_of(status: int | None, body: str) -> Overflow | None:
    """What a refusal says of an overflow; None when it is no overflow. `status` is the HTTP status, None for an error
    inside a stream. `body` is the text of the refusal, JSON or not.
    """
    if status is not None and status not in _STATUSES:
        return None
    body = body[:_SEARCHED_CHARS]
    if re.search(_SAYS, body, re.IGNORECASE) is None:
        return None
    fields = dict(_numbers(_document(body), 0))
    tokens = fields.get("n_prompt_tokens") or _first(_TOKENS, body)
    window = fields.get("n_ctx") or _first(_WINDOW, body)
    if tokens is not None and (functions := re.search(_FUNCTIONS, body, re.IGNORECASE)) is not None:
        tokens += _tokens(functions[1]) or 0
    return Overflow(tokens, window)


def _document(body: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _numbers(value: Any, depth: int) -> Iterable[tuple[str, int]]:
    """The numbers of tokens in a document, by the names of their fields."""
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for name, field in value.items():
            if isinstance(field, int) and 0 < field < MAX_TOKENS:
                yield name, field
            else:
                yield from _numbers(field, depth + 1)


def _first(patterns: Iterable[str], text: str) -> int | None:
    for pattern in patterns:
        if (found := re.search(pattern, text, re.IGNORECASE)) is not None:
            return _tokens(next(group for group in found.groups() if group is not None))
    return None


def _tokens(digits: str) -> int | None:
    number = int(digits.replace(",", "") or "0")
    return number if 0 < number < MAX_TOKENS else None
