"""The collector: batches of spans go to it by OTLP over HTTP.

The exporter of OpenTelemetry encodes and asks, as its variables say (endpoint, headers, time, compression,
certificates). It asks through a session that takes the status of an answer and nothing else: no body is read, no
redirect is followed, no cookie is kept, and no `.netrc` is looked into.

Source: the OTLP specification, "OTLP/HTTP Response".
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final, Literal, NamedTuple

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan

from goondan.schemas.system.authorities import places

#: Retry-After is believed up to this (seconds).
MAX_WAIT_S: Final = 600.0
#: How long the answer to a batch may take with all tries, whose time is 10 s unless a variable says more (seconds). The
#: end of one that drips does not come: the program ends instead, and the next one goes on at the position.
STUCK_S: Final = 180.0

Outcome = Literal["taken", "smaller", "bad", "later"]


class Sent(NamedTuple):
    """What became of a batch."""

    #: See `meaning`.
    outcome: Outcome
    #: For how long the collector wants to be left alone (seconds).
    retry_s: float = 0.0
    #: Why it was not taken, for a person. Nothing that a server has said.
    why: str = ""


def meaning(status: int) -> Outcome:
    """`taken`: the collector has the spans. `smaller`: they are too many at once. `bad`: they are why it refuses, and
    it always will. `later`: everything else. What is wrong with an address or a key the owner can mend.
    """
    if 200 <= status < 300:
        return "taken"
    return "smaller" if status == 413 else "bad" if status in (400, 422, 500) else "later"


def _of_address(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Who we are, as the address says: `https://name:key@host`."""
    name, key = requests.utils.get_auth_from_url(request.url or "")
    return requests.auth.HTTPBasicAuth(name, key)(request) if name or key else request


class Collector(requests.Session):
    """The collector of the environment. Raises what OpenTelemetry raises for variables that it does not understand."""

    def __init__(self) -> None:
        super().__init__()
        for noisy in ("opentelemetry", "urllib3", "requests"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)  # they write what a server has said
        self._last = Sent("later")
        self.auth = _of_address  # else a file of the user's home may have a password for this host
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        given = [os.environ.get(f"OTEL_EXPORTER_OTLP{of}_CERTIFICATE") for of in ("_TRACES", "")]
        trusted = next(filter(None, [*given, *places()]), None)
        self._exporter = OTLPSpanExporter(session=self, certificate_file=trusted)

    def deliver(self, batch: list[ReadableSpan]) -> Sent:
        """Send spans."""
        self._last = Sent("smaller", why="they cannot be encoded")  # one of them, so the others go by themselves
        over = threading.Timer(STUCK_S, os._exit, (1,))
        over.start()
        try:
            self._exporter.export(batch)
        finally:
            over.cancel()
        return self._last

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """One request of the exporter's. Raises what requests raises."""
        try:
            answer = super().request(*args, **{**options, "stream": True, "allow_redirects": False})
        except Exception as error:  # also ValueErrors of urllib3, about the address or a header
            self._last = Sent("later", why=type(error).__name__)  # its text may have what stands in the URL
            raise
        answer.close()  # unread
        retry_s = 0.0
        with suppress(ValueError):
            retry_s = min(max(0.0, float(answer.headers.get("Retry-After", ""))), MAX_WAIT_S)  # in this order: nan is 0
        self._last = Sent(meaning(answer.status_code or 0), retry_s, f"it answered {answer.status_code}")
        return answer
