"""Which certificate authorities are trusted, and which hosts are asked without a proxy: one rule for all processes.

Trusted are those of SSL_CERT_FILE and SSL_CERT_DIR; without these, those of the system's file and folder; where the
system has none, those of certifi.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ssl

#: How OpenSSL names a certificate in a folder: by its hash, such as 5443e9e3.0.
_HASHED: Final = re.compile(r"[0-9a-f]{8}\.\d+")


def tls_context() -> ssl.SSLContext:
    """A context for a client. Raises OSError when the authorities cannot be loaded.

    A folder is searched only when it is needed. Reading a whole bundle takes 30 ms and 6 MiB.
    """
    import ssl  # not before: the start of a kernel makes no such connection

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(*places())
    return context


def authorities_pem() -> bytes:
    """All of them as one file, for a process behind walls. Raises OSError."""
    file, folder = places()
    paths = [] if file is None else [file]
    if folder is not None:
        paths += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _HASHED.fullmatch(name)]
    parts = []
    for path in paths:
        with open(path, "rb") as source:
            parts.append(source.read())
    return b"\n".join(parts)


def places() -> tuple[str | None, str | None]:
    """The file and the folder of the authorities that are trusted."""
    file, folder = os.environ.get("SSL_CERT_FILE") or None, os.environ.get("SSL_CERT_DIR") or None
    if file is not None or folder is not None:
        return file, folder
    import ssl

    system = ssl.get_default_verify_paths()
    with suppress(OSError):
        if system.cafile or any(map(_HASHED.fullmatch, os.listdir(system.capath or ""))):
            return system.cafile or None, system.capath or None
    import certifi

    return certifi.where(), None


def skips_proxy(host: str, port: int | None = None) -> bool:
    """Whether NO_PROXY names a host: by its name or a domain above it (`example.com`, `.example.com`,
    `*.example.com`), by its address or a network (`10.0.0.0/8`, `2001:db8::1`), each with a port perhaps, or by `*`.
    """
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return any(_covers(entry, host.strip("[]").lower(), port) for entry in re.split(r"[\s,]+", listed.lower()) if entry)


def _covers(entry: str, host: str, port: int | None) -> bool:
    with suppress(ValueError):
        return entry == "*" or ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    name, colon, wanted = entry.rpartition(":")
    if colon and wanted.isdigit():
        return int(wanted) == port and _covers(name, host, None)
    name = entry.removeprefix("*").lstrip(".")
    return bool(name) and (host == name or host.endswith("." + name))
