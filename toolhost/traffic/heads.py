"""Heads of HTTP/1 requests to a proxy, and the ends of their bodies. Pure, and strict where servers read differently.

A request whose end two servers could see in different places is refused: with it a second request, to another host,
would travel unseen. Each connection carries one request.

Source: docs/design/sandbox.md section 6; RFC 9112 sections 3, 6, 7; RFC 9110 section 7.6.1.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from goondan.schemas.worker.hosts import BadHost, parse_host, parse_host_port

#: Request line and header fields together (bytes); common servers take 8 to 32 KiB.
MAX_HEAD: Final = 32768
#: Longest line of a chunked body that is no data (bytes).
MAX_CHUNK_LINE: Final = 1024
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_TARGET: Final = re.compile(r"[!-~]+\Z")
#: Fields that concern one connection, not the message.
_HOP: Final = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "upgrade")
)  # fmt: skip
_HTTP_PORT: Final = 80
_FORBIDDEN: Final = 403
#: RFC 9209's words for our own answers.
_STATUS_ERRORS: Final = {400: "http_request_error", 403: "http_request_denied", 502: "destination_unavailable"}


class BadRequest(ValueError):
    """A request that cannot be passed on. The text says why and repeats nothing of it."""


class Head(NamedTuple):
    """A request to a proxy."""

    #: Its method.
    method: str
    #: The host, normalised.
    host: str
    #: The port.
    port: int
    #: The head to send on; empty for CONNECT.
    forward: bytes
    #: The length of the body (bytes); None: chunked.
    length: int | None


def find_end(data: bytes) -> int:
    """Where the head that `data` begins with ends; -1: more bytes are needed. Raises BadRequest when it is too long."""
    end = data.find(b"\r\n\r\n")
    if (end < 0 and len(data) > MAX_HEAD) or end > MAX_HEAD:
        raise BadRequest("the head of the request is too long")
    return -1 if end < 0 else end + 4


def parse_head(data: bytes) -> Head:
    """A whole head, with the empty line at its end. Raises BadRequest."""
    lines = data[:-4].decode("latin-1").split("\r\n")
    if any("\n" in line or "\r" in line or "\0" in line for line in lines):
        raise BadRequest("a line ends in an unusual way")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not _TOKEN.match(parts[0]) or not _TARGET.match(parts[1]):
        raise BadRequest("not a request line")
    method, target, version = parts
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest("not HTTP/1.1")
    fields = [_field(line) for line in lines[1:]]
    if method == "CONNECT":
        host, port = _authority(target, None)
        _check_host(fields, host, port, None)
        return Head(method, host, port, b"", 0)
    if not target.lower().startswith("http://"):
        raise BadRequest("a proxy is asked for a whole http:// address, or with CONNECT")
    host, port, path = _absolute(target)
    _check_host(fields, host, port, _HTTP_PORT)
    length = _body_length(fields)
    start = f"{method} {path} {version}"
    return Head(method, host, port, _forwarded(start, host, port, fields), length)


def _field(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not _TOKEN.match(name):
        raise BadRequest("not a header field")
    value = value.strip(" \t")
    if any((c < " " and c != "\t") or c == "\x7f" for c in value):
        raise BadRequest("a header field holds control characters")
    return name, value


def _authority(text: str, default: int | None) -> tuple[str, int]:
    try:
        if default is not None and (text.endswith("]") or ":" not in text):
            return parse_host(text), default
        if default is not None and text.endswith(":"):
            return parse_host(text[:-1]), default
        return parse_host_port(text)
    except BadHost as error:
        raise BadRequest(f"the address of the request: {error}") from None


def _absolute(target: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(target)
    except ValueError:
        raise BadRequest("not a whole http:// address") from None
    authority = parts.netloc
    if "@" in authority:
        raise BadRequest("the address of the request holds credentials")
    if not authority or "\\" in target:
        raise BadRequest("not a whole http:// address")
    host, port = _authority(authority, _HTTP_PORT)
    rest = target[len("http://") :].partition("#")[0][len(authority) :]
    return host, port, rest if rest.startswith("/") else "/" + rest


def _check_host(fields: list[tuple[str, str]], host: str, port: int, default: int | None) -> None:
    """The Host field must say what the address says: servers choose their site by it."""
    said = [value for name, value in fields if name.lower() == "host"]
    if len(said) > 1:
        raise BadRequest("two Host fields")
    if not said:
        return
    try:
        there = _authority(said[0], default if default is not None else port)
    except BadRequest:
        raise BadRequest("the Host field names no host") from None
    # A CONNECT's Host often leaves out the port.
    if there[0] != host or there[1] != port:
        raise BadRequest("the Host field names another host than the address")


def _body_length(fields: list[tuple[str, str]]) -> int | None:
    codings = [value for name, value in fields if name.lower() == "transfer-encoding"]
    lengths = [value for name, value in fields if name.lower() == "content-length"]
    if (codings and lengths) or len(lengths) > 1 or len(codings) > 1:
        raise BadRequest("the length of the body is given twice")
    if codings:
        if codings[0].lower() != "chunked":
            raise BadRequest("an unknown coding of the body")
        return None
    if not lengths:
        return 0
    if not lengths[0].isascii() or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise BadRequest("the length of the body is no number")
    return int(lengths[0])


def _forwarded(start: str, host: str, port: int, fields: list[tuple[str, str]]) -> bytes:
    named = {
        part.strip().lower() for name, value in fields if name.lower() == "connection" for part in value.split(",")
    }
    kept = [f"{name}: {value}" for name, value in fields if name.lower() not in _HOP | named | {"host"}]
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _HTTP_PORT else f"{shown}:{port}"
    lines = [start, f"Host: {authority}", *kept, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


class Body:
    """Counts a request's body, so that nothing after it is passed on. `done` once its last byte has come."""

    def __init__(self, length: int | None) -> None:
        self._left = length or 0
        self._chunked = length is None
        self._line = b""
        self._last = False  # the chunk of size 0 has come; trailers follow
        self._gap = False  # the line end after a chunk's data is due
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that belongs to the body. Raises BadRequest when it is coded wrongly."""
        if not self._chunked:
            taken = data[: self._left]
            self._left -= len(taken)
            self.done = self._left == 0
            return taken
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                self._gap = self._left == 0
                continue
            end = data.find(b"\n", at)
            stop = len(data) if end < 0 else end + 1
            self._line += data[at:stop]
            at = stop
            if len(self._line) > MAX_CHUNK_LINE:
                raise BadRequest("a chunk of the body has too long a head")
            if end >= 0:
                line, self._line = self._line, b""
                self._take_line(line)
        return data[:at]

    def _take_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise BadRequest("a chunk of the body ends in an unusual way")
        text = line[:-2]
        if self._gap:
            if text:
                raise BadRequest("a chunk of the body is longer than it says")
            self._gap = False
        elif self._last:
            self.done = not text
        else:
            size = text.partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", size):
                raise BadRequest("a chunk of the body has no length")
            self._left = int(size, 16)
            self._last = self._left == 0


def response(status: int, reason: str, text: str) -> bytes:
    """A whole answer of the proxy itself, which ends the connection. A 403 is marked as a refusal of the sandbox.

    Proxy-Status tells a client that no server said this (RFC 9209).
    """
    body = (text + "\n").encode("utf-8", "replace")
    mark = "X-Goondan-Error: E_SANDBOX_DENIED\r\n" if status == _FORBIDDEN else ""
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        f"Proxy-Status: goondan; error={_STATUS_ERRORS.get(status, 'proxy_internal_error')}\r\n"
        f"{mark}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
