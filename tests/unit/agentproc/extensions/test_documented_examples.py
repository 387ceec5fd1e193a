"""The examples of the extension document of v0.9 and of the tool document of v2, line by line, with their effects.

They are modules in folders of their own, loaded as an agent loads its extensions, and run in whole turns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.extensions.test_points import DOCUMENT, result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, settle, the_answer

BASIC = """
import time

async def register(api):
    # 1. the state at the beginning
    state = api.ext_state()
    state["processedSteps"] = 0

    # 2. the configuration
    config = api.extension.spec.config or {}
    max_tokens = config.get("maxTokens", 8000)
    state["maxTokens"] = max_tokens

    # 3. the pipeline
    async def count(ctx):
        state["processedSteps"] += 1
        state["lastProcessedAt"] = time.time()
        if config.get("enableLogging"):
            api.logger.info(f"Step {state['processedSteps']} completed")
        return ctx

    api.pipelines.mutate("step.post", count)

    # 4. an event, if wanted
    async def available(payload):
        api.logger.info(f"Repo available: {payload['path']}")

    api.events.on("workspace.repoAvailable", available)

    # 5. told that it is there, if wanted
    api.events.emit("extension.initialized", {"name": api.extension.metadata.name, "timestamp": time.time()})
"""

LISTENS = """
def register(api):
    heard = api.instance.shared.setdefault("heard", [])
    api.events.on("**", heard.append)
"""

MUTATORS = """
import time

def register(api):
    async def add_block(ctx):
        blocks = [*ctx.blocks]
        blocks.append({"type": "custom.info", "data": {"timestamp": time.time(), "stepIndex": ctx.step.index}})
        return {**ctx, "blocks": blocks}

    async def filter_tools(ctx):
        filtered = [tool for tool in ctx.tool_catalog if not tool.name.startswith("internal.")]
        return {**ctx, "tool_catalog": filtered}

    async def start(ctx):
        ctx.turn.metadata = {**ctx.turn.metadata, "startTime": time.time(), "extensionVersion": "1.0.0"}
        return ctx

    async def end(ctx):
        duration = (time.time() - ctx.turn.metadata.get("startTime", 0)) * 1000
        api.logger.info(f"Turn completed in {duration:.0f}ms")
        return ctx

    api.tools.register({"name": "internal.reset", "description": "x", "handler": print})
    api.pipelines.mutate("step.blocks", add_block)
    api.pipelines.mutate("step.tools", filter_tools)
    api.pipelines.mutate("turn.pre", start)
    api.pipelines.mutate("turn.post", end)
"""

WRAPS = """
import asyncio
import time

def register(api):
    async def timed(ctx, next):
        start = time.time()
        about = {"model": ctx.agent.spec.modelConfig.modelRef, "toolCount": len(ctx.tool_catalog)}
        api.logger.debug("LLM call starting", about)
        try:
            result = await next(ctx)
            api.logger.debug(f"LLM call completed in {(time.time() - start) * 1000:.0f}ms")
            return result
        except Exception as error:
            api.logger.error("LLM call failed", error)
            raise

    async def guard(ctx, next):
        tool_name = ctx.tool_call.name
        auth = ctx.turn.auth
        if tool_name.startswith("admin.") and not (auth and auth.actor and auth.actor.isAdmin):
            raise PermissionError(f"Permission denied for tool: {tool_name}")
        try:
            return await next(ctx)
        except Exception as error:
            api.logger.error(f"Tool execution failed: {tool_name}", error)
            raise

    async def again(ctx, next):
        await asyncio.sleep(0.001)
        ctx.step.metadata = {**ctx.step.metadata, "retryAttempt": ctx.step.metadata.get("retryAttempt", 0) + 1}
        return await next(ctx)

    def attempts(ctx):
        api.instance.shared["retryAttempt"] = ctx.step.metadata.get("retryAttempt")
        return ctx

    api.tools.register({"name": "admin.wipe", "description": "x", "handler": lambda ctx, input: "wiped"})
    api.pipelines.wrap("step.llmCall", timed)
    api.pipelines.wrap("toolCall.exec", guard)
    api.pipelines.wrap("step.llmError", again)
    api.pipelines.mutate("step.post", attempts)
"""

DYNAMIC = """
import time

async def register(api):
    # a tool
    async def echo(ctx, input):
        return {"echoed": input["message"]}

    api.tools.register({
        "name": "myExt.echo",
        "description": "Echo the input message",
        "parameters": {
            "type": "object",
            "properties": {"message": {"type": "string", "description": "Message to echo"}},
            "required": ["message"],
        },
        "handler": echo,
        "metadata": {"source": "myExtension", "version": "1.0.0"},
    })

    # a tool without parameters
    async def get_status(ctx, input):
        state = api.ext_state()
        return {"processedSteps": state["processedSteps"], "uptime": time.time() - state["startTime"]}

    api.tools.register({
        "name": "myExt.getStatus",
        "description": "Get current extension status",
        "handler": get_status,
    })

    # a tool with many parameters
    async def search(ctx, input):
        query = str(input["query"])
        limit = input.get("limit") or 10
        # what is searched for...
        return {"results": [], "total": 0}

    api.tools.register({
        "name": "myExt.search",
        "description": "Search for items matching criteria",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Search query"},
                "filters": {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string"},
                        "status": {"type": "string", "enum": ["active", "inactive"]},
                    },
                },
                "limit": {"type": "number", "description": "Maximum results"},
            },
            "required": ["query"],
        },
        "handler": search,
    })
"""

#: 6.4: a tool that is registered is offered when a patch of the configuration names it.
#: What the example's second tool reads: its extension says elsewhere what it has done since when.
STATUS = (
    DYNAMIC
    + """
    api.ext_state().update(processedSteps=3, startTime=time.time())
"""
)

#: The tool document of v2: middleware that says how long each call has taken.
TIMED = """
import time

def register(api):
    async def timed(ctx):
        # before next(): the arguments may be looked at and changed
        api.logger.debug(f"Tool 호출: {ctx.tool_name}", ctx.args)

        start_time = time.time()
        result = await ctx.next()
        elapsed = (time.time() - start_time) * 1000

        # after next(): the result may be looked at and changed
        api.logger.debug(f"Tool 완료: {ctx.tool_name} ({elapsed:.0f}ms)")

        return result

    api.pipeline.register("toolCall", timed)
"""

#: The tool document of v2: a tool that an extension registers and that asks a server. The address is filled in.
WEATHER = """
import asyncio
import json
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, build_opener

def fetch(url):
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=10) as response:
            return response.status, response.read()
    except HTTPError as error:
        return error.code, error.read()

def register(api):
    async def get(ctx, input):
        city = str(input["city"])
        status, body = await asyncio.to_thread(fetch, f"https://api.weather.example/v1/current?city={quote(city)}")
        if status != 200:
            raise RuntimeError(f"날씨 API 오류: {status}")
        return json.loads(body)

    api.tools.register(
        {
            "name": "weather__get",
            "description": "특정 도시의 현재 날씨 정보를 조회합니다",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "도시 이름 (예: Seoul, Tokyo)"}},
                "required": ["city"],
            },
        },
        get,
    )
"""

EVENTS = """
import time

async def register(api):
    scanned = api.instance.shared.setdefault("scanned", [])

    async def on_repo(payload):
        path = payload["path"]
        api.logger.info(f"Repo available at {path}")
        scanned.append(path)

    async def on_any(payload):
        api.logger.debug("Workspace event:", payload)

    async def granted(payload):
        api.logger.info("OAuth granted:", payload["oauthAppRef"])

    api.events.on("workspace.repoAvailable", on_repo)
    api.events.on("workspace.*", on_any)
    api.events.once("auth.granted", granted)
    api.events.emit("myExtension.initialized", {
        "name": api.extension.metadata.name,
        "timestamp": time.time(),
        "config": api.extension.spec.config,
    })
"""

STATS = """
import time

async def register(api):
    state = api.ext_state()
    state["processedSteps"] = 0
    state["catalog"] = []
    state["lastUpdated"] = time.time()

    async def count(ctx):
        state["processedSteps"] += 1
        state["lastUpdated"] = time.time()
        return ctx

    async def stats(ctx, input):
        return {
            "processedSteps": state["processedSteps"],
            "catalogSize": len(state["catalog"]),
            "lastUpdated": state["lastUpdated"],
        }

    api.pipelines.mutate("step.post", count)
    api.tools.register({"name": "myExt.getStats", "description": "Get extension statistics", "handler": stats})
"""

SHARES = """
async def register(api):
    name = api.extension.metadata.name or "unknown"
    api.instance.shared[f"{name}:data"] = {"initialized": True, "version": "1.0.0"}

    async def read(ctx):
        other = api.instance.shared.get("otherExt:data")
        if other:
            api.logger.debug("Other extension data:", other)
        return ctx

    api.pipelines.mutate("step.pre", read)
"""

PERSISTS = """
import json
import os
import time
from pathlib import Path

async def register(api):
    state_dir = os.environ.get("GOONDAN_STATE_ROOT") or os.path.expanduser("~/.goondan")
    state_file = Path(state_dir, "extensions", api.extension.metadata.name or "unknown", "state.json")

    persisted = {}
    try:
        persisted = json.loads(state_file.read_text("utf-8"))
    except (OSError, ValueError):
        pass  # no file: the state at the beginning

    async def save():
        state_file.parent.mkdir(parents=True, exist_ok=True)
        state_file.write_text(json.dumps(persisted, indent=2))

    async def turn_post(ctx):
        persisted["lastTurnAt"] = time.time()
        persisted["turns"] = persisted.get("turns", 0) + 1
        await save()
        return ctx

    api.pipelines.mutate("turn.post", turn_post)
"""

CLEANS = """
class Connection:
    open = True

    async def close(self):
        self.open = False

async def register(api):
    connection = api.instance.shared["connection"] = Connection()

    async def close(payload):
        await connection.close()

    api.events.on("extension.cleanup", close)
"""


class Examples:
    """Agents with examples as their extensions."""

    def __init__(self, make: Make, place: Path) -> None:
        self._make = make
        self._place = place

    async def start(
        self, link: FakeLink, model: FakeModel, *, exposes: bool = True, **codes: str | tuple[str, dict[str, Any]]
    ) -> TurnRunner:
        """An agent whose extensions have these names and modules (with their config, if they have any). `exposes`:
        their tools are offered by themselves, which those of v0.9 are not.
        """
        specs = []
        for name, given in codes.items():
            code, config = given if isinstance(given, tuple) else (given, {})
            folder = self._place / "bundle" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "index.py").write_text(code)
            resource = {"kind": "Extension", "metadata": {"name": name}, "spec": {"config": config} if config else {}}
            entry = str(folder / "index.py")
            specs.append(ExtensionSpec(name=name, entry=entry, resource=resource, config=config, exposes_tools=exposes))
        runner = self._make(link, model, extensions=specs, resource=DOCUMENT)
        await runner.load_extensions()
        return runner


@pytest.fixture
def examples(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examples:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", "")  # what load_extensions sets is taken back
    return Examples(make, tmp_path)


def state_of(runner: TurnRunner, name: str) -> dict[str, Any]:
    return runner.instance.extensions._loaded[name].state


@pytest.mark.requirement("EXT-15", "EVENTS-12", "EXT-11")
async def test_the_basic_extension(examples: Examples, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = await examples.start(FakeLink(), model, listens=LISTENS, basic=(BASIC, {"enableLogging": True}))
    (told,) = runner.instance.extensions._shared["heard"]
    assert (told["type"], told["name"]) == ("extension.initialized", "basic")
    assert isinstance(told["timestamp"], float)
    (tmp_path / ".git").write_text("gitdir: elsewhere")
    await runner.run(event_frame("e1", "go", workdir=str(tmp_path)))
    state = state_of(runner, "basic")
    assert (state["processedSteps"], state["maxTokens"]) == (2, 8000)
    assert "Step 2 completed" in caplog.text
    await settle()
    assert f"Repo available: {tmp_path}" in caplog.text


async def test_the_basic_extension_reads_its_config(examples: Examples) -> None:
    runner = await examples.start(FakeLink(), FakeModel(), basic=(BASIC, {"maxTokens": 500}))
    assert state_of(runner, "basic")["maxTokens"] == 500


@pytest.mark.requirement("PIPELINE-17", "PIPELINE-18", "PIPELINE-19")
async def test_the_mutators(examples: Examples, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = FakeModel(says("done"))
    runner = await examples.start(FakeLink(), model, mutators=MUTATORS)
    await runner.run(event_frame("e1", "go"))
    (block,) = model.requests[0].blocks
    assert (block["type"], block["data"]["stepIndex"]) == ("custom.info", 0)
    assert [item.name for item in model.requests[0].tools] == ["bash__exec", "notes__add"]
    assert "Turn completed in " in caplog.text
    assert float(caplog.text.partition("Turn completed in ")[2].partition("ms")[0]) < 60_000


@pytest.mark.requirement("PIPELINE-20", "PIPELINE-21", "PIPELINE-22", "PIPELINE-26")
async def test_the_wraps(examples: Examples, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    failures = [fail("E_MODEL_FAILED", "busy"), fail("E_MODEL_FAILED", "busy")]
    link = FakeLink(lambda tool, args: ok(1))
    model = FakeModel(*failures, wants(("a", "admin__wipe", {}), ("b", "notes__add", {})), says("done"))
    runner = await examples.start(link, model, wraps=WRAPS)
    await runner.run(event_frame("e1", "go"))
    assert the_answer(link).status == "completed"
    for said in ("LLM call starting", "Model/fast", "LLM call completed in", "LLM call failed"):
        assert said in caplog.text
    error = result_of(runner, "a").error
    assert error is not None
    assert error.message == "Permission denied for tool: admin.wipe"
    assert result_of(runner, "b").status == "ok"


async def test_an_admin_may(examples: Examples) -> None:
    model = FakeModel(fail("E_MODEL_FAILED", "busy"), wants(("a", "admin__wipe", {})), says("done"))
    runner = await examples.start(FakeLink(), model, wraps=WRAPS)
    frame: Frame = event_frame("e1", "go")
    frame.auth = to_raw({"actor": {"isAdmin": True}})
    seen: list[Any] = []
    await runner.run(frame)
    seen.append(runner.instance.extensions._shared["retryAttempt"])
    assert result_of(runner, "a").status == "ok"
    assert seen == [None]  # of the last step, which did not fail


async def test_who_only_says_that_it_is_an_admin_may_not(examples: Examples) -> None:
    """The payload is its sender's; on whose behalf it is, the broker says in the header."""
    model = FakeModel(wants(("a", "admin__wipe", {})), says("done"))
    runner = await examples.start(FakeLink(), model, wraps=WRAPS)
    frame: Frame = event_frame("e1", "go")
    frame.payload = to_raw(from_raw(frame.payload, dict) | {"auth": {"actor": {"isAdmin": True}}})
    await runner.run(frame)
    assert result_of(runner, "a").status == "error"


@pytest.mark.requirement("EVENTS-02", "EVENTS-03", "EVENTS-04", "EVENTS-12")
async def test_the_events(examples: Examples, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = FakeModel(says("done"))
    runner = await examples.start(FakeLink(), model, listens=LISTENS, events=(EVENTS, {"k": 1}))
    (told,) = runner.instance.extensions._shared["heard"]
    assert (told["type"], told["name"], told["config"]) == ("myExtension.initialized", "events", {"k": 1})
    (tmp_path / ".git").write_text("gitdir: elsewhere")
    await runner.run(event_frame("e1", "go", workdir=str(tmp_path)))
    for ref in ("OAuthApp/one", "OAuthApp/two"):
        payload = {"oauthAppRef": ref, "subject": "user:1", "scopes": ["a"]}
        runner.instance.events.emit("auth.granted", payload, emitter="the test")
    await settle()
    assert runner.instance.extensions._shared["scanned"] == [str(tmp_path)]
    assert caplog.text.count("Workspace event:") == 1
    assert "OAuth granted: OAuthApp/one" in caplog.text
    assert "OAuthApp/two" not in caplog.text


@pytest.mark.requirement("STATE-01", "STATE-02")
async def test_the_statistics(examples: Examples) -> None:
    model = FakeModel(wants(("a", "notes__add", {})), wants(("b", "myExt__getStats", {})), says("done"))
    runner = await examples.start(FakeLink(), model, stats=STATS)
    await runner.run(event_frame("e1", "go"))
    output = from_raw(result_of(runner, "b").output, dict)  # type: ignore[arg-type]
    assert (output["processedSteps"], output["catalogSize"]) == (1, 0)
    assert isinstance(output["lastUpdated"], float)


@pytest.mark.requirement("STATE-04", "STATE-05")
async def test_what_extensions_share(examples: Examples, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runner = await examples.start(FakeLink(), FakeModel(says("done")), otherExt=SHARES, mine=SHARES)
    assert sorted(runner.instance.extensions._shared) == ["mine:data", "otherExt:data"]
    await runner.run(event_frame("e1", "go"))
    assert caplog.text.count("Other extension data:") == 2


@pytest.mark.requirement("STATE-06", "STATE-08")
async def test_state_that_an_extension_keeps_in_a_file(examples: Examples, tmp_path: Path) -> None:
    """A missing file is the state at the beginning; the folder is made at the first save; a new process goes on."""
    for turns in (1, 2):
        runner = await examples.start(FakeLink(), FakeModel(says("done")), persists=PERSISTS)
        assert (state_of(runner, "persists"), runner.instance.extensions._shared) == (
            {},
            {},
        )  # the runtime itself keeps nothing
        await runner.run(event_frame(f"e{turns}", "go"))
        state_of(runner, "persists")["mine"] = runner.instance.extensions._shared["persists:mine"] = turns
        (file,) = Path(runner.instance.spec.state_dir).glob("extensions/persists/state.json")
        assert json.loads(file.read_text())["turns"] == turns
        assert not list(Path(runner.instance.spec.state_dir).glob("instances/*/*/extensions"))


@pytest.mark.requirement("RECONCILE-05")
async def test_the_connection_is_closed_at_the_end(examples: Examples) -> None:
    runner = await examples.start(FakeLink(), FakeModel(), cleans=CLEANS)
    connection = runner.instance.extensions._shared["connection"]
    assert connection.open
    async with asyncio.timeout(5):
        await runner.close()
    assert not connection.open


async def test_the_dynamic_tools(examples: Examples) -> None:
    """6.3: each of the three answers; arguments that their schemas do not have are refused."""
    search = {"query": "x", "filters": {"type": "t", "status": "active"}, "limit": 3}
    model = FakeModel(
        wants(
            ("echo", "myExt__echo", {"message": "hello"}),
            ("status", "myExt__getStatus", {}),
            ("search", "myExt__search", search),
            ("no-message", "myExt__echo", {}),
            ("no-such-status", "myExt__search", {"query": "x", "filters": {"status": "gone"}}),
        ),
        says("done"),
    )
    runner = await examples.start(FakeLink(), model, dynamic=STATUS)
    await runner.run(event_frame("e1", "go"))
    shown = {tool.name: tool.parameters for tool in model.requests[0].tools if tool.name.startswith("myExt")}
    assert list(shown) == ["myExt__echo", "myExt__getStatus", "myExt__search"]
    assert (shown["myExt__search"] or {})["required"] == ["query"]
    outputs = [from_raw(result_of(runner, call).output or b"", dict) for call in ("echo", "status", "search")]
    uptime = outputs[1].pop("uptime")
    assert 0 <= uptime < 60
    assert outputs == [{"echoed": "hello"}, {"processedSteps": 3}, {"results": [], "total": 0}]
    for call in ("no-message", "no-such-status"):
        error = result_of(runner, call).error
        assert error is not None
        assert error.code == "E_TOOL_INVALID_ARGS"


async def test_middleware_that_times_each_call(examples: Examples, caplog: pytest.LogCaptureFixture) -> None:
    """Its two lines lie around the call, and the call's result is what it was without it."""
    caplog.set_level(logging.DEBUG)
    lines: list[int] = []

    def handler(tool: str, args: Any) -> Any:
        lines.append(caplog.text.count("Tool 호출: notes__add"))
        lines.append(caplog.text.count("Tool 완료"))
        return ok({"added": args})

    model = FakeModel(wants(("a", "notes__add", {"text": "milk"})), says("done"))
    runner = await examples.start(FakeLink(handler), model, timed=TIMED)
    await runner.run(event_frame("e1", "go"))
    assert lines == [1, 0], "said before the call, and not yet after it"
    assert from_raw(result_of(runner, "a").output or b"", object) == {"added": {"text": "milk"}}
    assert "milk" in next(line for line in caplog.text.splitlines() if "Tool 호출: notes__add" in line)
    (took,) = re.findall(r"Tool 완료: notes__add \((\d+)ms\)", caplog.text)
    assert int(took) < 60_000


class Weather(BaseHTTPRequestHandler):
    """Knows the weather of Seoul."""

    def do_GET(self) -> None:
        known = self.path == "/v1/current?city=Seoul%20%26%20more"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b'{"sky": "clear"}' if known else b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def weather_api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Weather)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_the_weather(examples: Examples, weather_api: str) -> None:
    """The tool is in the catalog of the next step by itself; what it raises is a result for the model."""
    code = WEATHER.replace("https://api.weather.example", weather_api)
    assert code != WEATHER
    link = FakeLink()
    model = FakeModel(
        wants(("a", "weather__get", {"city": "Seoul & more"}), ("b", "weather__get", {"city": "Atlantis"})),
        says("done"),
    )
    runner = await examples.start(link, model, weather=code)
    await runner.run(event_frame("e1", "go"))
    (item,) = [tool for tool in model.requests[0].tools if tool.name == "weather__get"]
    assert (item.source.type, item.source.name) == ("extension", "weather")
    assert item.description == "특정 도시의 현재 날씨 정보를 조회합니다"
    assert from_raw(result_of(runner, "a").output or b"", object) == {"sky": "clear"}
    error = result_of(runner, "b").error
    assert error is not None
    assert (error.code, error.message) == ("E_TOOL", "날씨 API 오류: 404")
    assert link.calls == [], "the calls run in the agent"
