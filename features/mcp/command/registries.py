"""Where packages come from, as the user's npm and pip say. Nothing in this repository names a registry.

The installers are asked outside of any bundle: a file of a stranger's folder must not name another registry.
"""

from __future__ import annotations

import ast
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from goondan.features.mcp.command.rules.packages import PackageCommand
from goondan.schemas.wire.errors import GoondanError, fail

#: How long npm or pip may take to print its settings (seconds); npm needs half of one.
ASK_S: Final = 30.0
#: Settings of npm that the jail's npm gets.
_NPM: Final = ("registry", "strict-ssl", "https-proxy", "proxy")
#: Settings of pip that the jail's pip gets. Those of `install` count more than those of all commands, those of the
#: environment most.
_PIP: Final = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "pre",
    "prefer-binary",
)
_PIP_ORDER: Final = ("global", "install", ":env:")
#: pip's default, as pip has it: the index, and the host of its files.
_PIP_DEFAULT: Final = (
    "from pip._internal.models.index import PyPI; print(PyPI.simple_url); print(PyPI.file_storage_domain)"
)


class Source(Struct, frozen=True, kw_only=True):
    """Where a package comes from, and what installs it."""

    #: The installer's command: programs by their real paths.
    installer: list[str]
    #: Its settings, by their names.
    settings: dict[str, str]
    #: `HOST:PORT` of everything that it reaches.
    hosts: list[str]
    #: Paths that it reads, beside the system's.
    reads: list[str]
    #: A file of certificates to trust, if the user has one; it is one of `reads`.
    certificates: str | None = None


def source_of(command: PackageCommand) -> Source:
    """Where the package of a command comes from on this machine. Raises GoondanError E_MCP_INSTALL."""
    return _npm_source(command.package) if command.registry == "npm" else _pip_source()


def reachable(hosts: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Grants for these `HOST:PORT`, and where a name has to be reached by its address: `HOST:PORT` -> `ADDRESS:PORT`.

    A jail reaches a granted name at public addresses and in private networks. Where this machine's resolver gives
    another one (a proxy of its own, a test network), the address itself is granted.
    """
    grants, via = [], {}
    for target in dict.fromkeys(hosts):
        host, _, port = target.rpartition(":")
        grants.append(target)
        with suppress(OSError, ValueError):
            found = [
                str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            ]
            if found and found[0] != host.strip("[]") and not any(ipaddress.ip_address(one).is_global for one in found):
                address = f"[{found[0]}]" if ":" in found[0] else found[0]
                grants.append(f"{address}:{port}")
                via[target] = f"{address}:{port}"
    return grants, via


# --- npm


def _npm_source(package: str) -> Source:
    node, npm = _program("node"), _program("npm")
    scope = package.partition("/")[0] if package.startswith("@") else None
    keys = [*_NPM, "cafile", *([f"{scope}:registry"] if scope is not None else [])]
    told = npm_settings(_ask([node, npm, "config", "get", *keys]))
    settings = {name: value for name, value in told.items() if name != "cafile"}
    urls = [value for name, value in settings.items() if name in ("registry", f"{scope}:registry")]
    proxies = [value for name, value in settings.items() if name.endswith("proxy")]
    hosts = hosts_of(proxies or urls)
    if not hosts:
        raise fail("E_MCP_INSTALL", "npm has no registry", suggestion="`npm config get registry` has to print one.")
    certificates = _certificates(told.get("cafile"), "NODE_EXTRA_CA_CERTS")
    reads = [*_outside_system(node), *_outside_system(npm), *([certificates] if certificates else [])]
    return Source(installer=[node, npm], settings=settings, hosts=hosts, reads=reads, certificates=certificates)


def npm_settings(text: str) -> dict[str, str]:
    """What `npm config get KEY KEY…` prints, without what is not set."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and value.strip() not in ("", "null", "undefined"):
            found[name.strip()] = value.strip()
    return found


# --- pip


def _pip_source() -> Source:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    ask = [python, "-I", "-m", "pip"]
    told = pip_settings(_ask([*ask, "config", "list"]))
    certificates = _certificates(told.pop("cert", None), "PIP_CERT", "SSL_CERT_FILE")
    urls = [url for key in ("index-url", "extra-index-url", "find-links") for url in told.get(key, "").split()]
    if "index-url" not in told and told.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        default, files = ([*_ask([python, "-I", "-c", _PIP_DEFAULT]).split(), "", ""])[:2]
        if not default:
            hint = "`pip config set global.index-url URL` names one."
            raise fail("E_MCP_INSTALL", "pip does not say which index it uses", suggestion=hint)
        urls += [default, f"https://{files}/"]
    folders = [os.path.realpath(path) for url in urls if (path := _local(url)) and os.path.exists(path)]
    proxies = [told["proxy"]] if "proxy" in told else []
    settings = {name: value for name, value in told.items() if name in _PIP}
    if certificates is not None:
        settings["cert"] = certificates
    reads = [*_outside_system(python), *folders, *([certificates] if certificates else [])]
    hosts = hosts_of(proxies or [url for url in urls if _local(url) is None])
    return Source(installer=[python, "-I"], settings=settings, hosts=hosts, reads=reads, certificates=certificates)


def pip_settings(text: str) -> dict[str, str]:
    """What `pip config list` prints, with what counts most of each setting."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        section, dot, name = key.rpartition(".")
        if equals and dot:
            with suppress(ValueError, SyntaxError):
                found.setdefault(section, {})[name] = " ".join(str(ast.literal_eval(value)).split())
    return {name: value for section in _PIP_ORDER for name, value in found.get(section, {}).items()}


# --- both


def hosts_of(urls: Iterable[str]) -> list[str]:
    """`HOST:PORT` of each URL of http or https, each once."""
    found = []
    for url in urls:
        with suppress(ValueError):
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
            if parts.hostname and port is not None:
                found.append(f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}")
    return list(dict.fromkeys(found))


def interpreter_reads() -> list[str]:
    """What a program of a virtual environment reads of the Python that it was made with."""
    return _outside_system(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def node_command() -> tuple[str, list[str]]:
    """How node is started in a jail, and what has to be granted for it. Raises GoondanError E_MCP_INSTALL."""
    node = _program("node")
    reads = _outside_system(node)
    return (node, reads) if reads else ("node", [])


def _local(url: str) -> str | None:
    """The folder that a URL or a path names; None for what is elsewhere. Files of an index lie beside its `simple`."""
    path = urlsplit(url).path if url.startswith("file://") else url if url.startswith("/") else None
    return os.path.dirname(path.rstrip("/")) if path and path.rstrip("/").endswith("/simple") else path


def _certificates(configured: str | None, *variables: str) -> str | None:
    named = [configured, *(os.environ.get(name) for name in variables)]
    found = next((path for path in named if path and os.path.isfile(path)), None)
    return None if found is None else os.path.realpath(found)


def _outside_system(program: str) -> list[str]:
    """The prefix of a program that is not of the system: `/opt/node` of `/opt/node/bin/node`."""
    if program.startswith(("/usr/", "/bin/", "/lib/")) and not program.startswith("/usr/local/"):
        return []
    parts = program.split("/")
    for folder in ("bin", "lib"):
        if folder in parts[2:-1]:
            return ["/".join(parts[: parts.index(folder, 2)])]
    return [os.path.dirname(program)]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise fail("E_MCP_INSTALL", f"there is no {name}", suggestion="Install Node.js, which brings node and npm.")
    return os.path.realpath(found)


def _ask(words: list[str]) -> str:
    """What an installer prints about itself, in a folder without files. Raises GoondanError E_MCP_INSTALL."""
    with tempfile.TemporaryDirectory(prefix="goondan-ask-") as empty:
        try:
            done = subprocess.run(
                words, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _no_answer(words, str(error)) from None
    if done.returncode != 0:
        raise _no_answer(words, (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
    return done.stdout


def _no_answer(words: list[str], why: Any) -> GoondanError:
    said = why if isinstance(why, str) else " ".join(why)
    return fail(
        "E_MCP_INSTALL", f"{os.path.basename(words[1] if len(words) > 1 else words[0])} gives no answer: {said[:300]}"
    )
