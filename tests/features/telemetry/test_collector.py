"""A collector on loopback that answers as collectors do, and as none should; the spans that it gets are decoded."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from pytest_genai_semconv import assert_genai_span_compliant

from goondan.features.telemetry.process import collector
from goondan.features.telemetry.process import spans as of_turns
from goondan.features.telemetry.process.collector import Collector, Sent
from goondan.features.telemetry.process.spans import CONTENTS, SCOPE, SpansOf
from goondan.kernel.traces.rules.tree import grow
from goondan.kernel.traces.rules.turn import Note, Trace, Waits, tell
from tests.features.telemetry.turns import ASKER, TRACE, at, ids, simple

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


def spans(answer: str | None = None) -> list[ReadableSpan]:
    """Those of a turn with one of each."""
    row = Trace(
        turn_id="t-1", event_id="e-1", agent="main", instance_key="k", attempt=1, status="completed", steps=[],
        started_at=at(0), ended_at=at(100), trace_id=TRACE, parent_span_id=ASKER, waits=Waits(queue_ms=7), message="hi",
    )  # fmt: skip
    (turn,) = grow([tell(row, [Note(kind, at(ms), detail) for kind, ms, detail, _ in simple("t-1")])], at(100))
    turn.message = "hi"
    return list(SpansOf(turn, Resource.create({"service.name": "goondan"}), answer))


def test_spans_are_sent_as_opentelemetry_has_them(server: Server) -> None:
    assert Collector().deliver(spans()).outcome == "taken"
    (headers,) = server.headers
    assert headers["api-key"] == "sesame open"
    (of,) = ExportTraceServiceRequest.FromString(server.bodies[0]).resource_spans
    assert {item.key: item.value.string_value for item in of.resource.attributes}["service.name"] == "goondan"
    assert of.scope_spans[0].schema_url == SCOPE.schema_url
    assert [span.span_id.hex() for span in server.spans] == ids("t-1")
    chat, tool, step, turn = server.spans
    assert turn.trace_id.hex() == TRACE
    assert (turn.parent_span_id.hex(), turn.links[0].span_id.hex()) == (ASKER, ASKER)
    assert (chat.parent_span_id, tool.parent_span_id, step.parent_span_id) == (step.span_id, step.span_id, turn.span_id)
    assert chat.end_time_unix_nano - chat.start_time_unix_nano == 39_000_000
    assert (chat.name, chat.kind, tool.name, turn.name, turn.kind) == (
        *("chat m", 3, "execute_tool shell__run", "invoke_agent main", 1),
    )


def test_waiting_receipts_and_money_are_attributes_and_contents_only_if_they_are_wanted() -> None:
    chat, tool, _, turn = (span.attributes or {} for span in spans())
    assert (chat["gen_ai.provider.name"], chat["gen_ai.response.model"]) == ("openai", "m-2")
    assert (chat["goondan.model.waited_ms"], chat["goondan.cost.USD"]) == (20, 0.005)
    assert (turn["goondan.wait.queue_ms"], turn["goondan.wait.place_ms"]) == (5, 2)
    assert turn["goondan.wait.person_ms"] == 34  # of 38 ms, the jail had four
    assert (tool["goondan.receipt.denied"], tool["goondan.receipt.cpu_ms"]) == (["b:80"], 3)
    assert tool["goondan.refused.by"] == "grant"
    assert not any(set(CONTENTS) & set(span.attributes or {}) for span in spans())
    whole = [span.attributes or {} for span in spans("done")]
    assert (whole[1][CONTENTS[2]], whole[1][CONTENTS[3]]) == ('{"a":1}', '"done"')
    told = [json.loads(str(whole[3][name])) for name in CONTENTS[:2]]
    assert [(one["role"], one["parts"][0]["content"]) for (one,) in told] == [("user", "hi"), ("assistant", "done")]


def test_every_name_is_of_the_conventions_in_the_version_that_we_say() -> None:
    modules = (gen_ai_attributes, error_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    assert SCOPE.schema_url in [schema.value for schema in Schemas]
    for span in spans("done"):
        assert all(name in known for name in span.attributes or {} if not name.startswith("goondan."))
        if "gen_ai.operation.name" in (span.attributes or {}):
            assert_genai_span_compliant(span)
    source = Path(of_turns.__file__).read_text()
    literals = set(re.findall(r'"((?:gen_ai|error)\.[a-z_.]+)"', source))
    assert literals - {"gen_ai.usage"} <= known  # it is the beginning of two
    assert len(literals) == 15


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "taken"), (400, "bad"), (413, "smaller"), (500, "bad"), (401, "later"), (404, "later"), (302, "later")],
)
def test_what_an_answer_means(server: Server, status: int, outcome: str) -> None:
    there = f"http://127.0.0.1:{server.server_port}/"
    server.answer = lambda request: say(request, status, b"\x1b[2J secret", Location=there)
    assert Collector().deliver(spans()) == (outcome, 0.0, f"it answered {status}")
    assert len(server.bodies) == 1


def test_a_collector_that_has_no_time_says_for_how_long(server: Server) -> None:
    server.answer = lambda request: say(request, 429, Retry_After="77", Set_Cookie="a=b")
    sender = Collector()
    assert sender.deliver(spans()) == Sent("later", 77.0, "it answered 429")
    server.answer = lambda request: say(request, 503, Retry_After="1e999")
    assert sender.deliver(spans()).retry_s == collector.MAX_WAIT_S
    server.answer = lambda request: say(request, 503, Retry_After="nan")
    assert sender.deliver(spans()).retry_s == 0.0
    assert "cookie" not in server.headers[-1]


def test_a_hundred_megabytes_back_are_not_read(server: Server) -> None:
    sent = 0

    def flood(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.send_response(200)
        request.send_header("Content-Length", str(100 << 20))
        request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        try:
            while sent < 100:
                request.wfile.write(b"\xff" * (1 << 20))
                sent += 1
        except OSError:
            request.close_connection = True

    server.answer = flood
    tracemalloc.start()
    assert Collector().deliver(spans()).outcome == "taken"
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert sent < 50


def test_a_collector_that_closes_or_says_nothing_or_no_http_is_tried_again_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    sender = Collector()
    server.answer = lambda request: request.connection.shutdown(socket.SHUT_RDWR)
    assert sender.deliver(spans()).outcome == "later"
    server.answer = lambda request: (request.wfile.write(b"\xff\x00 no HTTP\r\n\r\n" * 100), None)[1]
    said = sender.deliver(spans())
    assert (said.outcome, said.why) == ("later", "ConnectionError")
    let_go = threading.Event()
    server.answer = lambda request: (let_go.wait(10), None)[1]
    began = time.monotonic()
    assert sender.deliver(spans()).outcome == "later"
    assert time.monotonic() - began < 8
    let_go.set()


def test_an_answer_that_never_ends_ends_the_program(server: Server) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        try:
            request.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
            while True:
                request.wfile.write(b"x")
                request.wfile.flush()
                time.sleep(0.05)
        except OSError:
            request.close_connection = True

    server.answer = drip
    code = (
        "from goondan.features.telemetry.process import collector; collector.STUCK_S = 0.5;"
        "collector.Collector().deliver([])"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=20, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://" + "a" * 70 + ".example"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=%E2%82%AC"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%0Ab"),
    ],
)
def test_an_address_or_a_key_that_cannot_be_costs_no_span(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    said = Collector().deliver(spans())
    assert said.outcome == "later"
    assert value not in said.why


def test_one_span_that_cannot_be_encoded_is_told_apart(server: Server) -> None:
    broken, *others = spans()
    broken._end_time = 1 << 70
    sender = Collector()
    assert sender.deliver([broken, *others]).outcome == "smaller"
    assert sender.deliver(others).outcome == "taken"


def test_the_end_of_the_program_waits_for_no_collector(server: Server) -> None:
    let_go = threading.Event()
    server.answer = lambda request: (let_go.wait(20), None)[1]
    code = (
        "import threading, time; from goondan.features.telemetry.process.collector import Collector;"
        "threading.Thread(target=Collector().deliver, args=([],), daemon=True).start(); time.sleep(0.3)"
    )
    began = time.monotonic()
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "9"}
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True, env=environment)
    let_go.set()
    assert time.monotonic() - began < 7


def test_a_name_and_a_key_may_stand_in_the_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:k%40y@127.0.0.1:{server.server_port}")
    server.answer = lambda request: say(request, 401)
    assert Collector().deliver(spans()).why == "it answered 401"
    assert server.headers[0]["authorization"] == "Basic bWU6a0B5"
    assert server.headers[0]["host"] == f"127.0.0.1:{server.server_port}"
