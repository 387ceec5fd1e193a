"""Twists of wraps and of middleware: 004 §5.6, and 001 §8.4 and 000 §6.4 (as in tests/requirements.yaml)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.schemas.wire.frames import ToolResult
from tests.contract.twists.stage import NOTES, Stage, calls, fails, layer, new, old, wrap
from tests.unit.agentproc.fakes import ok
from tests.unit.agentproc.turns import failed

READ = ("files__read", {"path": "a"})


@pytest.mark.requirement("PIPELINE-20")
async def test_two_llm_call_wraps_and_a_failure(stage: Stage) -> None:
    """5.6 step.llmCall twice: in and out in order, the error passes through both, and both raise it again."""
    source = """
        def register(api):
            name = api.extension.metadata.name

            async def call(ctx, next):
                note(name, "in", len(ctx.tool_catalog), ctx.agent.spec.modelConfig.modelRef)
                try:
                    return await next(ctx)
                except Exception as error:
                    note(name, "failed", error.code)
                    raise

            api.pipelines.wrap("step.llmCall", call)
    """
    actor = await stage.agent(old("a", source), old("b", source))
    failed(await actor.turn("x", fails("down")), "E_MODEL_FAILED")
    assert [one[:2] for one in NOTES] == [("a", "in"), ("b", "in"), ("b", "failed"), ("a", "failed")]
    assert NOTES[0][3] == "Model/console"
    assert NOTES[3][2] == "E_MODEL_FAILED"


@pytest.mark.requirement("PIPELINE-20")
async def test_the_answer_is_there_behind_next(stage: Stage) -> None:
    """5.6 step.llmCall that reads what the model said."""
    body = """
        result = await next(ctx)
        note(result.llm_result.text, len(result.llm_result.tool_calls), result.llm_result.finish_reason)
        return result
    """
    actor = await stage.agent(wrap("step.llmCall", body))
    await actor.turn("x", calls(READ), "done")
    assert NOTES == [("", 1, "tool-calls"), ("done", 0, "stop")]


#: What a wrap may do wrong.
WRONG_WRAPS = (
    "await next(ctx); return await next(ctx)",
    "return ctx",
    "return None",
    "await next(ctx)",
    "await next(); return ctx",
    "await next(None); return ctx",
    "return 'rubbish'",
    "import asyncio\n        await asyncio.gather(next(ctx), next(ctx))\n        return ctx",
    "import asyncio; raise asyncio.CancelledError",
    "raise GeneratorExit",
    "raise SystemExit(1)",
    "next(ctx)\n        return ctx",
)


@pytest.mark.parametrize("point", ["step.llmCall", "toolCall.exec"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_wraps_that_break_the_rule(stage: Stage, point: str) -> None:
    """5.3: next twice, never, without a context, rubbish given back. It fails by name; nothing runs twice."""
    source = "import asyncio\n\ndef register(api):\n"
    for number, body in enumerate(WRONG_WRAPS):
        source += f"    async def bad{number}(ctx, next):\n        {body}\n"
    source += (
        "    known = dict(locals())\n"
        "    async def bad(ctx, next):\n"
        "        chosen = known.get(ctx.turn.input_event.input)\n"
        "        return await next(ctx) if chosen is None else await chosen(ctx, next)\n"
        f"    api.pipelines.wrap('{point}', bad)\n"
    )
    actor = await stage.agent(old("rulebreaker", source))
    for number, body in enumerate(WRONG_WRAPS):
        sent, asked = len(actor.sent()), len(actor.asked)
        wants = [calls((f"i{number}", *READ)), "done", "more"] if point == "toolCall.exec" else ["done", "more"]
        answer = await actor.turn(f"bad{number}", *wants)
        if point == "toolCall.exec":
            result = actor.results()[f"i{number}"]
            assert result["status"] == "error", body
            assert "rulebreaker" in result["message"] + result["suggestion"], body
            assert len(actor.sent()) - sent <= 1, body
        else:
            assert answer.error is not None, body
            assert answer.error.code == "E_MIDDLEWARE", body
            assert "rulebreaker" in answer.error.message, body
            assert "step.llmCall" in answer.error.message, body
            assert len(actor.asked) - asked <= 1, body
        after = await actor.turn("well", calls((f"after{number}", *READ)), "done")
        assert after.error is None, body
        assert actor.results()[f"after{number}"]["status"] == "ok", body


async def test_a_wrap_that_swallows_the_failure_of_the_model(stage: Stage) -> None:
    """5.6 step.llmCall with a catch that raises nothing: there is no answer, so the step fails all the same."""
    body = """
        try:
            return await next(ctx)
        except Exception:
            return ctx
    """
    actor = await stage.agent(wrap("step.llmCall", body, "swallows"))
    failed(await actor.turn("x", fails("down")), "E_MIDDLEWARE", "without llm_result")
    assert (await actor.turn()).error is None


ERROR = """
    def register(api):
        async def again(ctx, next):
            attempt = (ctx.step.metadata or {}).get("retryAttempt", 0) + 1
            ctx.step.metadata = {**ctx.step.metadata, "retryAttempt": attempt}
            note(attempt, ctx.llm_error.code)
            return await next(ctx)

        api.pipelines.wrap("step.llmError", again)
        api.pipelines.mutate("step.post", lambda ctx: note("post", ctx.step.metadata.get("retryAttempt")) or ctx)
"""


@pytest.mark.requirement("PIPELINE-22")
async def test_a_model_that_fails_twice(stage: Stage) -> None:
    """5.6 step.llmError: asked again until it answers; the number of attempts is in the step's metadata."""
    actor = await stage.agent(old("a", ERROR))
    answer = await actor.turn("x", fails("one"), fails("two"), "done")
    assert (answer.error, answer.response) == (None, "done")
    assert NOTES == [(1, "E_MODEL_FAILED"), (2, "E_MODEL_FAILED"), ("post", 2)]
    assert len(actor.asked) == 3


@pytest.mark.requirement("PIPELINE-22")
async def test_a_model_that_always_fails(stage: Stage) -> None:
    """5.6 step.llmError without an end: asked again three times, then the model's error ends the turn."""
    actor = await stage.agent(old("a", ERROR))
    failed(await actor.turn("x", *[fails(f"try {n}") for n in range(9)]), "E_MODEL_FAILED", "try 3")
    assert len(actor.asked) == 4
    assert [one[0] for one in NOTES if one[0] != "post"][:3] == [1, 2, 3]


async def test_llm_error_that_does_not_ask_again(stage: Stage) -> None:
    """5.6 step.llmError without next: the model's error stands. One that raises: its own error, by name."""
    body = """
        if ctx.turn.input_event.input == "raise":
            raise RuntimeError("enough")
        return ctx
    """
    actor = await stage.agent(wrap("step.llmError", body, "quitter"))
    answer = await actor.turn("x", fails("down"), "never")
    assert answer.error is not None
    assert (answer.error.code, len(actor.asked)) == ("E_MODEL_FAILED", 1)
    failed(await actor.turn("raise", fails("down"), "never"), "E_MIDDLEWARE", "quitter", "enough")


GUARD = """
    def register(api):
        for name in ("admin.erase", "safe.look"):
            api.tools.register({"name": name, "description": "d", "handler": lambda ctx, input: note("ran") or 1})

        async def guard(ctx, next):
            name = ctx.tool_call.name
            actor = (ctx.turn.auth or {}).get("actor", {})
            if name.startswith("admin.") and not actor.get("isAdmin"):
                raise PermissionError(f"Permission denied for tool: {name}")
            try:
                return await next(ctx)
            except Exception as error:
                note("failed", name, str(error))
                raise

        api.pipelines.wrap("toolCall.exec", guard)
"""
AUTO = {"goondan.ai/expose-tools": "auto"}


@pytest.mark.requirement("PIPELINE-21")
@pytest.mark.parametrize("auth", [None, {}, {"actor": {}}, {"actor": {"isAdmin": False}}])
async def test_permission_denied(stage: Stage, auth: Any) -> None:
    """5.6 toolCall.exec beside an allowed call, by both spellings of the name: only the allowed one runs."""
    actor = await stage.agent(old("guard", GUARD, annotations=AUTO))
    asked = calls(("a", "admin__erase", {}), ("b", "admin.erase", {}), ("c", "safe__look", {}))
    answer = await actor.turn("x", asked, "done", auth=auth)
    assert answer.error is None
    found = actor.results()
    for call in "ab":
        assert (found[call]["status"], found[call]["name"]) == ("error", "PermissionError")
        assert found[call]["message"] == "Permission denied for tool: admin.erase"
    assert found["c"]["status"] == "ok"
    assert NOTES == ["ran"]


async def test_the_error_of_a_tool_passes_through_a_wrap_unchanged(stage: Stage) -> None:
    """5.6 toolCall.exec around a tool that fails: a failure is a result and no exception, as with `ctx.next()`."""
    source = GUARD.replace('note("ran") or 1', '{}["missing"]').replace(
        "return await next(ctx)",
        "result = await next(ctx)\n"
        "                note(result.tool_result.status, result.tool_result.error.name)\n"
        "                return result",
    )
    actor = await stage.agent(old("guard", source, annotations=AUTO))
    await actor.turn("x", calls(("c", "safe__look", {})), "done")
    assert (actor.results()["c"]["code"], actor.results()["c"]["name"]) == ("E_TOOL", "KeyError")
    assert NOTES == [("error", "KeyError")]


async def test_a_wrap_that_swallows_the_error_of_a_tool(stage: Stage) -> None:
    """5.6 toolCall.exec with a catch that raises nothing and gives its context back: the model still reads an error."""
    body = """
        try:
            return await next(ctx)
        except Exception:
            return ctx
    """
    from goondan.schemas.wire.frames import ToolError

    result = ToolResult(status="error", error=ToolError(message="no such file", name="OSError", code="E_TOOL"))
    actor = await stage.agent(wrap("toolCall.exec", body, "swallows"), handler=lambda tool, args: result)
    await actor.turn("x", calls(READ), "done")
    assert actor.results()["c1"]["status"] == "error"


async def test_the_timing_example_for_each_kind_of_result(stage: Stage) -> None:
    """001 8.4 around an ok, an error and a pending result: each comes through unchanged, with its arguments logged."""
    source = """
        import time

        def register(api):
            async def timed(ctx):
                api.logger.debug(f"Tool: {ctx.tool_name}", ctx.args)
                began = time.monotonic()
                result = await ctx.next()
                note(ctx.tool_call_id, result.status, time.monotonic() - began >= 0)
                return result

            api.pipeline.register("toolCall", timed)
    """
    from goondan.schemas.wire.frames import ToolError

    results = {
        "good": ok({"n": 1}),
        "bad": ToolResult(status="error", error=ToolError(message="m", code="E_X", name="N", suggestion="s")),
        "late": ToolResult(status="pending", handle="h1"),
    }
    actor = await stage.agent(new("timer", source), handler=lambda tool, args: results[args["path"]])
    await actor.turn("x", calls(*[(name, "files__read", {"path": name}) for name in results]), "done")
    assert NOTES == [("good", "ok", True), ("bad", "error", True), ("late", "pending", True)]
    found = actor.results()
    assert found["good"] == {"status": "ok", "output": {"n": 1}}
    assert (found["bad"]["code"], found["bad"]["message"], found["bad"]["suggestion"]) == ("E_X", "m", "s")
    assert (found["late"]["status"], found["late"]["handle"]) == ("pending", "h1")


#: What middleware may do wrong: the rules that it breaks, and what it raises.
BROKEN_RULES = (
    "await ctx.next(); return await ctx.next()",
    "return None",
    "await ctx.next()",
    "result = await ctx.next(); return 'rubbish'",
    "return {'status': 'ok'}",
    "result = await ctx.next(); result.status = 'fine'; return result",
    "ctx.next()\n        return None",
)
RAISED = (
    "await ctx.next(ctx)",
    "ctx.agent_name = 'other'; return await ctx.next()",
    "raise ValueError('boom')",
    "result = await ctx.next(); raise ValueError('boom')",
    "raise SystemExit(4)",
    "raise KeyboardInterrupt",
    "import asyncio; raise asyncio.CancelledError",
    "raise GeneratorExit",
    "raise StopAsyncIteration",
    "import asyncio; gone = asyncio.ensure_future(asyncio.sleep(9)); gone.cancel(); await gone",
    "def deep(n): return deep(n + 1)\n        deep(0)",
)
WRONG_LAYERS = (*BROKEN_RULES, *RAISED)


@pytest.mark.parametrize("kind", ["turn", "step", "toolCall"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_middleware_that_breaks_a_rule(stage: Stage, kind: str) -> None:
    """001 8.3 bent in every way: that call, step or turn fails with the extension's name, once; the agent goes on."""
    which = {"turn": "ctx.input_event.input", "step": "ctx.turn.input_event.input"}.get(kind, "ctx.args.get('path')")
    source = "import asyncio\n\ndef register(api):\n"
    for number, body in enumerate(WRONG_LAYERS):
        source += f"    async def bad{number}(ctx):\n        {body}\n"
    source += (
        "    known = dict(locals())\n"
        "    async def bad(ctx):\n"
        f"        chosen = known.get({which})\n"
        "        return await ctx.next() if chosen is None else await chosen(ctx)\n"
        f"    api.pipeline.register('{kind}', bad)\n"
    )
    actor = await stage.agent(new("rulebreaker", source))
    for number, body in enumerate(WRONG_LAYERS):
        sent = len(actor.sent())
        said = f"bad{number}"
        answer = await actor.turn(said, calls((said, "files__read", {"path": said})), "done", "more", "more")
        if kind == "toolCall":
            assert answer.error is None, body
            result = actor.results()[said]
            assert (result["status"], result["code"]) == (
                "error",
                "E_TOOL" if body in RAISED else "E_MIDDLEWARE",
            ), body
            assert "rulebreaker" in result["message"] + result["suggestion"], body
            assert len(actor.sent()) - sent <= 1, body
        else:
            assert answer.error is not None, body
            assert answer.error.code == "E_MIDDLEWARE", body
            assert "rulebreaker" in answer.error.message, body
        after = await actor.turn("well", calls((f"after{number}", *READ)), "done")
        assert (after.error, after.response) == (None, "done"), body
        assert actor.results()[f"after{number}"]["status"] == "ok", body


async def test_a_result_that_is_changed_afterwards(stage: Stage) -> None:
    """001 8.4 with a task that changes the result and the arguments once they were given back: nothing of it counts."""
    source = """
        import asyncio

        def register(api):
            async def later(result, args):
                for _ in range(3):
                    result.output["n"] = "changed"
                    args["path"] = "changed"
                    await asyncio.sleep(0)

            async def layer(ctx):
                result = await ctx.next()
                result.output = {"n": 1}
                api.ext_state()["task"] = asyncio.ensure_future(later(result, ctx.args))
                return result

            api.pipeline.register("toolCall", layer)
    """
    actor = await stage.agent(new("a", source))
    await actor.turn("x", calls(READ), "done")
    await asyncio.sleep(0.01)
    await actor.turn("y")
    assert actor.results()["c1"]["output"] == {"n": 1}


async def test_metadata_is_of_one_call(stage: Stage) -> None:
    """CALL-16 with three calls at once and two layers: the layers of one call share it, the calls do not."""
    body = """
        ctx.metadata.setdefault("seen", []).append(ctx.tool_call_id + api.extension.metadata.name)
        result = await ctx.next()
        if api.extension.metadata.name == "a":
            note(ctx.metadata["seen"])
        return result
    """
    actor = await stage.agent(layer("toolCall", body), layer("toolCall", body, "b"))
    await actor.turn("x", calls(*[(n, *READ) for n in "123"]), "done")
    assert sorted(NOTES) == [["1a", "1b"], ["2a", "2b"], ["3a", "3b"]]


async def test_results_stand_in_the_order_of_the_calls(stage: Stage) -> None:
    """001 8.4 with layers that delay the first calls most."""
    source = """
        import asyncio

        def register(api):
            async def layer(ctx):
                result = await ctx.next()
                await asyncio.sleep(0.03 - 0.01 * int(ctx.args["path"]))
                note(ctx.args["path"])
                return result

            api.pipeline.register("toolCall", layer)
    """
    actor = await stage.agent(new("a", source))
    await actor.turn("x", calls(*[(f"i{n}", "files__read", {"path": str(n)}) for n in range(3)]), "done")
    assert NOTES == ["2", "1", "0"]
    assert list(actor.results()) == ["i0", "i1", "i2"]


@pytest.mark.parametrize(
    ("tool", "args", "limit"), [("files__read", {"path": "a"}, 1000), ("bash__exec", {"command": "x"}, 1200)]
)
async def test_the_message_of_a_layer_is_bounded_like_a_tools(stage: Stage, tool: str, args: Any, limit: int) -> None:
    """ERROR-03, 001 10.4: a long message of middleware is cut at the limit of the tool that is called."""
    actor = await stage.agent(layer("toolCall", 'raise ValueError("가" * 5000)', "long"))
    await actor.turn("x", calls(("c1", tool, args)), "done")
    message = actor.results()["c1"]["message"]
    assert len(message) == limit
    assert message.endswith("... (truncated)")


async def test_an_exception_with_members_of_its_own(stage: Stage) -> None:
    """001 10.1: `code`, `suggestion` and `help_url` of an exception are those of the error, if they are texts."""
    source = """
        class Denied(Exception):
            code, suggestion, help_url = "E_MINE", "ask Kim", "https://example.org/x"

        class Odd(Exception):
            code, suggestion, help_url = 5, ["x"], object()

        def register(api):
            async def layer(ctx):
                raise (Denied if ctx.args["path"] == "a" else Odd)("no")

            api.pipeline.register("toolCall", layer)
    """
    actor = await stage.agent(new("a", source))
    await actor.turn("x", calls(("a", "files__read", {"path": "a"}), ("b", "files__read", {"path": "b"})), "done")
    found = actor.results()
    assert (found["a"]["code"], found["a"]["name"], found["a"]["suggestion"]) == ("E_MINE", "Denied", "ask Kim")
    assert found["b"]["name"] == "Odd"
    assert isinstance(found["b"]["code"], str)


async def test_a_changed_item_reaches_the_model(stage: Stage) -> None:
    """DYNAMIC-10: a layer that describes a tool in other words, and hides another one from the model's sight."""
    source = """
        import copy

        def register(api):
            async def step(ctx):
                words = {"files__read": {"description": "Better words."}, "files__wipe": {"deferred": True}}
                ctx.tool_catalog = [item.replace(**words.get(item.name, {})) for item in ctx.tool_catalog]
                return await ctx.next()

            api.pipeline.register("step", step)
    """
    actor = await stage.agent(new("a", source))
    answer = await actor.turn("x", calls(("w", "files__wipe", {})), "done")
    assert answer.error is None, answer.error
    (read,) = [tool for tool in actor.asked[0].tools if tool.name == "files__read"]
    assert read.description == "Better words."
    assert "files__wipe" not in actor.shown(0)
    assert actor.results()["w"]["status"] == "ok"


async def test_going_on_after_a_failed_step_is_bounded(stage: Stage) -> None:
    """docs: should_continue True after a failed step tries again, within maxStepsPerTurn."""
    body = """
        result = await ctx.next()
        note(result.status)
        result.should_continue = True
        return result
    """
    actor = await stage.agent(layer("step", body), swarm={"maxStepsPerTurn": 3})
    answer = await actor.turn("x", fails("1"), fails("2"), fails("3"), "never")
    assert NOTES == ["failed"] * 3
    assert answer.error is not None


async def test_events_of_the_conversation_in_a_bent_order(stage: Stage) -> None:
    """docs, "The conversation": remove of a result, of a message that there is not, a truncate, and rubbish. The model
    is always shown a valid history, and what cannot be is an error by name.
    """
    body = """
        what = ctx.turn.input_event.input
        if ctx.step_index == 1 and what == "results":
            for message in ctx.conversation_state.next_messages:
                if type(message.data).__name__ == "ToolData":
                    ctx.emit_message_event({"type": "remove", "targetId": message.id})
        if ctx.step_index == 1 and what == "all":
            ctx.emit_message_event({"type": "truncate"})
        if what == "nothing":
            ctx.emit_message_event({"type": "remove", "targetId": "no such message"})
        if what == "rubbish":
            ctx.emit_message_event({"type": "append", "message": {"data": {"role": "emperor", "content": 1}}})
        return await ctx.next()
    """
    actor = await stage.agent(layer("step", body, "edits"))
    answer = await actor.turn("results", calls(READ), "done")
    assert answer.error is None, answer.error
    assert actor.results(-1)["c1"]  # a result behind every call
    answer = await actor.turn("all", calls(("c2", *READ)), "done")
    assert answer.error is None, answer.error
    assert (await actor.turn("nothing")).error is None
    failed(await actor.turn("rubbish"), "E_MIDDLEWARE", "edits")
    assert (await actor.turn("well")).error is None
