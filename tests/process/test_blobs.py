"""Large payloads from end to end: between real links over a real broker, and through a whole kernel."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.system.blob_files import BlobFolder
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, MAX_FOLDER_BYTES, MAX_REQUEST_BYTES, describe
from goondan.schemas.wire.codec import decode, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Blob, ErrorPayload, Frame, ReplyTo
from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.bare_broker import TOOL, Broker, bare_broker, call_tool

LARGE = to_raw({"text": "x" * 2_000_000})
PATIENCE_S = 30.0


# --- links over a broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    with bare_broker() as made:
        yield made


def folder(broker: Broker) -> Path:
    return Path(broker.plan.state_dir) / "blobs"


@asynccontextmanager
async def linked(broker: Broker, **agent_options: Any) -> AsyncIterator[tuple[Link, Link, Link, Any, Any]]:
    """Client, agent and tool host, and what the last two are sent."""
    events: asyncio.Queue[Frame] = asyncio.Queue()
    calls: asyncio.Queue[Frame] = asyncio.Queue()
    token = broker.token("agent", agent="coder", instance_key="k")
    agent = Link(broker.endpoint("agent"), token, on_frame=events.put_nowait, **agent_options)
    host = Link(broker.endpoint("toolhost"), broker.token("toolhost"), on_frame=calls.put_nowait)
    client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=print)
    links = (client, agent, host)
    try:
        for link in links:
            await link.start()
        yield *links, events, calls
    finally:
        for link in links:
            await link.close()


def event(event_id: str, **more: Any) -> Frame:
    return Frame("event", to="coder", instance_key="k", event_id=event_id, reply_to=ReplyTo("client", event_id), **more)


@pytest.mark.feature("approvals")
async def test_large_payloads_go_every_way_and_leave_nothing(broker: Broker) -> None:
    async with linked(broker) as (client, agent, host, events, calls):
        asked = client.ask(event("e1", payload=LARGE))
        small = client.post(Frame("event", to="coder", instance_key="k", event_id="e2"))
        given = await asyncio.wait_for(events.get(), PATIENCE_S)
        assert (given.event_id, bytes(given.payload), given.blob) == ("e1", bytes(LARGE), None)
        call = Frame("tool.call", tool=TOOL, call_id="t/1", event_id="e1", epoch=given.epoch, payload=LARGE)
        result = call_tool(agent, call)
        arrived = await asyncio.wait_for(calls.get(), PATIENCE_S)
        assert bytes(arrived.payload) == bytes(LARGE)
        assert host.send(Frame("tool.result", call_id="t/1", payload=LARGE))
        assert bytes((await asyncio.wait_for(result, PATIENCE_S)).payload) == bytes(LARGE)
        (kept,) = folder(broker).iterdir()  # the event's own, which may be handed over again
        assert kept.stat().st_mode & 0o777 == 0o600
        done = Frame("ack", stage="done", event_id="e1", epoch=given.epoch, payload=LARGE)
        await asyncio.wait_for(agent.post(done), PATIENCE_S)
        assert bytes((await asyncio.wait_for(asked, PATIENCE_S)).payload) == bytes(LARGE)
        assert (await small).stage == "accepted"
        assert (await asyncio.wait_for(events.get(), PATIENCE_S)).event_id == "e2"  # in the order of sending
        await asyncio.to_thread(
            wait_until, lambda: list(folder(broker).iterdir()) == [], PATIENCE_S, "the answer has arrived, too"
        )
        assert call.blob is None


async def test_who_waits_for_an_answer_goes_on_before_it_is_confirmed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the broker does with the confirmation takes the core of who waits, or the next one."""
    async with linked(broker) as (client, agent, _, events, _):
        order: list[str] = []
        send = client._transport.send

        def noted(queue: Any) -> None:
            order.extend("confirmed" for data in queue if decode(data).type == "ack")
            send(queue)

        monkeypatch.setattr(client._transport, "send", noted)
        asked = client.ask(event("e1"))
        given = await asyncio.wait_for(events.get(), PATIENCE_S)
        answered = agent.post(Frame("ack", stage="done", event_id="e1", epoch=given.epoch, payload=to_raw({})))
        async with asyncio.timeout(PATIENCE_S):
            await asked
        order.append("goes on")
        await asyncio.wait_for(answered, PATIENCE_S)
        while len(order) < 2:
            await asyncio.sleep(0.01)
        assert order == ["goes on", "confirmed"]


@pytest.mark.feature("approvals")
async def test_hostile_references_are_one_clear_error_each_and_nobody_waits(broker: Broker) -> None:
    """A client that may write to the folder names what is missing, swapped, no file at all, or of another content."""
    written = BlobFolder(str(folder(broker)))
    payload = bytes(LARGE)

    def named(number: int) -> Path:
        return folder(broker) / f"{number:032x}"

    missing, fifo, link, other, shorter = (describe(payload, named(number).name) for number in range(5))
    os.mkfifo(named(1))
    named(2).symlink_to("/etc/passwd")
    named(3).write_bytes(payload[:-1] + b"y")
    named(4).write_bytes(payload[:-1])
    codes = ["E_BLOB_MISSING", "E_BLOB_MISSING", "E_BLOB_MISSING", "E_BLOB_MISMATCH", "E_BLOB_MISMATCH"]
    async with linked(broker) as (client, agent, host, events, calls):
        for number, (blob, code) in enumerate(zip((missing, fifo, link, other, shorter), codes, strict=True)):
            answer = client.ask(event(f"e{number}", blob=blob))
            given = await asyncio.wait_for(events.get(), PATIENCE_S)
            assert given.blob == blob
            assert from_raw(given.payload, ErrorPayload).code == code
            if number == 0:  # a result that is no better ends its call
                call = Frame("tool.call", tool=TOOL, call_id="t/1", event_id="e0", epoch=given.epoch)
                result = call_tool(agent, call)
                await asyncio.wait_for(calls.get(), PATIENCE_S)
                host.send(Frame("tool.result", call_id="t/1", blob=fifo))
                with pytest.raises(GoondanError) as refused:
                    await asyncio.wait_for(result, PATIENCE_S)
                assert refused.value.info.code == "E_BLOB_MISSING"
            done = Frame("ack", stage="failed", event_id=f"e{number}", epoch=given.epoch, payload=given.payload)
            await agent.post(done)
            await asyncio.wait_for(answer, PATIENCE_S)
        for blob, kind, code in (
            (Blob("../" * 10 + "aa", other.digest, 9), "event", "E_BLOB_INVALID"),
            (Blob("client.token", other.digest, 9), "event", "E_BLOB_INVALID"),
            (Blob(other.file, other.digest, 0), "event", "E_BLOB_INVALID"),
            (Blob(other.file, other.digest, MAX_REQUEST_BYTES + 1), "event", "E_FRAME_TOO_LARGE"),
            (Blob(other.file, other.digest, MAX_BLOB_BYTES + 1), "event", "E_FRAME_TOO_LARGE"),
            (other, "admin", "E_BLOB_INVALID"),
        ):
            bad = event("bad", blob=blob)
            bad.type = kind
            with pytest.raises(GoondanError) as refused:
                await asyncio.wait_for(client.post(bad), PATIENCE_S)
            assert refused.value.info.code == code
        assert written.read(written.write(payload, sync=True)) == payload
        await asyncio.wait_for(client.post(Frame("event", to="coder", instance_key="k", event_id="after")), PATIENCE_S)


@pytest.mark.feature("approvals")
async def test_a_peer_without_the_folder_is_told_so(broker: Broker) -> None:
    async with linked(broker, by_reference=False) as (client, agent, _, events, _):
        answer = client.ask(event("e1", payload=LARGE))
        given = await asyncio.wait_for(events.get(), PATIENCE_S)
        assert from_raw(given.payload, ErrorPayload).code == "E_BLOB_UNAVAILABLE"
        with pytest.raises(GoondanError) as refused:
            agent.post(Frame("ack", stage="done", event_id="e1", epoch=given.epoch, payload=LARGE))
        assert refused.value.info.code == "E_FRAME_TOO_LARGE"
        await agent.post(Frame("ack", stage="done", event_id="e1", epoch=given.epoch, payload=to_raw({})))
        await asyncio.wait_for(answer, PATIENCE_S)


# --- a whole kernel

TOOL_SOURCE = """
def make(ctx, input): return "x" * input["size"]
def measure(ctx, input): return {name: len(value) for name, value in input.items()}
handlers = {"make": make, "measure": measure}
"""
BIG = "---\n" + documents(
    "Tool big {entry: ./big/big.py, exports: [{name: make, description: A text, parameters: {type: object, "
    "properties: {size: {type: integer}}}}, {name: measure, description: Lengths, parameters: {type: object}}]}",
)
SIZE = 4_089_446  # 3.9 MiB


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """One kernel for all of these."""
    with sandbox(BUNDLE.replace("tools: [Tool/bash]", "tools: [Tool/bash, Tool/big]") + BIG) as made:
        (made.home / "big").mkdir()
        (made.home / "big" / "big.py").write_text(TOOL_SOURCE)
        made.detach()
        yield made


def blobs(kernel: Sandbox) -> Path:
    (found,) = (kernel.home / "state" / "workspaces").glob("*/blobs")
    return found


def call(kernel: Sandbox, size: int) -> Any:
    return kernel.gdn("call", "big__make", json.dumps({"size": size}), "--json").json


def test_outputs_have_all_of_their_limit_and_no_more(running: Sandbox) -> None:
    result = call(running, SIZE)
    assert (result["status"], result["output"] == "x" * SIZE) == ("ok", True)
    error = call(running, 50 << 20)["error"]
    assert error["code"] == "E_TOOL_LIMIT"
    assert "outputMb" in error["message"]


def test_large_arguments_reach_the_tool(running: Sandbox) -> None:
    arguments = json.dumps({"text": "y" * (3 << 20)})
    assert running.gdn("call", "big__measure", "-", "--json", input=arguments).json["output"] == {"text": 3 << 20}


def test_an_agent_gets_large_messages_and_makes_large_calls(running: Sandbox) -> None:
    """The embedded console does what the lines say: one large in both directions, one with a large output."""
    lines = [f'/big__measure {{"text": "{"z" * (2 << 20)}"}}', f'/big__make {{"size": {SIZE}}}']
    answer = running.gdn("send", "-", "--json", input="\n".join(lines)).json
    assert answer["status"] == "completed"
    assert str(2 << 20) in answer["response"]
    assert "xxx" in answer["response"]


def test_a_full_folder_is_an_error_and_not_the_end(running: Sandbox) -> None:
    hoard = blobs(running) / ("f" * 32)
    with hoard.open("wb") as sparse:
        sparse.truncate(MAX_FOLDER_BYTES)
    try:
        assert call(running, SIZE)["error"]["code"] == "E_DISK_FULL"
    finally:
        hoard.unlink()
    assert call(running, SIZE)["status"] == "ok"


def test_a_killed_tool_host_leaves_nothing_after_the_sweep(running: Sandbox) -> None:
    """kill -9 in the middle of large results; the next start of the kernel sweeps what nobody read."""
    batch = running.home / "batch.jsonl"
    batch.write_text("\n".join(json.dumps({"id": n, "tool": "big__make", "args": {"size": SIZE}}) for n in range(4)))
    process = running.popen("call", "--batch", str(batch))
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    os.kill(running.pid("toolhost"), signal.SIGKILL)
    lines += process.stdout.readlines()
    assert process.wait(30) == 0
    results = [json.loads(line)["result"] for line in lines]
    assert len(results) == 4
    assert {r["status"] if "error" not in r else r["error"]["code"] for r in results} <= {
        "ok",
        "E_TOOL_OUTCOME_UNKNOWN",
    }
    assert running.gdn("stop").status == 0
    (blobs(running) / f"{0:032x}").write_bytes(b"left by somebody who was killed while he wrote")
    running.detach()
    assert list(blobs(running).iterdir()) == []
