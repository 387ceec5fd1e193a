"""Why a model's server gave no answer, and whether and when to ask again. Pure: the clock and the dice are arguments.

A server may send any data. Every bad answer is a `Fault` with the reason in the server's words. Vendors, proxies and
local servers give the same refusal other statuses and names, so each sign is looked for in every refusal: a request
that is too long, a quota that is used up, a model that is loaded, too many requests.

Source: docs/design/turns.md sections 6, 10 and 13; the vendors' pages about errors and rate limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from goondan.agentproc.providers.base import Overflow, Usage, encode_json
from goondan.schemas.models import model_providers, server_answers

#: How much of a vendor's own text is shown (characters).
MAX_WORDS: Final = 500

#: `busy`: the server may answer later. `limited`: it refuses because too much is asked of it, by us or by all.
#: `loading`: it loads the model. `broken`: an answer began and was not valid. `silent`: nothing came for too long.
#: `quota`: what the account may use is used up. `final`: asking again would end the same way.
FaultKind = Literal["busy", "limited", "loading", "broken", "silent", "quota", "final"]


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


# --- the words of a server --------------------------------------------------------------------------------------------

#: How much of a page's title is shown (characters).
MAX_TITLE: Final = 120
# Patterns of refusals are compiled when the first one comes, if ever.
_PAGE: Final = r"(?is)\s*(?:<!--.{0,500}?-->\s*)?<(?:!doctype\s+html|html)\b"
_TITLE: Final = r"(?i)<title[^<>]{0,200}>([^<]{0,1000})"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\s]+")


def plain(text: str) -> str:
    """Text from outside as one line without control characters."""
    return _CONTROL.sub(" ", text).strip()


def page_title(text: str) -> str:
    """The title of an HTML page in quotes, as one line; "" when the text is no page. A page without a title is `a
    page`.

    A page comes from what stands before a server, or from a server that is no model's: its text says nothing more.
    """
    if not re.match(_PAGE, text):
        return ""
    from html import unescape  # its tables are worth a megabyte, and few agents ever see a page

    found = re.search(_TITLE, text)
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


# --- what a refusal means ---------------------------------------------------------------------------------------------

#: Statuses below 500 after which the same request may succeed: timeout, conflict with another, too early, too many.
_PASSING: Final = frozenset((408, 409, 425, 429))
#: Statuses of a server of which too much is asked: by us (429), by all (529).
_LIMITING: Final = frozenset((429, 529))
#: Names of errors after which the same request may succeed.
_PASSING_NAMES: Final = frozenset(
    ("server_error", "internal_server_error", "api_error", "timeout_error", "overloaded", "service_unavailable")
)
#: Names of errors of a server of which too much is asked.
_LIMITING_NAMES: Final = frozenset(
    ("rate_limit_error", "rate_limit_exceeded", "rate_limit_reached", "too_many_requests", "overloaded_error")
)
#: Names of errors of an account that may use no more.
_SPENT_NAMES: Final = frozenset(
    ("insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active", "insufficient_credits")
)
#: The same in words.
_SPENT: Final = r"(?i)credit balance is too low|insufficient[ _](?:quota|balance|credits?|funds)|billing hard limit"
#: Words that some vendors write of a used-up quota and others of a limit per minute. They mean a quota when the server
#: names no wait.
_PERHAPS_SPENT: Final = r"(?i)exceeded your current quota|\bbilling\b"
_LOADING: Final = r"(?i)\bload(?:ing|ed yet)\b.{0,80}\bmodel\b|\bmodel\b.{0,200}\bload(?:ing|ed yet)\b"
#: What a person can do about a server that gives no answer at all, by what was seen of it.
ADVICE: Final[Mapping[str, str]] = {
    "refused": "Nothing listens there: start the model server, or correct host and port of the Model's endpoint.",
    "no host": "Correct the host in the Model's endpoint, or look at the network and the DNS of this machine.",
    "unreachable": "Check host and port of the Model's endpoint, and the network and firewalls in between.",
    "untrusted": "Check the endpoint's host; for an authority of your own, name its file in SSL_CERT_FILE.",
    "silent": "It takes requests and does not answer: look at its log; it may be loading its model, or be overloaded.",
    "closed": "It ends connections without an answer: look at its log, and whether the endpoint is http or https.",
    "cut off": "Send it again. If it is cut off again, look at the log of the server and at proxies in between.",
    "page": "What answers there is no model server: check the path of the Model's endpoint; most end with /v1.",
}
_PAYMENT_REQUIRED: Final = 402
_UNAVAILABLE: Final = 503


def refusal_kind(
    status: int, headers: Mapping[str, str], names: Iterable[str], words: str, retry_after_s: float | None
) -> FaultKind:
    """The meaning of a refused request. With `x-should-retry` both vendors overrule the status."""
    if status == _PAYMENT_REQUIRED or _is_spent(frozenset(names), words, named_wait=retry_after_s is not None):
        return "quota"
    if status == _UNAVAILABLE and re.search(_LOADING, words):
        return "loading"
    wish = headers.get("x-should-retry")
    if wish == "false":
        return "final"
    if status in _LIMITING:
        return "limited"
    return "busy" if wish == "true" or status in _PASSING or status >= 500 else "final"


def stream_kind(names: Iterable[Any], words: str) -> FaultKind:
    """The meaning of an error inside a stream. `names` are its type and its code; some servers give a status there."""
    named = frozenset(name for name in names if isinstance(name, str))
    codes = [code for code in names if isinstance(code, int) and not isinstance(code, bool)]
    if _is_spent(named, words, named_wait=False):
        return "quota"
    if named & _LIMITING_NAMES or any(code in _LIMITING for code in codes):
        return "limited"
    if named & _PASSING_NAMES or any(500 <= code < 600 for code in codes):
        return "busy"
    return "final"


def stream_fault(error: Any, names: Iterable[Any], words: str) -> Fault:
    """The fault of an error inside a stream, `error` as its document has it, with its names and words."""
    overflow = overflow_of(None, encode_json(error).decode("utf-8", "replace"))
    kind = stream_kind(names, words) if overflow is None else "final"
    return Fault(kind, f"an error: {words}", overflow=overflow)


def error_names(body: Any) -> list[str]:
    """The type and the code of an error document: those of `{"error": {…}}`, or of the document itself."""
    if not isinstance(body, dict):
        return []
    error = body.get("error")
    found = [part.get(key) for part in (error, body) if isinstance(part, dict) for key in ("type", "code")]
    return [name for name in found if isinstance(name, str)]


def _is_spent(names: frozenset[str], words: str, *, named_wait: bool) -> bool:
    if names & _SPENT_NAMES or re.search(_SPENT, words):
        return True
    return not named_wait and re.search(_PERHAPS_SPENT, words) is not None


# --- longer than the model's context ----------------------------------------------------------------------------------

# Every server says it in words of its own, and most of them with numbers. The words here are those of the servers that
# are named beside them. A limit of tokens a minute is no overflow, whatever words it has: its status is 429.

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


# --- when to ask again ------------------------------------------------------------------------------------------------

#: How often a try is repeated at most, by its fault; a fault that is not named is repeated as long as the patience
#: lasts. Asking a server again that is busy or out of reach costs nothing. Half an answer was paid for. A silent try
#: has already taken minutes.
REPEATS: Final[Mapping[FaultKind, int]] = {"broken": 2, "silent": 1, "quota": 0, "final": 0}
#: The first wait (seconds). It doubles with every try. A short overload is over within it.
FIRST_WAIT_S: Final = 0.5
#: The longest wait that we choose (seconds).
MAX_WAIT_S: Final = 8.0
#: The random part of a wait, so that agents that were refused together do not come back together.
JITTER: Final = 0.5


class Retries(msgspec.Struct):
    """The tries of one model call."""

    #: The patience with the model.
    retry: model_providers.ModelRetry
    #: How many tries have failed.
    count: int = 0
    #: The same by kind.
    faults: dict[FaultKind, int] = {}
    #: The waits so far together.
    waited_s: float = 0.0

    def patience_s(self, kind: FaultKind) -> float:
        """How long the model is asked again after faults of this kind (seconds)."""
        return self.retry.loading_s if kind == "loading" else self.retry.busy_s

    def asks_too_long(self, fault: Fault) -> bool:
        """Whether the server asks for a wait that is longer than the patience."""
        return fault.retry_after_s is not None and fault.retry_after_s > self.patience_s(fault.kind)

    def next_wait(self, fault: Fault, chance: float, spent_s: float, left_s: float | None = None) -> float | None:
        """Count a try that failed. Returns the seconds until the next one, None to give up.

        `chance` is in [0, 1). `spent_s` is the time since the first fault. `left_s` is the time that the turn has left,
        None when there is no limit. A wait that a vendor asked for is never shortened.
        """
        kind = fault.kind
        self.count += 1
        self.faults[kind] = faults = self.faults.get(kind, 0) + 1
        repeats = REPEATS.get(kind)
        if (repeats is not None and faults > repeats) or self.asks_too_long(fault):
            return None
        own = min(FIRST_WAIT_S * 2.0 ** min(self.count - 1, 10), MAX_WAIT_S)
        asked = fault.retry_after_s
        wait = own * (1 - JITTER * chance) if asked is None else asked + own * JITTER * chance
        spent_s = max(spent_s, self.waited_s)
        if spent_s + (wait if asked is None else asked) > self.patience_s(kind) or (
            left_s is not None and wait >= left_s
        ):
            return None
        self.waited_s += wait
        return wait


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """The wait that a server asks for (seconds). None when it asks for none, or in a form that cannot be read.

    `now` is Unix time, for servers that send a date.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            from email.utils import parsedate_to_datetime  # it brings ten modules, and most answers name no date

            try:
                seconds = parsedate_to_datetime(value).timestamp() - now
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None


# --- limits in the headers of answers ---------------------------------------------------------------------------------

# OpenAI and those who copy it write `x-ratelimit-remaining-requests: 59` and `x-ratelimit-reset-requests: 1m2.5s`,
# Anthropic `anthropic-ratelimit-requests-remaining: 49` and `anthropic-ratelimit-requests-reset: <RFC 3339>`. Numbers
# that cannot be read are as if they were not there.

#: What is left counts as little at this share of the limit.
LOW_SHARE = 0.05
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|s|m|h|d)")
_UNITS_MS = {"us": 0.001, "µs": 0.001, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}


#: The headers that say how much is left.
REMAINING: Final = frozenset(
    name
    for what in ("requests", "tokens")
    for name in (f"x-ratelimit-remaining-{what}", f"anthropic-ratelimit-{what}-remaining")
)


def rate_limits(headers: Mapping[str, str], now: float) -> server_answers.RateLimits | None:
    """What the headers say; None when they say nothing. `now` is Unix time, for servers that send a date."""
    if REMAINING.isdisjoint(headers):
        return None
    requests, tokens = _left(headers, "requests"), _left(headers, "tokens")
    if requests is None and tokens is None:
        return None
    return server_answers.RateLimits(
        requests, _reset_ms(headers, "requests", now), tokens, _reset_ms(headers, "tokens", now)
    )


def exhausted_wait(headers: Mapping[str, str], now: float) -> float | None:
    """How long a server that refuses has nothing left, by its headers (seconds); None: they do not say."""
    limits = rate_limits(headers, now)
    if limits is None:
        return None
    resets = ((limits.requests_left, limits.requests_reset_ms), (limits.tokens_left, limits.tokens_reset_ms))
    waits = [reset_ms for left, reset_ms in resets if left == 0 and reset_ms is not None]
    return max(waits) / 1000 if waits else None


def is_low(headers: Mapping[str, str]) -> bool:
    """Whether little is left of a limit that the headers name."""
    for what in ("requests", "tokens"):
        left, limit = _left(headers, what), _number(_header(headers, "limit", what))
        if left is not None and (left <= 1 or (limit is not None and left <= LOW_SHARE * limit)):
            return True
    return False


def _header(headers: Mapping[str, str], which: str, what: str) -> str | None:
    return headers.get(f"x-ratelimit-{which}-{what}") or headers.get(f"anthropic-ratelimit-{what}-{which}")


def _left(headers: Mapping[str, str], what: str) -> int | None:
    return _number(_header(headers, "remaining", what))


def _number(text: str | None) -> int | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return min(int(value), server_answers.MAX_NAMED) if math.isfinite(value) and value >= 0 else None


def _reset_ms(headers: Mapping[str, str], what: str, now: float) -> int | None:
    """Milliseconds until the limit is full again: `1m2.5s`, `250ms`, seconds, or a date."""
    text = (_header(headers, "reset", what) or "").strip()[:64]
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        total = sum(float(number) * _UNITS_MS[unit] for number, unit in parts)
    else:
        try:
            total = float(text) * 1000
        except ValueError:
            try:
                total = (datetime.fromisoformat(text).timestamp() - now) * 1000
            except (ValueError, OverflowError, OSError):
                return None
    return min(max(0, math.ceil(total)), server_answers.MAX_NAMED) if math.isfinite(total) else None
