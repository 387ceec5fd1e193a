"""Reads web addresses as browsers do (the URL standard), as far as requests need it: for tools that take any URL.

    address = WebAddress(" HTTP://Example.org:80/a/../b?q#f")
    address.href == "http://example.org/b?q#f"       # the canonical spelling of the whole address
    address.request                                  # without user name, password and fragment

Source: requirement HTTP-01; recorded parity (`url-*`, `invalid-*`, `ipv4-hex`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms

PORTS = {"http": 80, "https": 443}
MAX_PORT = 65535
_C0 = "".join(map(chr, range(33)))
_FORBIDDEN_IN_HOST = set(" #/:<>?@[\\]^|%\x7f") | set(map(chr, range(32)))
#: Invisible characters, which older rules drop. A name with one of them looks like another name.
JOINERS = "\u200c\u200d"
#: The characters that stay unchanged in each part. All others become %XX of their UTF-8 form.
_PATH = "!$%&'()*+,-./:;=@[\\]_~|"
_QUERY = "!$%&()*+,-./:;=?@[\\]^_`{|}~"
_FRAGMENT = "!#$%&'()*+,-./:;=?@[\\]^_{|}~"
_USER = "!$%&'()*+,-._~"


class BadAddress(ValueError):
    """The text is no URL."""


class WebAddress:
    """The parts of a URL. `credentials` are the user name and password in the form of Basic. None: there are none.

    For schemes other than http and https only `scheme` is set. Raises BadAddress.
    """

    __slots__ = ("_fragment", "_host", "_path", "_port", "_query", "_user", "credentials", "scheme")

    def __init__(self, text: str, base: WebAddress | None = None) -> None:
        text = text.strip(_C0).translate({9: None, 10: None, 13: None})
        name, colon, rest = text.partition(":")
        sound = bool(colon) and name[:1].isalpha() and all(c.isalnum() or c in "+-." for c in name) and name.isascii()
        self.credentials: str | None = None
        self.scheme: str
        self._host: str
        self._port: int | None
        self._path: str
        self._query: str
        self._fragment: str
        self._user = ""
        if not sound:
            if base is None:
                raise BadAddress("no scheme")
            self.scheme = base.scheme
            self._relative(text, base)
            return
        self.scheme = name.lower()
        if self.scheme in PORTS:
            self._absolute(rest.lstrip("/\\"))

    def _absolute(self, text: str) -> None:
        """Read the part after `http://`."""
        end = next((at for at, c in enumerate(text) if c in "/\\?#"), len(text))
        authority, rest = text[:end], text[end:]
        user, at, place = authority.rpartition("@")
        if at and user not in ("", ":"):
            self._take_user(user)
        self._take_host(place)
        self._take_rest(rest, "/")

    def _relative(self, text: str, base: WebAddress) -> None:
        """Read a relative reference, as in a Location header."""
        if text[:2] in ("//", "/\\", "\\/", "\\\\"):
            self._absolute(text[2:])
            return
        self._host, self._port = base._host, base._port
        if not text or text[0] in "?#":
            self._take_rest(text, base._path)
            if not text.startswith("?"):
                self._query = base._query
        elif text[0] in "/\\":
            self._take_rest(text, "/")
        else:
            self._take_rest(base._path.rpartition("/")[0] + "/" + text, "/")

    def _take_user(self, user: str) -> None:
        from base64 import b64encode
        from urllib.parse import quote, unquote

        name, colon, password = user.partition(":")
        self.credentials = b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode("ascii")
        self._user = quote(name, safe=_USER) + (":" + quote(password, safe=_USER) if colon and password else "") + "@"

    def _take_host(self, place: str) -> None:
        if place.startswith("["):
            host, bracket, port = place.partition("]")
            if not bracket or (port and not port.startswith(":")):
                raise BadAddress("a bracket is missing")
            self._host = f"[{_ipv6(host[1:])}]"
            port = port[1:]
        else:
            host, _, port = place.partition(":")
            self._host = _host(host)
        if port and (
            not port.isascii() or not port.isdigit() or int(port[-6:]) > MAX_PORT or len(port.lstrip("0")) > 5
        ):
            raise BadAddress("not a port")
        self._port = int(port) if port and int(port) != PORTS[self.scheme] else None

    def _take_rest(self, rest: str, empty: str) -> None:
        from urllib.parse import quote

        before, hash_, fragment = rest.partition("#")
        path, mark, query = before.partition("?")
        self._path = quote(_without_dots(path.replace("\\", "/")), safe=_PATH) if path else empty
        self._query = "?" + quote(query, safe=_QUERY) if mark else ""
        self._fragment = "#" + quote(fragment, safe=_FRAGMENT) if hash_ else ""

    @property
    def origin(self) -> tuple[str, str, int | None]:
        """The part that all addresses of one server share."""
        return (self.scheme, self._host, self._port)

    @property
    def request(self) -> str:
        """The address for the request."""
        port = "" if self._port is None else f":{self._port}"
        return f"{self.scheme}://{self._host}{port}{self._path}{self._query}"

    @property
    def href(self) -> str:
        """The whole address in its canonical spelling."""
        port = "" if self._port is None else f":{self._port}"
        return f"{self.scheme}://{self._user}{self._host}{port}{self._path}{self._query}{self._fragment}"


def _without_dots(path: str) -> str:
    out: list[str] = []
    names = path.removeprefix("/").split("/")
    for at, name in enumerate(names):
        plain = name.lower().replace("%2e", ".")
        last = at == len(names) - 1
        if plain == "..":
            if out:
                out.pop()
            if last:
                out.append("")
        elif plain == ".":
            if last:
                out.append("")
        else:
            out.append(name)
    return "/" + "/".join(out)


def _host(text: str) -> str:
    from urllib.parse import unquote

    name = unquote(text)
    if any(c in JOINERS for c in name):
        raise BadAddress("not the name of a host")
    if not name.isascii():
        try:
            name = ".".join(label.encode("idna").decode("ascii") for label in name.replace("\u3002", ".").split("."))
        except UnicodeError:
            raise BadAddress("not the name of a host") from None
    name = name.lower()
    if not name or any(c in _FORBIDDEN_IN_HOST for c in name) or "xn--" in name.split("."):
        raise BadAddress("not the name of a host")
    return _ipv4(name)


def _ipv4(name: str) -> str:
    """A host that the URL standard takes for an IPv4 address, as four decimal numbers. Other names stay unchanged."""
    parts = name.removesuffix(".").split(".")
    last = parts[-1]
    if not (last.isdigit() or _number(last) is not None):
        return name
    numbers = [_number(part) for part in parts]
    if len(parts) > 4 or any(value is None for value in numbers):
        raise BadAddress("not an IPv4 address")
    values = [value or 0 for value in numbers]
    if any(value > 255 for value in values[:-1]) or values[-1] >= 256 ** (5 - len(values)):
        raise BadAddress("not an IPv4 address")
    total = values[-1] + sum(value << (8 * (3 - at)) for at, value in enumerate(values[:-1]))
    return ".".join(str(total >> shift & 255) for shift in (24, 16, 8, 0))


def _number(text: str) -> int | None:
    if not text.isascii() or len(text) > 16:
        return None
    try:
        if text[:2] == "0x":
            return int(text[2:] or "0", 16)
        if len(text) > 1 and text[0] == "0":
            return int(text, 8)
        return int(text) if text.isdigit() else None
    except ValueError:
        return None


def _ipv6(text: str) -> str:
    from ipaddress import IPv6Address

    try:
        return IPv6Address(text if "%" not in text else "").compressed
    except ValueError:
        raise BadAddress("not an IPv6 address") from None
