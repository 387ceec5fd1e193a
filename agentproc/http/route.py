"""How a model's server is reached: the form of a URL on the wire, the proxy, TLS, and the addresses of a host.

Proxies come from the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY), as other programs read them; a server
on this machine is never asked through one.

Source: RFC 9110 sections 4.2, 7 and 9.3.6; RFC 8305 (addresses).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from msgspec import Struct

from goondan.agentproc.providers.faults import ADVICE, Fault, plain
from goondan.schemas.system import authorities

#: The header lines of every request.
_SAME: Final = (
    "user-agent: goondan-kernel\r\n"
    "content-type: application/json\r\n"
    "accept: text/event-stream, application/json\r\n"
    "accept-encoding: identity\r\n"
)
#: Characters of a path that are not quoted. "%" is one of them, because the path may be quoted already.
_SAFE: Final = "/%:@!$&'()*+,;=~"
#: How long one address is tried alone, before the next one is tried at the same time (seconds; RFC 8305 section 5).
NEXT_ADDRESS_S: Final = 0.25
_NO_URL: Final = "an endpoint that is no URL"
_BAD_PROXY: Final = "the proxy settings (HTTP_PROXY and its like) cannot be used"


class Way(Struct, frozen=True):
    """The first hop of a connection."""

    #: The host to connect to: that of the server or of a proxy.
    host: str
    #: The port to connect to.
    port: int
    #: Whether the first hop uses TLS.
    tls: bool
    #: The host of the server itself.
    server: str
    #: The CONNECT request for a proxy that leads to a server with TLS.
    tunnel: bytes | None = None


class Route(Struct, frozen=True):
    """The parts of a request for a URL."""

    #: The URL.
    url: str
    #: The connection.
    way: Way
    #: The target in the request line.
    target: str
    #: The header lines.
    lines: str


def route_to(url: str) -> Route:
    """The route to a URL. Raises Fault `final` when it is no http or https URL, or when a proxy cannot be used."""
    try:
        parts = urlsplit(url)
        host, port = _host(parts), parts.port
    except (ValueError, UnicodeError) as error:
        raise Fault("final", f"{_NO_URL}: {plain(str(error))[:80]}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise Fault("final", "an endpoint that is no http or https URL")
    if "@" in parts.netloc:
        raise Fault("final", "an endpoint with a user or a password in it: it would be sent in place of the key")
    tls = parts.scheme == "https"
    named = f"[{host}]" if ":" in host else host
    name = named if port is None else f"{named}:{port}"
    port = port or (443 if tls else 80)
    path = quote(parts.path or "/", safe=_SAFE)
    if parts.query:
        path += f"?{quote(parts.query, safe=_SAFE + '?')}"
    lines = f"host: {name}\r\n{_SAME}"
    proxy = None if is_loopback(host) else _proxy(parts.scheme, host, port)
    if proxy is None:
        return Route(url, Way(host, port, tls, host), path, lines)
    try:
        proxy_host, proxy_port = _host(proxy), proxy.port
    except (ValueError, UnicodeError):
        raise Fault("final", _BAD_PROXY) from None
    if proxy.scheme not in ("http", "https") or not proxy_host:
        raise Fault("final", _BAD_PROXY)
    first = (proxy_host, proxy_port or (443 if proxy.scheme == "https" else 80), proxy.scheme == "https")
    leave = _leave_of(proxy)
    if not tls:
        return Route(url, Way(*first, host), f"http://{name}{path}", lines + leave)
    tunnel = f"CONNECT {named}:{port} HTTP/1.1\r\nhost: {named}:{port}\r\n{leave}\r\n".encode("ascii")
    return Route(url, Way(*first, host, tunnel), path, lines)


def _host(parts: SplitResult) -> str:
    """The host in the form for lookups and requests. Raises UnicodeError, ValueError."""
    host = parts.hostname or ""
    if ":" in host:
        return str(ip_address(host))
    name = host.encode("idna").decode("ascii")
    if not all(letter.isalnum() or letter in "-._" for letter in name):
        raise ValueError("a host name with other than letters, digits, - and .")
    return name


def _leave_of(proxy: SplitResult) -> str:
    """User and password of a proxy as a header line."""
    if not proxy.username and not proxy.password:
        return ""
    words = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}".encode()
    return f"proxy-authorization: Basic {b64encode(words).decode()}\r\n"


def _proxy(scheme: str, host: str, port: int) -> SplitResult | None:
    """The proxy that the environment names for a host, read as other programs read it."""
    from urllib.request import getproxies

    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or authorities.skips_proxy(host, port):
        return None
    try:
        return urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError:
        raise Fault("final", _BAD_PROXY) from None


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context() -> ssl.SSLContext:
    """A context that checks certificates (schemas/system/authorities.py). Raises Fault: no authority can be loaded."""
    try:
        context = authorities.tls_context()
    except OSError as error:
        message = f"the certificates cannot be loaded: {error.strerror or error} (see SSL_CERT_FILE, SSL_CERT_DIR)"
        raise Fault("final", message) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def request_head(method: str, route: Route, headers: Mapping[str, str]) -> bytes:
    """A request up to the length of its body, which is the last header."""
    given = "".join([f"{name}: {value}\r\n" for name, value in headers.items() if f"\n{name}: " not in route.lines])
    return f"{method} {route.target} HTTP/1.1\r\n{route.lines}{given}content-length: ".encode("ascii")


# --- connecting -------------------------------------------------------------------------------------------------------


async def dial(
    loop: asyncio.AbstractEventLoop, connection: asyncio.Protocol, host: str, port: int, tls: ssl.SSLContext | None
) -> None:
    """Connect to one of the host's addresses. When an address does not answer soon, the next one is tried at the same
    time.
    """
    addresses = await _addresses(loop, host, port)
    sock = await _race(loop, addresses) if len(addresses) > 1 else await _reach(loop, addresses[0])
    try:
        await loop.create_connection(
            lambda: connection, sock=sock, ssl=tls, server_hostname=host if tls is not None else None
        )
    except BaseException:
        sock.close()
        raise


async def _addresses(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[Any]:
    """The addresses of a host, alternating between families: one family is often broken as a whole. Raises OSError."""
    with suppress(ValueError):  # asking the resolver takes threads, and each of them memory
        return [(host, port, 0, 0) if ip_address(host).version == 6 else (host, port)]
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [info[4] for info in found if info[0] == found[0][0]]
    for index, other in enumerate([info[4] for info in found if info[0] != found[0][0]]):
        addresses.insert(2 * index + 1, other)
    return addresses


async def _reach(loop: asyncio.AbstractEventLoop, address: Any) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _connected(loop, sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connected(loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Any) -> None:
    """Connect a socket that does not block. uvloop's `sock_connect` would start four threads to look an address up."""
    try:
        sock.connect(address)
    except BlockingIOError:
        ready = asyncio.Event()
        loop.add_writer(sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(sock.fileno())
        if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error)) from None


async def _race(loop: asyncio.AbstractEventLoop, addresses: list[Any]) -> socket.socket:
    """The first socket that is connected. Raises the first OSError when no socket is."""
    tries: set[asyncio.Task[socket.socket]] = set()
    todo = list(addresses)
    failure: BaseException | None = None
    try:
        while todo or tries:
            if todo:
                tries.add(loop.create_task(_reach(loop, todo.pop(0))))
            done, tries = await asyncio.wait(
                tries, timeout=NEXT_ADDRESS_S if todo else None, return_when=asyncio.FIRST_COMPLETED
            )
            connected = [one.result() for one in done if one.exception() is None]
            failure = failure or next((one.exception() for one in done if one.exception() is not None), None)
            for spare in connected[1:]:
                spare.close()
            if connected:
                return connected[0]
    finally:
        for one in tries:
            one.cancel()
        for ended in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(ended, socket.socket):
                ended.close()
    assert failure is not None
    raise failure


def failed_to_connect(error: OSError) -> Fault:
    """The fault of a failed connection, in the words of the system or TLS."""
    if isinstance(error, ssl.SSLError):  # nothing proves that it is this server: asking again would not help
        text = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
        return Fault("final", f"no connection: {plain(text)[:200]}", suggestion=ADVICE["untrusted"])
    reason = str(error)
    if error.strerror:  # asyncio writes texts of its own; the resolver's are below zero
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    advice = ADVICE["no host" if isinstance(error, socket.gaierror) else "unreachable"]
    if isinstance(error, ConnectionRefusedError):
        advice = ADVICE["refused"]
    return Fault("busy", f"no connection: {plain(reason)[:200] or 'no reason given'}", suggestion=advice)
