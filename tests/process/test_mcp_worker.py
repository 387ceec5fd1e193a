"""The MCP worker over real sockets, against servers of both eras.

Servers: one that is written with the official SDK, over a descriptor and at an URL, and one that is written by hand.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.process import mcp_sdk_server
from tests.process.mcp_worker_host import Host, Scripted, beside, hosted, tunnels

WAYS = ["descriptor, modern", "descriptor, handshake", "url, modern", "url, handshake"]


@pytest.fixture(params=WAYS)
async def sdk(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """A worker beside the SDK's server, listed."""
    way, era = request.param.split(", ")
    async with AsyncExitStack() as stack:
        if way == "descriptor":
            sock = await stack.enter_async_context(mcp_sdk_server.beside(era))
            host = await stack.enter_async_context(hosted(sock, longest_export=48))
        else:
            url = await stack.enter_async_context(mcp_sdk_server.at_url(handshake=era == "handshake"))
            connector, _ = await stack.enter_async_context(tunnels())
            host = await stack.enter_async_context(hosted(None, connector, endpoint=url))
        ready = await host.ready()
        assert ready.listing is not None
        assert ready.listing.era == era
        yield host


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


async def test_a_server_of_the_sdk_is_listed_and_every_kind_of_result_comes_back(sdk: Host) -> None:
    listing = (await sdk.ready()).listing
    assert listing is not None
    assert (listing.server_name, listing.server_version) == ("sdk", "7")
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


async def test_failures_of_a_server_of_the_sdk_are_errors_of_the_call(sdk: Host) -> None:
    error: Any = await sdk.fails("fail", why="no tea")
    assert "no tea" in error.message
    assert error.code is None
    assert error.name == "McpToolError"
    error = await sdk.fails("read_resource", uri="memo:///nowhere/at/all")
    assert error.code == "E_MCP_REFUSED"
    error = await sdk.fails("nothing")
    assert error.code == "E_TOOL_NOT_FOUND"


async def test_progress_comes_while_a_call_of_the_sdk_runs(sdk: Host) -> None:
    call = sdk.start("count", to=3)
    assert (await sdk.result(call)).status == "ok"
    assert [(news.done, news.total, news.message) for news in sdk.progress] == [
        (1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")
    ]  # fmt: skip
    assert {news.call_id for news in sdk.progress} == {call}


async def test_a_call_of_the_sdk_that_is_cancelled_ends_at_once_and_the_next_one_works(sdk: Host) -> None:
    call = sdk.start("hang")
    await sdk.until(lambda: bool(sdk.progress))
    sdk.cancel(call)
    result = await sdk.result(call)
    assert result.error is not None
    assert result.error.code == "E_CANCELLED"
    assert await sdk.call("add", a=1, b=1) == {"result": 2}


async def test_a_person_is_asked_by_a_server_of_the_sdk(sdk: Host) -> None:
    call = sdk.start("pizza")
    ask = await asyncio.wait_for(sdk.asks.get(), 20)
    assert (ask.op, ask.call_id) == ("elicit", call)
    question = sdk.value(ask)
    assert question["mode"] == "form"
    assert question["message"] == "How large?"
    assert question["schema"]["properties"]["size"]["type"] == "string"
    listing = (await sdk.ready()).listing
    assert listing is not None
    assert question.get("again", False) is (listing.era == "modern")
    sdk.answer(ask, {"action": "accept", "content": {"size": "large"}})
    assert sdk.output(await sdk.result(call)) == "accept: large"


async def test_a_new_tool_of_the_sdk_is_news_and_is_in_the_next_listing(sdk: Host) -> None:
    await sdk.call("grow")
    await sdk.until(lambda: any(news.kind == "tools" for news in sdk.news))
    listed = await sdk.list()
    assert listed.listing is not None
    assert "grown" in {tool.export for tool in listed.listing.tools}
    assert await sdk.call("grown") == "new"
