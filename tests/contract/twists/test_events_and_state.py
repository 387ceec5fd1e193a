"""Twists of events and of state: 004 §7 and §9 (as in tests/requirements.yaml), and docs/extensions.md."""

from __future__ import annotations

import asyncio

from tests.contract.twists.stage import NOTES, Actor, Stage, calls, new


async def events(stage: Stage, body: str) -> Actor:
    """An extension whose register has this body; everything that it has set going is done."""
    indented = "\n".join("    " + line for line in body.strip("\n").splitlines())
    source = "import asyncio\nfrom tests.contract.twists.notes import note\n\nasync def register(api):\n" + indented
    actor = await stage.agent(new("bus", source))
    answer = await actor.turn()
    assert answer.error is None, answer.error
    for _ in range(20):
        await asyncio.sleep(0)
    return actor


async def test_unsubscribing_within_handlers(stage: Stage) -> None:
    """7.1: a handler that ends itself, one that ends a later one, ending twice, and all of it in the next event."""
    await events(
        stage,
        """
ends = {}
def first(payload):
    note("first")
    ends["first"]()
    ends["first"]()
def second(payload):
    note("second")
    ends["third"]()
ends["first"] = api.events.on("x", first)
ends["second"] = api.events.on("x", second)
ends["third"] = api.events.on("x", lambda p: note("third"))
ends["fourth"] = api.events.on("x", lambda p: note("fourth"))
api.events.emit("x")
await asyncio.sleep(0.01)
note("--")
api.events.emit("x")
""",
    )
    cut = NOTES.index("--")
    assert [one for one in NOTES[:cut] if one != "third"] == ["first", "second", "fourth"]
    assert NOTES[cut + 1 :] == ["second", "fourth"]


async def test_subscribing_within_a_handler(stage: Stage) -> None:
    """7.1: who subscribes while an event is told hears the next one, not this one."""
    await events(
        stage,
        """
def first(payload):
    if payload["n"] == 1:
        api.events.on("x", lambda p: note("late", p["n"]))
api.events.on("x", first)
api.events.emit("x", {"n": 1})
await asyncio.sleep(0.01)
api.events.emit("x", {"n": 2})
""",
    )
    assert NOTES == [("late", 2)]


async def test_two_instances_do_not_hear_each_other(stage: Stage) -> None:
    """7: one bus for each instance, with two of them in one process."""
    source = """
        def register(api):
            api.events.on("x", lambda p: note(api.instance_key, p["from"]))
            api.pipelines.mutate("turn.pre", lambda ctx: api.events.emit("x", {"from": api.instance_key}) or ctx)
    """
    one = await stage.agent(new("bus", source), key="one")
    two = await stage.agent(new("bus", source), key="two")
    await one.turn()
    await two.turn()
    await asyncio.sleep(0.01)
    assert NOTES == [("one", "one"), ("two", "two")]


async def state(stage: Stage, body: str, *, key: str = "k", name: str = "keeps") -> None:
    """An extension whose register does this with `api.state`, in an instance of its own process."""
    indented = "\n".join("    " + line for line in body.strip("\n").splitlines())
    source = (
        "import asyncio, threading\nfrom tests.contract.twists.notes import note\n\nasync def register(api):\n"
        + indented
    )
    actor = await stage.agent(new(name, source), key=key)
    answer = await actor.turn()
    assert answer.error is None, answer.error
    await actor.close()


async def test_stored_state_begins_empty_and_stays(stage: Stage) -> None:
    """docs, "State that stays": {} at first; what was stored last, in another process too, not in another instance."""
    await state(stage, "note(api.state.get())\napi.state.set({'a': 1})\napi.state.set({'b': [None, True, 'ü']})")
    await state(stage, "note(api.state.get())")
    await state(stage, "note(api.state.get())", key="other")
    await state(stage, "note(api.state.get())", name="another")
    assert NOTES == [{}, {"b": [None, True, "ü"]}, {}, {}]


async def test_an_update_that_raises_or_gives_rubbish(stage: Stage) -> None:
    """`update` with a function that raises, gives nothing, or changes its argument in place."""
    await state(
        stage,
        """
api.state.set({"n": 1})
def fails(value):
    value["n"] = 99
    raise ValueError("x")
for change in (fails, lambda value: None, lambda value: [1]):
    try:
        api.state.update(change, scope="instance")
        note("stored")
    except Exception as error:
        note("refused")
note(api.state.get())
api.state.update(lambda value: value.update(n=2) or value, scope="instance")
note(api.state.get())
""",
    )
    assert NOTES == ["refused"] * 3 + [{"n": 1}, {"n": 2}]


async def test_eight_threads_count_without_a_lost_update(stage: Stage) -> None:
    """`update` of the workspace's object by eight sync tool handlers at once, which run in threads."""
    source = """
        def register(api):
            def run(ctx, input):
                for _ in range(5):
                    api.state.update(lambda value: {"n": value.get("n", 0) + 1}, scope="workspace")
                    api.state.update(lambda value: {"n": value.get("n", 0) + 1}, scope="instance")
                return "ran"

            api.tools.register({"name": "count.run", "description": "d", "handler": run})
            both = lambda: (api.state.get(), api.state.get(scope="workspace"))
            api.pipelines.mutate("turn.post", lambda ctx: note(both()) or ctx)
    """
    actor = await stage.agent(new("count", source))
    await actor.turn("x", calls(*[(f"i{n}", "count__run", {}) for n in range(8)]), "done")
    assert NOTES == [({"n": 40}, {"n": 40})]
