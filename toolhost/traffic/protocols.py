"""What jails and their resolvers say to the egress proxy, parsed: heads of HTTP/1 requests, DNS, and how TLS begins.
Pure.

A request whose end two servers could see in different places is refused: with it a second request, to another host,
would travel unseen. Each connection carries one request.

Questions of a jail's resolver come over TCP and are answered without asking a server. A granted name has an address in
the jail. Every other name does not exist there. The proxy learns from the question which name a tool wanted, so the
refusal can name it. Programs of the jail normally find granted names in /etc/hosts and do not ask. The server name in a
TLS ClientHello is read as strictly as the server reads it that the name belongs to.

Source: docs/design/sandbox.md section 6; RFC 9112 sections 3, 6, 7; RFC 9110 section 7.6.1; RFC 1035, RFC 7766; RFC
8446 section 4.1.2, RFC 6066 section 3.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from goondan.schemas.worker.hosts import BadHost, is_address, parse_host, parse_host_port

# --- HTTP/1 -----------------------------------------------------------------------------------------------------------

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


# --- DNS and TLS ------------------------------------------------------------------------------------------------------

#: A question has a header, one name and four bytes; resolvers add some options (bytes).
MAX_QUERY: Final = 1024
_A: Final = 1
_AAAA: Final = 28
_IN: Final = 1
_HEADER: Final = struct.Struct(">HHHHHH")
#: response, recursion available
_ANSWERED: Final = 0x8080
_NAME_ERROR: Final = 3
_FORMAT_ERROR: Final = 1
_TTL_S: Final = 1
#: A ClientHello with post-quantum key shares has some 2 KiB; larger ones than this are none (bytes).
MAX_HELLO: Final = 16384
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0


class TooShort(ValueError):
    """A field is longer than the bytes that are left."""


class Fields:
    """Takes fields off the front. Each method raises TooShort when the field is not all there."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        #: Where the next field begins.
        self.at = at

    def take(self, size: int) -> bytes:
        """So many bytes."""
        end = self.at + size
        if end > len(self._data):
            raise TooShort("a field ends too early")
        found = self._data[self.at : end]
        self.at = end
        return found

    def number(self, width: int) -> int:
        """A number of so many bytes, the highest one first."""
        return int.from_bytes(self.take(width), "big")

    def vector(self, width: int) -> bytes:
        """A field with its length before it, which is a number of so many bytes."""
        return self.take(self.number(width))

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return self.at == len(self._data)


class Question(NamedTuple):
    """One question."""

    #: The number of the query.
    id: int
    #: The name, normalised; None when no host can have it.
    host: str | None
    #: The type of record that is asked for.
    type: int
    #: Where the question ends in the message.
    end: int


def parse_query(message: bytes) -> Question | None:
    """The question of a query; None for what is none."""
    if len(message) < _HEADER.size or len(message) > MAX_QUERY:
        return None
    number, flags, questions, _, _, _ = _HEADER.unpack_from(message)
    if flags & 0xF800 or questions != 1:  # a response, or an operation that is no query
        return None
    fields = Fields(message, _HEADER.size)
    labels: list[bytes] = []
    try:
        while label := fields.vector(1):
            if len(label) > 63 or b"." in label:
                return None  # a question has nothing that a compressed name could point to
            labels.append(label)
        kind, cls = fields.number(2), fields.number(2)
    except TooShort:
        return None
    if cls != _IN:
        return None
    try:
        host: str | None = parse_host(b".".join(labels).decode("ascii"))
    except (BadHost, UnicodeDecodeError):
        host = None
    return Question(number, host, kind, fields.at)


def answer(message: bytes, address_of: Callable[[str], str | None]) -> tuple[bytes, str | None]:
    """The response to a query, and the name that was refused, if one was.

    `address_of` gives the IPv4 address in the jail of a granted name.
    """
    question = parse_query(message)
    if question is None:
        number = int.from_bytes(message[:2], "big")
        return _HEADER.pack(number, _ANSWERED | _FORMAT_ERROR, 0, 0, 0, 0), None
    address = None if question.host is None else address_of(question.host)
    asked = message[_HEADER.size : question.end]
    if address is None:
        return _HEADER.pack(question.id, _ANSWERED | _NAME_ERROR, 1, 0, 0, 0) + asked, question.host
    if question.type != _A:  # the name exists, but has nothing of this type
        return _HEADER.pack(question.id, _ANSWERED, 1, 0, 0, 0) + asked, None
    record = struct.pack(">HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + ipaddress.IPv4Address(address).packed
    return _HEADER.pack(question.id, _ANSWERED, 1, 1, 0, 0) + asked + record, None


class NoHello(ValueError):
    """The bytes are no ClientHello."""


def looks_like_tls(data: bytes) -> bool:
    """Whether a connection that begins like this is TLS."""
    return data[:1] == b"\x16" and data[1:2] in (b"", b"\x03")


def server_name(data: bytes) -> str | None:
    """The name in the ClientHello that `data` begins with, as it is written; '' when it has none.

    None: more bytes are needed. Raises NoHello for what can become no ClientHello.
    """
    message = b""
    at = 0
    while len(data) - at >= 5:
        if data[at] != _HANDSHAKE or data[at + 1] != 3:
            raise NoHello("not a TLS handshake")
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if size == 0 or size > MAX_HELLO:
            raise NoHello("a record of an impossible length")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise NoHello("not a ClientHello")
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO:
                raise NoHello("too long a ClientHello")
            if len(message) >= wanted:
                try:
                    return _name_in(Fields(message[4:wanted]))
                except TooShort as error:
                    raise NoHello(str(error)) from None
    if data and not looks_like_tls(data):
        raise NoHello("not a TLS handshake")
    if len(data) > MAX_HELLO:
        raise NoHello("too long a ClientHello")
    return None


def _name_in(body: Fields) -> str:
    body.take(2 + 32)  # version, random
    body.vector(1)  # session
    body.vector(2)  # ciphers
    body.vector(1)  # compression
    if body.empty:
        return ""
    extensions = Fields(body.vector(2))
    found: list[str] = []
    while not extensions.empty:
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind == _SERVER_NAME:
            found.append(_server_name_in(content))
    if len(found) > 1:
        raise NoHello("two server names")
    return found[0] if found else ""


def _server_name_in(content: bytes) -> str:
    names = Fields(Fields(content).vector(2))
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or not names.empty:
        raise NoHello("a server name that is none")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise NoHello("a server name that is none") from None


class Gate:
    """Holds back what a client sends through a tunnel to `host`, until its ClientHello names that host.

    `must`: only TLS passes. An exact grant carries any protocol, also ones in which the server speaks first.
    """

    def __init__(self, host: str, *, must: bool) -> None:
        self._host = host
        self._must = must
        self._held = b""
        self._open = False
        self.done = False  # as for a body: a tunnel has no end of its own

    def feed(self, data: bytes) -> bytes:
        """The part of what has come that may be passed on now. Raises NoHello."""
        if self._open:
            return data
        self._held += data
        if not self._held:
            return b""
        if self._must or looks_like_tls(self._held):
            name = server_name(self._held)
            if name is None:
                return b""
            if not self._fits(name):
                raise NoHello("the TLS server name is not the host that the proxy was asked for")
        self._open = True
        held, self._held = self._held, b""
        return held

    def _fits(self, name: str) -> bool:
        if not name:  # an address has none (RFC 6066), and what must be TLS must say where it goes
            return not self._must or is_address(self._host)
        try:
            return parse_host(name) == self._host
        except BadHost:
            return False
