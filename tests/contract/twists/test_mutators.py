"""Twists of mutators: 004 §5.2 to §5.5 and §5.7 (as in tests/requirements.yaml), and docs/extensions.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.twists.stage import NOTES, Stage, calls, fails, mutator, old
from tests.unit.agentproc.turns import failed

READ = ("files__read", {"path": "a"})
MUTATED = (
    "turn.pre",
    "step.pre",
    "step.config",
    "step.tools",
    "step.blocks",
    "toolCall.pre",
    "toolCall.post",
    "step.post",
    "turn.post",
)


@pytest.mark.requirement("PIPELINE-08", "PIPELINE-13")
async def test_blocks_by_unpacking_and_by_replace(stage: Stage) -> None:
    """5.5 step.blocks in both ways of writing it; the second extension sees the block of the first."""
    unpacks = 'return {**ctx, "blocks": [*ctx.blocks, {"type": "custom.info", "data": {"stepIndex": ctx.step.index}}]}'
    replaces = """
        note([block["type"] for block in ctx.blocks])
        return ctx.replace(blocks=[*ctx.blocks, {"type": "second"}])
    """
    actor = await stage.agent(mutator("step.blocks", unpacks), mutator("step.blocks", replaces, "b"))
    await actor.turn()
    assert actor.asked[0].blocks == [{"type": "custom.info", "data": {"stepIndex": 0}}, {"type": "second"}]
    assert NOTES == [["custom.info"]]


@pytest.mark.requirement("PIPELINE-17", "EXT-05")
async def test_blocks_are_of_one_step(stage: Stage) -> None:
    """5.5 step.blocks in the first step only: the second step begins without; nothing is stored."""
    body = """
        note(len(ctx.blocks))
        return ctx if ctx.step.index else ctx.replace(blocks=[{"type": "first", "text": "only now"}])
    """
    actor = await stage.agent(mutator("step.blocks", body))
    await actor.turn("x", calls(READ), "done")
    assert [request.blocks for request in actor.asked] == [[{"type": "first", "text": "only now"}], []]
    assert NOTES == [0, 0]


async def test_a_block_that_is_changed_afterwards(stage: Stage) -> None:
    """5.5 step.blocks with one object that the extension keeps and changes later: what was given is what was shown."""
    source = """
        def register(api):
            kept = {"type": "count", "n": 0}

            def blocks(ctx):
                kept["n"] += 1
                return ctx.replace(blocks=[kept])

            def later(ctx):
                kept["n"] = 100
                return ctx

            api.pipelines.mutate("step.blocks", blocks)
            api.pipelines.mutate("toolCall.pre", later)
    """
    actor = await stage.agent(old("a", source))
    await actor.turn("x", calls(READ), "done")
    assert [request.blocks[0]["n"] for request in actor.asked] == [1, 101]


@pytest.mark.parametrize(
    "blocks",
    [
        "'text'",
        "[1]",
        "[{'no': 'type'}]",
        "[{'type': 5}]",
        "[{'type': 'x', 'v': object()}]",
        "None",
        "[{'type': 'x'}] * 300",
    ],
)
async def test_blocks_of_another_shape(stage: Stage, blocks: str) -> None:
    """EXT-13: a block is an object with a string `type` and JSON values. Else the step fails, by name."""
    source = f"def register(api): api.pipelines.mutate('step.blocks', lambda ctx: ctx.replace(blocks={blocks}))"
    actor = await stage.agent(old("shapeless", source))
    failed(await actor.turn(), "E_MIDDLEWARE", "shapeless", "step.blocks")


@pytest.mark.requirement("PIPELINE-18", "EXT-05")
async def test_the_tools_filter_holds_for_the_model_and_for_its_calls(stage: Stage) -> None:
    """5.5 step.tools with a model that calls what it was not shown: refused, and nothing leaves the agent."""
    body = """
        kept = [tool for tool in ctx.tool_catalog if not tool.name.startswith("files__w")]
        return {**ctx, "tool_catalog": kept}
    """
    actor = await stage.agent(mutator("step.tools", body))
    await actor.turn("x", calls(("w", "files__wipe", {}), ("r", *READ)), "done")
    assert "files__wipe" not in actor.shown(0)
    assert actor.results()["w"]["code"] == "E_TOOL_NOT_IN_CATALOG"
    assert actor.results()["w"]["message"] == "Tool 'files__wipe' is not available in the current Tool Catalog."
    assert actor.sent() == [READ]


@pytest.mark.requirement("NAME-15")
async def test_the_prefix_filter_of_the_example_meets_dotted_names(stage: Stage) -> None:
    """5.5 step.tools as printed (`internal.`): tools registered with a dot are seen with it, and so are filtered."""
    source = """
        def register(api):
            for name in ("internal.peek", "open.peek"):
                api.tools.register({"name": name, "description": "d", "handler": lambda ctx, input: 1})

            def tools(ctx):
                note(sorted(tool.name for tool in ctx.tool_catalog if "peek" in tool.name))
                kept = [tool for tool in ctx.tool_catalog if not tool.name.startswith("internal.")]
                return ctx.replace(tool_catalog=kept)

            api.pipelines.mutate("step.tools", tools)
    """
    actor = await stage.agent(old("a", source, annotations={"goondan.ai/expose-tools": "auto"}))
    await actor.turn(
        "x", calls(("i", "internal__peek", {}), ("d", "internal.peek", {}), ("o", "open__peek", {})), "done"
    )
    assert NOTES[0] == ["internal.peek", "open.peek"]
    assert "open__peek" in actor.shown(0)
    assert "internal__peek" not in actor.shown(0)
    found = actor.results()
    assert [found[i].get("code") for i in "ido"] == ["E_TOOL_NOT_IN_CATALOG", "E_TOOL_NOT_IN_CATALOG", None]


async def test_one_catalog_entry_for_a_tool_that_is_put_in_twice(stage: Stage) -> None:
    """5.5 step.tools that repeats the catalog: each tool is shown once."""
    source = """
        def register(api):
            api.pipelines.mutate("step.tools", lambda ctx: ctx.replace(tool_catalog=[*ctx.tool_catalog] * 2))
    """
    actor = await stage.agent(old("a", source))
    answer = await actor.turn()
    assert answer.error is None
    assert actor.shown() == ["files__read", "files__wipe", "bash__exec", "bash__script"]


@pytest.mark.requirement("PIPELINE-19")
async def test_metadata_by_assignment_in_two_extensions(stage: Stage) -> None:
    """5.5 turn.pre as printed, with an assignment, in two extensions: both are seen in turn.post and in a layer."""
    source = """
        def register(api):
            def pre(ctx):
                ctx.turn.metadata = {**ctx.turn.metadata, api.extension.metadata.name: 1}
                return ctx

            def post(ctx):
                note(sorted(ctx.turn.metadata))
                return ctx

            async def layer(ctx):
                note(sorted(ctx.metadata))
                return await ctx.next()

            api.pipelines.mutate("turn.pre", pre)
            api.pipelines.mutate("turn.post", post)
            api.pipeline.register("turn", layer)
    """
    actor = await stage.agent(old("a", source), old("b", source))
    answer = await actor.turn()
    assert answer.error is None, answer.error
    assert NOTES == [["a"], ["a", "b"], ["a", "b"], ["a", "b"]]


async def test_the_duration_of_a_turn_that_failed(stage: Stage) -> None:
    """5.5 turn.post of a turn whose model cannot be asked: it sees the error, and can put an answer in its place."""
    source = """
        def register(api):
            def post(ctx):
                note(ctx.turn.metadata.get("startTime"), ctx.turn.result.error.code)
                if ctx.turn.input_event.input == "mend":
                    ctx.turn.result.error = None
                    ctx.turn.result.response = "sorry"
                return ctx

            def pre(ctx):
                ctx.turn.metadata["startTime"] = 5
                return ctx

            api.pipelines.mutate("turn.post", post)
            api.pipelines.mutate("turn.pre", pre)
    """
    actor = await stage.agent(old("a", source))
    failed(await actor.turn("x", fails("down")), "E_MODEL_FAILED")
    mended = await actor.turn("mend", fails("down"))
    assert (mended.status, mended.response, mended.error) == ("completed", "sorry", None)
    assert NOTES == [(5, "E_MODEL_FAILED")] * 2


@pytest.mark.requirement("PIPELINE-16")
async def test_order_with_ties_and_negative_priorities(stage: Stage) -> None:
    """5.7: by priority, equal ones in the order of registration, over two extensions, sync and async mixed."""
    source = """
        def register(api, config):
            for mark, priority in config["marks"]:
                async def slow(ctx, mark=mark):
                    note(mark)
                    return ctx

                def quick(ctx, mark=mark):
                    note(mark)
                    return ctx

                how = {} if priority is None else {"priority": priority}
                api.pipelines.mutate("step.pre", slow if mark in "ace" else quick, **how)
    """
    actor = await stage.agent(
        old("one", source, config={"marks": [["a", 5], ["b", None], ["c", -1]]}),
        old("two", source, config={"marks": [["d", -1], ["e", 0], ["f", 5]]}),
    )
    for _ in range(2):
        NOTES.clear()
        await actor.turn()
        assert NOTES == ["c", "d", "b", "e", "a", "f"]


@pytest.mark.parametrize("point", MUTATED)
async def test_an_exception_at_each_point(stage: Stage, point: str) -> None:
    """5.5 with an error at each point: around a call it is that call's, elsewhere the turn's; the agent goes on."""
    body = """
        if ctx.turn.input_event.input == "fail":
            raise ValueError("boom")
        return ctx
    """
    actor = await stage.agent(mutator(point, body, "bomb"))
    answer = await actor.turn("fail", calls(READ), "done")
    if point.startswith("toolCall"):
        assert answer.error is None
        result = actor.results()["c1"]
        assert (result["status"], result["name"]) == ("error", "ValueError")
        assert "boom" in result["message"]
    else:
        failed(answer, "E_MIDDLEWARE", "boom", "bomb", point)
    after = await actor.turn("well", calls(("after", *READ)), "done")
    assert (after.error, after.response) == (None, "done")
    assert actor.results()["after"]["status"] == "ok"


@pytest.mark.parametrize("point", MUTATED)
async def test_rubbish_from_each_point(stage: Stage, point: str) -> None:
    """5.3: a mutator gives a context back. Whoever forgets it is told so, by point and extension; the agent goes on."""
    given = ("None", "3", "[]", "{'turn': 1}")
    source = f"""
        RUBBISH = {{{", ".join(f"{one!r}: {one}" for one in given)}}}

        def register(api):
            api.pipelines.mutate("{point}", lambda ctx: RUBBISH.get(ctx.turn.input_event.input, ctx))
    """
    actor = await stage.agent(old("forgetful", source))
    for number, rubbish in enumerate(given):
        answer = await actor.turn(rubbish, calls((f"i{number}", *READ)), "done")
        if point.startswith("toolCall"):
            assert answer.error is None
            result = actor.results()[f"i{number}"]
            assert result["status"] == "error", rubbish
            text = result["message"] + result["suggestion"]
        else:
            assert answer.error is not None, rubbish
            assert answer.error.code == "E_MIDDLEWARE"
            text = answer.error.message
        assert "forgetful" in text, rubbish
        assert point in text, rubbish
    assert (await actor.turn("{}")).error is None


async def test_only_what_the_table_names_may_be_given_back(stage: Stage) -> None:
    """5.4: another `turn`, `agent` or `step` is refused at a point that may not change it, and so is a new field."""
    body = """
        what = ctx.turn.input_event.input
        return ctx.replace(**{what: {"changed": True}}) if what != "well" else ctx
    """
    actor = await stage.agent(mutator("step.blocks", body, "changer"))
    for what in ("turn", "agent", "swarm", "step", "effective_config", "tool_catalog", "sandbox"):
        answer = await actor.turn(what)
        assert answer.error is not None, what
        assert answer.error.code == "E_MIDDLEWARE"
        assert "changer" in answer.error.message
    assert (await actor.turn("well")).error is None


@pytest.mark.parametrize("key", ["model", "policy", "swarm", "agent"])
async def test_what_step_config_may_not_change(stage: Stage, key: str) -> None:
    """step.config may change prompt.system, tools and extensions, and nothing else."""
    body = f"""
        return ctx.replace(effective_config={{**ctx.effective_config, "{key}": {{"x": 1}}}})
    """
    actor = await stage.agent(mutator("step.config", body, "grabs"))
    failed(await actor.turn(), "E_MIDDLEWARE", "grabs")
    assert actor.asked == []


async def test_step_config_in_place_does_not_last(stage: Stage) -> None:
    """step.config that changes the object in place: whatever it does to this step, the next begins anew."""
    body = """
        if ctx.step.index == 0:
            ctx.effective_config["prompt"]["system"] = "taken over"
            ctx.effective_config["tools"].clear()
        else:
            note(ctx.effective_config["prompt"]["system"], len(ctx.effective_config["tools"]))
        return ctx
    """
    actor = await stage.agent(mutator("step.config", body))
    await actor.turn("x", calls(READ), "done")
    assert NOTES == [("You are main.", 2)]
    again = await actor.turn("y", calls(READ), "done")
    assert actor.asked[-1].system == "You are main."
    assert again.error is None


async def test_going_on_for_ever_is_bounded(stage: Stage) -> None:
    """step.post that always goes on: `maxStepsPerTurn` ends it."""
    body = """
        ctx.step.result.should_continue = True
        return ctx
    """
    actor = await stage.agent(mutator("step.post", body), swarm={"maxStepsPerTurn": 3})
    answer = await actor.turn("x", *["again"] * 10)
    assert len(actor.asked) == 3
    failed(answer, "E_MAX_STEPS")


async def test_stopping_in_the_middle(stage: Stage) -> None:
    """step.post with should_continue False after tool calls: the calls are done, the turn ends with the step's text."""
    body = """
        ctx.step.result.should_continue = False
        return ctx
    """
    actor = await stage.agent(mutator("step.post", body))
    answer = await actor.turn("x", calls(READ), "never said")
    assert len(actor.asked) == 1
    assert actor.sent() == [READ]
    assert answer.status == "completed"


@pytest.mark.requirement("PIPELINE-23")
async def test_arguments_are_checked_behind_the_mutators(stage: Stage) -> None:
    """toolCall.pre that makes arguments wrong, and one that makes wrong ones right."""
    body = """
        if ctx.tool_call.args.get("path") == "break":
            ctx.tool_call.args = {"path": 5}
        if "file" in ctx.tool_call.args:
            ctx.tool_call.args = {"path": ctx.tool_call.args["file"]}
        return ctx
    """
    actor = await stage.agent(mutator("toolCall.pre", body))
    await actor.turn("x", calls(("b", "files__read", {"path": "break"}), ("m", "files__read", {"file": "y"})), "done")
    assert actor.results()["b"]["code"] == "E_TOOL_INVALID_ARGS"
    assert actor.results()["m"]["status"] == "ok"
    assert actor.sent() == [("files__read", {"path": "y"})]


async def test_what_the_model_asked_for_stays_in_the_conversation(stage: Stage) -> None:
    """toolCall.pre that changes arguments in place: the call in the history is what the model said."""
    body = """
        ctx.tool_call.args["path"] = "changed"
        return ctx
    """
    actor = await stage.agent(mutator("toolCall.pre", body))
    await actor.turn("x", calls(("r", "files__read", {"path": "asked"})), "done")
    assert actor.sent() == [("files__read", {"path": "changed"})]
    (said,) = [m.data for m in actor.asked[1].messages if type(m.data).__name__ == "AssistantData"]
    assert said.content[0].args == {"path": "asked"}


@pytest.mark.requirement("PIPELINE-23")
async def test_results_changed_by_two_mutators(stage: Stage) -> None:
    """toolCall.post by assignment and in place, in order, for a result and for an error."""
    body = """
        note(ctx.tool_result.status)
        if ctx.tool_result.status == "ok":
            ctx.tool_result.output = {"by": api.extension.metadata.name, "was": ctx.tool_result.output}
        return ctx
    """
    actor = await stage.agent(mutator("toolCall.post", body), mutator("toolCall.post", body, "b"))
    await actor.turn("x", calls(("r", *READ), ("bad", "files__read", {})), "done")
    found: Any = actor.results()
    assert found["r"]["output"] == {
        "by": "b",
        "was": {"by": "a", "was": {"tool": "files__read", "args": {"path": "a"}}},
    }
    assert found["bad"]["code"] == "E_TOOL_INVALID_ARGS"


@pytest.mark.requirement("COMPAT-03", "PIPELINE-03")
async def test_both_spellings_in_one_order(stage: Stage) -> None:
    """COMPAT-03: `.pre` stands among the layers in one order; each `.post` runs before the code behind `next()`."""
    source = """
        def register(api):
            name = api.extension.metadata.name

            def marks(what):
                return lambda ctx: note(name + what) or ctx

            async def layer(ctx):
                note(name + "(")
                result = await ctx.next()
                note(name + ")")
                return result

            api.pipelines.mutate("POINT.post", marks(".post"))
            api.pipelines.mutate("POINT.pre", marks(".pre"))
            api.pipeline.register("POINT", layer)
    """
    for kind in ("turn", "step", "toolCall"):
        actor = await stage.agent(old("a", source.replace("POINT", kind)), old("b", source.replace("POINT", kind)))
        NOTES.clear()
        script = [calls(READ), "done"] if kind == "toolCall" else ["done"]
        answer = await actor.turn("x", *script)
        assert answer.error is None
        assert NOTES == ["a.pre", "a(", "b.pre", "b(", "a.post", "b.post", "b)", "a)"], kind
