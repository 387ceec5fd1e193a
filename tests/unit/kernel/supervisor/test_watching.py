"""When a watched bundle is looked at, and what of a kernel its changes affect."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from goondan.kernel.bundle.rules.plan import Difference, difference
from goondan.kernel.supervisor.conductor import KEPT, REST_S, News, Rest, Watched, marks_of
from goondan.schemas.bundle.launch import (
    AgentSpec,
    CatalogItem,
    ExtensionSpec,
    KernelPlan,
    ModelSpec,
    SandboxSpec,
    ToolHostSpec,
    ToolSpec,
)
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import OPERATOR_AGENT

# --- rest


def test_a_change_is_told_once_when_it_has_rested() -> None:
    rest = Rest({"a": (1,)})
    assert not rest.see({"a": (1,)}, 100.0)
    assert not rest.see({"a": (2,)}, 100.1)
    assert not rest.see({"a": (2,)}, 100.1 + REST_S - 0.01)
    assert rest.see({"a": (2,)}, 100.11 + REST_S)
    assert not rest.see({"a": (2,)}, 200.0)


def test_what_goes_on_changing_is_waited_for() -> None:
    rest = Rest({})
    for number in range(20):
        assert not rest.see({"a": (number,)}, number * 0.2)
    assert rest.see({"a": (19,)}, 19 * 0.2 + REST_S + 0.01)


def test_what_is_put_back_before_it_rested_was_no_change() -> None:
    rest = Rest({"a": (1,)})
    assert not rest.see({}, 1.0)
    assert not rest.see({"a": (1,)}, 1.1)
    assert not rest.see({"a": (1,)}, 9.0)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 1.0)), max_size=30))
def test_nothing_is_told_that_has_not_rested_and_the_last_state_always_is(steps: list[tuple[int, float]]) -> None:
    rest, now, since, last, told = Rest({"a": (0,)}), 0.0, 0.0, 0, 0
    for value, pause in steps:
        now += pause
        if value != last:
            since, last = now, value
        if rest.see({"a": (value,)}, now):
            assert now - since >= REST_S
            assert value != told
            told = value
    rest.see({"a": (last,)}, now)
    rest.see({"a": (last,)}, now + REST_S + 0.01)
    assert not rest.see({"a": (last,)}, now + 10 * REST_S)


# --- marks


def test_what_editors_and_interpreters_leave_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "t.py").write_text("1")
    (tmp_path / "goondan.yaml").write_text("1")
    watched = Watched([str(tmp_path / "goondan.yaml")], None, [str(tmp_path / "tool")])
    before = marks_of(watched)
    assert sorted(before) == [str(tmp_path / "goondan.yaml"), str(tmp_path / "tool/t.py")]
    for junk in (".t.py.swp", "t.py~", "#t.py#", "4913.tmp", "t.pyc"):
        (tmp_path / "tool" / junk).write_text("x")
    (tmp_path / "tool" / "__pycache__").mkdir()
    (tmp_path / "tool" / "__pycache__" / "t.cpython-311.pyc").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    assert marks_of(watched) == before
    (tmp_path / "tool" / "more.py").write_text("x")
    assert marks_of(watched) != before


def test_an_exchanged_a_vanished_and_a_new_file_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("1")
    watched = Watched([], str(tmp_path))
    seen = [marks_of(watched)]
    other = tmp_path / "b"
    other.write_text("2")
    other.rename(path)
    seen.append(marks_of(watched))
    path.unlink()
    seen.append(marks_of(watched))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.yml").write_text("3")
    seen.append(marks_of(watched))
    assert [len(marks) for marks in seen] == [1, 1, 0, 1]
    assert seen[0] != seen[1]
    assert marks_of(Watched(["/nonexistent/x"], "/nonexistent", ["/nonexistent/y"])) == {}


# --- difference

ITEMS = [CatalogItem(name="words__say"), CatalogItem(name="bash__exec")]


def agent(name: str, catalog: list[str], **more: object) -> AgentSpec:
    model = ModelSpec(provider="embedded")
    spec = AgentSpec(name=name, model=model, registry=ITEMS, catalog=catalog, state_dir="/s", revision="1")
    return replace(spec, **more)


def plan(**more: object) -> KernelPlan:
    words = ToolSpec(name="words", entry="/b/w/w.py", root="/b/w", exports=[], digest="d1")
    bash = ToolSpec(name="bash", entry="/base/bash.py", root="/base", exports=[])
    agents = {
        "writer": agent("writer", ["words__say"]),
        "other": agent("other", ["bash__exec"]),
        OPERATOR_AGENT: agent(OPERATOR_AGENT, ["words__say", "bash__exec"]),
    }
    host = ToolHostSpec(tools=[words, bash], state_dir="/s", revision="1")
    made = KernelPlan(revision="1", bundle="/b/g", state_dir="/s", entry_agent="writer", agents=agents, toolhost=host)
    return replace(made, **more)


def with_agent(name: str, **more: object) -> KernelPlan:
    made = plan()
    return replace(made, agents={**made.agents, name: replace(made.agents[name], **more)})


def with_tool(**more: object) -> KernelPlan:
    made = plan()
    words, bash = made.toolhost.tools
    return replace(made, toolhost=replace(made.toolhost, tools=[replace(words, **more), bash]))


def test_another_revision_of_the_same_is_no_change() -> None:
    same = plan(revision="2")
    same = replace(same, agents={name: replace(spec, revision="2") for name, spec in same.agents.items()})
    assert difference(plan(), same).nothing


def test_a_prompt_concerns_its_agent_alone() -> None:
    assert difference(plan(), with_agent("writer", system="new")) == Difference(agents=["writer"])


def test_code_of_a_tool_concerns_its_jails_alone() -> None:
    assert difference(plan(), with_tool(digest="d2")) == Difference(tools=["words"])


def test_a_description_concerns_those_who_read_it() -> None:
    items = [CatalogItem(name="words__say", description="new"), ITEMS[1]]
    changed = plan()
    changed = replace(changed, agents={n: replace(s, registry=items) for n, s in changed.agents.items()})
    assert difference(plan(), changed).agents == ["writer"]
    opened = with_agent("other", allow_registry=["words__*"])
    both = replace(opened, agents={n: replace(s, registry=items) for n, s in opened.agents.items()})
    assert difference(opened, both).agents == ["other", "writer"]


def test_an_agent_that_comes_or_goes_is_named() -> None:
    fewer = plan()
    fewer = replace(fewer, agents={name: spec for name, spec in fewer.agents.items() if name != "other"})
    assert difference(fewer, plan()) == Difference(agents=["other"])
    assert difference(plan(), fewer) == Difference(agents=["other"], replaced=["other"])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (plan(max_live_agents=3), "max_live_agents"),
        (plan(durability="process"), "durability"),
        (with_tool(sandbox=SandboxSpec(env=["KEY"])), "sandbox.env"),
    ],
)
def test_what_is_read_once_needs_the_whole_kernel(changed: KernelPlan, why: str) -> None:
    assert difference(plan(), changed).whole == why


def test_another_entry_agent_needs_no_process() -> None:
    change = difference(plan(), plan(entry_agent="other"))
    assert (change.nothing, change.agents, change.quiet) == (False, [], True)
    assert difference(plan(), plan(protected=["/b/new.yaml"])) == Difference(quiet=True)


def test_another_private_copy_of_the_same_is_no_change() -> None:
    def copied(place: str) -> KernelPlan:
        extension = ExtensionSpec(name="e", entry=f"{place}/e.py", resource={})
        made = with_tool(entry=f"{place}/w/w.py", root=f"{place}/w")
        agents = {**made.agents, "writer": replace(made.agents["writer"], extensions=[extension])}
        return replace(made, agents=agents, private_copy=place)

    assert difference(copied("/s/private/1"), copied("/s/private/2")).nothing


# --- news


async def test_news_are_told_to_who_asks_early_late_or_of_the_program_before() -> None:
    news = News()
    waiting = asyncio.ensure_future(news.after(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    news.say("one\x1b[0m")
    lines, told = await waiting
    assert (len(lines), told, "\x1b" in lines[0]) == (1, 1, False)
    news.say("two")
    assert await news.after(1) == (["two"], 2)
    assert (await news.after(7))[1] == 2
    for number in range(KEPT + 5):
        news.say(str(number))
    assert len((await news.after(0))[0]) == KEPT
    waiting = asyncio.ensure_future(news.after(KEPT + 7))
    await asyncio.sleep(0)
    news.close()
    with pytest.raises(GoondanError):
        await waiting
