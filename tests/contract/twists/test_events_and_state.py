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


async def test_two_extensions_that_answer_each_other_for_ever(stage: Stage) -> None:
    """docs: emit waits for nobody. Events that follow each other without an end stop no turn and no end."""
    source = """
        def register(api):
            state = api.ext_state()
            state["n"] = 0

            def pong(payload):
                state["n"] += 1
                api.events.emit("ping" if payload["type"] == "pong" else "pong")

            api.events.on("ping", pong)
            api.events.on("pong", pong)
            api.events.emit("ping")
            api.pipelines.mutate("turn.post", lambda ctx: note(state["n"]) or ctx)
    """
    async with asyncio.timeout(10):
        actor = await stage.agent(new("endless", source))
        answer = await actor.turn()
        assert answer.error is None
        await actor.close()
    assert NOTES[0] > 0
    quiet = len(asyncio.all_tasks())
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) <= quiet


async def test_ext_state_is_one_object_for_each_extension_and_instance(stage: Stage) -> None:
    """9.1 with two extensions and two instances: the same object at every call, and four of them in all."""
    source = """
        def register(api):
            assert api.ext_state() is api.ext_state()
            api.ext_state()["me"] = (api.extension.metadata.name, api.instance_key)
            api.pipelines.mutate("turn.pre", lambda ctx: note(api.ext_state()["me"], len(api.ext_state())) or ctx)
    """
    for key in ("k1", "k2"):
        actor = await stage.agent(new("a", source), new("b", source), key=key)
        await actor.turn()
    assert [((name, key), 1) for key in ("k1", "k2") for name in "ab"] == NOTES


async def test_shared_keys_that_clash_and_one_that_is_missing(stage: Stage) -> None:
    """9.2 bent: without a namespace the later one wins; a key that nobody has set is nothing; instances are apart."""
    source = """
        def register(api):
            api.instance.shared["data"] = api.extension.metadata.name
            api.instance.shared[f"{api.extension.metadata.name}:data"] = {"initialized": True}
            shared = api.instance.shared

            def pre(ctx):
                note(shared["data"], shared.get("otherExt:data"), len(shared))
                return ctx

            api.pipelines.mutate("step.pre", pre)
    """
    actor = await stage.agent(new("a", source), new("b", source))
    await actor.turn()
    assert NOTES == [("b", None, 3)] * 2
    NOTES.clear()
    other = await stage.agent(new("a", source), key="other")
    await other.turn()
    assert NOTES == [("a", None, 2)]


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
