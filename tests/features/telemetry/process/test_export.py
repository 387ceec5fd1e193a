"""A real kernel exports to a receiver that nobody here wrote, through its own end and that of the exporter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from prometheus_client.parser import text_string_to_metric_families
from pytest_genai_semconv import assert_genai_span_compliant

from goondan.kernel.spawn import AGENT_ENVIRONMENT
from goondan.schemas.wire.spans import read_traceparent, traceparent
from tests.bundles import documents
from tests.features.telemetry.test_collector import Server, say
from tests.kernel_fixture import Sandbox, sandbox, shown, wait_until
from tests.process.scripted_model import ScriptedModel, scripted_model

BUNDLE = documents(
    "Model m {provider: openai, model: m, endpoint: BASE}",
    "Agent main {modelConfig: {modelRef: Model/m}, tools: [Tool/bash, Tool/agents]}",
    "Agent other {modelConfig: {modelRef: Model/m}}",
    "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/other}]}",
)
KEY = "sesame-4711"
PAGE = (Path(__file__).resolve().parents[4] / "docs" / "serve.md").read_text(encoding="utf-8")
#: What Prometheus accepts.
SCRAPED = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with scripted_model() as made:
        made.scripts = {
            "work": [
                [("c1", "bash__exec", {"command": "echo hello"}), ("c2", "no__such", {})],
                [("c3", "agents__request", {"target": "other", "input": "help"})],
                "done",
            ],
            "help": ["helped"],
            "again": ["yes"],
        }
        made.otherwise = "ok"
        yield made


@pytest.fixture(scope="module")
def kernel(port: int, model: ScriptedModel) -> Iterator[Sandbox]:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://me:{KEY}@127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={KEY}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
        "GOONDAN_TRACEPARENT": "1",
    }
    with sandbox(BUNDLE.replace("BASE", json.dumps(model.base)), variables) as running:
        yield running


@pytest.fixture
async def receiver(port: int) -> AsyncIterator[OtelTapHttpProtobufReceiver]:
    async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=port)) as made:
        yield made


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a received span."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


class _Received:
    """A received span, as the checker of the conventions wants it."""

    def __init__(self, span: Any) -> None:
        self.name = span.name
        self.kind = {1: "INTERNAL", 3: "CLIENT"}[span.kind]
        self.attributes = attributes(span)
        for name in ("gen_ai.response.finish_reasons",):
            if name in self.attributes:
                self.attributes[name] = [value.string_value for value in self.attributes[name].values]


async def turn_of(receiver: OtelTapHttpProtobufReceiver, agent: str) -> Any:
    """The span of a turn of this agent."""
    return await receiver.await_trace(lambda span: span.name == f"invoke_agent {agent}", 30)


async def test_a_trace_of_two_agents_arrives_whole(
    kernel: Sandbox, model: ScriptedModel, receiver: OtelTapHttpProtobufReceiver
) -> None:
    found: list[Any] = []

    async def keep() -> None:
        async for span in receiver.stream_traces():
            found.extend([span])

    keeping = asyncio.create_task(keep())
    await asyncio.to_thread(kernel.detach)
    trace = "0af7651916cd43dd8448eb211c80319c"
    sent = await asyncio.to_thread(kernel.gdn, "send", "work", "--trace-id", trace, "--json")
    assert sent.json["traceId"] == trace
    shown_trace = await asyncio.to_thread(kernel.gdn, "trace", trace, "--json")

    def whole() -> bool:
        return {"invoke_agent main", "invoke_agent other"} <= {span.name for span in found}

    async with asyncio.timeout(30):
        while not whole():
            await asyncio.sleep(0.05)
    keeping.cancel()
    assert {span.trace_id.hex() for span in found} == {trace}
    ids = [span.span_id.hex() for span in found]
    assert len(set(ids)) == len(ids)
    (told,) = shown_trace.json["turns"]
    asked = next(call for step in told["steps"] for call in step["tools"] if call.get("turns"))
    by_name = {span.name: span for span in found}
    assert by_name["invoke_agent main"].span_id.hex() == told["spanId"]
    assert by_name["invoke_agent other"].parent_span_id.hex() == asked["spanId"]
    assert {"execute_tool bash__exec", "execute_tool agents__request", "chat m", "step 1"} <= by_name.keys()
    # The tree is whole: each span hangs on another one, but for the first.
    assert [span.name for span in found if span.parent_span_id.hex() not in ids] == ["invoke_agent main"]
    for span in found:
        if "gen_ai.operation.name" in attributes(span):
            assert_genai_span_compliant(_Received(span))
    assert attributes(by_name["execute_tool bash__exec"])["goondan.receipt.tier"] in ("full", "reduced")
    assert "hello" not in str(found)
    asked = {read_traceparent(headers["traceparent"]) for headers in model.headers}
    assert asked == {(trace, span.span_id.hex()) for span in found if span.name == "chat m"}


async def test_status_and_secret_and_what_is_imported(kernel: Sandbox, receiver: OtelTapHttpProtobufReceiver) -> None:
    pid = kernel.pid("telemetry")
    assert KEY.encode() not in shown(pid)
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in AGENT_ENVIRONMENT
    told = await asyncio.to_thread(kernel.gdn, "ps")
    assert "telemetry: exporting, " in told.out
    for role in ("broker", "toolhost", "forkserver", "agent"):
        assert "google/_upb" not in Path(f"/proc/{kernel.pid(role)}/maps").read_text()


async def test_what_was_done_without_a_collector_or_an_exporter_arrives_later(kernel: Sandbox, port: int) -> None:
    await asyncio.to_thread(kernel.gdn, "send", "again")

    def waits() -> bool:
        return "telemetry: waiting for the collector since" in kernel.gdn("ps").out

    await asyncio.to_thread(wait_until, waits)
    os.kill(kernel.pid("telemetry"), signal.SIGKILL)
    assert (await asyncio.to_thread(kernel.gdn, "stop")).status == 0
    await asyncio.to_thread(kernel.detach)
    async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=port)) as receiver:
        assert attributes(await turn_of(receiver, "main"))["goondan.turn.status"] == "completed"
    assert KEY not in kernel.log("telemetry")


@pytest.mark.feature("serve")
def test_what_the_page_tells_prometheus_is_a_scrape_and_for_those_who_may_look(kernel: Sandbox) -> None:
    from tests.features.serve.process.test_gdn_serve import door

    tokens, token = kernel.home / "tokens", "looker-0123456789"
    line = PAGE.partition("With a token line `")[2].partition("`")[0].replace("TOKEN", token)
    block = PAGE.partition("## Prometheus")[2].partition("```yaml\n")[2].partition("```")[0]
    (job,) = yaml.safe_load(block)["scrape_configs"]
    # Prometheus refuses a key that it does not know. What stands there is a bearer at http://TARGET/metrics.
    assert job.keys() == {"job_name", "authorization", "static_configs"}
    assert job["authorization"].keys() == {"credentials_file"}
    assert job["static_configs"] == [{"targets": ["127.0.0.1:7117"]}]
    tokens.write_text(f"{line}\nweb talk talker-0123456789 *\n")
    tokens.chmod(0o600)
    with door(kernel, "--token-file", str(tokens)) as told:
        request = urllib.request.Request(f"{told['url']}/api/v1/messages", b'{"text": "again"}')
        request.add_header("Authorization", "Bearer talker-0123456789")
        request.add_header("Content-Type", "application/json")
        request.add_header("traceparent", traceparent(TRACE, SPAN))
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["traceId"] == TRACE
        request = urllib.request.Request(f"http://127.0.0.1:{told['port']}/metrics", headers={"Accept": SCRAPED})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version="), "else Prometheus takes nothing"
            families = text_string_to_metric_families(answer.read().decode())
            found = {sample.name: sample for family in families for sample in family.samples}
    (turn,) = kernel.gdn("trace", TRACE, "--json").json["turns"]
    assert turn["parentSpanId"] == SPAN
    assert found["goondan_up"].value == 1
    assert {"goondan_model_calls_total", "goondan_process_memory_bytes", "goondan_places"} <= found.keys()


@pytest.fixture
def collector() -> Iterator[Server]:
    """A collector that answers as a test says."""
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


def test_what_the_page_tells_a_shell_sends_spans_to_the_collector(collector: Server) -> None:
    block = PAGE.partition("## An OpenTelemetry collector")[2].partition("```console\n")[2].partition("```")[0]
    export, run, ps = [line.removeprefix("$ ").partition("#")[0] for line in block.splitlines()]
    export = export.replace("https://collector:4318", f"http://127.0.0.1:{collector.server_port}").replace("…", KEY)
    with sandbox() as kernel, kernel.on_path() as path:
        sent = f"until {ps} | grep -E 'telemetry: exporting, [1-9][0-9]* spans sent$'; do sleep 0.2; done"
        shell = ["bash", "-ec", f"{export}\n{run}\ngdn send hello\n{sent}"]
        how: dict[str, Any] = {"cwd": kernel.home, "capture_output": True, "text": True, "timeout": 50}
        done = subprocess.run(shell, env={**kernel.env, "PATH": path}, check=False, **how)
        assert done.returncode == 0, done.stderr
    assert [headers["api-key"] for headers in collector.headers] == [KEY] * len(collector.headers)
    assert "invoke_agent main" in [span.name for span in collector.spans]


def test_no_turn_waits_for_a_collector_that_says_nothing_or_refuses_or_for_the_exporter(collector: Server) -> None:
    let_go = threading.Event()
    # An exporter whose request is not answered waits longer for that than this test.
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "50",
    }
    with sandbox(extra_env=variables) as kernel:
        kernel.detach()
        [state] = kernel.state_dirs

        def turns() -> list[str]:
            """The traces of three turns, which come to their ends."""
            done = [kernel.gdn("send", "hello", "--json").json for _ in range(3)]
            assert [turn["status"] for turn in done] == ["completed"] * 3
            return [turn["traceId"] for turn in done]

        def refuses_late(request: BaseHTTPRequestHandler) -> None:
            let_go.wait(50)
            say(request, 500)

        def arrived(traces: list[str]) -> bool:
            return {span.trace_id.hex() for span in collector.spans} >= {*traces}

        first = turns()
        wait_until(lambda: arrived(first))
        position = state / "telemetry" / "position.json"
        wait_until(position.exists)
        collector.answer = refuses_late
        before = len(collector.bodies)
        turns()
        wait_until(lambda: len(collector.bodies) == before + 1)
        turns()
        os.kill(kernel.pid("telemetry"), signal.SIGSTOP)
        late = turns()
        assert [*position.parent.iterdir()] == [position], "all that is kept"
        assert position.stat().st_size < 2000
        assert len(collector.bodies) == before + 1, "the exporter was in its first request all the while"
        os.kill(kernel.pid("telemetry"), signal.SIGCONT)
        let_go.set()
        wait_until(lambda: "spans and 0 turns dropped" in kernel.gdn("ps").out)
        collector.answer = lambda request: say(request, 200)
        last = turns()
        wait_until(lambda: arrived([*late, *last]))
