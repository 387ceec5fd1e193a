"""The specification's rules of tools, on the whole way: bundle, agent, middleware, broker, tool host, jail, and back.

One swarm serves all tests. What the model was shown and told stands in the requests of a scripted model server; what
middleware saw, in the file that the extension writes; what the handler saw, in what it returned.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox
from tests.process.scripted_model import Answer, ScriptedModel, scripted_model

#: What every agent has besides, to read results that it was shown shortened.
READS = "tool-result__read"
BUNDLE = documents(
    "Model scripted {provider: openai, model: m, endpoint: ENDPOINT}",
    "Tool words {entry: ./tools/words.py, errorMessageLimit: 200, exports: [{name: about, "
    "description: What the handler sees., parameters: {type: object, properties: {text: {type: string}, "
    "filters: {type: object, properties: {status: {type: string, enum: [active, inactive]}}}}, required: [text], "
    "additionalProperties: false}}, {name: list-all}, {name: later}, {name: fail}]}",
    "Tool hidden {entry: ./tools/words.py, exports: [{name: list-all}, {name: fail}]}",
    "Extension weather-ext {entry: ./ext/probe.py, config: {log: LOGFILE}}",
    "Agent main {modelConfig: {modelRef: Model/scripted}, tools: [{ref: Tool/words}], "
    'extensions: [{ref: Extension/weather-ext}], policy: {toolCalls: {extensionsMayAdd: ["hidden__*"]}}}',
    "Agent trusted {modelConfig: {modelRef: Model/scripted}, tools: [Tool/words], "
    'policy: {toolCalls: {allowRegistry: ["hidden__*"]}}}',
    "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/trusted}]}",
).replace("{name: words}", "{name: words, labels: {tier: own}}")
WORDS = '''\
import asyncio, os, sys

NAMES = ["agent_name", "instance_key", "turn_id", "tool_call_id", "workdir"]
REMOVED = ["swarm_bundle", "swarmBundle", "oauth", "instance", "swarm", "agent", "runtime"]

def about(ctx, input):
    """Everything a handler can know."""
    ctx.logger.warn("seen by", ctx.tool_call_id)
    fixed = []
    for name in [*NAMES, "message", "logger"]:
        try:
            setattr(ctx, name, "other")
        except AttributeError:
            fixed.append(name)
    message = ctx.message
    message.metadata["mine"] = 1
    return {
        "input": input, "pid": os.getpid(), "cwd": os.getcwd(), "fixed": fixed,
        "removed": [name for name in REMOVED if getattr(ctx, name, None) is not None],
        "message": {"id": message.id, "data": message.data, "createdAt": str(message.created_at)},
        "source": message.source["type"],
        "methods": [name for name in ("debug", "info", "warn", "error") if callable(getattr(ctx.logger, name))],
        **{name: getattr(ctx, name) for name in NAMES},
    }

async def later(ctx, input):
    await asyncio.sleep(0)
    return None

class NoSuchCity(Exception):
    code = "E_NO_CITY"

def fail(ctx, input):
    if "code" in input:
        raise NoSuchCity("nowhere")
    raise KeyError("x" * 5000) if "long" in input else ValueError("plainly")

handlers = {"about": about, "later": later, "fail": fail}
handlers["list-all"] = lambda ctx, input: sorted(os.listdir(ctx.workdir))
'''
PROBE = """\
import json, os

def register(api, config):
    def note(**what):
        with open(config["log"], "a") as out:
            out.write(json.dumps(what) + "\\n")

    async def step(ctx):
        said = ctx.turn.input_event.input
        items = [{"name": i.name, "description": i.description, "parameters": i.parameters,
                  "source": {"type": i.source.type, "name": i.source.name}} for i in ctx.tool_catalog]
        note(said=said, step=ctx.step_index, catalog=items, pid=os.getpid())
        if said == "narrow" and ctx.step_index == 0:
            ctx.tool_catalog = [i for i in ctx.tool_catalog if i.name not in ("words__later", "words__list-all")]
            ctx.tool_catalog.append({"name": "words__list-all", "description": "renewed"})
            ctx.tool_catalog.append({"name": "hidden__list-all", "description": "now shown"})
        return await ctx.next()

    async def call(ctx):
        note(call=ctx.tool_call_id, tool=ctx.tool_name, args=ctx.args)
        return await ctx.next()

    api.pipeline.register("step", step)
    api.pipeline.register("toolCall", call)

    async def get(ctx, input):
        if input["city"] == "nowhere":
            raise Exception("날씨 API 오류: 404")
        if input["city"] == "long":
            raise Exception("y" * 5000)
        return {"city": input["city"], "pid": os.getpid(), "id": ctx.tool_call_id}

    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    api.tools.register({"name": "weather__get", "description": "The weather of a city.", "parameters": parameters}, get)
"""


class Swarm:
    """The running swarm. `turn` makes the model say what it is told, and returns the answer."""

    def __init__(self, kernel: Sandbox, model: ScriptedModel) -> None:
        self.kernel = kernel
        self.model = model

    def turn(self, said: str, *answers: Answer, agent: str = "main") -> dict[str, Any]:
        """A turn in an instance of its own, that must complete."""
        self.model.scripts[said] = [*answers, f"end of {said}"]
        result = self.kernel.gdn("send", agent, said, "--instance", said, "--json")
        assert (result.status, result.json["response"]) == (0, f"end of {said}"), result.out
        return dict(result.json)

    def results(self, said: str) -> dict[str, Any]:
        """What the model was told about each call."""
        return self.model.results(said)

    @property
    def noted(self) -> list[dict[str, Any]]:
        """What the extension wrote down, of all turns."""
        return [json.loads(line) for line in (self.kernel.home / "probe.log").read_text().splitlines()]


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with scripted_model() as model:
        with sandbox("", {"OPENAI_API_KEY": "k"}) as kernel:
            bundle = BUNDLE.replace("ENDPOINT", model.base).replace("LOGFILE", str(kernel.home / "probe.log"))
            kernel.bundle.write_text(bundle)
            for name, text in (("tools/words.py", WORDS), ("ext/probe.py", PROBE)):
                (kernel.home / name).parent.mkdir()
                (kernel.home / name).write_text(text)
            kernel.detach()
            yield Swarm(kernel, model)


@pytest.mark.requirement("NAME-01", "NAME-02", "NAME-03", "NAME-06", "CATALOG-01", "CATALOG-02", "CATALOG-04")
@pytest.mark.requirement("CATALOG-06", "CATALOG-08", "CATALOG-09", "SCHEMA-08", "SCHEMA-11")
@pytest.mark.requirement("ITEM-01", "ITEM-02", "ITEM-04", "ITEM-05", "DYNAMIC-01", "DYNAMIC-10", "PIPELINE-02")
def test_the_model_is_shown_the_agents_tools_and_the_extensions(swarm: Swarm) -> None:
    swarm.turn("names", [("c1", "words__list-all", {}), ("c2", "weather__get", {"city": "Seoul"})])
    offered = swarm.model.offered("names")
    exports = ["about", "list-all", "later", "fail"]
    assert list(offered) == [READS, *[f"words__{export}" for export in exports], "weather__get"]
    schema = offered["words__about"]["parameters"]
    assert schema["properties"]["filters"]["properties"]["status"]["enum"] == ["active", "inactive"]
    assert offered["words__about"]["description"] == "What the handler sees."
    (noted,) = [line for line in swarm.noted if line.get("said") == "names" and line["step"] == 0]
    assert [READS, *(item["name"] for item in noted["catalog"])] == list(offered)
    assert noted["catalog"][0]["source"] == {"type": "config", "name": "words"}
    assert noted["catalog"][0]["parameters"] == schema
    assert noted["catalog"][-1] == {
        "name": "weather__get",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "source": {"type": "extension", "name": "weather-ext"},
    }
    assert swarm.results("names")["c1"] == []
    assert swarm.results("names")["c2"]["city"] == "Seoul"


@pytest.mark.requirement("CALL-08", "CALL-10", "CONTEXT-01", "CONTEXT-02", "CONTEXT-03", "CONTEXT-04", "CONTEXT-05")
@pytest.mark.requirement(
    "CONTEXT-06", "CONTEXT-07", "CONTEXT-08", "CONTEXT-10", "HANDLER-01", "HANDLER-05", "RESULT-02"
)
def test_a_call_reaches_its_handler_with_its_id_and_its_context(swarm: Swarm) -> None:
    args = {"text": "여기", "filters": {"status": "active"}}
    answer = swarm.turn("about", [("call_77", "words__about", args)])
    seen = swarm.results("about")["call_77"]
    assert (seen["input"], seen["tool_call_id"]) == (args, "call_77")
    assert (seen["agent_name"], seen["instance_key"], seen["turn_id"]) == ("main", "about", answer["turnId"])
    assert seen["workdir"].endswith("/instances/main/about/workspace")
    assert seen["cwd"] == seen["workdir"]
    assert seen["fixed"] == ["agent_name", "instance_key", "turn_id", "tool_call_id", "workdir", "message", "logger"]
    assert seen["removed"] == []
    assert seen["methods"] == ["debug", "info", "warn", "error"]
    assert "seen by call_77" in swarm.kernel.log("toolhost")
    message = seen["message"]
    assert (message["data"]["role"], seen["source"]) == ("assistant", "assistant")
    assert "call_77" in json.dumps(message["data"])
    assert message["id"].startswith(answer["turnId"]) and message["createdAt"].startswith("20")
    (call,) = [line for line in swarm.noted if line.get("call") == "call_77"]
    assert (call["tool"], call["args"]) == ("words__about", args)
    agent = next(line["pid"] for line in swarm.noted if line.get("said") == "about")
    assert seen["pid"] != agent


@pytest.mark.requirement("CALL-01", "CALL-02", "CALL-04", "CALL-05", "CALL-06", "CALL-07", "ERROR-08")
def test_a_tool_outside_the_catalog_is_refused_and_the_turn_goes_on(swarm: Swarm) -> None:
    swarm.turn("outside", [("c1", "hidden__list-all", {}), ("c2", "no-such", {}), ("c3", "words__list-all", {})])
    told = swarm.results("outside")
    assert told["c1"]["error"]["message"] == "Tool 'hidden__list-all' is not available in the current Tool Catalog."
    for refused in ("c1", "c2"):
        error = told[refused]["error"]
        assert (error["code"], error["name"]) == ("E_TOOL_NOT_IN_CATALOG", "ToolNotInCatalogError")
        assert error["suggestion"] and "spec.tools" not in error["suggestion"], (
            "what only a person can do is no advice for a model"
        )
        assert error["helpUrl"].endswith("/E_TOOL_NOT_IN_CATALOG")
    assert told["c3"] == []
    jails = [row for row in swarm.kernel.ps() if row["role"] == "worker"]
    assert jails and not [row for row in jails if "hidden" in row["name"]], "the refused call started a jail"


@pytest.mark.requirement("CALL-03")
def test_a_policy_opens_the_registry_to_the_names_it_lists(swarm: Swarm) -> None:
    swarm.turn("policy", [("c1", "hidden__list-all", {}), ("c2", "bash__exec", {"command": "ls"})], agent="trusted")
    told = swarm.results("policy")
    assert told["c1"] == []
    assert told["c2"]["error"]["code"] == "E_TOOL_NOT_IN_CATALOG"
    assert {name for name in swarm.model.offered("policy") if not name.startswith("words__")} == {READS}
    (step, _) = swarm.kernel.gdn("trace", "--agent", "trusted", "--json").json["steps"]
    direct = {call["toolName"]: call.get("direct", False) for call in step["tools"]}
    assert direct == {"hidden__list-all": True, "bash__exec": False}, "whoever reads the trace sees the mode at work"


@pytest.mark.requirement("CATALOG-03", "CATALOG-05", "CATALOG-07", "CALL-01", "CALL-02", "PIPELINE-02")
def test_step_middleware_changes_one_steps_catalog_for_the_model_and_for_the_check(swarm: Swarm) -> None:
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("c1", "words__later", {}),
        ("c2", "hidden__list-all", {}),
        ("c5", "words__list-all", {}),
    ]
    again: list[tuple[str, str, dict[str, Any]]] = [("c3", "words__later", {}), ("c4", "hidden__list-all", {})]
    swarm.turn("narrow", calls, again)
    first, second = (swarm.model.offered("narrow", step) for step in (0, 1))
    assert ("words__later" in first, first["hidden__list-all"]["description"]) == (False, "now shown")
    assert ("words__later" in second, "hidden__list-all" in second) == (True, False)
    told = swarm.results("narrow")
    assert told["c1"]["error"]["code"] == "E_TOOL_NOT_IN_CATALOG"
    assert told["c2"] == [], "what middleware adds within the policy can be called"
    assert first["words__list-all"]["description"] == "renewed"
    assert told["c5"] == []
    assert told["c3"] is None
    assert told["c4"]["error"]["code"] == "E_TOOL_NOT_IN_CATALOG"


@pytest.mark.requirement("ERROR-01", "ERROR-02", "ERROR-03", "ERROR-04", "ERROR-05", "ERROR-06", "ERROR-07", "ERROR-08")
@pytest.mark.requirement("ERROR-10", "RESULT-01", "RESULT-05", "SCHEMA-05", "DYNAMIC-07", "DYNAMIC-11", "CALL-15")
def test_what_handlers_raise_is_told_to_the_model_cut_to_the_tools_limit(swarm: Swarm) -> None:
    swarm.turn(
        "errors",
        [("c1", "words__fail", {}), ("c2", "words__fail", {"long": 1}), ("c3", "words__fail", {"code": 1})],
        [("c4", "weather__get", {"city": "nowhere"}), ("c5", "weather__get", {"city": "long"})],
    )
    told = {call: result["error"] for call, result in swarm.results("errors").items()}
    assert (told["c1"]["code"], told["c1"]["name"], told["c1"]["message"]) == ("E_TOOL", "ValueError", "plainly")
    assert told["c1"]["suggestion"]
    assert told["c1"]["helpUrl"] == "https://docs.goondan.ai/errors/E_TOOL"
    assert len(told["c2"]["message"]) == 200 and told["c2"]["message"].endswith("x... (truncated)")
    assert (told["c3"]["code"], told["c3"]["name"]) == ("E_NO_CITY", "NoSuchCity")
    assert told["c4"]["message"] == "날씨 API 오류: 404"
    assert told["c5"]["message"] == "y" * 985 + "... (truncated)"
    swarm.turn("default limit", [("c1", "hidden__fail", {"long": 1})], agent="trusted")
    assert len(swarm.results("default limit")["c1"]["error"]["message"]) == 1000
    (database,) = swarm.kernel.home.glob("state/workspaces/*/instances/main/errors/conversation.db")
    with closing(sqlite3.connect(database)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for table in tables for row in db.execute(f'SELECT * FROM "{table}"')]
    stored = b"".join(cell if isinstance(cell, bytes) else str(cell).encode() for row in rows for cell in row)
    assert "날씨 API 오류: 404".encode() in stored, "the result is no part of the conversation"
