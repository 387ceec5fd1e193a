"""`gdn mcp serve` with the SDK's client as counterpart, and with clients that want to do harm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from goondan.kernel.cli import execute
from tests.kernel_fixture import Sandbox, sandbox, wait_until

TOOL = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: slow}
spec:
  entry: tools/slow.py
  exports:
    - {name: count, description: "Counts.", parameters: {type: object, properties: {to: {type: integer}}}}
    - {name: waits}
    - {name: later}
    - {name: paint}
    - {name: lint}
---
"""
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash, Tool/slow, Tool/tool-result]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""
#: An agent with rules for approvals and a budget.
CAREFUL = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: careful}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash]
  extensions:
    - ref: Extension/approval
      config: {rules: [{tools: ["bash__exec"], action: ask}, {tools: ["bash__script"], action: deny}]}
    - ref: Extension/budget
      config: {limits: {toolCalls: 1}}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/careful, agents: [{ref: Agent/careful}]}
"""
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # one pixel
)
CODE = (
    f"""\
PICTURE = "{PICTURE}"
"""
    + """\
import asyncio, os
from goondan_tool import Pending

async def count(ctx, input):
    for done in range(1, input.get("to", 3) + 1):
        ctx.progress(done, input.get("to", 3), f"at {done}")
        await asyncio.sleep(0.02)
    return {"counted": input.get("to", 3)}

async def waits(ctx, input):
    open(ctx.workdir + "/began", "w").close()
    await asyncio.sleep(30)

def later(ctx, input):
    return Pending("job", lambda: "done")

def paint(ctx, input):
    return {"content": [{"type": "image", "data": PICTURE, "mimeType": "image/png"}]}

def lint(ctx, input):
    return {"file": "main.py", "lines": 3}

handlers = {"count": count, "waits": waits, "later": later, "paint": paint, "lint": lint}
"""
)


INITIALIZE = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox(TOOL + BUNDLE) as made:
        (made.home / "tools").mkdir()
        (made.home / "tools" / "slow.py").write_text(CODE)
        made.detach()
        yield made


def words(*more: str, agent: str = "main") -> list[str]:
    return ["mcp", "serve", "--agent", agent, *more]


@asynccontextmanager
async def on_stdio(kernel: Sandbox, *more: str, agent: str = "main", mode: Any = "auto") -> AsyncIterator[Client]:
    """A client whose server is our command, as other programs start it."""
    started = StdioServerParameters(
        command=sys.executable,
        args=["-I", "-m", "goondan.kernel.cli", *words(*more, agent=agent)],
        env=kernel.env,
        cwd=kernel.home,
    )
    async with Client(started, mode=mode) as client:
        yield client


@contextmanager
def over_http(kernel: Sandbox, *more: str, agent: str = "main") -> Iterator[dict[str, Any]]:
    """Our command with --http; where it listens, and its token."""
    process = kernel.popen(*words("--http", "0", "--json", *more, agent=agent))
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        told["token"] = Path(told["tokenFile"]).read_text().strip()
        told["port"] = int(told["url"].split(":")[2].split("/")[0])
        told["process"] = process
        yield told
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    assert not Path(told["tokenFile"]).exists(), "the token goes with the server"
    assert process.returncode in (0, 143)


@asynccontextmanager
async def http_client(told: dict[str, Any], mode: Any = "auto") -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {told['token']}"}, timeout=30) as http:
        async with Client(streamable_http_client(told["url"], http_client=http), mode=mode) as client:
            yield client


async def uses(client: Client, *more: str) -> None:
    """What any client does: list, call, be refused. `more`: tools that are offered besides."""
    listed = await client.list_tools()
    assert [tool.name for tool in listed.tools] == ["bash__exec", *(f"slow__{name}" for name in EXPORTS), *more]
    done = await client.call_tool("bash__exec", {"command": "echo $((6*7))"})
    assert not done.is_error
    assert done.structured_content["stdout"] == "42\n"
    assert done.meta is not None
    assert done.meta["goondan.ai/receipt"]["jail"]["walls"]
    wrong = await client.call_tool("bash__exec", {"comand": "x"})
    assert wrong.is_error
    assert wrong.meta is not None
    assert wrong.meta["goondan.ai/error"]["code"] == "E_TOOL_INVALID_ARGS"
    for name in {"bash__script", "no__such", "tool-result__get"} - {*more}:  # two of them are the agent's
        with pytest.raises(MCPError):
            await client.call_tool(name, {})


async def leaves_work(client: Client, kernel: Sandbox) -> None:
    """Pending work is a handle, and a cancelled call ends in its jail."""
    begun = await client.call_tool("slow__later", {})
    handle = begun.structured_content["handle"]
    assert begun.meta is not None
    assert begun.meta["goondan.ai/pending"] == {"handle": handle}
    got = await client.call_tool("tool-result__get", {"handle": handle, "waitMs": 5000})
    assert "done" in json.dumps(got.structured_content or got.content[0].text)  # type: ignore[union-attr]

    task = asyncio.ensure_future(client.call_tool("slow__waits", {}))
    while not list(kernel.home.glob("state/workspaces/*/instances/main/stdio-legacy/workspace/began")):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = time.monotonic()
    assert not (await client.call_tool("bash__exec", {"command": "true"})).is_error
    assert time.monotonic() - before < 15, "the instance is free again"


EXPORTS = ("count", "waits", "later", "paint", "lint")
MINE = ("--tools", "bash__exec", "--tools", "slow__*")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_of_either_era_on_standard_streams(kernel: Sandbox, mode: str) -> None:
    later = ["tool-result__get"] if mode == "legacy" else []
    patterns = [word for name in later for word in ("--tools", name)]
    async with on_stdio(kernel, *MINE, *patterns, "--instance", f"stdio-{mode}", mode=mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        await uses(client, *later)
        if later:
            await leaves_work(client, kernel)
            return
        said: list[tuple[float, float | None, str | None]] = []

        async def heard(progress: float, total: float | None, message: str | None) -> None:
            said.append((progress, total, message))

        (painted,) = (await client.call_tool("slow__paint", {})).model_dump(by_alias=True)["content"]
        assert (painted["type"], painted["data"]) == ("image", PICTURE), "a block as its tool gave it"
        linted = await client.call_tool("slow__lint", {})
        assert linted.structured_content == {"file": "main.py", "lines": 3}, "no file, although a key is called so"
        counted = await client.call_tool("slow__count", {"to": 4}, progress_callback=heard)
        assert counted.structured_content == {"counted": 4}
        assert said, "progress is told while the call runs"
        assert [done for done, *_ in said] == sorted({done for done, *_ in said})
        assert said[-1][1] == 4
        huge = await client.call_tool("bash__exec", {"command": "echo", "timeoutMs": 10**40})
        assert huge.content, "a number beyond 64 bits is a double, as everywhere"


async def test_the_end_of_a_client_ends_its_calls(kernel: Sandbox) -> None:
    process = kernel.popen(*words(*MINE, "--instance", "gone"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    for message in (
        INITIALIZE,
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "slow__waits", "arguments": {}}},
    ):  # fmt: skip
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    process.stdin.flush()
    wait_until(lambda: list(kernel.home.glob("state/workspaces/*/instances/main/gone/workspace/began")))
    process.stdin.close()
    assert process.wait(30) == 0
    waits = kernel.gdn("ps", "--why", "--json").json
    assert "gone" not in json.dumps(waits.get("waits", waits) if isinstance(waits, dict) else [])
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


@pytest.mark.feature("approvals", "budgets")
async def test_the_agents_approvals_and_budget_hold() -> None:
    with sandbox(CAREFUL) as kernel:
        kernel.detach()
        async with on_stdio(kernel, "--tools", "*", agent="careful") as client:
            denied = await client.call_tool("bash__script", {"path": "x"})
            assert denied.is_error
            assert denied.meta is not None
            assert denied.meta["goondan.ai/error"]["code"] == "E_APPROVAL_DENIED"
            asking = asyncio.ensure_future(client.call_tool("bash__exec", {"command": "echo yes"}))
            while not (items := (await asyncio.to_thread(kernel.gdn, "approve", "list", "--json")).json["items"]):
                assert not asking.done()
            await asyncio.to_thread(kernel.gdn, "approve", "yes", items[0]["code"])
            done = await asking
            assert done.structured_content["stdout"] == "yes\n"
        assert "careful" in kernel.gdn("budget", "--json").out


def test_what_cannot_be_served_is_one_error(
    kernel: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what a server needs: that takes a second."""
    for name, value in kernel.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(kernel.home)
    for arguments, code in (
        (words(agent="none"), "E_AGENT_NOT_FOUND"),
        (words(agent="_operator"), "E_USAGE"),
        (words("--token-file", "/nowhere"), "E_USAGE"),
    ):
        assert execute(arguments) != 0
        said = capsys.readouterr().err
        assert code in said and "Traceback" not in said, arguments


def test_a_port_that_is_taken_and_an_open_file_are_one_error(kernel: Sandbox, tmp_path: Path) -> None:
    open_file = tmp_path / "token"
    open_file.write_text("a-token-of-some-length\n")
    open_file.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for where in ([str(taken.getsockname()[1])], ["0", "--token-file", str(open_file)]):
            done = kernel.gdn(*words("--http", *where), timeout=50)
            assert done.status != 0
            assert "E_USAGE" in done.err and "Traceback" not in done.err


# --- HTTP


@pytest.fixture(scope="module")
def served(kernel: Sandbox) -> Iterator[dict[str, Any]]:
    with over_http(kernel, *MINE, "--instance", "http") as told:
        yield told


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_of_either_era_over_http(served: dict[str, Any], mode: str) -> None:
    async with http_client(served, mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        await uses(client)
    assert Path(served["tokenFile"]).stat().st_mode & 0o777 == 0o600
    assert served["token"] not in " ".join(Path(f"/proc/{served['pid']}/cmdline").read_text().split("\0"))


def asks(told: dict[str, Any], body: bytes, **headers: str) -> tuple[int, bytes]:
    """One request, byte by byte as given."""
    lines = {
        "Host": f"127.0.0.1:{told['port']}", "Authorization": f"Bearer {told['token']}",
        "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
        "Content-Length": str(len(body)), "Connection": "close",
    } | headers  # fmt: skip
    text = b"POST /mcp HTTP/1.1\r\n" + b"".join(
        f"{name}: {value}\r\n".encode() for name, value in lines.items() if value
    )
    with socket.create_connection(("127.0.0.1", told["port"]), timeout=20) as stream:
        data = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it may be refused while we write
            stream.sendall(text + b"\r\n" + body)
        with suppress(ConnectionResetError):
            while chunk := stream.recv(65536):
                data += chunk
    return int(data.split(b" ", 2)[1]) if data else 0, data


def test_strangers_are_kept_out(served: dict[str, Any]) -> None:
    body = json.dumps(INITIALIZE).encode()
    assert asks(served, body)[0] == 200
    assert asks(served, body, Host="evil.example")[0] == 421
    assert asks(served, body, Origin="http://evil.example")[0] == 403
    assert asks(served, body, Authorization="")[0] == 401
    assert asks(served, body, Authorization="Bearer wrong")[0] == 401
    status, answer = asks(served, b"", **{"Content-Length": str(1 << 40)})
    assert status == 413
    assert served["token"].encode() not in answer


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"jsonrpc":"2.0","id":1,"method":"nothing"}',
        b'{"jsonrpc":"2.0","id":null,"method":"ping"}', b'{"jsonrpc":"2.0","id":{"a":1},"method":"tools/list"}',
        b'{"jsonrpc":"2.0","id":1e999,"method":"tools/list"}', b'{"jsonrpc":"2.0","id":7,"result":{}}',
        b'{"jsonrpc":"1.0","id":1,"method":"ping"}',
    ],
)  # fmt: skip
def test_what_is_no_request_is_answered_and_the_server_goes_on(served: dict[str, Any], body: bytes) -> None:
    for version in ("", "2025-11-25", "2026-07-28", "1999-01-01"):
        status, answer = asks(served, body, **{"Mcp-Protocol-Version": version})
        assert 400 <= status < 500 or status in (200, 202), (version, status, answer[:300])
        assert b"Traceback" not in answer
    assert asks(served, json.dumps(INITIALIZE).encode())[0] == 200


def test_a_session_that_does_not_exist_is_not_found(served: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    for session in ("0" * 32, "../x", "x" * 4000):
        assert asks(served, body, **{"Mcp-Session-Id": session})[0] in (400, 404)


async def test_floods_of_sessions_connections_and_half_requests_leave_room_for_others(served: dict[str, Any]) -> None:
    with ExitStack() as stack:
        body = json.dumps(INITIALIZE).encode()
        answers = [asks(served, body)[0] for _ in range(70)]
        assert answers.count(503) >= 6, "sessions are bounded"
        assert set(answers) <= {200, 503}
        half = []
        for number in range(150):
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", served["port"]), timeout=30))
            stream.sendall(b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1" if number % 2 else b"")
            half.append(stream)
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", served["port"]), timeout=30))
        with pytest.raises(OSError):
            endless.sendall((b"X-Much: " + b"a" * 8192 + b"\r\n") * 4096)
        async with http_client(served) as client:  # the modern era has no sessions
            assert not (await client.call_tool("bash__exec", {"command": "true"})).is_error
        assert half[0].recv(1) == b"", "a connection without a request is closed"
        status = Path(f"/proc/{served['process'].pid}/statm").read_text()
        assert int(status.split()[1]) * os.sysconf("SC_PAGE_SIZE") < 300 << 20


def test_without_patterns_nothing_is_offered_and_a_line_that_is_too_long_is_refused(kernel: Sandbox) -> None:
    messages = [
        INITIALIZE,
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "bash__exec", "arguments": {}}},
    ]
    lines = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    process = kernel.popen(*words("--instance", "long"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"x" * (17 << 20) + b"\nnot json\n" + lines)
    process.stdin.flush()
    answers: dict[Any, Any] = {}
    while not answers.keys() >= {None, 1, 2, 3}:
        answer = json.loads(process.stdout.readline())
        answers[answer.get("id")] = answer
    _, err = process.communicate(timeout=30)
    assert answers[None]["error"]["code"] in (-32600, -32700)
    assert answers[1]["result"]["serverInfo"]["name"] == "goondan"
    assert answers[2]["result"]["tools"] == []
    assert answers[3]["error"]["code"] == -32602
    assert b"nothing is offered" in err
    assert b"Traceback" not in err
