"""A real kernel exports to a receiver that nobody here wrote, through its own end and that of the exporter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from prometheus_client.parser import text_string_to_metric_families
from pytest_genai_semconv import assert_genai_span_compliant

from goondan.kernel.spawn import AGENT_ENVIRONMENT
from goondan.schemas.wire.spans import read_traceparent, traceparent
from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, shown, wait_until
from tests.process.scripted_model import ScriptedModel, scripted_model

BUNDLE = documents(
    "Model m {provider: openai, model: m, endpoint: BASE}",
    "Agent main {modelConfig: {modelRef: Model/m}, tools: [Tool/bash, Tool/agents]}",
    "Agent other {modelConfig: {modelRef: Model/m}}",
    "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/other}]}",
)
KEY = "sesame-4711"
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
def test_metrics_are_for_those_who_may_look(kernel: Sandbox) -> None:
    from tests.features.serve.process.test_gdn_serve import door

    tokens = kernel.home / "tokens"
    tokens.write_text("prometheus look looker-0123456789 *\nweb talk talker-0123456789 *\n")
    tokens.chmod(0o600)
    with door(kernel, "--token-file", str(tokens)) as told:
        request = urllib.request.Request(f"{told['url']}/metrics")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        request.add_header("Authorization", "Bearer looker-0123456789")
        with urllib.request.urlopen(request, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            found = {sample.name: sample for family in families for sample in family.samples}
        request = urllib.request.Request(f"{told['url']}/api/v1/messages", b'{"text": "again"}')
        request.add_header("Authorization", "Bearer talker-0123456789")
        request.add_header("Content-Type", "application/json")
        request.add_header("traceparent", traceparent(TRACE, SPAN))
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["traceId"] == TRACE
    (turn,) = kernel.gdn("trace", TRACE, "--json").json["turns"]
    assert turn["parentSpanId"] == SPAN
    assert found["goondan_up"].value == 1
    assert {"goondan_model_calls_total", "goondan_process_memory_bytes", "goondan_places"} <= found.keys()
