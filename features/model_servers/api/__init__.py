"""Model servers, as far as commands look at them: the servers of this machine, and the one that a person has chosen.
`listing.py` decides about answers, `offering.py` asks the person. How models are asked for answers is the agents'
business (agentproc/providers/).

Asking. One request within a time tells which models a server has. Proxies and certificates are those of the
environment, as for agents. A server on this machine is asked without a proxy. A redirect is an answer, and is not
followed.

Finding. Of the listeners on the usual ports only those of root and of the user are asked: anybody may listen on a port,
and would get the question. They are looked up again afterwards, because a port can change hands meanwhile.

Choosing. `$GOONDAN_STATE_ROOT/model-server.json` has the server that a person has chosen. It counts for `provider:
auto` where the environment names no model. It is always on this machine, and is not used while somebody else listens on
its port. It is believed as trust records are: only where nobody else could have written it.

Source: docs/design/commands.md section 10; docs/design/bundle.md section 6; proc_net_tcp(5).
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from goondan.features.model_servers.api.listing import Learned, Question, learn, listeners, owned, question
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.state_root import open_state_root
from goondan.kernel.trust.records import why_not_believed
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.system import authorities, directories
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire.errors import fail

# --- finding the servers of this machine ------------------------------------------------------------------------------


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
        here = asked.here or authorities.skips_proxy(parts.hostname or "", parts.port)
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
    return build_opener(Stay, ProxyHandler(), HTTPSHandler(context=authorities.tls_context()))


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
    return [directories.text_of(path) for path in _TABLES]


# --- the server that a person has chosen ------------------------------------------------------------------------------


FILE: Final = "model-server.json"
_MAX_BYTES: Final = 64 << 10
#: Servers that were declined are remembered, so many at most.
_MAX_DECLINED: Final = 32
_FORMAT: Final = 1


class Choice(Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """What a person has said about servers of this machine."""

    #: The base URL of the server; None: none was chosen.
    endpoint: str | None = None
    #: Servers that the person did not want. They are not offered by `gdn run` again.
    declined: list[str] = []
    #: When it was said last: RFC 3339.
    when: str = ""
    #: The version of this form.
    format: int = _FORMAT


def read(state_root: str, bundle: str) -> Choice:
    """What was said, for the bundle at `bundle`; nothing when it is not believed."""
    path = os.path.join(state_root, FILE)
    try:
        state = os.lstat(path)
        if state.st_uid != os.geteuid() or state.st_mode & 0o022 or not stat.S_ISREG(state.st_mode):
            return Choice()
        if why_not_believed(state_root, bundle) is not None:
            return Choice()
        found = msgspec.json.decode(read_file(path, _MAX_BYTES), type=Choice)
    except (OSError, Unreadable, msgspec.DecodeError, RecursionError):
        return Choice()
    if found.format != _FORMAT or (found.endpoint is not None and not is_here(found.endpoint)):
        return Choice()
    return found


def endpoint(state_root: str, bundle: str) -> str | None:
    """The server to use: None when none was chosen, or somebody else listens on its port."""
    chosen = read(state_root, bundle).endpoint
    return None if chosen is None or belongs_to_others(urlsplit(chosen).port or 80) else chosen


def choose(state_root: str, bundle: str, endpoint: str) -> None:
    """Use this server from now on. Raises GoondanError E_STATE."""
    before = read(state_root, bundle)
    declined = [one for one in before.declined if one != endpoint]
    _write(state_root, bundle, Choice(endpoint=endpoint, declined=declined, when=rfc3339_seconds(time.time())))


def decline(state_root: str, bundle: str, endpoint: str) -> None:
    """Offer this server no more when a swarm starts. Raises GoondanError E_STATE."""
    before = read(state_root, bundle)
    declined = [*(one for one in before.declined if one != endpoint), endpoint][-_MAX_DECLINED:]
    _write(state_root, bundle, Choice(endpoint=before.endpoint, declined=declined, when=rfc3339_seconds(time.time())))


def forget(state_root: str) -> bool:
    """Forget everything that was said; whether there was something. Raises GoondanError E_STATE."""
    path = os.path.join(state_root, FILE)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise fail("E_STATE", f"{path}: {error.strerror}") from None
    return True


def is_here(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, over http."""
    origin = origin_of(endpoint)
    return origin is not None and origin.startswith("http:") and not is_open(origin)


def _write(state_root: str, bundle: str, choice: Choice) -> None:
    reason = why_not_believed(state_root, bundle)
    if reason is not None:
        raise fail("E_STATE", f"nothing can be kept in {state_root}: {reason}")
    open_state_root(state_root, make=True)
    try:
        with directories.open_directory(state_root, make=True, private_from=state_root) as folder:
            data = msgspec.json.format(msgspec.json.encode(choice), indent=1) + b"\n"
            directories.replace_in(folder.fd, FILE, data, sync=True)
    except directories.DirectoryRefused as refused:
        raise fail("E_STATE", str(refused), suggestion=refused.fix) from None
    except OSError as error:
        raise fail("E_STATE", f"{os.path.join(state_root, FILE)}: {error.strerror}") from None
