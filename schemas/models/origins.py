"""Origins of URLs, and which of them a key may be sent to. Pure.

A key belongs to one origin: the vendor's, or that of the endpoint which the person has named or agreed to. The kernel
binds the two when it resolves a model, and whoever sends a request compares them.

Source: docs/design/bundle.md section 6.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}
#: Origins that are remembered: an agent compares the same two or three before each request.
_REMEMBERED: Final = 32


@lru_cache(maxsize=_REMEMBERED)
def origin_of(url: str) -> str | None:
    """`scheme://host:port` of an http or https URL, always with its port, in lower case; None for anything else.

    A name is written as it goes over the wire (`xn--…`): letters of other alphabets look like those of a vendor's name.
    """
    try:
        parts = urlsplit(url)
        host, port = _wire_form(parts.hostname or ""), parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not host:
        return None
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}:{_PORTS[parts.scheme] if port is None else port}"


def _wire_form(host: str) -> str:
    """Raises ValueError for what is no host."""
    if ":" in host:
        return str(ip_address(host))
    name = host if host.isascii() else host.encode("idna").decode("ascii").lower()
    if not all(letter.isalnum() or letter in "-._" for letter in name):
        raise ValueError("a host name with other than letters, digits, - and .")
    return name


def is_open(origin: str) -> bool:
    """Whether everybody on the way can read what is sent there: http to anything but this machine.

    Of names only `localhost` is this machine; `*.localhost` is what a name server says it is.
    """
    parts = urlsplit(origin)
    if parts.scheme != "http":
        return False
    try:
        return not ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname != "localhost"


@lru_cache(maxsize=_REMEMBERED)
def key_may_go(url: str, key_origin: str | None, vendor_url: str) -> bool:
    """Whether a key that belongs to `key_origin` may be sent with a request to `url`.

    Without a `key_origin` it is the vendor's, and may also go to this machine: so that agents which are started by hand
    can ask a local server.
    """
    origin = origin_of(url)
    if origin is None:
        return False
    if key_origin is not None:
        return origin == key_origin
    return origin == origin_of(vendor_url) or (urlsplit(origin).scheme == "http" and not is_open(origin))
