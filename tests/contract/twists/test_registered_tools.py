"""Twists of tools that extensions register: 004 §6, 001 §12 and §13, 000 §10 (as in tests/requirements.yaml)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.twists.stage import NOTES, Stage, calls, layer, new, old
from tests.unit.agentproc.turns import failed

AUTO = {"goondan.ai/expose-tools": "auto"}
ECHO = """
    def register(api):
        async def echo(ctx, input):
            note(input)
            return {"echoed": input["message"]}

        api.tools.register(
            {
                "name": "myExt.echo",
                "description": "Echo the input message",
                "parameters": {
                    "type": "object",
                    "properties": {"message": {"type": "string"}},
                    "required": ["message"],
                },
                "handler": echo,
                "metadata": {"source": "myExtension", "version": "1.0.0", "secret": "not for models"},
            }
        )
"""


@pytest.mark.requirement("NAME-14")
async def test_both_names_reach_one_handler_and_arguments_are_checked(stage: Stage) -> None:
    """6.3 echo by both names, without its message, and with one of another type."""
    actor = await stage.agent(old("my-ext", ECHO, annotations=AUTO))
    asked = calls(
        ("a", "myExt__echo", {"message": "x"}),
        ("b", "myExt.echo", {"message": "y"}),
        ("c", "myExt__echo", {}),
        ("d", "myExt.echo", {"message": 5}),
        ("e", "myext__echo", {"message": "case counts"}),
    )
    await actor.turn("x", asked, "done")
    found = actor.results()
    assert [found[call].get("output") for call in "ab"] == [{"echoed": "x"}, {"echoed": "y"}]
    assert [found[call].get("code") for call in "cde"] == ["E_TOOL_INVALID_ARGS"] * 2 + ["E_TOOL_NOT_IN_CATALOG"]
    assert NOTES == [{"message": "x"}, {"message": "y"}]
    assert actor.shown(0).count("myExt__echo") == 1
    assert "not for models" not in str(actor.asked)
    assert actor.sent() == []


@pytest.mark.parametrize(
    "catalog",
    ["{}", "[5]", "[None]", "[{}]", "[{'name': 5}]", "['files__read']", "[{'name': 'files__read', 'parameters': []}]"],
)
async def test_catalogs_of_another_shape(stage: Stage, catalog: str) -> None:
    """ITEM-01 bent: what is no item fails the step by name, or is the tool that it names; never a crash."""
    source = f"def register(api): api.pipelines.mutate('step.tools', lambda ctx: ctx.replace(tool_catalog={catalog}))"
    actor = await stage.agent(old("shapeless", source))
    failed(await actor.turn(), "E_MIDDLEWARE", "shapeless")


async def test_registered_again_by_its_owner(stage: Stage) -> None:
    """6.1 twice with one name, dotted and not: the second takes the place of the first; there is one tool."""
    source = """
        def register(api):
            for n, name in enumerate(["twice.run", "twice__run"]):
                api.tools.register({"name": name, "description": str(n), "handler": lambda ctx, input, n=n: n})
    """
    actor = await stage.agent(new("twice", source))
    await actor.turn("x", calls(("a", "twice__run", {})), "done")
    assert actor.shown(0).count("twice__run") == 1
    assert actor.results()["a"] == {"status": "ok", "output": 1}


@pytest.mark.requirement("DYNAMIC-08")
async def test_registered_in_the_middle_of_a_step(stage: Stage) -> None:
    """001 12.3: a tool that a handler or a layer registers is in the next step's catalog, not in the one that runs."""
    body = """
        if ctx.step_index == 0:
            api.tools.register({"name": "late.run", "description": "d", "handler": lambda ctx, input: "ran"})
        result = await ctx.next()
        return result
    """
    actor = await stage.agent(layer("step", body, "late"))
    await actor.turn("x", calls(("a", "late__run", {})), calls(("b", "late__run", {})), "done")
    assert ["late__run" in actor.shown(n) for n in range(3)] == [False, True, True]
    assert actor.results()["a"]["code"] == "E_TOOL_NOT_IN_CATALOG"
    assert actor.results()["b"] == {"status": "ok", "output": "ran"}


@pytest.mark.requirement("DYNAMIC-04")
async def test_unregistered_by_anybody_and_by_its_owner(stage: Stage) -> None:
    """6.1 unregister: an unknown name and another's are ignored; its own is gone from the next step on."""
    source = """
        def register(api):
            def gone(ctx, input):
                for name in ("no.such", "kept.run", "bash__exec", "gone__run"):
                    api.tools.unregister(name)
                return "unregistered"

            api.tools.register({"name": "gone.run", "description": "d", "handler": gone})
    """
    kept = "def register(api): api.tools.register({'name': 'kept.run', 'description': 'd', 'handler': lambda c, i: 1})"
    actor = await stage.agent(new("kept", kept), new("gone", source))
    await actor.turn("x", calls(("a", "gone__run", {})), calls(("b", "gone__run", {}), ("c", "kept__run", {})), "done")
    assert actor.results()["a"] == {"status": "ok", "output": "unregistered"}
    assert actor.results()["b"]["code"] == "E_TOOL_NOT_IN_CATALOG"
    assert actor.results()["c"]["status"] == "ok"
    assert {"kept__run", "bash__exec"} <= set(actor.shown(1))
    assert "gone__run" not in actor.shown(1)


#: What a handler may do wrong, by the code that tells of it.
WRONG_HANDLERS = {
    "E_TOOL_BAD_OUTPUT": (
        "return object()",
        "return float('nan')",
        "return {1: 'a'}",
        "return b'bytes'",
        "return lambda: 1",
        "x = []; x.append(x); return x",
        "return '\\ud800'",
        "return 10 ** 400",
        "yield 1",
    ),
    "E_TOOL_LIMIT": ("return 'x' * (20 << 20)",),
    "E_TOOL": (
        "raise ValueError('날씨 API 오류: 503')",
        "raise SystemExit(5)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "import asyncio; raise asyncio.CancelledError",
        "raise StopIteration",
        "def deep(n): return deep(n + 1)\n        deep(0)",
    ),
}


@pytest.mark.requirement("HANDLER-07")
@pytest.mark.parametrize("how", ["def", "async def"])
async def test_what_a_handler_may_do_wrong(stage: Stage, how: str) -> None:
    """6.2 with a handler that returns what is no JSON or raises anything: an error result, and the agent goes on. A set
    is made to fit.
    """
    wrong = [("return {1, 2}", None), *((body, code) for code, bodies in WRONG_HANDLERS.items() for body in bodies)]
    source = "import asyncio\n\ndef register(api):\n"
    for number, (body, _) in enumerate(wrong):
        source += f"    {how} bad(ctx, input):\n        {body}\n"
        source += f"    api.tools.register({{'name': 'bad.run{number}', 'description': 'd', 'handler': bad}})\n"
    actor = await stage.agent(new("bad", source))
    answer = await actor.turn("x", calls(*[(f"c{n}", f"bad__run{n}", {}) for n in range(len(wrong))]), "done")
    assert (answer.error, answer.response) == (None, "done")
    results = [*actor.results().values()]
    assert [result.get("code") for result in results] == [code for _, code in wrong]
    assert results[0] == {"status": "ok", "output": [1, 2]}
    (told,) = [result for result in results if "날씨" in result.get("message", "")]
    assert (told["name"], told["message"], bool(told["suggestion"])) == ("ValueError", "날씨 API 오류: 503", True)
    assert (await actor.turn("again")).error is None


@pytest.mark.requirement("HANDLER-07")
async def test_plain_values_come_back_as_they_are(stage: Stage) -> None:
    """HANDLER-07: null, false, 0, "" and empty containers are results and no errors."""
    values: list[Any] = [None, False, 0, "", [], {}, 1.5, [None, {"a": []}]]
    source = f"""
        def register(api):
            for n, value in enumerate({values!r}):
                give = lambda ctx, input, value=value: value
                api.tools.register({{"name": f"v.run{{n}}", "description": "d", "handler": give}})
    """
    actor = await stage.agent(new("v", source))
    await actor.turn("x", calls(*[(f"i{n}", f"v__run{n}", {}) for n in range(len(values))]), "done")
    assert [actor.results()[f"i{n}"] for n in range(len(values))] == [{"status": "ok", "output": v} for v in values]


async def test_a_result_that_its_handler_keeps_and_changes(stage: Stage) -> None:
    """6.3 with one object for all calls: each result is what it was when it was returned."""
    source = """
        def register(api):
            kept = {"n": 0}

            async def run(ctx, input):
                kept["n"] += 1
                input["changed"] = True
                return kept

            api.tools.register({"name": "keeps.run", "description": "d", "handler": run})
    """
    actor = await stage.agent(new("keeps", source))
    await actor.turn("x", calls(("a", "keeps__run", {"k": 1})), calls(("b", "keeps__run", {})), "done")
    found = actor.results()
    assert [found[call]["output"]["n"] for call in "ab"] == [1, 2]
    said = [m.data for m in actor.asked[-1].messages if type(m.data).__name__ == "AssistantData"]
    assert said[0].content[0].args == {"k": 1}


async def test_parameters_that_are_changed_after_the_registration(stage: Stage) -> None:
    """6.3 with a schema that the extension changes afterwards: what was registered counts."""
    source = """
        def register(api):
            parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
            run = lambda ctx, input: 1
            api.tools.register({"name": "p.run", "description": "d", "parameters": parameters, "handler": run})
            parameters["required"].clear()
            parameters["properties"].clear()
    """
    actor = await stage.agent(new("p", source))
    await actor.turn("x", calls(("a", "p__run", {})), "done")
    assert actor.results()["a"]["code"] == "E_TOOL_INVALID_ARGS"


async def test_the_call_of_a_registered_tool_passes_all_layers(stage: Stage) -> None:
    """DYNAMIC-07 with another extension's layers: arguments are changed, then checked, and the result is changed."""
    other = """
        def register(api):
            async def layer(ctx):
                ctx.args = {**ctx.args, "message": ctx.args.get("message", "") + "!"}
                result = await ctx.next()
                if result.status == "ok":
                    result.output = [result.output]
                return result

            api.pipeline.register("toolCall", layer)
            api.pipelines.mutate("toolCall.pre", lambda ctx: note(ctx.tool_call.name) or ctx)
    """
    actor = await stage.agent(new("other", other), old("my-ext", ECHO, annotations=AUTO))
    await actor.turn("x", calls(("a", "myExt__echo", {}), ("b", "myExt__echo", {"message": "m"})), "done")
    assert actor.results()["a"]["output"] == [{"echoed": "!"}]
    assert actor.results()["b"]["output"] == [{"echoed": "m!"}]
    assert "myExt.echo" in NOTES


@pytest.mark.requirement("CONTEXT-08")
async def test_context_of_a_registered_tool(stage: Stage) -> None:
    """002 12.5 bent: every field is there, none can be assigned, and none of v0.9's members is."""
    source = """
        def register(api):
            def look(ctx, input):
                found = {}
                for name in ("agentName", "instanceKey", "turnId", "toolCallId", "workdir"):
                    snake = "".join("_" + c.lower() if c.isupper() else c for c in name)
                    value = getattr(ctx, name, None) or getattr(ctx, snake)
                    found[name] = str(value)
                for name in ("oauth", "swarmBundle", "swarm_bundle", "instance", "swarm", "agent"):
                    assert not hasattr(ctx, name), name
                for name in ("workdir", "message", "logger", "agent_name"):
                    try:
                        setattr(ctx, name, "x")
                    except AttributeError:
                        continue
                    raise AssertionError(name)
                ctx.logger.info("looked")
                found["message"] = type(ctx.message).__name__
                return found

            api.tools.register({"name": "look.at", "description": "d", "handler": look})
    """
    actor = await stage.agent(new("look", source), key="k7")
    answer = await actor.turn("x", calls(("id-9", "look__at", {})), "done")
    found = actor.results()["id-9"]
    assert found["status"] == "ok", found
    assert (found["output"]["agentName"], found["output"]["instanceKey"]) == ("main", "k7")
    assert (found["output"]["toolCallId"], found["output"]["turnId"]) == ("id-9", answer.turn_id)


async def test_what_extensions_may_add(stage: Stage) -> None:
    """docs, "Which tools an extension may add": one of the bundle, one of @goondan/base without and with a pattern."""
    source = """
        def register(api, config):
            async def step(ctx):
                ctx.tool_catalog = [*ctx.tool_catalog, {"name": config["adds"]}]
                return await ctx.next()

            api.pipeline.register("step", step)
    """
    for adds, policy, allowed in [
        ("admin__wipe", None, True),
        ("http-fetch__get", None, False),
        ("http-fetch__get", {"toolCalls": {"extensionsMayAdd": ["http-fetch__*"]}}, True),
        ("admin__wipe", {"toolCalls": {"extensionsMayAdd": ["http-fetch__*"]}}, False),
    ]:
        actor = await stage.agent(
            new("adder", source, config={"adds": adds}), policy=policy, key=f"k{len(stage.actors)}"
        )
        answer = await actor.turn("x", calls(("a", adds, {"url": "http://x"} if "http" in adds else {})), "done")
        if allowed:
            assert answer.error is None, (adds, policy, answer.error)
            assert actor.results()["a"]["status"] == "ok"
        else:
            assert answer.error is not None
            assert "adder" in answer.error.message
            assert "extensionsMayAdd" in f"{answer.error.message} {answer.error.suggestion}"
