"""One HTTP request from inside a jail.

    from goondan_base.fetch import Unreachable, send
    with send("GET", "https://example.com/", timeout_s=15.0) as answer:
        answer.status, answer.header("content-type"), answer.read(100_000)

Rules.
- `timeout_s` covers the request up to the head of the answer, however slowly the server sends it. The body has a time
  of its own.
- `read` says how much of the body is read. The rest stays unread, and the connection is closed.
- No redirect is followed, nothing is decompressed, and nothing is tried again. The caller decides about that.
- HTTP_PROXY and HTTPS_PROXY are used. A grant for exact hosts needs neither. Patterns and `public` need them.
- No error contains the path of the address, a header or a body: each of them can contain a token.

Everything is imported with the first request (http.client takes 20 to 50 ms), so that a cold jail does not pay for it.

Source: docs/design/sandbox.md section 6; requirements TELEGRAM-04, SLACK-04; docs/design/tools.md section 9.
"""

from __future__ import annotations

import posix
from io import BufferedReader, RawIOBase
from time import monotonic

from goondan_tool import ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from http.client import HTTPResponse
    from types import TracebackType
    from typing import Self

#: The longest wait of a socket (seconds). A call's own deadline is far shorter.
MAX_WAIT_S = 3600.0
#: How often a wait for bytes checks whether the call was cancelled (seconds).
LOOK_S = 0.25
#: How long a body may take after the head of the answer (seconds): 20 MB at 350 kB/s.
BODY_S = 60.0
#: The size of one read (bytes).
READ_BYTES = 1 << 16
#: The longest address (characters). Servers take 8 KiB.
MAX_URL = 8192
#: The characters that stay unchanged in a path and in a query, as in the URL standard: no server takes them for the end
#: of the request line. `%` is among them, because encoded characters begin with it.
PATH_SAFE = "/%:@!$&'()*+,;=-._~[]|"
QUERY_SAFE = PATH_SAFE.replace("'", "") + "?^`{}"
AGENT = "goondan"
#: The places where systems keep the certificates that they trust. A jail shows these (toolhost/lookup/this_host.py).
CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/certs/ca-bundle.crt")
#: The most digits of a length.
LENGTH_DIGITS = 19
#: The header with which a proxy marks its own answers (RFC 9209), so that they are not taken for the server's.
PROXY_STATUS = "proxy-status"
FORBIDDEN = 403
_PORTS = {"http": 80, "https": 443}


class Unreachable(Exception):
    """There was no answer, or it could not be read to its end. The text says why, without anything that may be
    secret.
    """


class TimedOut(Unreachable):
    """The head of the answer did not come in time."""


class Address:
    """The parts of an http or https address. `host` has the form for name servers, `target` is the path with the query.

    Raises Unreachable for any other address, and for one with a user name or a password.
    """

    __slots__ = ("host", "port", "scheme", "target")

    def __init__(self, url: str) -> None:
        from urllib.parse import quote, urlsplit

        if len(url) > MAX_URL:
            raise Unreachable(f"the address is longer than {MAX_URL} characters")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise Unreachable("the address is no URL") from None
        if parts.scheme not in _PORTS or not host:
            raise Unreachable("the address is no http or https URL")
        if "@" in parts.netloc:
            raise Unreachable("the address holds a user name or a password")
        try:
            self.host = host if host.isascii() else host.encode("idna").decode("ascii")
        except UnicodeError:
            raise Unreachable("the address names no host") from None
        if any(c <= " " or c in '"<>\\^`{|}%\x7f' for c in self.host):
            raise Unreachable("the address names no host")
        self.scheme = parts.scheme
        self.port = _PORTS[parts.scheme] if port is None else port
        # An empty query is a query as well, and urlsplit does not distinguish it from none.
        query = "?" + quote(parts.query, safe=QUERY_SAFE) if "?" in url.partition("#")[0] else ""
        self.target = (quote(parts.path, safe=PATH_SAFE) or "/") + query

    @property
    def authority(self) -> str:
        """Host and port in the form of a request. The port is left out when it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int]:
        """The part that all addresses of one server share."""
        return (self.scheme, self.host, self.port)


class Answer:
    """An answer whose body has not been read yet. Use it as a context manager, or close it."""

    def __init__(self, response: HTTPResponse, line: _Line) -> None:
        self._response = response
        self._line = line
        self._left = response.length  # 0 for an answer that has no body, whatever its headers say
        self.status = response.status
        self.reason = response.reason.strip()

    def header(self, name: str) -> str | None:
        """The value of a header: the first one when there are several, None when there is none."""
        values = self._response.headers.get_all(name)
        return str(values[0]) if values else None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """All headers, in the order in which they came."""
        return [(name, str(value)) for name, value in self._response.headers.items()]

    def limit(self, deadline: float) -> None:
        """Set the time by which the whole body must have come (of time.monotonic)."""
        self._line.deadline = deadline

    @property
    def length(self) -> int | None:
        """The Content-Length of the body (bytes). None when there is none."""
        value = self.header("content-length") or ""
        whole = value.isascii() and value.isdigit() and len(value) < LENGTH_DIGITS
        return int(value) if whole and self.header("transfer-encoding") is None else None

    def read(self, most: int) -> bytes:
        """Read the next bytes of the body, at most so many. Fewer come only at its end. Raises Unreachable."""
        from http.client import HTTPException

        chunks: list[bytes] = []
        try:
            while most > 0 and (chunk := self._response.read(min(most, READ_BYTES))):
                chunks.append(chunk)
                most -= len(chunk)
                if self._left is not None:
                    self._left -= len(chunk)
        except (HTTPException, ValueError):
            raise Unreachable("the answer broke off, or is no HTTP") from None
        except TimeoutError as error:
            raise TimedOut("the answer did not come to its end in time") from error
        except OSError as error:
            raise Unreachable(f"{_name(error)}: the answer broke off") from error
        if most > 0 and self._left is not None and self._left > 0:
            raise Unreachable("the answer broke off")
        return b"".join(chunks)

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        self._line.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float,
    body_s: float = BODY_S,
    cancelled: Callable[[], bool] = lambda: False,
) -> Answer:
    """Make a request and wait for the head of its answer.

    `timeout_s` is the time for connecting, sending and the head, `body_s` the time for the body after that (seconds).
    `cancelled` is called from time to time while waiting. Raises TimedOut, Unreachable, and ToolError E_CANCELLED.
    """
    from http.client import HTTPException, HTTPResponse, RemoteDisconnected

    address = Address(url)
    deadline = monotonic() + min(timeout_s, MAX_WAIT_S)
    proxy = _proxy(address.scheme)
    line: _Line | None = None
    try:
        line = _Line(_connect(proxy or address, deadline), deadline, cancelled)
        if address.scheme == "https":
            if proxy is not None:
                _tunnel(line, address)
            line.encrypt(address.host)
        target = address.target if proxy is None or address.scheme == "https" else _whole(address)
        line.sendall(_head(method, target, address, headers or {}, body) + (body or b""))
        response = HTTPResponse(line, method=method)  # type: ignore[arg-type]  # it needs makefile only
        response.begin()
        if proxy is not None and address.scheme == "http" and response.headers.get(PROXY_STATUS):
            what = "refused" if response.status == FORBIDDEN else "could not reach"
            raise Unreachable(f"the proxy {what} {address.authority}")
    except BaseException as error:
        if line is not None:
            line.end()
        if isinstance(error, TimeoutError):
            raise TimedOut("the server did not answer in time") from error
        if isinstance(error, RemoteDisconnected):
            raise Unreachable("the server closed the connection without an answer") from None
        if isinstance(error, OSError):
            raise Unreachable(_why(error, address, "connection to" if line is None else "answer from")) from error
        if isinstance(error, HTTPException | ValueError):
            raise Unreachable("the answer is no HTTP") from None
        raise
    line.deadline = monotonic() + body_s
    return Answer(response, line)


class _Line:
    """A connected socket. Its waits end at `deadline`, and when the call is cancelled."""

    def __init__(self, connected: socket.socket, deadline: float, cancelled: Callable[[], bool]) -> None:
        self._socket = connected
        self.deadline = deadline
        self._cancelled = cancelled

    def encrypt(self, host: str) -> None:
        """Begin TLS, with the certificates of the system."""
        from ssl import create_default_context, get_default_verify_paths

        context = create_default_context()
        paths = get_default_verify_paths()
        if not (paths.cafile or paths.capath):  # the interpreter was built for another system
            for path in CA_FILES:
                if _is_there(path):
                    context.load_verify_locations(path)
                    break
        context.set_alpn_protocols(["http/1.1"])
        self._socket.settimeout(self._left())
        self._socket = context.wrap_socket(self._socket, server_hostname=host)

    def sendall(self, data: bytes) -> None:
        """Send all bytes, before the deadline."""
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def read_into(self, buffer: memoryview) -> int:
        """Read the next bytes into a buffer. Returns their number, 0 at the end."""
        while True:
            left = self._left()
            self._socket.settimeout(min(left, LOOK_S))
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                if self._cancelled():
                    raise ToolError("the request was cancelled", code="E_CANCELLED") from None

    def makefile(self, mode: str) -> BufferedReader:
        """The file that http.client reads from."""
        return BufferedReader(_Reader(self))

    def end(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _left(self) -> float:
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Reader(RawIOBase):
    def __init__(self, line: _Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._line.read_into(buffer)


def _connect(address: Address, deadline: float) -> socket.socket:
    from socket import IPPROTO_TCP, TCP_NODELAY, create_connection

    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    made = create_connection((address.host, address.port), left)
    made.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    return made


def _proxy(scheme: str) -> Address | None:
    """The proxy of the environment for a scheme."""
    for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY"):
        value = posix.environ.get(name.encode())
        if value:
            return Address(value.decode("utf-8", "replace"))
    return None


def _tunnel(line: _Line, address: Address) -> None:
    """Ask a proxy for a connection to the address. Raises Unreachable when it refuses."""
    from http.client import HTTPResponse

    host = f"[{address.host}]" if ":" in address.host else address.host
    line.sendall(f"CONNECT {host}:{address.port} HTTP/1.1\r\nHost: {host}:{address.port}\r\n\r\n".encode("ascii"))
    response = HTTPResponse(line, method="CONNECT")  # type: ignore[arg-type]
    response.begin()
    if response.status != 200:
        raise Unreachable(f"the proxy refused a connection to {address.authority}: HTTP {response.status}")


def _whole(address: Address) -> str:
    """The request target for a proxy: the whole address."""
    return f"{address.scheme}://{address.authority}{address.target}"


def _head(method: str, target: str, address: Address, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The request line and the headers. Raises Unreachable for a header that would become two headers."""
    fields = {"Host": address.authority, "User-Agent": AGENT, "Accept": "*/*", "Accept-Encoding": "identity"}
    fields["Connection"] = "close"
    if body is not None:
        fields["Content-Length"] = str(len(body))
    given = {name.lower() for name in headers}
    fields = {name: value for name, value in fields.items() if name.lower() not in given}
    lines = [f"{method} {target} HTTP/1.1"]
    for name, value in {**fields, **headers}.items():
        sound = name != "" and name.isascii() and all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name)
        if not sound or not all(c == "\t" or " " <= c <= "~" or "\x80" <= c <= "\xff" for c in value):
            raise Unreachable(f"the header {name!r} holds characters that no header may have")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _is_there(path: str) -> bool:
    try:
        posix.stat(path)
    except OSError:
        return False
    return True


def _name(error: OSError) -> str:
    """The system's name of an error."""
    from errno import errorcode

    return errorcode.get(error.errno or 0, type(error).__name__)


def _why(error: OSError, address: Address, missing: str) -> str:
    """The system's error in words. Of the address it contains only the host."""
    from socket import gaierror
    from ssl import SSLCertVerificationError, SSLError

    where = address.authority
    if isinstance(error, gaierror):
        return f"the host {where} is not known"
    if isinstance(error, SSLCertVerificationError):
        return f"the certificate of {where} is not valid: {error.verify_message}"
    if isinstance(error, SSLError):
        return f"no encrypted connection to {where}: {error.reason or 'TLS failed'}"
    return f"{_name(error)}: no {missing} {where}"
