"""Tools that extensions register: names, both signatures, exposure, and calls that run in the agent's process."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import msgspec
import pytest

from goondan.agentproc.extensions.api import ExtensionApi
from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.extensions.points.contexts import Resource
from goondan.agentproc.extensions.points.results import read_items
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.bundle.launch import CatalogItem, ServerSource, ToolSource
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc import turns
from tests.unit.agentproc.fakes import FakeLink, FakeModel, catalog_of, event_frame, says, wants
from tests.unit.agentproc.turns import Make

ITEM = {
    "name": "weather__get",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def api_of(runner: TurnRunner, name: str = "weather-ext", **changes: Any) -> ExtensionApi:
    return turns.api_of(runner, name, **changes)


def results(model: FakeModel) -> list[ToolResult]:
    return [m.data.content[0].result for m in model.requests[-1].messages if m.source.type == "tool"]  # type: ignore[union-attr]


def code_of(result: ToolResult) -> str | None:
    return None if result.error is None else result.error.code


@pytest.mark.requirement("DYNAMIC-01", "DYNAMIC-07", "DYNAMIC-11", "ITEM-05", "CATALOG-06", "CATALOG-09")
async def test_a_registered_tool_is_shown_checked_and_run_here(make: Make, link: FakeLink) -> None:
    seen: list[Any] = []

    async def weather(ctx: Any, given: Any) -> Any:
        seen.append(
            (ctx.agent_name, ctx.instance_key, ctx.tool_call_id, ctx.workdir, ctx.message.data.calls[0].tool_name)
        )
        if given["city"] == "Atlantis":
            raise RuntimeError("날씨 API 오류: 404")
        return {"city": given["city"], "sky": "clear"}

    model = FakeModel(
        wants(
            ("a", "weather__get", {"city": "Seoul"}),
            ("b", "weather__get", {}),
            ("c", "weather__get", {"city": "Atlantis"}),
        ),
        says("done"),
    )
    runner = make(link, model)
    api_of(runner).tools.register(ITEM, weather)
    await runner.run(event_frame("e1", "go"))
    shown = model.requests[0].tools[-1]
    assert (shown.name, shown.source.type, shown.source.name) == ("weather__get", "extension", "weather-ext")
    fine, wrong, raised = results(model)
    assert from_raw(fine.output, dict) == {"city": "Seoul", "sky": "clear"}  # type: ignore[arg-type]
    assert code_of(wrong) == "E_TOOL_INVALID_ARGS"
    assert raised.error is not None
    assert (raised.error.code, raised.error.name, raised.error.message) == (
        "E_TOOL", "RuntimeError", "날씨 API 오류: 404",
    )  # fmt: skip
    assert seen[0] == (
        "coder",
        "k",
        "a",
        instance_workdir(runner.instance.spec.state_dir, "coder", "k"),
        "weather__get",
    )
    assert link.calls == []


@pytest.mark.requirement("ITEM-03", "ITEM-07")
@pytest.mark.parametrize(
    ("given", "server"),
    [
        ({"type": "mcp", "name": "other", "mcp": {"extensionName": "other", "serverName": "files"}}, "files"),
        ({"type": "mcp", "name": "weather-ext", "mcp": {"extensionName": "weather-ext"}}, None),
        ({"type": "mcp", "extension": "weather-ext"}, None),
    ],
)
async def test_a_tool_of_an_mcp_server_says_so_and_whose_it_is(make: Make, given: Any, server: str | None) -> None:
    model = FakeModel(says("done"))
    runner = make(FakeLink(), model)
    kept = {"tool": {"kind": "Tool"}, "export": {"name": "get"}}
    api_of(runner).tools.register({**ITEM, "source": given, **kept}, lambda ctx, args: None)
    await runner.run(event_frame("e1", "go"))
    item = model.requests[0].tools[-1]
    assert (item.source.type, item.source.name) == ("mcp", "weather-ext")
    assert item.source.mcp == ServerSource("weather-ext", server)
    assert (item.tool, item.export) == (kept["tool"], kept["export"])


@pytest.mark.requirement("ITEM-07")
def test_an_item_of_middleware_may_name_its_source_in_the_older_form() -> None:
    names = ("github__find", "a__b")
    catalog = catalog_of(*(CatalogItem(name=name) for name in names), reach=names)
    (item,) = read_items([{"name": "github__find", "source": {"type": "mcp", "extension": "mcp-github"}}], catalog)
    assert item.source == ToolSource("mcp", "mcp-github", ServerSource("mcp-github"))
    (plain,) = read_items([{"name": "a__b", "source": {"type": "config", "name": "a"}}], catalog)
    assert plain.source == ToolSource("config", "a")


@pytest.mark.requirement("DYNAMIC-02", "DYNAMIC-03", "DYNAMIC-05", "DYNAMIC-06", "DYNAMIC-12")
async def test_a_definition_with_its_handler_inside_does_the_same(make: Make, link: FakeLink) -> None:
    model = FakeModel(wants(("a", "myExt__getStatus", {}), ("b", "myExt__search", {"query": "x"})), says("done"))
    runner = make(link, model)
    api = api_of(runner)
    state = {"steps": 3}
    api.tools.register(
        {
            "name": "myExt.getStatus",
            "description": "Status.",
            "handler": lambda ctx, given: {"processedSteps": state["steps"], "given": given},
            "metadata": {"source": "test", "version": "1"},
        }
    )
    search = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "number"}}}

    def find(ctx: Any, given: Any) -> Any:
        return {"results": [given["query"]] * given.get("limit", 10), "total": given.get("limit", 10)}

    api.tools.register({"name": "myExt.search", "description": "Search.", "parameters": search, "handler": find})
    await runner.run(event_frame("e1", "go"))
    assert [item.name for item in model.requests[0].tools][-2:] == ["myExt__getStatus", "myExt__search"]
    assert from_raw(results(model)[0].output, dict) == {"processedSteps": 3, "given": {}}  # type: ignore[arg-type]
    assert from_raw(results(model)[1].output, dict)["total"] == 10  # type: ignore[arg-type]
    tool = runner.instance.tools.get("myExt__getStatus")
    assert tool is not None
    assert tool.metadata == {"source": "test", "version": "1"}
    for missing in ("name", "description", "handler"):
        whole = {"name": "a__b", "description": "x", "handler": print}
        with pytest.raises(GoondanError, match=f"no {missing}"):
            api.tools.register({key: value for key, value in whole.items() if key != missing})
    with pytest.raises(GoondanError, match="is no function"):
        api.tools.register({"name": "a__b", "description": "x", "handler": "f"})


#: Twenty-six definitions, each of which applies the next one twice: 67 million looks at one value.
BOMB: dict[str, Any] = {
    "type": "object",
    "$defs": {
        **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]} for n in range(26)},
        "a26": {},
    },
    "$ref": "#/$defs/a0",
}


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"name": "bash__exec", "description": "x"}, "E_TOOL_NAME_CONFLICT"),
        ({"name": "other__tool", "description": "x"}, "E_TOOL_NAME_CONFLICT"),
        ({"name": "sp ace", "description": "x"}, "E_USAGE"),
        ({"name": "x" * 65, "description": "x"}, "E_USAGE"),
        ({"name": 5, "description": "x"}, "E_USAGE"),
        ({"name": "a__b", "description": 5}, "E_USAGE"),
        ({"name": "a__b", "description": "x", "parameters": {"type": "nonsense"}}, "E_CONFIG_SCHEMA"),
        ({"name": "a__b", "description": "x", "parameters": {"type": "array"}}, "E_CONFIG_SCHEMA"),
        ({"name": "a__b", "description": "x", "parameters": "object"}, "E_USAGE"),
        ([], "E_USAGE"),
        ({"name": "a__b", "description": "x", "parameters": BOMB}, "E_CONFIG_SCHEMA"),
        ({"name": "a__b", "description": "x", "parameters": {"x": float("nan")}}, "E_USAGE"),
        (None, "E_USAGE"),
    ],
)
def test_what_cannot_be_registered_is_said_and_changes_nothing(item: Any, code: str) -> None:
    tools = DynamicTools({"bash__exec": CatalogItem(name="bash__exec")})
    tools.register({"name": "other.tool"}, print, extension="other")
    with pytest.raises(GoondanError) as raised:
        tools.register(item, print, extension="mine")
    assert raised.value.info.code == code
    assert [entry.name for entry in tools.exposed] == ["other__tool"]


@pytest.mark.requirement("HANDLER-02")
async def test_a_blocking_handler_does_not_stop_the_agent_and_async_ones_run_side_by_side(make: Make) -> None:
    threads: list[bool] = []
    other_ran = threading.Event()

    def blocking(ctx: Any, given: Any) -> bool:
        threads.append(threading.current_thread() is threading.main_thread())
        return other_ran.wait(20)

    async def quick(ctx: Any, given: Any) -> str:
        other_ran.set()
        return "done"

    model = FakeModel(wants(("a", "slow__one", {}), ("b", "quick__one", {})), says("done"))
    runner = make(FakeLink(), model)
    api = api_of(runner)
    api.tools.register({"name": "slow.one", "description": "x", "handler": blocking})
    api.tools.register({"name": "quick.one", "description": "x", "handler": quick})
    await runner.run(event_frame("e1", "go"))
    assert threads == [False]
    assert from_raw(results(model)[0].output, bool), "one that blocks waits for the other, which runs"  # type: ignore[arg-type]


async def test_a_call_that_hangs_ends_with_the_turns_time(make: Make, link: FakeLink) -> None:
    async def hang(ctx: Any, given: Any) -> None:
        await asyncio.sleep(60)

    model = FakeModel(wants(("a", "hang__one", {})), says("too late"))
    runner = make(link, model)
    api_of(runner).tools.register({"name": "hang.one", "description": "x", "handler": hang})
    await asyncio.wait_for(runner.run(event_frame("e1", "go", deadline_ms=500)), 5)  # the call begins in it, also late
    stored = runner.instance.store.load_messages()[2]
    assert code_of(stored.data.content[0].result) == "E_TOOL_TIMEOUT"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["plain", "__x", "x__", ".x", "x.", "a.b.c", "a b.c", "", 5])
async def test_a_name_says_whose_the_tool_is(make: Make, name: Any) -> None:
    runner = make(FakeLink(), FakeModel())
    with pytest.raises(GoondanError) as caught:
        api_of(runner).tools.register({"name": name, "description": "x", "handler": print})
    assert caught.value.info.code == "E_USAGE"
    if name == "plain":
        assert "weather-ext.plain" in (caught.value.info.suggestion or "")


@pytest.mark.requirement("EXT-03", "EXT-10")
def test_a_resource_reads_by_key_and_by_attribute() -> None:
    resource = Resource({"kind": "Extension", "metadata": {"name": "x"}, "spec": {"entry": "a.py", "config": {"k": 1}}})
    assert resource.metadata.name == resource["metadata"]["name"] == "x"
    assert resource.spec.config == {"k": 1}
    assert type(resource.spec.config) is dict, "as it was written, and the extension's own"
    assert resource.api_version is None
    assert "apiVersion" not in resource
    assert len(resource) == 3
    with pytest.raises(AttributeError):
        setattr(resource, "kind", "Tool")  # noqa: B010


def test_a_resource_is_json_and_a_copy_of_it_is_the_readers_own() -> None:
    resource = Resource({"metadata": {"name": "x", "labels": {"tier": "base"}}})
    assert json.dumps(resource.metadata.labels) == '{"tier": "base"}'
    assert json.loads(json.dumps(resource)) == {"metadata": {"name": "x", "labels": {"tier": "base"}}}
    changes: list[tuple[Any, list[Any]]] = [(resource.update, [{}]), (resource.pop, ["kind"]), (resource.clear, [])]
    for change, given in (*changes, (resource.__setitem__, ["a", 1])):
        with pytest.raises(AttributeError, match="read-only"):
            change(*given)
    copied = copy.deepcopy(resource)
    copied["metadata"]["name"] = "y"
    assert (type(copied), resource.metadata.name) == (dict, "x")


@pytest.mark.requirement("DYNAMIC-09")
@pytest.mark.parametrize("way", ["spec.tools", "step.tools", "step.config", "none"])
async def test_a_tool_of_a_v09_extension_is_offered_when_something_names_it(make: Make, way: str) -> None:
    runner = make(FakeLink(), model := FakeModel(says("one")), dynamic=["skills__list"] if way == "spec.tools" else [])
    api = api_of(runner, exposes_tools=False)
    item = {"name": "skills.list", "description": "x"}
    api.tools.register(item, lambda ctx, given: 1)

    def add_to_catalog(ctx: Any) -> Any:
        return ctx.replace(tool_catalog=[*ctx.tool_catalog, item])

    def add_to_config(ctx: Any) -> Any:
        config = ctx.effective_config
        tools = [*config["tools"], {"kind": "Tool", "name": "skills.list"}]
        return ctx.replace(effective_config={**config, "tools": tools})

    if way == "step.tools":
        api.pipelines.mutate("step.tools", add_to_catalog)
    elif way == "step.config":
        api.pipelines.mutate("step.config", add_to_config)
    await runner.run(event_frame("e1", "go"))
    names = [tool.name for tool in model.requests[0].tools]
    assert names == ["bash__exec", "notes__add", *([] if way == "none" else ["skills__list"])]


@pytest.mark.requirement("ITEM-06")
async def test_the_source_of_a_tool_of_an_mcp_extension_is_whole(make: Make) -> None:
    runner = make(FakeLink(), model := FakeModel(says("done")))
    item = {"name": "github__create_issue", "description": "x", "source": {"type": "mcp"}}
    api_of(runner, "mcp-github").tools.register(item, lambda ctx, given: 1)
    await runner.run(event_frame("e1", "go"))
    assert msgspec.to_builtins(model.requests[0].tools[-1].source) == {
        "type": "mcp",
        "name": "mcp-github",
        "mcp": {"extensionName": "mcp-github"},
    }


@pytest.mark.requirement("DYNAMIC-10")
async def test_step_middleware_sees_registered_tools_takes_them_out_and_changes_them(make: Make) -> None:
    link, model = FakeLink(), FakeModel(wants(("a", "gone__it", {})), says("done"))
    runner = make(link, model)
    api = api_of(runner)
    ran: list[str] = []
    for name in ("gone.it", "kept.it"):
        api.tools.register(
            {"name": name, "description": "As registered.", "handler": lambda ctx, given: ran.append("x")}
        )
    seen: list[list[str]] = []

    async def step(ctx: Any) -> Any:
        seen.append([item.name for item in ctx.tool_catalog])
        kept = [item for item in ctx.tool_catalog if item.name != "gone__it"]
        ctx.tool_catalog = [
            {"name": item.name, "description": "Changed."} if item.name == "kept__it" else item for item in kept
        ]
        return await ctx.next()

    api.pipeline.register("step", step)
    await runner.run(event_frame("e1", "go"))
    assert {"gone__it", "kept__it"} <= set(seen[0])
    offered = {item.name: item.description for item in model.requests[0].tools}
    assert offered["kept__it"] == "Changed."
    assert "gone__it" not in offered
    assert [code_of(result) for result in results(model)] == ["E_TOOL_NOT_IN_CATALOG"]
    assert ran == []


# --- tools that bundled extensions bring ------------------------------------------------------------------------------

DRILL = CatalogItem(
    name="drill__turn",
    description="Make a hole.",
    parameters={"type": "object"},
    source=ToolSource("extension", "drill"),
)


@pytest.mark.parametrize("asked", ["drill__turn", "drill.turn"])
async def test_a_brought_tool_is_shown_from_the_next_step_on_and_runs_in_the_tool_host(make: Make, asked: str) -> None:
    link = FakeLink()
    model = FakeModel(wants(("a", asked, {"deep": 1})), says("done"), says("bye"))
    runner = make(link, model, registry=[DRILL], catalog=[], addable=["drill__turn"])
    api_of(runner, "drill", tools=["drill"]).tools.bring("drill.turn")
    await runner.run(event_frame("e1", "go"))
    assert [item.name for item in model.requests[0].tools] == ["drill__turn"]
    assert [frame.tool for frame in link.calls] == ["drill__turn"]
    assert from_raw(results(model)[0].output, dict) == {"tool": "drill__turn", "args": {"deep": 1}}  # type: ignore[arg-type]
    runner.instance.tools.unregister("drill.turn", extension="another")
    runner.instance.tools.unregister("drill.turn", extension="drill")
    await runner.run(event_frame("e2", "again"))
    assert model.requests[-1].tools == []


async def test_a_brought_tool_that_nobody_shows_cannot_be_called(make: Make, link: FakeLink) -> None:
    model = FakeModel(wants(("a", "drill__turn", {})), says("done"))
    await make(link, model, registry=[DRILL], catalog=[], addable=["drill__turn"]).run(event_frame("e1", "go"))
    assert code_of(results(model)[0]) == "E_TOOL_NOT_IN_CATALOG"
    assert link.calls == []


@pytest.mark.parametrize("name", ["bash__exec", "nothing__here", "drill", 5])
async def test_an_extension_brings_only_what_its_manifest_names(make: Make, name: Any) -> None:
    runner = make(FakeLink(), FakeModel(), registry=[DRILL, CatalogItem(name="bash__exec")], catalog=[])
    with pytest.raises(GoondanError, match="brings no tool"):
        api_of(runner, "drill").tools.bring(name)
    with pytest.raises(GoondanError, match="brings no tool"):
        api_of(runner, "another").tools.bring("drill__turn")


async def test_a_brought_tool_goes_with_its_extension(make: Make) -> None:
    runner = make(FakeLink(), FakeModel(), registry=[DRILL], catalog=[])
    tools = runner.instance.tools
    api_of(runner, "drill").tools.bring("drill.turn")
    assert (tools.find("drill__turn"), tools.get("drill__turn"), tools.dotted) == (
        DRILL, None, {"drill__turn": "drill.turn"},
    )  # fmt: skip
    with pytest.raises(GoondanError, match="belongs to the bundle"):
        api_of(runner, "another").tools.register({**ITEM, "name": "drill__turn"}, print)
    tools.unregister_all("drill")
    assert tools.exposed == []
