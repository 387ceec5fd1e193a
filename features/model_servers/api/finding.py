"""Asks a model server which models it has, in one request within a time; and looks for servers on the usual ports of
this machine.

Proxies and certificates are those of the environment, as for agents. A server on this machine is asked without a proxy.
A redirect is an answer, and is not followed.

Of the listeners on the usual ports only those of root and of the user are asked: anybody may listen on a port, and
would get the question. They are looked up again afterwards, because a port can change hands meanwhile.

Source: docs/design/commands.md section 10.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from goondan.features.model_servers.api.listing import Learned, Question, learn, listeners, owned, question
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.system.authorities import skips_proxy, tls_context

#: The most of an answer that is read (bytes): lists of some thousand models.
MAX_BODY: Final = 4 << 20


class Asking:
    """One question under way. The thread is a daemon: nobody waits for a server at the end of a command."""

    def __init__(self, model: ModelSpec, limit_s: float) -> None:
        self._model = model
        self._limit_s = limit_s
        self._learned: Learned | None = None
        self._question = question(model)
        self._thread = threading.Thread(target=self._run, name="model server", daemon=True)
        if self._question is not None:
            self._thread.start()

    def wait(self, limit_s: float) -> Learned | None:
        """What was learned; `slow` when there is no answer within the time. None: there is no server to ask."""
        if self._question is None:
            return None
        self._thread.join(max(0.0, limit_s))
        return self._learned or Learned(state="slow")

    def _run(self) -> None:
        if self._question is None:
            return
        try:
            self._learned = _ask(self._model, self._question, self._limit_s)
        except Exception as error:  # a thread's would be printed with its traceback, and that may show the key
            self._learned = Learned(state="unreachable", reason=type(error).__name__)


def _ask(model: ModelSpec, asked: Question, limit_s: float) -> Learned:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    try:
        # `question` makes URLs of http and https only.
        request = Request(asked.url, headers=asked.headers)  # noqa: S310
        parts = urlsplit(asked.url)
        here = asked.here or skips_proxy(parts.hostname or "", parts.port)
        with _opener(here=here).open(request, timeout=limit_s) as answer:
            return learn(model, answer.status, answer.read(MAX_BODY))
    except HTTPError as error:
        error.close()
        return learn(model, error.code, b"")
    except TimeoutError:
        return Learned(state="slow")
    except URLError as error:
        reason: object = error.reason
        if isinstance(reason, TimeoutError):
            return Learned(state="slow")
        if isinstance(reason, ssl.SSLCertVerificationError):
            return Learned(state="unreachable", reason=f"its certificate: {reason.verify_message}")
        words = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        return Learned(state="unreachable", reason=words)
    except (OSError, HTTPException, ValueError) as error:  # the text may show what was sent
        return Learned(state="unreachable", reason=type(error).__name__)


def _opener(*, here: bool) -> Any:
    from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, build_opener

    class Stay(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    if here:
        return build_opener(Stay, ProxyHandler({}))
    return build_opener(Stay, ProxyHandler(), HTTPSHandler(context=tls_context()))


# --- servers of this machine

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
