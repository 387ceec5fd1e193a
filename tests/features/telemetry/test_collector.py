"""A collector on loopback that answers as collectors do, and as none should; the spans that it gets are decoded."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from pytest_genai_semconv import assert_genai_span_compliant

from goondan.features.telemetry.process import collector, conventions
from goondan.features.telemetry.process.collector import Collector, outcome_of
from goondan.features.telemetry.process.rules import Note, Span, TurnRow, TurnSpans
from tests.features.telemetry.turns import ASKER, TRACE, at, simple

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Keeps what came, and answers with `answer`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Answer = lambda request: say(request, 200)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        """The spans of all requests."""
        requests = map(ExportTraceServiceRequest.FromString, self.bodies)
        return [
            span for each in requests for of in each.resource_spans for scope in of.scope_spans for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.answer(self)

    def do_GET(self) -> None:
        raise AssertionError("a redirect was followed")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def say(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=sesame%20open,x=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    yield made
    made.shutdown()
    made.server_close()


def spans() -> list[tuple[str, Span]]:
    """Those of a turn with one of each, contents included."""
    row = TurnRow(
        turn_id="t-1", event_id="e-1", agent="main", instance_key="k", attempt=1, status="completed",
        started_at=at(0), ended_at=at(100), parent_id=ASKER,
    )  # fmt: skip
    turn = TurnSpans(row, lambda call: (None, None))
    found: list[Span] = []
    for number, (kind, ms, detail, parent) in enumerate(simple("t-1"), 1):
        found += turn.take(Note(number, kind, at(ms), detail or "", parent))
    found += turn.finish(row, 99, {conventions.INPUT_MESSAGES: "[]"})
    return [(TRACE, span) for span in found]


def test_spans_are_sent_as_opentelemetry_has_them(server: Server) -> None:
    assert Collector("0.1").send(spans())[:2] == ("taken", 0)
    (headers,) = server.headers
    assert headers["api-key"] == "sesame open"
    request = ExportTraceServiceRequest.FromString(server.bodies[0])
    (of,) = request.resource_spans
    resource = {item.key: item.value.string_value for item in of.resource.attributes}
    assert (resource["service.name"], resource["service.version"]) == ("goondan", "0.1")
    assert of.scope_spans[0].schema_url == conventions.SCHEMA_URL
    chat, tool, step, turn = server.spans
    assert turn.trace_id.hex() == TRACE
    assert (turn.parent_span_id.hex(), turn.links[0].span_id.hex()) == (ASKER, ASKER)
    assert (chat.parent_span_id, tool.parent_span_id, step.parent_span_id) == (step.span_id, step.span_id, turn.span_id)
    assert chat.end_time_unix_nano - chat.start_time_unix_nano == 39_000_000
    assert (chat.kind, turn.kind) == (3, 1)


def test_every_name_is_of_the_conventions_in_the_version_that_we_say(server: Server) -> None:
    modules = (gen_ai_attributes, error_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    assert conventions.SCHEMA_URL in [schema.value for schema in Schemas]
    for _, span in spans():
        assert all(name in known for name in span.attributes if not name.startswith("goondan."))
        if span.attributes.get("gen_ai.operation.name"):
            kind = SimpleNamespace(name=span.kind.upper())
            assert_genai_span_compliant(SimpleNamespace(name=span.name, kind=kind, attributes=span.attributes))
    literals = {value for value in vars(conventions).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert literals <= known


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "taken"), (400, "bad"), (413, "smaller"), (500, "broken"), (401, "later"), (404, "later"), (302, "later")],
)
def test_what_an_answer_means(server: Server, status: int, outcome: str) -> None:
    server.answer = lambda request: say(
        request, status, b"\x1b[2J secret", Location=f"http://127.0.0.1:{server.server_port}/"
    )
    said = Collector("0.1").send(spans())
    assert said[0] == outcome == outcome_of(status)
    assert said[3] == f"it answered {status}"
    assert len(server.bodies) == 1


def test_a_collector_that_has_no_time_says_for_how_long(server: Server) -> None:
    server.answer = lambda request: say(request, 429, Retry_After="77", Set_Cookie="a=b")
    sender = Collector("0.1")
    assert sender.send(spans()) == ("later", 0, 77.0, "it answered 429")
    server.answer = lambda request: say(request, 503, Retry_After="1e999")
    assert sender.send(spans())[2] == collector.MAX_WAIT_S
    assert "cookie" not in server.headers[-1]


def test_spans_that_a_collector_refuses_are_counted_and_garbage_is_not_read(server: Server) -> None:
    told = ExportTraceServiceResponse()
    told.partial_success.rejected_spans = 3
    server.answer = lambda request: say(request, 200, told.SerializeToString())
    sender = Collector("0.1")
    assert sender.send(spans())[:2] == ("taken", 3)
    server.answer = lambda request: say(request, 200, b"\xff" * 1000, Content_Encoding="gzip")
    assert sender.send(spans())[:2] == ("taken", 0)


def test_a_hundred_megabytes_back_are_not_read(server: Server) -> None:
    def flood(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(100 << 20))
        request.end_headers()
        try:
            for _ in range(100):
                request.wfile.write(bytes(1 << 20))
        except OSError:
            request.close_connection = True

    server.answer = flood
    sender = Collector("0.1")
    tracemalloc.start()
    assert sender.send(spans())[0] == "taken"
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_collector_that_closes_or_says_nothing_or_drips_is_tried_again_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Collector("0.1")
    server.answer = lambda request: request.connection.close()
    assert sender.send(spans())[0] == "later"
    let_go = threading.Event()
    server.answer = lambda request: (let_go.wait(10), None)[1]
    began = time.monotonic()
    assert sender.send(spans())[0] == "later"
    assert time.monotonic() - began < 8
    let_go.set()
    monkeypatch.setattr(collector, "ANSWER_S", 0.3)

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        try:
            for _ in range(100):
                request.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            request.close_connection = True

    server.answer = drip
    began = time.monotonic()
    assert sender.send(spans())[0] == "taken"
    assert time.monotonic() - began < 3


def test_numbers_that_are_too_large_and_broken_text_spoil_no_batch(server: Server) -> None:
    made = spans()
    made[0][1].attributes |= {"gen_ai.usage.input_tokens": 1 << 80, "goondan.x": -(1 << 80)}
    assert Collector("0.1").send(made)[0] == "taken"
    assert len(server.spans) == 4
