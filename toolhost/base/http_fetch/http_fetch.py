"""The bundled tool `http-fetch`: one web request, with its answer as text.

The sandbox decides which addresses may be reached (`network: public`): the egress proxy judges the address of the first
request and of every redirect. This module allows only http and https, also in every redirect. It reads at most
`maxBytes` of the body, also of a compressed body.

Source: docs/design/tools.md section 9; requirements HTTP-01 to HTTP-10; recorded parity `http-fetch__*`.
"""

from __future__ import annotations

from time import monotonic

from goondan_base.arguments import EXACT, InvalidInput, as_text, mapping, non_empty, number, string
from goondan_base.fetch import Answer, TimedOut, Unreachable, send
from goondan_base.web_address import BadAddress, WebAddress
from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEFAULT_TIMEOUT_MS = 30_000
DEFAULT_MAX_BYTES = 500_000
#: The most redirects, as in the fetch standard.
MAX_REDIRECTS = 20
REDIRECTS = (301, 302, 303, 307, 308)
#: The redirects after which a POST becomes a GET without its body, as in browsers.
TO_GET = (301, 302, 303)
#: The headers of the connection, which the caller cannot set.
OURS = (
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
)
#: The headers that are not sent to another server after a redirect.
PERSONAL = ("authorization", "cookie")
#: The headers about a body, which are dropped with the body.
OF_A_BODY = ("content-encoding", "content-language", "content-location", "content-type")
#: The argument of zlib for both compressions: gzip or zlib, by the header of the data.
EITHER = 47
READ_BYTES = 1 << 16


def get(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`http-fetch__get`."""
    return fetch(ctx, Request("GET", input))


def post(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`http-fetch__post`: send an object as JSON, or a text unchanged."""
    request = Request("POST", input)
    body, text = mapping(input, "body"), string(input, "bodyString", "")
    if "body" in input:
        from json import dumps

        data = dumps(_as_doubles(body), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        request.headers.setdefault("content-type", "application/json")
        request.body = data.encode("utf-8", "replace")
    else:
        request.body = text.encode("utf-8", "replace")
    return fetch(ctx, request)


class Request:
    """The arguments of both exports. A body may be added. Raises InvalidInput, and ToolError for the address."""

    def __init__(self, method: str, input: dict[str, Any]) -> None:
        self.method = method
        self.address = _address(non_empty(input, "url"))
        self.headers = _headers(mapping(input, "headers"))
        self.timeout_ms = number(input, "timeoutMs", DEFAULT_TIMEOUT_MS)
        self.most = int(number(input, "maxBytes", DEFAULT_MAX_BYTES))
        self.body: bytes | None = None
        if self.most < 0:
            raise InvalidInput("'maxBytes' must not be negative")


def fetch(ctx: ToolContext, request: Request) -> dict[str, Any]:
    """Make the request, follow its redirects and read its body. Returns the result of both exports."""
    began = monotonic()
    address, most, headers = request.address, request.most, request.headers
    if address.credentials is not None:
        headers.setdefault("authorization", "Basic " + address.credentials)
    # First the registered names in order, then the caller's own, sorted: the order of the recorded fetch.
    headers = dict(sorted(headers.items(), key=lambda field: "x-" if field[0].startswith("x-") else field[0]))
    try:
        deadline = began + request.timeout_ms / 1000
        status, reason, seen, data = _follow(ctx, request.method, address, headers, request.body, deadline, most)
    except TimedOut:
        message = f"the request timed out after {as_text(request.timeout_ms)} ms"
        raise ToolError(message, code="E_TOOL_TIMEOUT") from None
    except Unreachable as error:
        raise ToolError(str(error)) from error
    truncated = len(data) > most
    return {
        "url": address.href,
        "method": request.method,
        "status": status,
        "statusText": reason,
        "headers": seen,
        "body": data[:most].decode("utf-8", "replace").removeprefix("\ufeff"),
        "truncated": truncated,
        "durationMs": int((monotonic() - began) * 1000),
    }


def _follow(
    ctx: ToolContext,
    method: str,
    address: WebAddress,
    headers: dict[str, str],
    body: bytes | None,
    deadline: float,
    most: int,
) -> tuple[int, str, dict[str, str], bytes]:
    """The status, the reason, the headers and the first `most` + 1 bytes of the last answer."""
    for _ in range(MAX_REDIRECTS + 1):
        left = deadline - monotonic()
        if left <= 0:
            raise TimedOut("no time is left")
        with send(
            method,
            address.request,
            headers=headers,
            body=body,
            timeout_s=left,
            body_s=left,
            cancelled=lambda: ctx.cancelled,
        ) as answer:
            location = answer.header("location")
            if answer.status not in REDIRECTS or not location:
                answer.limit(deadline)
                return answer.status, answer.reason, _seen(answer), _body(answer, most + 1)
            following = _address(location, address)
            if answer.status in TO_GET and method != "GET" and method != "HEAD":
                method, body = "GET", None
                headers = _without(headers, OF_A_BODY)
        if following.origin != address.origin:
            headers = _without(headers, PERSONAL)
        address = following
    raise ToolError(f"the answer redirects more than {MAX_REDIRECTS} times")


def _address(text: str, base: WebAddress | None = None) -> WebAddress:
    """Check that an address may be requested (HTTP-01)."""
    try:
        found = WebAddress(text, base)
    except BadAddress:
        raise ToolError(f"Invalid URL: {text}") from None
    if found.scheme not in ("http", "https"):
        raise ToolError(f"Unsupported protocol '{found.scheme}:'. Only http: and https: are allowed.")
    return found


def _headers(given: dict[str, Any]) -> dict[str, str]:
    """The caller's headers by their names in small letters. A value that is no text, number or boolean is left out.

    A name that is given in two spellings has both values.
    """
    headers: dict[str, str] = {}
    for name in sorted(given):
        value = given[name]
        if not isinstance(value, str | int | float):
            continue
        text = value if isinstance(value, str) else as_text(value)
        if not name or not all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name) or not name.isascii():
            raise InvalidInput(f"Invalid header name: '{name}'")
        text = text.strip(" \t\r\n")
        if any((c < " " and c != "\t") or c == "\x7f" or c > "\xff" for c in text):
            raise InvalidInput(f"Header '{name}' has invalid value")
        key = name.lower()
        if key not in OURS:
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _as_doubles(value: Any) -> Any:
    """A JSON value with 1.0 written as 1, as in languages with one kind of numbers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, dict):
        return {key: _as_doubles(item) for key, item in value.items()}
    return [_as_doubles(item) for item in value] if isinstance(value, list) else value


def _without(headers: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in names}


def _seen(answer: Answer) -> dict[str, str]:
    """The answer's headers. Values of the same name are joined. Of several cookies the last one counts."""
    seen: dict[str, str] = {}
    for name, value in answer.headers:
        key = name.lower()
        seen[key] = f"{seen[key]}, {value}" if key in seen and key != "set-cookie" else value
    return seen


def _body(answer: Answer, most: int) -> bytes:
    """The first `most` bytes of the body, decompressed if the server compressed it."""
    packing = (answer.header("content-encoding") or "").strip().lower()
    if packing not in ("gzip", "x-gzip", "deflate"):
        return answer.read(most)
    from zlib import decompressobj, error

    unpacker = decompressobj(EITHER)
    out = b""
    try:
        while len(out) < most and not unpacker.eof:
            chunk = unpacker.unconsumed_tail or answer.read(READ_BYTES)
            if not chunk:
                break
            out += unpacker.decompress(chunk, most - len(out))
    except error:
        raise Unreachable(f"the body is not the {packing} that its header says") from None
    return out


handlers: dict[str, Callable[..., Any]] = {"get": get, "post": post}
