"""The configuration of an agent: a step runs with what was in force when it began. Real modules, whole turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.effective_config import (
    Change,
    ConfigChange,
    ListChange,
    LiveChanges,
    ModelName,
    Prompt,
    digest_of,
)
from goondan.schemas.bundle.launch import CatalogItem, ToolSource
from goondan.schemas.wire.codec import from_raw, to_raw
from tests.unit.agentproc.extensions.test_points import result_of
from tests.unit.agentproc.extensions.test_reconcile import CHANGING, NOTING, spec_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, api_of, code_of, settle, the_answer

REGISTRY = [
    CatalogItem(name=name, source=ToolSource("config", name.partition("__")[0]))
    for name in ("notes__add", "bash__exec")
]


def say(runner: TurnRunner, revision: int, *changes: Change, base: str | None = None) -> None:
    """The broker says what is in force."""
    told = LiveChanges(
        revision=revision, base=digest_of(runner.instance.spec) if base is None else base, changes=list(changes)
    )
    runner.instance.config.take(to_raw(told))


ADD = Change(tools=ListChange(added=["bash"]))


def shown(model: FakeModel) -> list[list[str]]:
    return [[tool.name for tool in request.tools] for request in model.requests]


def only_notes(**more: Any) -> dict[str, Any]:
    return {"registry": REGISTRY, "catalog": ["notes__add"], "system": "Be kind.", **more}


# --- what a step runs with --------------------------------------------------------------------------------------------


@pytest.mark.requirement("CONFIG-02")
async def test_a_patch_reaches_the_catalog_and_the_prompt_of_the_next_step(make: Make) -> None:
    model = FakeModel(wants(("c1", "notes__add", {})), wants(("c2", "bash__exec", {})), says("done"))
    link = FakeLink(handler=lambda tool, args: None if tool == "notes__add" else ok(1))
    runner = make(link, model, **only_notes())
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    (open_call,) = link.open_calls()
    say(runner, 1, ADD, Change(prompt=Prompt("Be brief.")))
    link.finish(open_call, ok(1))
    await running
    assert shown(model) == [["notes__add"], ["notes__add", "bash__exec"], ["notes__add", "bash__exec"]]
    assert [request.system for request in model.requests] == ["Be kind.", "Be brief.", "Be brief."]
    assert [frame.tool for frame in link.calls] == ["notes__add", "bash__exec"]


async def test_the_next_step_asks_the_model_and_keeps_the_limit_that_an_operator_has_set(make: Make) -> None:
    model = FakeModel(wants(("c1", "notes__add", {})), wants(("c2", "notes__add", {})), says("done"))
    link = FakeLink(handler=lambda tool, args: None)
    runner = make(link, model, **only_notes(), max_steps_per_turn=1)
    provider = runner.instance.spec.model.provider
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await settle()
    say(runner, 1, Change(model=ModelName(provider, "large"), max_steps=3), Change(model=ModelName("other", "x")))
    for _ in range(2):
        link.finish(link.open_calls()[0], ok(1))
        await settle()
    await running
    assert [request.model.model for request in model.requests] == [runner.instance.spec.model.model, "large", "large"]
    assert {request.model.provider for request in model.requests} == {provider}
    assert the_answer(link).status == "completed", "the bundle's limit is one step"


async def test_a_step_keeps_what_it_began_with(make: Make) -> None:
    """The patch comes while the step's call is open: the call of a tool that it takes out still counts."""
    model = FakeModel(wants(("c1", "notes__add", {})), wants(("c2", "notes__add", {})), says("done"))
    runner = make(FakeLink(), model, **only_notes())
    seen: list[list[str]] = []

    async def patch(ctx: Any) -> Any:
        if not seen:
            say(runner, 1, Change(tools=ListChange(removed=["notes"])))
        seen.append([item["name"] for item in ctx.effective_config["tools"]])
        return ctx

    api_of(runner).pipelines.mutate("step.blocks", patch)
    await runner.run(event_frame("e1", "go"))
    assert seen == [["notes"], [], []]
    assert shown(model) == [["notes__add"], [], []]
    assert [result_of(runner, call).status for call in ("c1", "c2")] == ["ok", "error"]


async def test_extensions_of_the_next_step_are_those_of_the_patch(make: Make, tmp_path: Path) -> None:
    """Without any middleware as well: the extension registers a tool and nothing else."""
    code = "def register(api, config):\n    api.instance.shared.setdefault('levels', []).append(config['level'])\n"
    model = FakeModel(says("one"), says("two"), says("three"))
    runner = make(FakeLink(), model, extensions=[spec_of(tmp_path, "one", code, level=1)])
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    say(runner, 1, Change(configs=[ConfigChange("one", ["level"], 2)]))
    await runner.run(event_frame("e2", "go"))
    assert runner.instance.extensions._shared["levels"] == [1, 2]
    say(runner, 2)
    await runner.run(event_frame("e3", "go"))
    assert runner.instance.extensions._shared["levels"] == [1, 2, 1]


async def test_what_step_config_takes_out_is_not_loaded_at_each_begin(make: Make, tmp_path: Path) -> None:
    specs = [spec_of(tmp_path, "changer", CHANGING), spec_of(tmp_path, "one", NOTING, level=1)]
    runner = make(FakeLink(), FakeModel(*[says("done")] * 4), extensions=specs)
    await runner.load_extensions()
    notes = runner.instance.extensions._shared["notes"]
    for number in range(3):
        runner.instance.extensions._shared["changes"] = [{"extensions": ["Extension/changer"]}]
        await runner.run(event_frame(f"e{number}", "go"))
    assert [note[1] for note in notes] == ["register", "cleanup"]


async def test_an_extension_that_a_patch_breaks_is_mended_by_its_revert(make: Make, tmp_path: Path) -> None:
    code = "def register(api, config):\n    if config['level'] > 1:\n        raise ValueError('too high')\n"
    link = FakeLink()
    runner = make(
        link, FakeModel(says("a"), says("b"), says("c")), extensions=[spec_of(tmp_path, "one", code, level=1)]
    )
    say(runner, 1, Change(configs=[ConfigChange("one", ["level"], 2)]))
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    assert code_of(the_answer(link)) == "E_EXTENSION_FAILED"
    say(runner, 2)
    await runner.run(event_frame("e2", "go"))
    assert link.answers()[-1].status == "completed"
    say(runner, 3, Change(configs=[ConfigChange("one", ["level"], 3)]))
    await runner.run(event_frame("e3", "go"))
    assert code_of(link.answers()[-1]) == "E_EXTENSION_FAILED"
    say(runner, 4)
    await runner.run(event_frame("e4", "go"))
    assert link.answers()[-1].status == "completed"


async def test_what_is_older_or_for_another_bundle_is_ignored(make: Make) -> None:
    model = FakeModel(*[says("done")] * 3)
    runner = make(FakeLink(), model, **only_notes())
    say(runner, 2, ADD)
    say(runner, 1)
    say(runner, 3, base="another")
    await runner.run(event_frame("e1", "go"))
    assert shown(model) == [["notes__add", "bash__exec"]]
    say(runner, 4)
    await runner.run(event_frame("e2", "go"))
    assert shown(model)[1] == ["notes__add"]


@pytest.mark.requirement("CONFIG-03")
@pytest.mark.parametrize("wrapped", [True, False])
async def test_a_step_that_is_taken_up_again_has_the_configuration_of_its_begin(make: Make, wrapped: bool) -> None:
    """The process ends while a call is open. Meanwhile a patch takes the call's tool out, and another prompt comes."""

    def runner_of(link: FakeLink, model: FakeModel) -> TurnRunner:
        runner = make(link, model, **only_notes())
        if wrapped:
            api_of(runner).pipelines.mutate("step.pre", note)
        return runner

    configs: list[dict[str, Any]] = []

    def note(ctx: Any) -> Any:
        configs.append(ctx.effective_config)
        return ctx

    first = runner_of(FakeLink(handler=lambda tool, args: None), FakeModel(wants(("c1", "bash__exec", {}))))
    say(first, 1, ADD)
    running = asyncio.ensure_future(first.run(event_frame("e1", "go")))
    await settle(50)
    first.abandon()
    await running
    link, model = FakeLink(), FakeModel(says("done"))
    second = runner_of(link, model)
    say(second, 2, Change(prompt=Prompt("New.")))
    await second.run(event_frame("e1", "go", epoch=2))
    assert [frame.tool for frame in link.calls] == ["bash__exec"], "it was made again, and not refused"
    assert the_answer(link).status == "completed"
    assert [(request.system, shown(model)[at]) for at, request in enumerate(model.requests)] == [
        ("New.", ["notes__add"])
    ]
    if wrapped:
        told = [([tool["name"] for tool in config["tools"]], config["prompt"]["system"]) for config in configs]
        assert told == [
            (["notes", "bash"], "Be kind."),
            (["notes", "bash"], "Be kind."),
            (["notes"], "New."),
        ]


async def test_a_step_that_began_before_every_patch_is_taken_up_without_them(make: Make) -> None:
    first = make(FakeLink(handler=lambda tool, args: None), FakeModel(wants(("c1", "notes__add", {}))), **only_notes())
    running = asyncio.ensure_future(first.run(event_frame("e1", "go")))
    await settle(50)
    first.abandon()
    await running
    link, model = FakeLink(), FakeModel(says("done"))
    second = make(link, model, **only_notes())
    say(second, 1, Change(tools=ListChange(removed=["notes"])))
    await second.run(event_frame("e1", "go", epoch=2))
    assert [frame.tool for frame in link.calls] == ["notes__add"]
    assert shown(model) == [[]]


@pytest.mark.requirement("CONFIG-02")
async def test_a_patch_shows_a_dynamic_tool_that_is_not_there_by_itself(make: Make) -> None:
    model = FakeModel(wants(("c1", "myExt__echo", {"message": "hi"})), says("done"))
    runner = make(FakeLink(), model, **only_notes())
    api = api_of(runner, exposes_tools=False)
    api.tools.register(
        {"name": "myExt.echo", "description": "x", "handler": lambda ctx, given: {"echoed": given["message"]}}
    )
    say(runner, 1, Change(tools=ListChange(added=["myExt__echo", "notThere__yet"])))
    await runner.run(event_frame("e1", "go"))
    assert shown(model)[0] == ["notes__add", "myExt__echo"]
    assert from_raw(result_of(runner, "c1").output or b"", object) == {"echoed": "hi"}


async def test_what_an_operator_added_stays_when_middleware_changes_the_catalog(make: Make) -> None:
    """bash is beyond what the agent's extensions may add."""
    model = FakeModel(says("done"))
    runner = make(FakeLink(), model, **only_notes())
    say(runner, 1, ADD)
    api_of(runner).pipelines.mutate("step.tools", lambda ctx: ctx.replace(tool_catalog=ctx.tool_catalog[1:]))
    await runner.run(event_frame("e1", "go"))
    assert shown(model) == [["bash__exec"]]


async def test_an_agent_without_patches_stores_nothing_of_it(make: Make) -> None:
    runner = make(FakeLink(), FakeModel(says("done"), says("done")), **only_notes())
    await runner.run(event_frame("e1", "go"))
    assert runner.instance.store.remembered("step_config") is None
    say(runner, 1, ADD)
    await runner.run(event_frame("e2", "go"))
    assert runner.instance.store.remembered("step_config") is not None
