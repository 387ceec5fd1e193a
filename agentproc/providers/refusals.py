"""What a server means when it refuses a request, by status, headers, the names of its errors and its words. Pure.

Vendors, proxies and local servers give the same refusal other statuses and names. So each sign is looked for in every
refusal: first a quota that is used up, then a model that is loaded, then too many requests.

Source: docs/design/turns.md section 6; the vendors' pages about errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from goondan.agentproc.providers.overflow import overflow_of
from goondan.agentproc.providers.vendor import Fault, FaultKind, encode_json

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
_SPENT: Final = re.compile(
    r"credit balance is too low|insufficient[ _](?:quota|balance|credits?|funds)|billing hard limit", re.IGNORECASE
)
#: Words that some vendors write of a used-up quota and others of a limit per minute. They mean a quota when the server
#: names no wait.
_PERHAPS_SPENT: Final = re.compile(r"exceeded your current quota|\bbilling\b", re.IGNORECASE)
_LOADING: Final = re.compile(
    r"\bload(?:ing|ed yet)\b.{0,80}\bmodel\b|\bmodel\b.{0,200}\bload(?:ing|ed yet)\b", re.IGNORECASE
)
#: What a person can do about a server that gives no answer at all, by what was seen of it.
ADVICE: Final[Mapping[str, str]] = {
    "refused": "Nothing listens there: start the model server, or correct host and port of the Model's endpoint.",
    "no host": "Correct the host in the Model's endpoint, or look at the network and the DNS of this machine.",
    "unreachable": "Check host and port of the Model's endpoint, and the network and firewalls in between.",
    "certificate": "Check the endpoint's host; for an authority of your own, name its file in SSL_CERT_FILE.",
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
    if status == _UNAVAILABLE and _LOADING.search(words):
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
    if names & _SPENT_NAMES or _SPENT.search(words):
        return True
    return not named_wait and _PERHAPS_SPENT.search(words) is not None
