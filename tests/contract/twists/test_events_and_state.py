"""Twists of events and of state: 004 §7 and §9 (as in tests/requirements.yaml), and docs/extensions.md."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.twists.stage import NOTES, Actor, Stage, calls, new, old
from tests.unit.agentproc.turns import failed


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


#: A pattern, a type, and whether the one hears the other; None: nothing promises it, but it must not be an error.
PATTERNS = (
    ("workspace.*", "workspace.repoAvailable", True),
    ("workspace.*", "workspace", False),
    ("workspace.*", "workspace.a.b", False),
    ("workspace.*", "workspaces.a", False),
    ("*", "one", True),
    ("*", "one.two", False),
    ("**", "one.two.three", True),
    ("**", "one", True),
    ("*.granted", "auth.granted", True),
    ("**.granted", "a.b.granted", True),
    ("a.**.d", "a.b.c.d", True),
    ("a.**.d", "a.b.c", False),
    ("a.*.c", "a..c", False),
    ("a.b", "a.b", True),
    ("a.b", "A.b", False),
    ("a.b", "axb", False),
    ("a+.[b]", "a+.[b]", True),
    ("a.?", "a.b", False),
    ("agent.del*", "agent.delegate", True),
    ("workspace.*Available", "workspace.repoAvailable", True),
)


async def test_patterns(stage: Stage) -> None:
    """7.3 `workspace.*` bent: `*` is one segment, `**` any number, and nothing else means anything."""
    lines = []
    for pattern, type_, _ in PATTERNS:
        lines += [f"end = api.events.on({pattern!r}, lambda p: note({pattern!r}, p['type']))"]
        lines += [f"api.events.emit({type_!r}, {{}})", "end()"]
    await events(stage, "\n".join(lines))
    for pattern, type_, heard in PATTERNS:
        assert ((pattern, type_) in NOTES) is heard, (pattern, type_)


async def test_once_whose_handler_emits_the_same_again(stage: Stage) -> None:
    """7.3 once, with a handler that emits what it hears, and two emits in a row: heard once."""
    await events(
        stage,
        """
async def heard(payload):
    note(payload["n"])
    api.events.emit("auth.granted", {"n": payload["n"] + 1})
api.events.once("auth.granted", heard)
api.events.emit("auth.granted", {"n": 1})
api.events.emit("auth.granted", {"n": 5})
""",
    )
    assert NOTES == [1]


async def test_once_by_a_pattern_is_once_for_all_types(stage: Stage) -> None:
    """7.3 once with a pattern: the first event that fits ends it."""
    await events(
        stage, "api.events.once('a.*', lambda p: note(p['type']))\nfor t in ('b.x', 'a.x', 'a.y'): api.events.emit(t)"
    )
    assert NOTES == ["a.x"]


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


async def test_handlers_that_raise_disturb_nobody(stage: Stage) -> None:
    """EVENTS-05: sync and async handlers that raise anything, before and behind one that hears."""
    await events(
        stage,
        """
def bad(payload): raise ValueError("x")
async def worse(payload): raise RuntimeError("y")
def worst(payload): raise SystemExit(3)
async def cancelled(payload): raise asyncio.CancelledError
for handler in (bad, worse, worst, cancelled, lambda p: note("heard"), bad):
    api.events.on("x", handler)
api.events.emit("x")
note("emitted")
""",
    )
    assert sorted(NOTES) == ["emitted", "heard"]


async def test_each_handler_has_a_payload_of_its_own(stage: Stage) -> None:
    """docs: a copy for each handler; what the sender or another handler changes later is not seen, however deep."""
    await events(
        stage,
        """
payload = {"deep": {"list": [1]}}
def changes(p):
    p["deep"]["list"].append("changed")
    p["more"] = 1
async def looks(p):
    await asyncio.sleep(0.01)
    note(p["deep"]["list"], "more" in p)
api.events.on("x", changes)
api.events.on("x", looks)
api.events.emit("x", payload)
payload["deep"]["list"].append("later")
note(sorted(payload))
await asyncio.sleep(0.03)
""",
    )
    assert NOTES == [["deep"], ([1], False)]


async def test_the_type_of_a_payload(stage: Stage) -> None:
    """EVENTS-13: `type` is added to no payload, to an empty one and to any other; one that is there stays."""
    await events(
        stage,
        """
api.events.on("x", lambda p: note(p))
api.events.emit("x")
api.events.emit("x", {})
api.events.emit("x", None)
api.events.emit("x", {"type": "mine"})
""",
    )
    assert NOTES == [{"type": "x"}] * 3 + [{"type": "mine"}]


@pytest.mark.parametrize("payload", ["[]", "'text'", "5", "{'x': object()}", "{1: 2}"])
async def test_payloads_that_are_no_objects(stage: Stage, payload: str) -> None:
    """EVENTS-01: a payload is a JSON object. Anything else is an error where it is emitted, and nobody hears it."""
    await events(
        stage,
        f"""
api.events.on("x", lambda p: note("heard"))
try:
    api.events.emit("x", {payload})
except Exception as error:
    note(type(error).__name__ != "InternalError")
""",
    )
    assert NOTES == [True]


@pytest.mark.parametrize(
    "line", ["on('x', None)", "on(5, note)", "once('x', 'handler')", "emit(5)", "emit('')", "on('', note)"]
)
async def test_subscriptions_that_are_no_good(stage: Stage, line: str) -> None:
    """7.1 with rubbish: an error where it stands, not later somewhere else."""
    actor = await stage.agent(new("bus", f"def register(api): api.events.{line}"))
    failed(await actor.turn(), "E_EXTENSION_FAILED", "bus")


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


def repository(place: Path, head: str = "ref: refs/heads/main\n", config: str = "") -> Path:
    """A folder that git takes for a repository."""
    (place / ".git" / "objects").mkdir(parents=True)
    (place / ".git" / "refs").mkdir()
    (place / ".git" / "HEAD").write_text(head)
    (place / ".git" / "config").write_text(config)
    return place


REPO = """
    def register(api):
        api.events.on("workspace.*", lambda p: note("event", p["path"], p.get("metadata")))
        api.pipelines.mutate("workspace.repoAvailable", lambda ctx: note("point", ctx.path, ctx.type) or ctx)
"""


@pytest.mark.parametrize(
    ("head", "config", "metadata"),
    [
        (
            "ref: refs/heads/main\n",
            '[remote "origin"]\n\turl = https://example.org/x.git\n',
            {"remote": "https://example.org/x.git", "branch": "main"},
        ),
        ("ref: refs/heads/feature/a.b\n", "", {"branch": "feature/a.b"}),
        ("0123456789012345678901234567890123456789\n", "[core]\n", None),
        ("ref: refs/heads/main\n", '[remote "origin"\nbroken = = "\n\x00', {"branch": "main"}),
    ],
)
async def test_a_repository_is_told_once(stage: Stage, head: str, config: str, metadata: Any) -> None:
    """7.3 workspace.repoAvailable over two turns: by event and by point, once; what is not known is left out."""
    work = stage.state / "instances" / "main" / "k" / "workspace"
    repository(work, head, config)
    actor = await stage.agent(old("repo", REPO))
    assert (await actor.turn("one")).error is None
    assert (await actor.turn("two")).error is None
    await asyncio.sleep(0.01)
    assert sorted(one[0] for one in NOTES) == ["event", "point"]
    (event,) = [one for one in NOTES if one[0] == "event"]
    assert event[1] == str(work)
    assert (event[2] or None) == metadata
    assert ("point", str(work), "repo") in NOTES


async def test_the_repository_point_that_raises_and_gives_rubbish(stage: Stage) -> None:
    """workspace.repoAvailable with a handler that raises: it is logged; neither the turn nor the event fails."""
    repository(stage.state / "instances" / "main" / "k" / "workspace")
    source = REPO.replace('note("point", ctx.path, ctx.type) or ctx', "{}['missing']")
    actor = await stage.agent(old("repo", source))
    assert (await actor.turn("one")).error is None
    await asyncio.sleep(0.01)
    assert [one[0] for one in NOTES] == ["event"]


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


async def test_ext_state_by_attribute_as_in_the_specification(stage: Stage) -> None:
    """9.1 `state.processedSteps = 0` word by word: attributes and items are one thing."""
    source = """
        def register(api):
            state = api.ext_state()
            state.processedSteps = 0
            state["lastUpdated"] = 5

            def post(ctx):
                state.processedSteps += 1
                note(state["processedSteps"], state.lastUpdated)
                return ctx

            api.pipelines.mutate("step.post", post)
    """
    actor = await stage.agent(new("a", source))
    answer = await actor.turn()
    assert answer.error is None, answer.error
    assert NOTES == [(1, 5)]


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


PERSISTS = """
    import json, os

    def register(api):
        root = os.environ.get("GOONDAN_STATE_ROOT", "~/.goondan")
        file = os.path.join(root, "extensions", api.extension.metadata.name, "state.json")
        state = {}
        try:
            with open(file) as source:
                state = json.load(source)
        except (OSError, ValueError):
            pass

        def post(ctx):
            state["turns"] = state.get("turns", 0) + 1
            note(state["turns"])
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file + ".new", "w") as target:
                json.dump(state, target)
            os.replace(file + ".new", file)
            return ctx

        api.pipelines.mutate("turn.post", post)
"""


async def test_the_persistence_example_over_restarts_and_with_a_torn_file(stage: Stage) -> None:
    """9.3 in three processes; before the third the file is torn, which the example takes for an initial state."""
    for _ in range(2):
        actor = await stage.agent(old("keeper", PERSISTS))
        await actor.turn()
        await actor.close()
    (file,) = Path(os.environ["GOONDAN_STATE_ROOT"]).glob("**/extensions/keeper/state.json")
    assert json.loads(file.read_text()) == {"turns": 2}
    file.write_text('{"turns": ')
    await (await stage.agent(old("keeper", PERSISTS))).turn()
    assert NOTES == [1, 2, 1]


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


async def test_stored_state_is_what_it_was_when_it_was_stored(stage: Stage) -> None:
    """What is changed in the object afterwards, or in the one that `get` gave, is not stored."""
    await state(
        stage,
        """
mine = {"list": [1]}
api.state.set(mine)
mine["list"].append(2)
api.state.get()["list"].append(3)
note(api.state.get())
""",
    )
    await state(stage, "note(api.state.get())")
    assert NOTES == [{"list": [1]}] * 2


@pytest.mark.parametrize(
    "value", ["None", "[]", "'text'", "{'x': object()}", "{1: 'a'}", "{'x': float('nan')}", "{'x': {1}}"]
)
async def test_what_cannot_be_stored_is_refused_and_the_old_stays(stage: Stage, value: str) -> None:
    """A JSON object is stored whole or not at all."""
    await state(
        stage,
        f"""
api.state.set({{"old": True}})
try:
    api.state.set({value})
    note("stored")
except Exception as error:
    note("refused")
note(api.state.get())
""",
    )
    assert NOTES == ["refused", {"old": True}]


async def test_one_mebibyte_and_a_byte_more(stage: Stage) -> None:
    """9.3 with much of it: 1 MiB at most. What is more is refused with a code, and the old stays."""
    await state(
        stage,
        """
api.state.set({"x": "a" * ((1 << 20) - 100)})
note(len(api.state.get()["x"]))
for size in ((1 << 20) + 1, 4 << 20):
    try:
        api.state.set({"x": "b" * size})
        note("stored")
    except Exception as error:
        note(getattr(error, "code", None) is not None)
note(api.state.get()["x"][0])
""",
    )
    assert NOTES == [(1 << 20) - 100, True, True, "a"]


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


async def test_revisions_by_hand(stage: Stage) -> None:
    """`read`, somebody else's change, `set` with the old revision: E_STATE_CONFLICT, and theirs stays."""
    await state(
        stage,
        """
value, revision = api.state.read(scope="instance")
api.state.set({**value, "theirs": 1})
try:
    api.state.set({**value, "mine": 1}, revision=revision)
    note("stored")
except Exception as error:
    note(error.code)
value, revision = api.state.read(scope="instance")
api.state.set({**value, "mine": 1}, revision=revision)
note(api.state.get())
""",
    )
    assert NOTES == ["E_STATE_CONFLICT", {"theirs": 1, "mine": 1}]


async def test_one_workspace_state_for_all_instances(stage: Stage) -> None:
    """scope="workspace": instances share it, apart from the instance's own; another extension has another."""
    body = """
api.state.update(lambda value: {**value, "runs": value.get("runs", 0) + 1}, scope="workspace")
note(api.state.get(scope="workspace"), api.state.get())
"""
    await state(stage, body, key="k1")
    await state(stage, body, key="k2")
    await state(stage, body, name="another")
    assert NOTES == [({"runs": 1}, {}), ({"runs": 2}, {}), ({"runs": 1}, {})]
    with pytest.raises(AssertionError):
        await state(stage, "api.state.get(scope='galaxy')")


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


async def test_a_damaged_file_is_named_and_kept(stage: Stage) -> None:
    """A file that cannot be read is E_STATE, which names it; nothing overwrites it, neither set nor update."""
    await state(stage, "api.state.set({'precious': True})")
    (file,) = [path for path in stage.state.rglob("*") if path.is_file() and b"precious" in path.read_bytes()]
    file.write_bytes(b"\x00\xff not json")
    await state(
        stage,
        """
update = lambda: api.state.update(lambda v: {"new": 1}, scope="instance")
for act in (lambda: api.state.get(), lambda: api.state.set({"new": 1}), update):
    try:
        act()
        note("done")
    except Exception as error:
        note(error.code, str(error))
""",
    )
    assert [one[0] for one in NOTES] == ["E_STATE"] * 3
    assert all(str(file) in one[1] for one in NOTES)
    assert file.read_bytes() == b"\x00\xff not json"
