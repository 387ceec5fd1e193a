"""The head of a request: whether it may come in, before a byte of its body is read. Pure.

Every program and every page in a browser of this machine can connect to a port of loopback. A page of a stranger can
make a browser ask it (a form, a picture, an EventSource, DNS rebinding), and then Host, Origin or Sec-Fetch-Site says
so. The token keeps out what the user did not let in. Each check is of exact values.

A head that two readers may understand differently is refused: more than one Host, Content-Length with
Transfer-Encoding, HTTP/1.0, escapes that are no UTF-8.

Source: RFC 9110 section 7; RFC 9112 sections 3.2, 6.3 and 11.2; the Fetch standard's metadata headers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from goondan.features.serve.api.rules.callers import Caller, digest_of

#: What is asked with. HEAD, OPTIONS and the rest have nothing here that they could do.
METHODS: Final = ("GET", "POST", "DELETE")
#: Words in a query that are tokens somewhere: a query stands in logs and histories.
_SECRETS: Final = frozenset({"token", "access_token", "api_key", "apikey", "authorization", "bearer"})
#: The longest path with its query (bytes).
MAX_TARGET: Final = 8192
#: The most headers.
MAX_HEADERS: Final = 100
#: What most programs do not say.
_SPECIAL: Final = frozenset((b"origin", b"sec-fetch-site", b"transfer-encoding", b"upgrade", b"content-encoding"))
#: Most paths: they need no closer look.
_SIMPLE: Final = re.compile(rb"[a-zA-Z0-9/_-]*\Z")
#: The most digits of a length: as many as fit any number of bytes.
MAX_DIGITS: Final = 18
#: How a browser says that a person goes to a page: mode and destination.
_FOLLOWED: Final = (b"navigate", b"document")
#: Who shows no token where none is needed. No token has this name.
STRANGER: Final = Caller("", "look")


class Refusal(Struct, frozen=True):
    """Why a request is not let in."""

    #: The HTTP status.
    status: int
    #: The reason in words. It says nothing that the sender does not know.
    reason: str
    #: Its code.
    code: str = "E_DOOR_REQUEST"
    #: What the answer says of it in its head.
    headers: Mapping[str, str] | None = None


class Names:
    """The names under which a door may be asked."""

    def __init__(self, port: int, address: str = "127.0.0.1", more: Sequence[str] = ()) -> None:
        """`address` is what it listens at; `more` are names that its owner has given it, with or without a port."""
        names = ["127.0.0.1", "localhost", "[::1]", f"[{address}]" if ":" in address else address]
        self._more = {form.encode() for name in map(str.lower, more) for form in _forms(name, port)}
        #: What a Host may say.
        self.hosts = self._more.union(f"{name}:{port}".encode() for name in names)
        self._port = port
        # A page can rebind a name, and no address. So behind "all addresses" each address is a good Host.
        self._any_address = address in ("0.0.0.0", "::")  # noqa: S104 - compared, not listened at

    def has_host(self, host: bytes) -> bool:
        """Whether a Host names this door."""
        return host.lower() in self.hosts or (self._any_address and self._is_address(host))

    def has_origin(self, origin: bytes) -> bool:
        """Whether a page of this origin is one of the door's own."""
        scheme, _, host = origin.partition(b"://")
        # What its owner has named may be behind a proxy that speaks TLS; the door itself does not.
        return (scheme == b"http" and self.has_host(host)) or (scheme == b"https" and host in self._more)

    def _is_address(self, host: bytes) -> bool:
        name, _, port = host.decode("ascii", "replace").rpartition(":")
        try:
            ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return port == str(self._port)


def _forms(name: str, port: int) -> set[str]:
    """How a Host says a name that was given."""
    has_port = name.rpartition(":")[2].isdigit() and not name.endswith("]")
    return {name} if has_port else {name, f"{name}:{port}"}


class Head(Struct, frozen=True):
    """What a head says that was not refused."""

    #: Who asks.
    caller: Caller
    #: What is kept of its token.
    digest: bytes
    #: The size of the body that is announced (bytes). None: it comes in chunks.
    length: int | None
    #: All that it says, by names in lower case. What is said more than once has commas between.
    headers: Mapping[bytes, bytes]


def judge(
    scope: Any, names: Names, known: Callable[[bytes], Caller | None], is_open: bool = False, is_ours: bool = False
) -> Head | Refusal:
    """What a request says, by its ASGI scope; or why it is refused. `known` says whose token has a digest; `is_open`:
    it needs none; `is_ours`: its path is a way's, word for word.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found[name] = found[name] + b", " + value if name in found else value  # as RFC 9110 section 5.3 has it
    refusal = None if _SPECIAL.isdisjoint(found) else _special(found, names, is_open)
    refusal = refusal or _common(scope, found, names, is_ours)
    if refusal is not None:
        return refusal
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    digest = digest_of(token.strip() if scheme.lower() == b"bearer" else b"")  # no token is empty
    caller = known(digest) or (STRANGER if is_open else None)
    if caller is None:
        reason = "the token is missing or is not the right one"
        return Refusal(401, reason, "E_DOOR_REFUSED", {"www-authenticate": 'Bearer realm="goondan"'})
    length = None if b"transfer-encoding" in found else int(found.get(b"content-length", 0))
    return Head(caller, digest, length, found)


def _common(scope: Any, found: dict[bytes, bytes], names: Names, is_ours: bool) -> Refusal | None:
    """Whether it was meant for this door, and names one path and one length."""
    raw: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    if scope["http_version"] != "1.1":
        return Refusal(505, "HTTP/1.1 is spoken here")
    host = found.get(b"host", b"")
    if host not in names.hosts and not names.has_host(host):
        return Refusal(421, "this is not the host that the request names", "E_DOOR_REFUSED")
    if scope["method"] not in METHODS:
        return Refusal(405, f"only {', '.join(METHODS)} are served", headers={"allow": ", ".join(METHODS)})
    if not raw.startswith(b"/") or len(raw) + len(query) > MAX_TARGET or len(scope["headers"]) > MAX_HEADERS:
        return Refusal(400, f"a request names a path of at most {MAX_TARGET} bytes, and has at most 100 headers")
    if not (is_ours or _SIMPLE.match(raw) or _is_plain(raw)):
        return Refusal(400, "the path is not UTF-8, or has control characters or steps (..) in it")
    if query and any(_secret(part) for part in query.split(b"&")):
        reason = "a token stands in the query, where logs and histories keep it; send it as Authorization: Bearer"
        return Refusal(400, reason, "E_DOOR_REFUSED")
    length = found.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > MAX_DIGITS:
        return Refusal(400, "a request has one Content-Length, or one Transfer-Encoding")
    return None


def _special(found: dict[bytes, bytes], names: Names, is_open: bool) -> Refusal | None:
    """Whether what only some programs say is right: a page is ours, and the body comes in one way."""
    if b"origin" in found and not names.has_origin(found[b"origin"]):
        return Refusal(403, "pages of this origin may not ask", "E_DOOR_REFUSED")
    # A person may follow a link of another site to a page of ours. It then loads alone: in no frame, for no script.
    is_followed = is_open and (found.get(b"sec-fetch-mode"), found.get(b"sec-fetch-dest")) == _FOLLOWED
    if not is_followed and found.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
        return Refusal(403, "pages of another site may not ask", "E_DOOR_REFUSED")
    if b"transfer-encoding" in found and b"content-length" in found:
        return Refusal(400, "a request has one Content-Length, or one Transfer-Encoding")
    if found.get(b"transfer-encoding", b"chunked").lower() != b"chunked" or b"upgrade" in found:
        return Refusal(400, "the only transfer coding is chunked, and nothing is upgraded to")
    if found.get(b"content-encoding", b"identity").lower() != b"identity":
        return Refusal(415, "bodies come without a content coding")
    return None


def _is_plain(raw: bytes) -> bool:
    try:
        text = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() and not {"..", "."} & {*text.split("/")} and "\\" not in text


def _secret(part: bytes) -> bool:
    name = unquote_to_bytes(part.partition(b"=")[0]).decode("ascii", "replace")
    return name.strip().lower().replace("-", "_") in _SECRETS
