"""Asks a model server which models it has: one request, within a time.

Proxies and certificates are those of the environment, as for agents. A server on this machine is asked without a proxy.
A redirect is an answer, and is not followed.
"""

from __future__ import annotations

import threading
from typing import Any, Final
from urllib.parse import urlsplit

from goondan.kernel.model_server.listing import Learned, Question, learn, question
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
