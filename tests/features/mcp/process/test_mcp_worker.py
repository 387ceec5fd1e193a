"""The MCP worker over real sockets, against servers of both eras.

Servers: one that is written with the official SDK, over a descriptor and at an URL, and one that is written by hand.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from goondan.features.mcp.jail import calling
from goondan.features.mcp.jail.protocol import bounds
from goondan.schemas.worker.worker_frames import LoadFailed
from tests.features.mcp.process import mcp_sdk_server
from tests.features.mcp.process.mcp_worker_host import (
    Host,
    Scripted,
    as_json,
    beside,
    field,
    hosted,
    pass_time,
    tunnels,
    web_server,
)

WAYS = ["descriptor, modern", "descriptor, handshake", "url, modern", "url, handshake"]


@asynccontextmanager
async def worker_of(way: str) -> AsyncIterator[Host]:
    """A worker beside the SDK's server, listed."""
    how, era = way.split(", ")
    async with AsyncExitStack() as stack:
        if how == "descriptor":
            sock = await stack.enter_async_context(mcp_sdk_server.beside("modern" if era == "modern" else "handshake"))
            host = await stack.enter_async_context(hosted(sock, longest_export=48))
        else:
            url = await stack.enter_async_context(mcp_sdk_server.at_url(handshake=era == "handshake"))
            connector, _ = await stack.enter_async_context(tunnels())
            host = await stack.enter_async_context(hosted(None, connector, endpoint=url))
        yield host


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_of_the_sdk_in_both_eras_and_both_ways(way: str) -> None:
    async with worker_of(way) as sdk:
        await every_kind_of_result_comes_back(sdk, way.partition(", ")[2])
        await failures_are_errors_of_their_calls(sdk)
        await progress_comes_while_a_call_runs(sdk)
        await a_cancelled_call_ends_at_once_and_the_next_one_works(sdk)
        await a_person_is_asked(sdk, again=way.endswith("modern"))
        await a_new_tool_is_news_and_is_in_the_next_listing(sdk)


async def test_a_server_is_listed_and_called_over_its_descriptor() -> None:
    server = Scripted()
    async with beside(server) as host:
        ready = await host.ready()
        assert ready.listing is not None
        assert [(tool.export, tool.name) for tool in ready.listing.tools] == [("echo", "echo")]
        assert ready.listing.era == "handshake"
        assert ready.listing.protocol_version == "2025-11-25"
        assert (ready.listing.server_name, ready.listing.server_version) == ("scripted", "1")
        assert await host.call("echo", a=1, b=None) == '{"a": 1, "b": null}'
        assert await host.exit() == 0


async def every_kind_of_result_comes_back(sdk: Host, era: str) -> None:
    listing = (await sdk.ready()).listing
    assert listing is not None
    assert (listing.server_name, listing.server_version, listing.era) == ("sdk", "7", era)
    assert listing.instructions == "Ask for the weather."
    exports = {tool.export: tool for tool in listing.tools}
    assert {"add", "weather", "picture", "fail", "count", "read_resource", "get_prompt"} <= set(exports)
    assert exports["add"].description == "Adds two numbers."
    assert exports["add"].input_schema is not None
    assert exports["add"].input_schema["required"] == ["a", "b"]
    assert exports["read_resource"].offered
    assert [(item.uri, item.name, item.mime_type) for item in listing.resources] == [
        ("memo://today", "today", "text/plain")
    ]
    assert [item.uri for item in listing.resource_templates] == ["memo://{day}"]
    assert [(item.name, item.arguments) for item in listing.prompts] == [
        ("review", [{"name": "code", "required": True}])
    ]

    assert await sdk.call("add", a=2, b=3) == {"result": 5}
    assert await sdk.call("weather", city="Seoul") == {"city": "Seoul", "degrees": 21.5}
    picture = await sdk.call("picture")
    assert base64.b64decode(picture["content"][0]["data"]) == mcp_sdk_server.PIXEL
    assert picture["content"][0]["mimeType"] == "image/png"
    contents = (await sdk.call("read_resource", uri="memo://today"))["contents"]
    assert contents == [{"uri": "memo://today", "mimeType": "text/plain", "text": "buy tea"}]
    prompt = await sdk.call("get_prompt", name="review", arguments={"code": "x = 1"})
    assert prompt["messages"] == [{"role": "user", "content": {"type": "text", "text": "Review this: x = 1"}}]


async def failures_are_errors_of_their_calls(sdk: Host) -> None:
    error = await sdk.fails("fail", why="no tea")
    assert "no tea" in error.message
    assert error.code is None
    assert error.name == "McpToolError"
    error = await sdk.fails("read_resource", uri="memo:///nowhere/at/all")
    assert error.code == "E_MCP_REFUSED"
    error = await sdk.fails("nothing")
    assert error.code == "E_TOOL_NOT_FOUND"


async def progress_comes_while_a_call_runs(sdk: Host) -> None:
    call = sdk.start("count", to=3)
    assert (await sdk.result(call)).status == "ok"
    assert [(news.done, news.total, news.message) for news in sdk.progress] == [
        (1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")
    ]  # fmt: skip
    assert {news.call_id for news in sdk.progress} == {call}


async def a_cancelled_call_ends_at_once_and_the_next_one_works(sdk: Host) -> None:
    call = sdk.start("hang")
    await sdk.until(lambda: any(news.call_id == call for news in sdk.progress))
    sdk.cancel(call)
    assert (await sdk.error(call)).code == "E_CANCELLED"
    assert await sdk.call("add", a=1, b=1) == {"result": 2}


async def a_person_is_asked(sdk: Host, *, again: bool) -> None:
    call = sdk.start("pizza")
    ask = await asyncio.wait_for(sdk.asks.get(), 20)
    assert (ask.op, ask.call_id) == ("elicit", call)
    question = sdk.value(ask)
    assert question["mode"] == "form"
    assert question["message"] == "How large?"
    assert question["schema"]["properties"]["size"]["type"] == "string"
    assert question.get("again", False) is again
    sdk.answer(ask, {"action": "accept", "content": {"size": "large"}})
    assert sdk.output(await sdk.result(call)) == "accept: large"


async def a_new_tool_is_news_and_is_in_the_next_listing(sdk: Host) -> None:
    await sdk.call("grow")
    await sdk.until(lambda: any(news.kind == "tools" for news in sdk.news))
    listed = await sdk.list()
    assert listed.listing is not None
    assert "grown" in {tool.export for tool in listed.listing.tools}
    assert await sdk.call("grown") == "new"


# --- a server written by hand: hostile, broken, old


async def test_what_a_server_prints_is_logged_and_costs_nothing_else() -> None:
    server = Scripted()
    async with beside(server) as host:
        server.write(b"Server \x1b[31mrunning\x1b[0m on stdio\n\n\r\n[1,2]\nnull\n")
        assert await host.call("echo", a=1) == '{"a": 1}'
        noise = [line.message for line in host.logs if line.level == "warn"]
        assert len(noise) == 3
        assert noise[0] == "on its standard output (it is no JSON): Server [31mrunning[0m on stdio"


async def test_answers_to_nobody_are_named_and_reach_nobody() -> None:
    server = Scripted()
    server.answers["tools_call"] = None
    async with beside(server) as host:
        call = host.start("echo")
        mine = (await server.heard_of("tools/call"))["id"]
        for key in (str(mine), mine + 1, 0, -1, True, 1.5, None):
            server.say({"jsonrpc": "2.0", "id": key, "result": {"content": [{"type": "text", "text": "forged"}]}})
        server.say({"jsonrpc": "2.0", "id": mine, "result": {"content": [{"type": "text", "text": "mine"}]}})
        server.say({"jsonrpc": "2.0", "id": mine, "result": {"content": [{"type": "text", "text": "again"}]}})
        assert host.output(await host.result(call)) == "mine"
        await host.until(lambda: sum("nobody's request" in line.message for line in host.logs) == 5)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"content": "no list"}, "E_MCP_PROTOCOL"),
        ({}, "E_MCP_PROTOCOL"),
        ({"content": [{"type": "text", "text": 5}]}, "E_MCP_PROTOCOL"),
        ({"content": [{"type": "text", "text": "x" * (5 << 20)}]}, "E_TOOL_LIMIT"),
        ({"content": [], "structuredContent": [[[[]]] * 100_000]}, "E_MCP_PROTOCOL"),
        ({"error": {"code": -32602, "message": "bad \x1b[1mthing"}}, "E_MCP_REFUSED"),
        ({"error": {"code": "x", "message": None}}, "E_MCP_REFUSED"),
        ({"resultType": "input_required"}, "E_MCP_PROTOCOL"),
    ],
    ids=range(8),
)
async def test_an_answer_that_breaks_a_rule_fails_its_call_and_the_next_one_works(answer: Any, code: str) -> None:
    server = Scripted()
    answers = [answer]
    server.answers["tools_call"] = lambda message: answers.pop() if answers else server.usual(message)
    async with beside(server) as host:
        error = await host.fails("echo")
        assert error.code == code
        assert "\x1b" not in error.message
        assert await host.call("echo", a=1) == '{"a": 1}'


async def test_a_server_that_closes_in_the_middle_fails_its_calls_at_once() -> None:
    server: Scripted = Scripted(tools_call=lambda message: server.writer.close() if server.writer else None)
    async with beside(server) as host:
        calls = [host.start("echo"), host.start("echo")]
        for call in calls:
            error = await host.error(call)
            assert error.code == "E_MCP_GONE"
        assert await asyncio.wait_for(asyncio.shield(host.task), 20) == 1
        assert any(line.level == "error" and "is gone" in line.message for line in host.logs)


async def test_a_server_that_floods_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "UNASKED_BYTES_BURST", 1 << 20)
    monkeypatch.setattr(bounds, "UNASKED_BYTES_PER_S", 1)  # on no machine slow enough

    async def flood(message: dict[str, Any]) -> None:
        notice = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n' % (b"x" * (128 << 10))
        for _ in range(20):
            server.write(notice)
            assert server.writer is not None
            await server.writer.drain()

    server = Scripted(tools_call=flood)
    async with beside(server) as host:
        error = await host.fails("echo")
        assert error.code == "E_MCP_GONE"
        assert "nobody asked for" in error.message
        assert await asyncio.wait_for(asyncio.shield(host.task), 20) == 1
        assert len(host.logs) < 1_200


async def test_a_call_without_an_answer_ends_at_its_deadline_and_the_server_is_told() -> None:
    server = Scripted(tools_call=None)
    async with beside(server, idle_ms=60) as host:
        late = host.start("echo", deadline_ms=20)
        error = await host.error(late)
        assert (error.code, error.message) == ("E_TOOL_TIMEOUT", "the server did not answer before the call's deadline")
        silent: Any = await host.fails("echo")
        assert (silent.code, silent.message) == ("E_TOOL_TIMEOUT", "the server said nothing for 0.06 s")
        told = await server.heard_of("notifications/cancelled", 2)
        assert told["params"]["requestId"] == (await server.heard_of("tools/call", 2))["id"]


async def test_a_server_that_says_how_far_it_is_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard(count: int) -> bool:
        return len(host.progress) == count

    async def slowly(message: dict[str, Any]) -> dict[str, Any]:
        token = message["params"]["_meta"]["progressToken"]
        for done in range(3):
            pass_time(monkeypatch, 5)
            server.tell("notifications/progress", progressToken=token, progress=done, total="x", message=7)
            await host.until(partial(heard, done + 1))
        return {"content": []}

    server = Scripted(tools_call=slowly)
    async with beside(server, idle_ms=8000) as host:
        assert await host.call("echo") == ""
        assert [(news.done, news.total, news.message) for news in host.progress] == [(n, None, None) for n in range(3)]


async def test_a_person_is_asked_for_the_only_agent_and_for_nobody_when_there_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    async def ask(message: dict[str, Any]) -> dict[str, Any]:
        key = f"q{len(asked)}"
        asked.append(key)
        schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number", "default": 5}}}
        server.say({"jsonrpc": "2.0", "id": key, "method": "elicitation/create",
                    "params": {"message": "Who?", "requestedSchema": schema}})  # fmt: skip
        answer = await server.answer_to(key)
        said = answer.get("error", answer.get("result", {}))
        return {"content": [{"type": "text", "text": said.get("message", "?")}]}

    server = Scripted()
    server.concurrent = True
    server.answers["tools_call"] = ask
    async with beside(server, idle_ms=8000) as host:
        call = host.start("echo", deadline_ms=9000)
        question = await asyncio.wait_for(host.asks.get(), 20)
        pass_time(monkeypatch, 10)  # the clocks stand still while a person is asked
        two = host.start("echo", agent="other")
        assert "several agents" in host.output(await host.result(two))
        host.answer(question, {"action": "decline"})
        assert host.output(await host.result(call)) == "?"
        assert (await server.answer_to("q0"))["result"] == {"action": "decline"}
        third = host.start("echo")
        host.answer(await asyncio.wait_for(host.asks.get(), 20), {"action": "accept", "content": {"a": "x"}})
        await host.result(third)  # what a person leaves out is what the form says
        assert (await server.answer_to("q2"))["result"] == {"action": "accept", "content": {"a": "x", "b": 5}}


async def test_sampling_and_roots_are_refused_unless_they_were_granted() -> None:
    async def ask(message: dict[str, Any]) -> dict[str, Any]:
        server.say({"jsonrpc": "2.0", "id": "r", "method": "roots/list"})
        roots = await server.answer_to("r")
        wish = {"messages": [{"role": "user", "content": {"type": "text", "text": "hi"}}], "maxTokens": 5}
        server.say({"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage", "params": wish})
        said = await server.answer_to("s")
        server.say({"jsonrpc": "2.0", "id": "p", "method": "ping"})
        assert (await server.answer_to("p"))["result"] == {}
        return {"content": [], "structuredContent": {"roots": roots, "said": said}}

    server = Scripted(tools_call=ask)
    server.concurrent = True
    async with beside(server) as host:
        refused = await host.call("echo")
        assert "error" in refused["roots"]
        assert "error" in refused["said"]
        told = (await server.heard_of("initialize"))["params"]["capabilities"]
        assert "roots" not in told
        assert "sampling" not in told

    server = Scripted(tools_call=ask)
    server.concurrent = True
    async with beside(server, grants=["sampling", "roots"], root="/w d") as host:
        call = host.start("echo")
        question = await asyncio.wait_for(host.asks.get(), 20)
        assert (question.op, host.value(question)["maxTokens"]) == ("sample", 5)
        host.answer(question, {"role": "assistant", "content": {"type": "text", "text": "yes"}, "model": "m"})
        granted = host.output(await host.result(call))
        assert granted["roots"]["result"]["roots"] == [{"uri": "file:///w%20d", "name": "workdir"}]
        assert granted["said"]["result"]["content"]["text"] == "yes"


async def test_a_result_is_checked_against_what_its_tool_declares() -> None:
    server = Scripted()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    bad = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/nowhere"}}, "type": "object"}
    server.tools = [
        {"name": name, "inputSchema": {"type": "object"}, "outputSchema": schema if name != "odd" else bad}
        for name in ("right", "wrong", "none", "odd")
    ]
    given = {"right": {"n": 1}, "wrong": {"n": "one"}, "none": None, "odd": {"n": 1}}
    server.answers["tools_call"] = lambda m: {"content": [], "structuredContent": given[m["params"]["name"]]}
    async with beside(server) as host:
        assert await host.call("right") == {"n": 1}
        error = await host.fails("wrong")
        assert error.code == "E_MCP_PROTOCOL"
        assert "does not fit its own schema" in error.message
        assert (await host.fails("none")).code == "E_MCP_PROTOCOL"
        assert await host.call("odd") == {"n": 1}
        assert any("are not checked" in line.message for line in host.logs)


async def test_a_tool_that_must_be_a_task_gives_a_pending_result_and_then_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def state(message: dict[str, Any]) -> dict[str, Any]:
        if states[0] == "long":
            states[0] = "working"
            pass_time(monkeypatch, calling.QUICK_S)
        return {**task, "status": states.pop(0), "pollInterval": 1}

    monkeypatch.setattr(calling, "MIN_POLL_S", 0.01)
    states = ["working", "long", "completed"]
    task = {"taskId": "T1", "createdAt": "2026-01-01T00:00:00Z", "lastUpdatedAt": "2026-01-01T00:00:00Z", "ttl": None}
    server = Scripted(
        tools_call=lambda message: {"task": {**task, "status": "working", "pollInterval": 1}},
        tasks_get=state,
        tasks_result={"content": [{"type": "text", "text": "baked"}]},
        tasks_cancel={**task, "status": "cancelled"},
    )
    server.capabilities["tasks"] = {"requests": {"tools": {"call": {}}}}
    server.tools = [{"name": "bake", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}]
    async with beside(server) as host:
        call = host.start("bake")
        first = await host.result(call)
        assert (first.status, first.continues) == ("pending", True)
        assert host.output(await host.result(call)) == "baked"
        assert (await server.heard_of("tools/call"))["params"]["task"] == {"ttl": 3_600_000}
        quick = host.start("bake")  # it is over already: no pending result
        states.append("completed")
        assert host.output(await host.result(quick)) == "baked"
        states.extend(["long", *["working"] * 1000])
        gone = host.start("bake")
        assert (await host.result(gone)).status == "pending"
        host.cancel(gone)
        assert (await host.result(gone)).status == "error"
        assert (await server.heard_of("tasks/cancel"))["params"] == {"taskId": "T1"}


async def test_pages_are_followed_and_a_list_without_an_end_is_cut_off() -> None:
    def page(message: dict[str, Any]) -> dict[str, Any]:
        cursor = message.get("params", {}).get("cursor", "0")
        names = {"0": "1", "1": "2", "2": "1"}
        return {"tools": [{"name": f"t{cursor}", "inputSchema": {"type": "object"}}], "nextCursor": names[cursor]}

    async with beside(Scripted(tools_list=page)) as host:
        listing = (await host.ready()).listing
        assert listing is not None
        assert [tool.name for tool in listing.tools] == ["t0", "t1", "t2"]
        assert any("repeats itself" in line.message for line in host.logs)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"initialize": {"error": {"code": 1, "message": "go \x1b[1maway"}}}, "error 1: go [1maway"),
        (
            {"initialize": {"protocolVersion": "1", "capabilities": {}, "serverInfo": {}}},
            "not of the protocol",
        ),
        ({"initialize": {"protocolVersion": 5}}, "not of the protocol"),
        ({"tools_list": {"tools": [5]}}, "not of the protocol"),
        ({"tools_list": {"error": {"code": -32000, "message": "later"}}}, "later"),
    ],
    ids=range(5),
)
async def test_a_server_that_cannot_be_spoken_with_is_no_server_and_says_why(answers: Any, told: str) -> None:
    async with beside(Scripted(**answers), is_ready=False) as host:
        begun = await asyncio.wait_for(asyncio.shield(host.begun), 20)
        assert isinstance(begun, LoadFailed)
        assert told in begun.message
        assert await asyncio.wait_for(asyncio.shield(host.task), 20) == 1


# --- at a URL


async def test_a_server_that_answers_the_first_question_with_any_error_is_greeted() -> None:
    refusal = {"error": {"code": -32000, "message": "Bad Request: Server not initialized"}}
    async with beside(Scripted(server_discover=refusal, tools_call=refusal)) as host:
        listing = (await host.ready()).listing
        assert listing is not None
        assert listing.era == "handshake"
        assert (await host.fails("echo")).code == "E_MCP_REFUSED"  # it is not gone


async def test_only_the_proxy_decides_where_a_worker_goes() -> None:
    async with tunnels(refuse=True) as (connector, asked):
        async with hosted(None, connector, endpoint="http://127.0.0.1:9/mcp") as host:
            begun = await asyncio.wait_for(asyncio.shield(host.begun), 20)
            assert isinstance(begun, LoadFailed)
            assert "E_SANDBOX_DENIED: 127.0.0.1:9: not granted" in begun.message
        assert set(asked) == {"127.0.0.1:9"}


async def test_a_server_that_knows_its_session_no_more_is_gone() -> None:
    async with mcp_sdk_server.at_url(handshake=True, sessions_end=True) as url, tunnels() as (connector, _):
        async with hosted(None, connector, endpoint=url) as host:
            await host.ready()
            assert (await host.fails("add", a=1, b=1)).code == "E_MCP_REFUSED"
            assert await asyncio.wait_for(asyncio.shield(host.task), 20) == 1
            assert any("knows its session no more" in line.message for line in host.logs)


async def test_a_redirect_to_elsewhere_is_not_followed_and_headers_stay_home() -> None:
    heard: list[tuple[str, str | None]] = []

    async def answer(head: str, body: bytes) -> bytes:
        heard.append((head.split()[1], field(head, "authorization")))
        return b"HTTP/1.1 307 Away\r\nLocation: http://evil.example/mcp\r\nContent-Length: 0\r\n\r\n"

    async with web_server(answer) as port, tunnels() as (connector, asked):
        headers = {"Authorization": "Bearer s3cret"}
        async with hosted(None, connector, endpoint=f"http://127.0.0.1:{port}/mcp", headers=headers) as host:
            begun = await asyncio.wait_for(asyncio.shield(host.begun), 20)
            assert isinstance(begun, LoadFailed)
            assert "s3cret" not in begun.message
        assert set(asked) == {f"127.0.0.1:{port}"}
        assert set(heard) == {("/mcp", "Bearer s3cret")}


@pytest.mark.requirement("MCP-23")
async def test_a_server_that_lists_to_a_plain_get_is_listed_and_called() -> None:
    seen: list[str] = []

    async def answer(head: str, body: bytes) -> bytes:
        method, path = head.split()[:2]
        seen.append(f"{method} {path} {field(head, 'x-key')}")
        if (method, path) == ("GET", "/mcp/tools/list"):
            return as_json({"tools": [{"name": "ping", "description": "Pings."}]})
        if b'"tools/call"' in body:
            return as_json({"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "pong"}]}})
        return b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n"

    async with web_server(answer) as port, tunnels() as (connector, _):
        url = f"http://127.0.0.1:{port}/mcp"
        async with hosted(None, connector, endpoint=url, headers={"X-Key": "k"}) as host:
            listing = (await host.ready()).listing
            assert listing is not None
            assert [(tool.name, tool.description) for tool in listing.tools] == [("ping", "Pings.")]
            assert await host.call("ping") == "pong"
    assert "GET /mcp/tools/list k" in seen
    assert seen[-1] == "POST /mcp k"


async def test_events_that_nobody_asked_for_are_no_way_around_the_largest_answer() -> None:
    async def answer(head: str, body: bytes) -> bytes:
        if head.startswith("GET /mcp/tools/list"):
            return as_json({"tools": [{"name": "ping"}]})
        if b'"tools/call"' in body:
            events = b": more\n\n" * (3 << 20)
            return (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(events)
                + events
            )
        return b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n"

    async with web_server(answer) as port, tunnels() as (connector, _):
        async with hosted(None, connector, endpoint=f"http://127.0.0.1:{port}/mcp") as host:
            await host.ready()
            error = await host.fails("ping", deadline_ms=5000)
            assert "502" in error.message  # and not that it is no JSON, which is known when all of it was read


async def test_an_answer_of_a_web_server_that_has_no_end_is_cut_off() -> None:
    async def answer(head: str, body: bytes) -> bytes:
        if b'"tools/call"' in body:
            huge = b'{"jsonrpc":"2.0","id":1,"result":{"x":"' + b"x" * (17 << 20)
            return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(huge) + huge
        request = json.loads(body or b"{}")
        if "id" not in request:
            return b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
        usual = Scripted().usual(request)
        kind = "error" if "error" in usual else "result"
        return as_json({"jsonrpc": "2.0", "id": request["id"], kind: usual.get("error", usual)})

    async with web_server(answer) as port, tunnels() as (connector, _):
        async with hosted(None, connector, endpoint=f"http://127.0.0.1:{port}/mcp") as host:
            await host.ready()
            error = await host.fails("echo", deadline_ms=5000)
            assert "more than 16777216 bytes" in error.message
