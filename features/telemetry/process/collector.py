"""The collector: batches of spans go to it by OTLP over HTTP.

The exporter of OpenTelemetry encodes and asks, as its variables say (endpoint, headers, time, compression,
certificates). It asks through a session that believes nothing of an answer: a few bytes of it are read, no redirect is
followed, no cookie is kept, and no `.netrc` is looked into.

Source: the OTLP specification, "OTLP/HTTP Response".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final, Literal

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from goondan.features.telemetry.process import conventions as names
from goondan.features.telemetry.process.rules import Span, Value
from goondan.schemas.system.authorities import places

#: Bytes of an answer that are read: it says how many spans were refused, and why.
MAX_ANSWER: Final = 64 << 10
#: How long an answer may take to come whole (seconds).
ANSWER_S: Final = 10.0
#: Retry-After is believed up to this (seconds).
MAX_WAIT_S: Final = 600.0
#: What an integer of OTLP holds.
_MOST: Final = (1 << 63) - 1

#: What became of a batch. `later`: it may be taken later. `smaller`: it is too large. `bad`: these spans will never be
#: taken. `broken`: the server has a fault, which these spans may be the reason of.
Outcome = Literal["taken", "later", "smaller", "bad", "broken"]


class _Session(requests.Session):
    """See the module. It remembers what the last answer was."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.retry_s = 0.0
        self.refused = 0
        self.fault = ""
        self.auth = lambda request: request  # else a file of the user's home may have a password for this host
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """One request. Raises what requests raises."""
        self.status, self.retry_s, self.refused, self.fault = 0, 0.0, 0, ""
        options |= {"stream": True, "allow_redirects": False}
        try:
            answer = super().request(*args, **options)
        except requests.RequestException as error:
            self.fault = type(error).__name__  # its text may have the URL, with what stands in it
            raise
        with answer:
            self.status = answer.status_code or 0
            with suppress(ValueError):
                self.retry_s = min(max(float(answer.headers.get("Retry-After", "")), 0.0), MAX_WAIT_S)
            if self.status == HTTPStatus.OK:
                with suppress(DecodeError):
                    told = ExportTraceServiceResponse.FromString(_beginning(answer))
                    self.refused = max(0, told.partial_success.rejected_spans)
            elif 300 <= self.status < 400:  # the exporter would take it for success
                answer.status_code = HTTPStatus.BAD_REQUEST
        return answer


def _beginning(answer: requests.Response) -> bytes:
    """The body, or its beginning: it is not decompressed, and not waited for longer than ANSWER_S."""
    until, data = time.monotonic() + ANSWER_S, b""
    with suppress(Exception):  # whatever the connection does: the status was read, and the spans were taken
        while len(data) < MAX_ANSWER and time.monotonic() < until:
            if not (piece := answer.raw.read1(MAX_ANSWER - len(data), decode_content=False)):
                return data
            data += piece
    return b""


class Collector:
    """The collector of the environment. Raises what OpenTelemetry raises for variables that it does not understand."""

    def __init__(self, version: str) -> None:
        for noisy in ("opentelemetry", "urllib3", "requests"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)  # they write what a server has said
        self._session = _Session()
        given = [os.environ.get(f"OTEL_EXPORTER_OTLP{of}_CERTIFICATE") for of in ("_TRACES", "")]
        trusted = next(filter(None, [*given, *places()]), None)
        self._exporter = OTLPSpanExporter(session=self._session, certificate_file=trusted)
        self._resource = Resource.create({SERVICE_VERSION: version})
        if "unknown_service" in str(self._resource.attributes[SERVICE_NAME]):
            self._resource = self._resource.merge(Resource({SERVICE_NAME: "goondan"}))
        self._scope = InstrumentationScope(names.SCOPE, version, names.SCHEMA_URL)

    def send(self, batch: Sequence[tuple[str, Span]]) -> tuple[Outcome, int, float, str]:
        """Send spans, each with its trace. What became of them, how many were refused of a batch that was taken, for
        how long the collector wants to be left alone (seconds), and why it did not take it, for a person.
        """
        session = self._session
        session.status, session.fault = 0, ""
        self._exporter.export([self._made(trace_id, span) for trace_id, span in batch])
        why = session.fault or f"it answered {session.status}"
        return outcome_of(session.status), session.refused, session.retry_s, why

    def _made(self, trace_id: str, span: Span) -> ReadableSpan:
        def context(span_id: str) -> SpanContext:
            return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))

        failed = span.error is not None
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=None if span.parent_id is None else context(span.parent_id),
            resource=self._resource,
            attributes={name: _value(value) for name, value in span.attributes.items()},
            links=() if span.link is None else (Link(context(span.link), {"goondan.awaited": False}),),
            kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if failed else Status(StatusCode.UNSET),
            start_time=span.start_ms * 1_000_000,
            end_time=span.end_ms * 1_000_000,
            instrumentation_scope=self._scope,
        )


def _value(value: Value) -> Value:
    """Numbers of a file can be larger than OTLP has."""
    return max(-_MOST, min(value, _MOST)) if isinstance(value, int) and not isinstance(value, bool) else value


def outcome_of(status: int) -> Outcome:
    """What a status of the collector means for a batch; 0: there was none.

    400 is about the spans. What says that the address, the key or the path is wrong is not: the owner can mend it, and
    until then nothing is lost.
    """
    if 200 <= status < 300:
        return "taken"
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "smaller"
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return "bad"
    return "broken" if status == HTTPStatus.INTERNAL_SERVER_ERROR else "later"
