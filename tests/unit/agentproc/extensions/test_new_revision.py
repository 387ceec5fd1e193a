"""Another revision of the bundle in an agent that runs: it is in force from the next step, in the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.effective_config import Change, LiveChanges, Prompt, digest_of
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ExtensionSpec, ModelSpec, ToolSource
from goondan.schemas.wire.codec import to_raw
from tests.unit.agentproc.extensions.test_reconcile import NOTING, spec_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, settle, the_answer

REGISTRY = [
    CatalogItem(name=name, source=ToolSource("config", name.partition("__")[0]))
    for name in ("notes__add", "bash__exec")
]

#: Notes the configuration of each step: its prompt, its tools and its own level.
SEEING = """
def register(api, config):
    def note(ctx):
        seen = api.instance.shared.setdefault("seen", [])
        told = ctx.effective_config
        seen.append((told["prompt"]["system"], [tool["name"] for tool in told["tools"]], config["level"]))
        return ctx
    api.pipelines.mutate("step.blocks", note)
    def call(ctx):
        api.instance.shared.setdefault("calls", []).append((ctx.effective_config["prompt"]["system"], config["level"]))
        return ctx
    api.pipelines.mutate("toolCall.pre", call)
"""


def revise(runner: TurnRunner, revision: int = 0, *changes: Change, **more: Any) -> AgentSpec:
    """The kernel says that the bundle is another one."""
    new = replace(runner.instance.spec, revision="another", **more)
    told = LiveChanges(revision=revision, base=digest_of(new), changes=list(changes), spec=to_raw(new))
    runner.instance.config.take(to_raw(told))
    return new


def shown(model: FakeModel) -> list[tuple[str | None, list[str]]]:
    return [(request.system, [tool.name for tool in request.tools]) for request in model.requests]


async def begun(runner: TurnRunner, event: str = "e1", epoch: int = 1) -> asyncio.Task[None]:
    """A turn whose first step has an open call."""
    task = asyncio.ensure_future(runner.run(event_frame(event, "go", epoch=epoch)))
    await settle(60)
    return task


def given(**more: Any) -> dict[str, Any]:
    return {"registry": REGISTRY, "catalog": ["notes__add"], "system": "one", **more}


@pytest.mark.parametrize("extended", [True, False])
async def test_the_next_step_has_it_and_the_running_one_does_not(make: Make, tmp_path: Path, extended: bool) -> None:
    link = FakeLink(handler=lambda tool, args: None)
    model = FakeModel(wants(("c1", "notes__add", {})), says("done"), says("done"))
    extensions = [spec_of(tmp_path, "seeing", SEEING, level=1)] if extended else []
    runner = make(link, model, **given(extensions=extensions))
    await runner.load_extensions()
    task = await begun(runner)
    revise(runner, system="two", catalog=["bash__exec"])
    (open_call,) = link.open_calls()
    link.finish(open_call, ok(1))
    await task
    await runner.run(event_frame("e2", "go"))
    assert shown(model) == [("one", ["notes__add"]), ("two", ["bash__exec"]), ("two", ["bash__exec"])]
    if extended:
        seen = [(system, tools) for system, tools, _ in runner.instance.extensions._shared["seen"]]
        assert seen == [("one", ["notes"]), ("two", ["bash"]), ("two", ["bash"])]


async def test_what_extensions_have_in_memory_stays_and_only_the_changed_one_is_registered_anew(
    make: Make, tmp_path: Path
) -> None:
    link = FakeLink(handler=lambda tool, args: None)
    model = FakeModel(wants(("c1", "notes__add", {})), says("done"))
    one, two = (spec_of(tmp_path, name, NOTING, level=1) for name in ("one", "two"))
    runner = make(link, model, **given(extensions=[one, two]))
    await runner.load_extensions()
    task = await begun(runner)
    new = spec_of(tmp_path, "three", NOTING, level=7)
    revise(runner, extensions=[two, spec_of(tmp_path, "one", NOTING, level=2), new])
    (open_call,) = link.open_calls()
    link.finish(open_call, ok(1))
    await task
    assert runner.instance.extensions._shared["notes"] == [
        ("one", "register", 1, 0),
        ("two", "register", 1, 0),
        ("one", "cleanup", 1),
        ("one", "register", 2, 1),  # with the ext_state that it had
        ("three", "register", 7, 0),
    ]


async def test_patches_come_with_it_in_one(make: Make) -> None:
    model = FakeModel(says("a"), says("b"), says("c"))
    runner = make(FakeLink(), model, **given())
    old = digest_of(runner.instance.spec)
    runner.instance.config.take(to_raw(LiveChanges(revision=3, base=old, changes=[Change(prompt=Prompt("patched"))])))
    await runner.run(event_frame("e1", "go"))
    revise(runner, 3, Change(prompt=Prompt("patched")), system="two", catalog=["bash__exec"])
    await runner.run(event_frame("e2", "go"))
    runner.instance.config.take(to_raw(LiveChanges(revision=4, base=old)))  # for the bundle of before
    await runner.run(event_frame("e3", "go"))
    assert shown(model) == [
        ("patched", ["notes__add"]), ("patched", ["bash__exec"]), ("patched", ["bash__exec"]),
    ]  # fmt: skip


async def test_it_comes_with_a_welcome_too(make: Make) -> None:
    """The broker was replaced while the bundle changed."""
    model = FakeModel(says("a"))
    runner = make(FakeLink(), model, **given())
    runner.instance.config.take(to_raw(None), to_raw(replace(runner.instance.spec, system="two")))
    await runner.run(event_frame("e1", "go"))
    assert shown(model) == [("two", ["notes__add"])]


async def test_what_this_process_cannot_follow_is_left_to_the_next_one(make: Make, tmp_path: Path) -> None:
    model = FakeModel(says("a"), says("b"))
    runner = make(FakeLink(), model, **given())
    revise(runner, system="two", model=ModelSpec(provider="embedded", model="another"))
    await runner.run(event_frame("e1", "go"))
    revise(runner, system="two", extensions=[spec_of(tmp_path, "first", SEEING, level=1)])
    await runner.run(event_frame("e2", "go"))
    assert shown(model) == [("one", ["notes__add"])] * 2


async def test_a_dynamic_tool_whose_name_the_bundle_takes_is_named(make: Make, link: FakeLink, tmp_path: Path) -> None:
    code = (
        "def register(api):\n"
        "    api.tools.register({'name': 'mine.look', 'description': 'x', 'handler': lambda ctx, given: 1})\n"
    )
    runner = make(link, FakeModel(says("a"), says("b")), **given(extensions=[spec_of(tmp_path, "mine", code)]))
    await runner.load_extensions()
    await runner.run(event_frame("e1", "go"))
    revise(runner, registry=[*REGISTRY, CatalogItem(name="mine__look", source=ToolSource("config", "mine"))])
    await runner.run(event_frame("e2", "go"))
    error = link.answers()[-1].error
    assert error is not None and "mine__look belongs to the bundle" in error.message, error


@pytest.mark.requirement("CONFIG-03")
@pytest.mark.parametrize("confidential", [False, True])
async def test_a_step_that_is_taken_up_again_sees_the_bundle_of_its_begin(
    make: Make, tmp_path: Path, confidential: bool
) -> None:
    """The process ends while a call is open, and the next one is of another revision."""

    def seeing(level: int) -> ExtensionSpec:
        return replace(spec_of(tmp_path, "seeing", SEEING, level=level), confidential=confidential)

    first = make(
        FakeLink(handler=lambda tool, args: None),
        FakeModel(wants(("c1", "notes__add", {}))),
        **given(extensions=[seeing(1)]),
    )
    await first.load_extensions()
    task = await begun(first)
    first.abandon()
    await task
    link, model = FakeLink(), FakeModel(wants(("c2", "bash__exec", {})), says("done"))
    two = given(system="two", catalog=["bash__exec"], extensions=[seeing(2)])
    second = make(link, model, **two)
    await second.load_extensions()
    await second.run(event_frame("e1", "go", epoch=2))
    assert the_answer(link).status == "completed"
    assert [frame.tool for frame in link.calls] == ["notes__add", "bash__exec"]
    # Values of the environment are in no file: such an extension has the config of today.
    assert second.instance.extensions._shared["calls"] == [("one", 2 if confidential else 1), ("two", 2)]
    assert second.instance.extensions._shared["seen"][-1] == ("two", ["bash"], 2)
    assert (b"level" in (second.instance.store.remembered("bundle_said") or b"")) is not confidential

    third = make(FakeLink(handler=lambda tool, args: None), FakeModel(wants(("c3", "bash__exec", {}))), **two)
    await third.load_extensions()
    task = await begun(third, "e2", 3)
    third.abandon()
    await task
    fourth = make(FakeLink(), FakeModel(says("done")), **given(system="three", extensions=[seeing(3)]))
    await fourth.load_extensions()
    await fourth.run(event_frame("e2", "go", epoch=4))
    assert fourth.instance.extensions._shared["calls"] == [("two", 3 if confidential else 2)], (
        "the latest, not the first"
    )


async def test_an_agent_without_extensions_stores_nothing_of_it(make: Make) -> None:
    runner = make(FakeLink(), FakeModel(says("a")), **given())
    await runner.run(event_frame("e1", "go"))
    assert runner.instance.store.remembered("bundle_said") is None
