"""The bundled extension `mcp` in real turns; the broker and the tool host behind the link are functions of the test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from goondan.agentproc.machine.messages import ToolData
from goondan.features.mcp.base.mcp import mcp
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ServerSource, ToolSource
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.servers import (
    SHARED_RESOURCES,
    NamedServer,
    ServerListing,
    ServerNews,
    ServerPrompt,
    ServerResource,
    ServerTool,
)
from tests.unit.agentproc.bundled import bundled
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, the_answer

CREATE = ServerTool(
    export="create_issue",
    name="create_issue",
    description="Open an issue",
    input_schema={"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
)
LIST = ServerTool(export="list_issues", name="list_issues")
LISTING = ServerListing(server_name="GitHub", server_version="1.2", tools=[CREATE, LIST])
STATEFUL: dict[str, Any] = {"transport": {"type": "stdio", "command": ["x"]}, "expose": {"tools": True}}
STATELESS = {**STATEFUL, "attach": {"mode": "stateless"}}


class ServerLink(FakeLink):
    """A link behind which there are MCP servers. `offers` are what each says it has, or why it cannot be asked."""

    def __init__(self, **offers: ServerListing | str) -> None:
        super().__init__()
        self.offers: dict[str, ServerListing | str] = dict(offers)
        self.replies = dict.fromkeys(("mcp.attach", "mcp.list", "mcp.detach"), self._answer)
        #: What was asked of servers: the type of the frame, and the server.
        self.asked_of: list[tuple[str, str]] = []
        self.news: Callable[[Frame], None] = lambda frame: None

    def _answer(self, frame: Frame) -> Any:
        server = from_raw(frame.payload, NamedServer).server
        self.asked_of.append((frame.type, server))
        offer = self.offers[server]
        if frame.type == "mcp.detach":
            return Frame("reply")
        return GoondanError(error_payload("E_MCP_CONNECT", offer)) if isinstance(offer, str) else offer

    def tell(self, server: str, kind: Any, **more: Any) -> None:
        self.news(Frame("mcp.news", payload=to_raw(ServerNews(server=server, kind=kind, **more))))


def server(config: dict[str, Any], name: str = "mcp-github", prefix: str = "github") -> ExtensionSpec:
    """An extension of a bundle with the code of the bundled one."""
    made = bundled("mcp", config)
    resource = {**made.resource, "metadata": {"name": name}}
    return structs.replace(made, name=name, resource=resource, server=prefix if config else "")


async def begun(make: Make, link: ServerLink, model: FakeModel, *extensions: ExtensionSpec, **more: Any) -> Any:
    runner = make(link, model, extensions=list(extensions), **more)
    link.news = runner.takes["mcp.news"]
    await runner.load_extensions()
    return runner


async def turn(make: Make, link: ServerLink, model: FakeModel, *extensions: ExtensionSpec, **more: Any) -> Any:
    """One turn of an agent with these extensions, or with a stateful server."""
    runner = await begun(make, link, model, *(extensions or [server(STATEFUL)]), **more)
    await runner.run(event_frame("e1", "go"))
    return runner


def shown(model: FakeModel, step: int = -1, prefix: str = "") -> list[str]:
    return [item.name for item in model.requests[step].tools if item.name.startswith(prefix)]


def code(model: FakeModel, tool_call_id: str) -> str | None:
    """The code of the error that a call ended with, as the model was told it."""
    for message in model.requests[-1].messages:
        for part in message.data.content if isinstance(message.data, ToolData) else ():
            if part.tool_call_id == tool_call_id:
                return None if part.result.error is None else part.result.error.code
    raise AssertionError(f"the call {tool_call_id} has no result")


def blocks(model: FakeModel, step: int = -1) -> dict[str, dict[str, Any]]:
    return {block["type"]: block for block in model.requests[step].blocks}


@pytest.mark.requirement("MCP-01", "MCP-11", "MCP-13", "MCP-14", "MCP-15", "MCP-16", "ITEM-06", "MCP-24")
async def test_a_stateful_server_is_attached_when_it_is_registered_and_its_tools_are_called(make: Make) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", "github__create_issue", {"title": "t"})), says("done"))
    runner = await begun(make, link, model, server(STATEFUL))
    assert link.asked_of == [("mcp.attach", "github")]  # before any message
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == [("mcp.attach", "github")]  # and not again while nothing has changed
    item = next(item for item in model.requests[0].tools if item.name == "github__create_issue")
    assert item == CatalogItem(
        name="github__create_issue",
        description="Open an issue",
        parameters=CREATE.input_schema,
        source=ToolSource("mcp", "mcp-github", ServerSource("mcp-github", "GitHub")),
        call_s=600.0,
    )
    served = runner.instance.tools.served("github__create_issue")
    assert served is not None and served.metadata == {"source": "mcp", "mcpServer": "mcp-github"}
    (call,) = link.calls
    assert call.tool == "github__create_issue"
    assert call.deadline_ms == 600_000
    assert code(model, "a") is None


class SlowLink(ServerLink):
    """Servers that answer when the test says so."""

    def __init__(self, **offers: ServerListing | str) -> None:
        super().__init__(**offers)
        self.may_answer = asyncio.Event()

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        async def later(answer: asyncio.Future[Frame]) -> Frame:
            await self.may_answer.wait()
            return await answer

        return asyncio.ensure_future(later(super().post(frame)))


async def test_the_servers_of_several_extensions_start_at_the_same_time(make: Make) -> None:
    link = SlowLink(github=LISTING, gitlab=LISTING, other=LISTING)
    specs = [
        server(STATEFUL),
        server(STATEFUL, "mcp-gitlab", "gitlab"),
        server(STATELESS, "mcp-other", "other"),
    ]
    model = FakeModel(says("done"))
    loading = asyncio.ensure_future(begun(make, link, model, *specs))
    while len(link.asked_of) < 2:
        await asyncio.sleep(0)
    assert link.asked_of == [("mcp.attach", "github"), ("mcp.attach", "gitlab")]  # neither has answered
    assert not loading.done()
    link.may_answer.set()
    runner = await loading
    assert len(link.asked_of) == 2  # each was asked once
    await runner.run(event_frame("e1", "go"))
    assert shown(model, prefix="gitlab") == ["gitlab__create_issue", "gitlab__list_issues"]


async def test_a_server_that_ended_before_its_extension_was_registered_is_attached_to_anew(make: Make) -> None:
    link = SlowLink(github=LISTING, gitlab=LISTING)
    runner = make(link, FakeModel(says("done")), extensions=[server(STATEFUL), server(STATEFUL, "mcp-lab", "gitlab")])
    link.news = runner.takes["mcp.news"]
    loading = asyncio.ensure_future(runner.load_extensions())
    while len(link.asked_of) < 2:
        await asyncio.sleep(0)
    link.tell("gitlab", "gone", message="it fell over")
    link.may_answer.set()
    await loading
    assert link.asked_of == [("mcp.attach", "github"), ("mcp.attach", "gitlab"), ("mcp.attach", "gitlab")]


async def test_servers_of_extensions_that_are_not_reached_are_left(make: Make) -> None:
    link = ServerLink(github=LISTING, other=LISTING, gitlab=LISTING)
    broken = structs.replace(server(STATEFUL, "mcp-other", "other"), entry="/no/such/entry.py")
    await begun(make, link, FakeModel(), server(STATEFUL), broken, server(STATEFUL, "mcp-lab", "gitlab"))
    assert [kind for kind, _ in link.asked_of] == ["mcp.attach"] * 3 + ["mcp.detach"] * 2
    assert {name for kind, name in link.asked_of if kind == "mcp.detach"} == {"other", "gitlab"}


async def test_arguments_are_checked_by_the_servers_schema(make: Make) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", "github__create_issue", {"titel": "t"})), says("done"))
    await turn(make, link, model)
    assert link.calls == []
    assert code(model, "a") == "E_TOOL_INVALID_ARGS"


@pytest.mark.requirement("MCP-15")
@pytest.mark.parametrize("name", ["mcp__create_issue", "mcp.create_issue", "github.create_issue"])
async def test_another_name_of_a_tool_is_its_name(make: Make, name: str) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", name, {"title": "t"})), says("done"))
    await turn(make, link, model)
    assert [call.tool for call in link.calls] == ["github__create_issue"]


@pytest.mark.requirement("MCP-15")
async def test_a_name_that_two_servers_have_is_nobodys_other_name(make: Make) -> None:
    link = ServerLink(github=LISTING, gitlab=ServerListing(tools=[CREATE]))
    model = FakeModel(wants(("a", "mcp__create_issue", {"title": "t"}), ("b", "mcp__list_issues", {})), says("done"))
    await turn(make, link, model, server(STATEFUL), server(STATEFUL, "mcp-gitlab", "gitlab"))
    assert code(model, "a") == "E_TOOL_NOT_IN_CATALOG"
    assert [call.tool for call in link.calls] == ["github__list_issues"]


async def test_a_handler_may_show_a_tool_by_its_other_name(make: Make, tmp_path: Any) -> None:
    module = tmp_path / "own" / "own.py"
    module.parent.mkdir()
    module.write_text(
        "def register(api):\n"
        "    async def only(ctx):\n"
        "        item = {'name': 'mcp.create_issue', 'description': 'mine',"
        " 'source': {'type': 'mcp', 'extension': 'mcp-github'}}\n"
        "        return ctx.replace(tool_catalog=[item])\n"
        "    api.pipelines.mutate('step.tools', only)\n"
    )
    resource = {"kind": "Extension", "metadata": {"name": "own"}, "spec": {"entry": "own.py"}}
    own = ExtensionSpec(name="own", entry=str(module), resource=resource)
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", "github__create_issue", {"title": "t"})), says("done"))
    await turn(make, link, model, server(STATEFUL), own)
    assert shown(model, 0) == ["github__create_issue"]
    assert [call.tool for call in link.calls] == ["github__create_issue"]


@pytest.mark.requirement("MCP-10")
@pytest.mark.parametrize(
    ("tools", "names"),
    [
        (True, ["create_issue", "list_issues", "read_resource"]),
        (False, ["read_resource"]),
        (["list_*"], ["list_issues", "read_resource"]),
        (["LIST_*", "x"], ["read_resource"]),
        ([], ["read_resource"]),
    ],
)
async def test_what_is_exposed_is_offered_and_nothing_else(make: Make, tools: Any, names: list[str]) -> None:
    offered = ServerTool(export="read_resource", name="read_resource", offered=True)
    resource = ServerResource(uri="repo://readme", name="readme")
    listing = structs.replace(LISTING, tools=[*LISTING.tools, offered], resources=[resource])
    model = FakeModel(says("done"))
    config = {**STATEFUL, "expose": {"tools": tools, "resources": False}}
    runner = await begun(make, ServerLink(github=listing), model, server(config))
    await runner.run(event_frame("e1", "go"))
    assert shown(model, prefix="github") == [f"github__{name}" for name in names]
    assert "mcp.resources" not in blocks(model)


@pytest.mark.requirement("MCP-17", "MCP-18")
async def test_resources_prompts_and_instructions_are_blocks_of_each_step(make: Make) -> None:
    listing = ServerListing(
        instructions="Ask first.",
        resources=[
            ServerResource(uri="repo://readme", name="readme", mime_type="text/markdown"),
            ServerResource(uri="repo://x", name="x", description="not told"),
        ],
        resource_templates=[ServerResource(uri="repo://{path}", name="file")],
        prompts=[ServerPrompt(name="review", description="Look", arguments=[{"name": "n"}]), ServerPrompt(name="bare")],
    )
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    config = {**STATEFUL, "expose": {"resources": True, "prompts": True}}
    runner = await begun(make, ServerLink(github=listing), model, server(config))
    await runner.run(event_frame("e1", "go"))
    for step in (0, 1):
        told = blocks(model, step)
        assert told["mcp.resources"] == {
            "type": "mcp.resources",
            "items": [
                {"uri": "repo://readme", "name": "readme", "mimeType": "text/markdown"},
                {"uri": "repo://x", "name": "x"},
            ],
            "templates": [{"uriTemplate": "repo://{path}", "name": "file"}],
            "source": "mcp-github",
        }
        assert told["mcp.prompts"] == {
            "type": "mcp.prompts",
            "items": [{"name": "review", "description": "Look", "arguments": [{"name": "n"}]}, {"name": "bare"}],
            "source": "mcp-github",
        }
        assert told["mcp.instructions"]["text"] == "Ask first."
    shared = runner.instance.extensions._shared[SHARED_RESOURCES]
    assert [resource.uri for resource in shared["github"]] == ["repo://readme", "repo://x"]
    await runner.close()
    assert shared == {}, "other extensions do not hear of what is gone"
    quiet = FakeModel(says("done"))
    without = {**config, "expose": {}, "instructions": False}
    runner = await begun(make, ServerLink(github=listing), quiet, server(without))
    await runner.run(event_frame("e2", "go"))
    assert blocks(quiet) == {}


@pytest.mark.requirement("MCP-17")
async def test_a_server_without_resources_has_no_block_and_one_with_many_has_a_short_one(make: Make) -> None:
    resources = [ServerResource(uri=f"r://{n}", name=str(n)) for n in range(mcp.MAX_TOLD + 5)]
    link = ServerLink(github=ServerListing(), gitlab=ServerListing(resources=resources))
    config = {**STATEFUL, "expose": {"resources": True}}
    model = FakeModel(says("done"))
    await turn(make, link, model, server(config), server(config, "mcp-gitlab", "gitlab"))
    (block,) = model.requests[0].blocks
    assert (block["source"], len(block["items"]), block["more"]) == ("mcp-gitlab", mcp.MAX_TOLD, 5)


# --- a server that is not there


async def test_a_server_that_cannot_be_reached_costs_its_tools_and_not_the_agent(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    link = ServerLink(github="exit status 1: no such module")
    model = FakeModel(says("one"), says("two"))
    runner = await turn(make, link, model)
    assert the_answer(link).response == "one"
    assert shown(model, prefix="github") == []
    assert "E_MCP_CONNECT: exit status 1: no such module" in caplog.text
    assert blocks(model)["mcp.unavailable"] == {
        "type": "mcp.unavailable",
        "text": "The MCP server github cannot be used now, and its tools are not there: exit status 1: no such module",
        "source": "mcp-github",
    }
    link.offers["github"] = LISTING
    runner.instance.extensions._loaded["mcp-github"]  # it is loaded all the same
    await runner.run(event_frame("e2", "go"))
    assert shown(model, prefix="github") in ([], ["github__create_issue", "github__list_issues"])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.requirement("MCP-22")
async def test_after_an_end_calls_fail_at_once_and_each_step_tries_once(make: Make) -> None:
    link = ServerLink(github=LISTING)
    call: tuple[str, Any] = ("github__list_issues", {})
    model = FakeModel(
        wants(("a", *call)),
        wants(("b", *call)),
        says("done"),
    )
    runner = await begun(make, link, model, server(STATEFUL))

    def end(tool: str, args: Any) -> Any:
        link.handler = FakeLink().handler
        link.tell("github", "gone", message="exit status 139: segfault")
        return GoondanError(error_payload("E_MCP_GONE", "exit status 139: segfault"))

    link.handler = end
    link.offers["github"] = "still broken"
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == [("mcp.attach", "github")] * 3  # when it was registered, and one try in each later step
    assert len(link.calls) == 1  # the second call was never made
    assert code(model, "b") == "E_MCP_GONE"
    data = model.requests[2].messages[-1].data
    assert isinstance(data, ToolData)
    assert "exit status 139: segfault" in (data.content[0].result.error.message if data.content[0].result.error else "")


async def test_the_next_step_brings_a_server_back(make: Make) -> None:
    link = ServerLink(github=LISTING)
    call: tuple[str, Any] = ("github__list_issues", {})
    model = FakeModel(wants(("a", *call)), wants(("b", *call)), says("done"))
    runner = await begun(make, link, model, server(STATEFUL))
    link.tell("github", "gone", message="killed")
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == [("mcp.attach", "github")] * 2
    assert [frame.tool for frame in link.calls] == ["github__list_issues"] * 2


# --- what changes


@pytest.mark.parametrize("kind", ["tools", "resources", "prompts"])
async def test_news_are_asked_for_at_the_next_step(make: Make, kind: str) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = await begun(make, link, model, server(STATEFUL))

    def changes(tool: str, args: Any) -> Any:
        link.offers["github"] = structs.replace(LISTING, tools=[LIST, ServerTool(export="new", name="new")])
        link.tell("github", kind)
        return FakeLink().handler(tool, args)

    link.handler = changes
    await runner.run(event_frame("e1", "go"))
    assert shown(model, 0, "github") == ["github__create_issue", "github__list_issues"]
    assert link.asked_of == [("mcp.attach", "github"), ("mcp.list", "github")]
    assert shown(model, 1, "github") == ["github__list_issues", "github__new"]


async def test_news_of_other_servers_and_of_one_resource_ask_for_nothing(make: Make) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(says("done"))
    runner = await begun(make, link, model, server(STATEFUL))
    heard: list[Any] = []
    runner.instance.events.subscribe("mcp.resource", heard.append, extension="test")
    link.tell("gitlab", "tools")
    link.tell("github", "resource", uri="repo://readme")
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == [("mcp.attach", "github")]
    assert [payload["uri"] for payload in heard] == ["repo://readme"]


@pytest.mark.requirement("MCP-12")
async def test_a_stateless_server_is_asked_at_each_step_and_never_held(make: Make) -> None:
    link = ServerLink(github=LISTING)
    model = FakeModel(wants(("a", "github__list_issues", {})), says("done"))
    runner = await begun(make, link, model, server(STATELESS))
    assert link.asked_of == []
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == [("mcp.list", "github")] * 2
    assert shown(model, 0, "github") == ["github__create_issue", "github__list_issues"]
    assert [call.tool for call in link.calls] == ["github__list_issues"]
    await runner.close()
    assert "mcp.detach" not in [kind for kind, _ in link.asked_of]


@pytest.mark.requirement("MCP-20")
async def test_a_cleanup_leaves_the_server(make: Make) -> None:
    link = ServerLink(github=LISTING)
    runner = await begun(make, link, FakeModel(), server(STATEFUL))
    await runner.close()
    assert link.asked_of == [("mcp.attach", "github"), ("mcp.detach", "github")]


@pytest.mark.requirement("MCP-21", "MCP-22")
async def test_only_a_change_of_its_own_config_connects_anew(make: Make) -> None:
    link = ServerLink(github=LISTING, gitlab=LISTING)
    runner = await begun(make, link, FakeModel(), server(STATEFUL))
    extensions = runner.instance.extensions
    one = server(STATEFUL)
    await extensions.reconcile([server(STATEFUL, "mcp-gitlab", "gitlab"), one])  # another one, in another order
    assert link.asked_of == [("mcp.attach", "github"), ("mcp.attach", "gitlab")]
    link.asked_of.clear()
    await extensions.reconcile([structs.replace(one, server_digest="other")])
    assert link.asked_of == [("mcp.detach", "gitlab"), ("mcp.detach", "github"), ("mcp.attach", "github")]
    link.asked_of.clear()
    await extensions.reconcile([])
    assert link.asked_of == [("mcp.detach", "github")]
    assert runner.instance.tools.exposed == []


@pytest.mark.requirement("MCP-19")
async def test_without_a_config_it_warns_and_registers_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    link = ServerLink()
    model = FakeModel(says("done"))
    with caplog.at_level(logging.WARNING):
        runner = await begun(make, link, model, server({}))
    assert "MCP Extension: config is missing" in caplog.text
    await runner.run(event_frame("e1", "go"))
    assert link.asked_of == []
    assert the_answer(link).response == "done"


async def test_no_other_extension_has_a_server(make: Make, tmp_path: Any) -> None:
    module = tmp_path / "own" / "own.py"
    module.parent.mkdir()
    module.write_text("def register(api):\n    api.server.name\n")
    resource = {"kind": "Extension", "metadata": {"name": "own"}, "spec": {"entry": "own.py"}}
    own = ExtensionSpec(name="own", entry=str(module), resource=resource)
    link = ServerLink(github=LISTING)
    runner = await begun(make, link, FakeModel(), own)
    await runner.run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None
    assert "only the bundled extension mcp has a server" in error.message


# --- pure parts


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, {"type": "object"}),
        ({}, {"type": "object"}),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"type": "object", "x": 1}, {"type": "object", "x": 1}),
        ({"type": "string"}, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
    ],
)
def test_arguments_are_an_object_whatever_the_server_says(given: Any, used: Any) -> None:
    assert mcp.parameters_of(given) == used
