"""The bundled tool `http-fetch`: one web request, its answer as text.

Which addresses it may reach is the sandbox's affair (`network: public`): each address, of the first request and of
every redirect, is judged by the egress proxy. Here only http and https are let through, on each redirect again. The
body is read no further than `maxBytes`, also when it is packed.

Source: requirements HTTP-01 to HTTP-10; design section 12a; recorded parity `http-fetch__*`.
"""

from __future__ import annotations

from time import monotonic

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from toolhost.inside import ToolContext, ToolError
    from toolhost.inside.arguments import InvalidInput, as_text, non_empty, number, string
    from toolhost.inside.fetch import Answer, TimedOut, Unreachable, send
    from toolhost.inside.web_address import BadAddress, WebAddress
else:
    from goondan_tool import ToolError
    from goondan_tool.arguments import InvalidInput, as_text, non_empty, number, string
    from goondan_tool.fetch import TimedOut, Unreachable, send
    from goondan_tool.web_address import BadAddress, WebAddress

DEFAULT_TIMEOUT_MS = 30_000
DEFAULT_MAX_BYTES = 500_000
MAX_REDIRECTS = 10
REDIRECTS = (301, 302, 303, 307, 308)
#: Redirects after which a POST becomes a GET without its body, as browsers do it.
TO_GET = (301, 302, 303)
#: Headers that only make sense for the connection, which is not the caller's.
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
#: Not sent to another server than the one they were meant for.
PERSONAL = ("authorization", "cookie")
#: Say something about a body that is not sent any more.
OF_A_BODY = ("content-encoding", "content-language", "content-location", "content-type")
#: What zlib takes for the two packings: gzip or zlib by its own header.
EITHER = 47
READ_BYTES = 1 << 16


def get(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`http-fetch__get`."""
    return fetch(ctx, "GET", input, None, {})


def post(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`http-fetch__post`: an object as JSON, or a text as it is."""
    body = input.get("body")
    if body is not None:
        if not isinstance(body, dict):
            raise InvalidInput("'body' must be an object")
        from json import dumps

        data = dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return fetch(ctx, "POST", input, data.encode("utf-8", "replace"), {"content-type": "application/json"})
    return fetch(ctx, "POST", input, string(input, "bodyString", "").encode("utf-8", "replace"), {})


def fetch(
    ctx: ToolContext, method: str, input: dict[str, Any], body: bytes | None, defaults: dict[str, str]
) -> dict[str, Any]:
    """Make the request, follow its redirects, read its body; the result of both exports."""
    began = monotonic()
    address = _address(non_empty(input, "url"))
    timeout_s = number(input, "timeoutMs", DEFAULT_TIMEOUT_MS) / 1000
    most = int(number(input, "maxBytes", DEFAULT_MAX_BYTES))
    if most < 0:
        raise InvalidInput("'maxBytes' must not be negative")
    headers = {**defaults, **_headers(input)}
    if address.credentials is not None:
        headers.setdefault("authorization", "Basic " + address.credentials)
    try:
        status, reason, seen, data = _follow(ctx, method, address, headers, body, began + timeout_s, most)
    except TimedOut:
        message = f"the request timed out after {as_text(number(input, 'timeoutMs', DEFAULT_TIMEOUT_MS))} ms"
        raise ToolError(message, code="E_TOOL_TIMEOUT") from None
    except Unreachable as error:
        raise ToolError(str(error)) from error
    truncated = len(data) > most
    return {
        "url": address.href,
        "method": method,
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
    """Status, reason, headers and the first `most` + 1 bytes of the last answer."""
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
            if answer.status not in REDIRECTS or location is None:
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
    """An address that may be asked for (HTTP-01)."""
    try:
        found = WebAddress(text, base)
    except BadAddress:
        raise ToolError(f"Invalid URL: {text}") from None
    if found.scheme not in ("http", "https"):
        raise ToolError(f"Unsupported protocol '{found.scheme}:'. Only http: and https: are allowed.")
    return found


def _headers(input: dict[str, Any]) -> dict[str, str]:
    """The caller's headers by their names in small letters; what is no text, number or boolean is left out."""
    given = input.get("headers")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidInput("'headers' must be an object")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(value, str | int | float):
            continue
        text = value if isinstance(value, str) else as_text(value)
        if not name or not all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name) or not name.isascii():
            raise InvalidInput(f"Header name '{name[:100]}' is invalid")
        text = text.strip(" \t\r\n")
        if any((c < " " and c != "\t") or c == "\x7f" or c > "\xff" for c in text):
            raise InvalidInput(f"Header '{name}' has invalid value")
        if name.lower() not in OURS:
            headers[name.lower()] = text
    return dict(sorted(headers.items()))  # in the order in which fetch of the web sends them


def _without(headers: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in names}


def _seen(answer: Answer) -> dict[str, str]:
    """The answer's headers; several of one name are joined, of several cookies the last one counts."""
    seen: dict[str, str] = {}
    for name, value in answer.headers:
        key = name.lower()
        seen[key] = f"{seen[key]}, {value}" if key in seen and key != "set-cookie" else value
    return seen


def _body(answer: Answer, most: int) -> bytes:
    """The first `most` bytes of the body, unpacked if the server packed it."""
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
