"""Which HTTP requests reach `gdn mcp serve`. Pure.

Every program and every page in a browser of this machine can connect to a port of loopback. A page of a stranger can
make a browser ask it (DNS rebinding), and then Host or Origin names somebody else. The token keeps out what the user
did not let in. Each check is of exact values, and comes before a byte of the body is read.

Source: docs/mcp.md, "Our tools for MCP clients".
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

#: The only path that is served.
PATH: Final = "/mcp"
#: Arguments of a call have at most 8 MiB; the rest is for what stands around them (bytes).
MAX_BODY: Final = 9 << 20

Headers = Iterable[tuple[bytes, bytes]]


class Refusal(Struct, frozen=True):
    """Why a request is not let in."""

    #: The HTTP status.
    status: int
    #: The reason in words. It says nothing that the sender does not know.
    reason: str
    #: Whether the answer names the way to authenticate.
    wants_token: bool = False


class Gate:
    """The rules for one port and one token."""

    def __init__(self, port: int, token: str) -> None:
        hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
        self._hosts = frozenset(host.encode() for host in hosts)
        self._origins = frozenset(f"http://{host}".encode() for host in hosts)
        self._token = token.encode()

    def judge(self, path: str, headers: Headers) -> Refusal | None:
        """Why a request with this path and these headers is refused; None when it may come in."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            found.setdefault(name.lower(), []).append(value)
        hosts = found.get(b"host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return Refusal(421, "this is not the host that the request names")
        if any(origin not in self._origins for origin in found.get(b"origin", [])):
            return Refusal(403, "pages of this origin may not ask")
        if path != PATH:
            return Refusal(404, f"only {PATH} is served")
        if not self._has_token(found.get(b"authorization", [])):
            return Refusal(401, "the token is missing or is not the right one", wants_token=True)
        return self._size(found)

    def _has_token(self, given: list[bytes]) -> bool:
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)

    def _size(self, found: dict[bytes, list[bytes]]) -> Refusal | None:
        for length in found.get(b"content-length", []):
            if not length.isdigit() or len(length) > 12 or int(length) > MAX_BODY:
                return Refusal(413, f"a request has at most {MAX_BODY} bytes")
        return None
