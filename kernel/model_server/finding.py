"""Looks for model servers on the usual ports of this machine.

Only listeners of root and of the user are asked: anybody may listen on a port, and would get the question. They are
looked up again afterwards, because a port can change hands meanwhile.

Source: docs/design/commands.md section 10.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from goondan.kernel.model_server.asking import Asking
from goondan.kernel.model_server.listeners import listeners, owned
from goondan.schemas.bundle.launch import ModelSpec

#: The ports on which such servers listen by default, and what usually does.
PORTS: Final = {11434: "Ollama", 8080: "llama.cpp", 8000: "vLLM", 1234: "LM Studio", 4000: "LiteLLM"}
#: How long the search may take in all (seconds). Servers of this machine answer in milliseconds.
LIMIT_S: Final = 0.2
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


class FoundServer(Struct, frozen=True, rename="camel"):
    """A server that was found."""

    #: The base URL of its chat completions.
    endpoint: str
    #: What usually listens there.
    usual: str
    #: The first model of its list.
    model: str
    #: How many models it has.
    models: int


def find(ports: Iterable[int] = tuple(PORTS), limit_s: float = LIMIT_S) -> list[FoundServer]:
    """The servers that list models, in the order of the ports."""
    until = time.monotonic() + limit_s
    before = own_ports()
    endpoints = {port: f"http://{before[port]}:{port}/v1" for port in ports if port in before}
    asked = {
        port: Asking(ModelSpec(provider="openai", endpoint=endpoint), limit_s) for port, endpoint in endpoints.items()
    }
    found = []
    for port, asking in asked.items():
        learned = asking.wait(until - time.monotonic())
        if learned is not None and learned.state == "answered" and learned.model:
            found.append(FoundServer(endpoints[port], PORTS.get(port, "a server"), learned.model, learned.models))
    after = {f"http://{host}:{port}/v1" for port, host in own_ports().items()} if found else set[str]()
    return [server for server in found if server.endpoint in after]


def own_ports() -> dict[int, str]:
    """The ports whose listeners are all of root or of the user, each with the host that reaches it."""
    return owned(listeners(*_tables()), (0, os.geteuid()))


def belongs_to_others(port: int) -> bool:
    """Whether somebody listens on this port who is neither root nor the user."""
    found = [listener for listener in listeners(*_tables()) if listener.port == port]
    return any(listener.uid not in (0, os.geteuid()) for listener in found)


def _tables() -> list[str]:
    texts = []
    for path in _TABLES:
        try:
            with open(path, encoding="ascii", errors="replace") as source:
                texts.append(source.read())
        except OSError:
            texts.append("")
    return texts
