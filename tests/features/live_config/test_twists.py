"""Twists of live configuration: 004 §4 and §8, 000 §9 (CONFIG-01, CONFIG-02), and docs/live-config.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.twists.notes import HAPPENS, NOTES
from tests.contract.twists.stage import Stage, calls, new
from tests.features.live_config.patching import Patching, noting
from tests.features.live_config.test_patches import add, remove, replace

ACCEPTED = ("accepted", "")
CONFLICT = ("rejected", "E_CONFIG_CONFLICT")
FILES, ADMIN = (["files__read", "files__wipe"], ["admin__read", "admin__wipe"])
BASH = ["bash__exec", "bash__script"]


@pytest.fixture
async def kernel(stage: Stage) -> Patching:
    """`main` has the tools files and bash, and may be given admin; `k` runs."""
    made = Patching(
        stage,
        noting("one", level=1, deep={"a": [1, 2]}),
        noting("two"),
        policy={"toolCalls": {"extensionsMayAdd": ["admin__*"]}},
    )
    await made.start("k")
    return made


RUBBISH: list[Any] = [
    None,
    5,
    "text",
    [],
    {},
    {"patches": None},
    {"patches": "add"},
    {"patches": [None]},
    {"patches": [{}]},
    {"patches": [{"op": "test", "path": "/prompt/system", "value": "You are main."}]},
    {"patches": [{"op": "copy", "from": "/tools/0", "path": "/tools/-"}]},
    {"patches": [{"op": "ADD", "path": "/tools/-", "value": "Tool/admin"}]},
    {"patches": [{"op": "add", "value": "Tool/admin"}]},
    {"patches": [{"op": "add", "path": 5, "value": "x"}]},
    {"patches": [{"op": "add", "path": "", "value": {}}]},
    {"patches": [{"op": "add", "path": "/", "value": "Tool/admin"}]},
    {"patches": [{"op": "remove", "path": "/tools/" + "9" * 5000}]},
    {"patches": [{"op": "replace", "path": "/prompt", "value": "text"}]},
    {"patches": [{"op": "add", "path": "/tools/-", "value": None}]},
    {"patches": [{"op": "add", "path": "/tools/-", "value": {}}]},
    {"patches": [{"op": "add", "path": "/tools/-", "value": {"kind": "Tool", "name": ["admin"]}}]},
    {"patches": [{"op": "add", "path": "/tools/-", "value": "Tool/"}]},
    {"patches": [{"op": "add", "path": "/tools/-", "value": "Tool/admin" + "x" * 100_000}]},
    {"patches": [{"op": "replace", "path": "/tools", "value": {"0": "Tool/admin"}}]},
    {"patches": [{"op": "replace", "path": "/extensions/1/config", "value": []}]},
    {"patches": [replace("/prompt/system", "x" * 70_000)]},
    {"patches": [replace("/prompt/system", "x")], "scope": 1},
    {"patches": [replace("/prompt/system", "x")], "revision": -1},
    {"patches": [replace("/prompt/system", "x")], "revision": 10**9},
    {"patches": [replace("/prompt/system", "x")], "revision": 2**70},
    {"patches": [replace("/prompt/system", "x")], "revision": 0.5},
    {"patches": [replace("/prompt/system", "x")], "revision": True},
    {"patches": [replace("/prompt/system", "x")], "reason": 5},
    {"patches": [replace("/prompt/system", "x")], "reasons": "misspelt"},
    {"patches": [replace("/prompt/system", "\ud800")]},
    {"patches": [replace("/prompt/system", "x")], "reason": "\udfff"},
]


async def test_rubbish_is_refused_with_a_code_and_changes_nothing(kernel: Patching) -> None:
    told = await kernel.propose("k", *RUBBISH)
    assert len(told) == len(RUBBISH)
    wrong = [
        (each, RUBBISH[at]) for at, each in enumerate(told) if each[0] == "accepted" or not each[1].startswith("E_")
    ]
    assert wrong == []
    assert await kernel.look("k") == ("You are main.", [*FILES, *BASH])
    assert await kernel.one("k", replace("/prompt/system", "Good.")) == ACCEPTED
    assert (await kernel.look("k"))[0] == "Good."


async def test_values_that_are_no_json(stage: Stage) -> None:
    """An extension is Python: whatever it hands over is refused with a code, and its turn goes on."""
    source = """
        import datetime, decimal

        def register(api, config):
            cycle = {}
            cycle["self"] = cycle
            deep = []
            for _ in range(5000):
                deep = [deep]
            values = [2**70, -2**65, float("nan"), float("inf"), object(), b"bytes", bytearray(b"x"), cycle, deep,
                      {1: "number"}, {None: 1}, {(1, 2): 3}, lambda: 1, type, Exception("x"), 1j, "\\ud800",
                      {"\\ud800": 1}, range(3), iter([1]), ...]

            async def propose(ctx):
                if ctx.step.index == 0 and ctx.turn.input_event.input == "go":
                    for value in values:
                        patches = [{"op": "add", "path": "/extensions/1/config/x", "value": value}]
                        try:
                            told = await api.live_config.propose_patch({"patches": patches})
                            code = told["error"]["code"] if told["error"] else ""
                            note("proposed", repr(type(value)), told["status"], code)
                        except Exception as exc:
                            note("raised", repr(type(value)), repr(exc)[:200])
                return ctx

            api.pipelines.mutate("step.post", propose)
    """
    kernel = Patching(stage, noting("one"), proposer=source)
    actor = await kernel.start("k")
    answer = await actor.turn("go")
    assert answer.error is None, answer.error
    told = [one for one in NOTES if one[0] in ("proposed", "raised")]
    assert len(told) == 21
    assert [one for one in told if one[0] != "proposed" or one[2] != "rejected" or not one[3].startswith("E_")] == []
    await kernel.look("k")
    assert [one[2] for one in NOTES if one[0] == "registered"] == [{}]


async def test_the_same_tool_twice_is_there_once(kernel: Patching) -> None:
    told = [await kernel.one("k", add("/tools/-", "Tool/admin")) for _ in range(3)]
    assert told[0] == ACCEPTED
    both = await kernel.one("k", add("/tools/-", "Tool/bash"), add("/tools/0", "Tool/bash"))
    assert both[0] in ("accepted", "rejected")
    shown = (await kernel.look("k"))[1]
    assert sorted(shown) == sorted({*FILES, *BASH, *ADMIN}), "each once"
    # Taken out once, it is gone, however often it was put in.
    names = [tool["name"] for tool in kernel.admin(op="config.show", agent="main", instanceKey="k")["config"]["tools"]]
    assert await kernel.one("k", remove(f"/tools/{names.index('admin')}")) == ACCEPTED
    assert not set(ADMIN) & set((await kernel.look("k"))[1])


async def test_the_second_of_a_step_with_the_revision_of_the_first(kernel: Patching) -> None:
    first = {"patches": [replace("/prompt/system", "1")]}
    assert await kernel.propose("k", first, first) == [ACCEPTED, CONFLICT]
    revision = kernel.told[0][3]
    later = {"patches": [replace("/prompt/system", "2")], "revision": revision}
    assert await kernel.propose("k", later) == [ACCEPTED]
    assert (await kernel.look("k"))[0] == "2"
    assert await kernel.propose("k", later) == [CONFLICT], "the revision is old by now"


async def test_parts_of_one_config_do_not_touch_each_other_and_a_whole_touches_its_parts(kernel: Patching) -> None:
    at = "/extensions/1/config"
    parts = [{"patches": [replace(f"{at}/level", 2)]}, {"patches": [add(f"{at}/more", 1)]}]
    assert await kernel.propose("k", *parts) == [ACCEPTED, ACCEPTED]
    whole = {"patches": [replace(at, {"level": 5})]}
    assert await kernel.propose("k", {"patches": [add(f"{at}/other", 1)]}, whole) == [ACCEPTED, CONFLICT]
    assert await kernel.propose("k", whole, {"patches": [replace(f"{at}/level", 9)]}) == [ACCEPTED, CONFLICT]
    # Not beneath each other, though one path begins like the other.
    assert await kernel.propose("k", {"patches": [add(f"{at}/lev", 1)]}, {"patches": [replace(f"{at}/level", 6)]}) == [
        ACCEPTED,
        ACCEPTED,
    ]
    await kernel.look("k")
    configs = [one[2] for one in NOTES if isinstance(one, tuple) and one[:2] == ("registered", "one")]
    assert configs[-1] == {"level": 6, "lev": 1}


PROMPTS = [
    "",
    " ",
    "\n\n",
    "한국어 프롬프트 🙂",
    "a\x00b",
    "x" * 60_000,
    "{{name}} %s {0}",
    "e\u0301 \u202e",
    "---\nkind: Agent",
]


async def test_prompts_of_every_kind_arrive_as_they_are(kernel: Patching) -> None:
    for prompt in PROMPTS:
        assert await kernel.one("k", replace("/prompt/system", prompt)) == ACCEPTED, prompt[:20]
        system, _ = await kernel.look("k")
        assert (system or "") == prompt, prompt[:20]


async def test_changed_after_the_proposal(stage: Stage) -> None:
    """What the extension does with its objects afterwards, or with what it was answered, is nobody's patch."""
    source = """
        def register(api):
            async def propose(ctx):
                if ctx.step.index == 0 and ctx.turn.input_event.input == "go":
                    value = {"level": 2}
                    patch = {"op": "replace", "path": "/extensions/1/config", "value": value}
                    asked = {"patches": [patch], "reason": "r"}
                    told = await api.live_config.propose_patch(asked)
                    value["level"] = "later"
                    patch["path"] = "/tools"
                    asked["patches"].append({"op": "remove", "path": "/tools/0"})
                    told["status"] = "mine"
                    ctx.effective_config["prompt"] = "mine"
                return ctx

            api.pipelines.mutate("step.pre", lambda ctx: ctx)
            api.pipelines.mutate("step.post", propose)
    """
    kernel = Patching(stage, noting("one", level=1), proposer=source)
    actor = await kernel.start("k")
    await actor.turn("go")
    assert (await kernel.look("k"))[0] == "You are main."
    assert [one[2] for one in NOTES if one[0] == "registered"] == [{"level": 1}, {"level": 2}]


async def test_keys_of_instances_that_resemble_each_other(kernel: Patching) -> None:
    for key in ("K", "k ", "k/k", "ｋ", "k\u0301"):
        await kernel.start(key)
    assert await kernel.one("k", replace("/prompt/system", "Mine.")) == ACCEPTED
    for key in ("K", "k ", "k/k", "ｋ", "k\u0301"):
        assert (await kernel.look(key))[0] == "You are main.", key


async def test_config_changes_back_before_the_step(kernel: Patching) -> None:
    """Two patches between two steps that come to nothing: nobody is registered anew."""
    assert kernel.operator(replace("/extensions/1/config/level", 2), key="k") == ACCEPTED
    assert kernel.operator(replace("/extensions/1/config/level", 1), key="k") == ACCEPTED
    before = len(NOTES)
    await kernel.look("k")
    assert NOTES[before:] == []


async def test_reasons_of_every_kind(kernel: Patching) -> None:
    for number, reason in enumerate(["", "한글", "x" * 10_000, "a\nb\x1b[31m", None]):
        (told,) = await kernel.propose("k", {"patches": [replace("/prompt/system", str(number))], "reason": reason})
        assert told == ACCEPTED, reason
    kept = [one.get("reason") or "" for one in kernel.listed("k")]
    assert max(map(len, kept)) == 500
    assert "한글" in kept


#: Two facts of one change at every place of a step: the prompt, and the config, by which a tool is named as well.
LOOKING = """
    from tests.contract.twists.notes import here

    def register(api, config):
        def see(ctx, place):
            here(place)
            said = ctx.effective_config
            own = next(one["config"] for one in said["extensions"] if one["name"] == "looking")
            index = getattr(getattr(ctx, "step", None), "index", -1)
            note("saw", index, place, said["prompt"]["system"], own["number"], own["other"], config["number"])

        def look(place):
            def mutator(ctx):
                see(ctx, place)
                return ctx
            return mutator

        async def around(ctx, next):
            see(ctx, "before " + "step.llmCall")
            told = await next(ctx)
            see(ctx, "after " + "step.llmCall")
            return told

        for place in PLACES:
            api.pipelines.mutate(place, look(place))
        api.pipelines.wrap("step.llmCall", around)
        named = f"look.n{config['number']}"
        api.tools.register({"name": named, "description": str(config["other"]), "handler": lambda ctx, given: 1})
"""
PLACES = ("step.pre", "step.config", "step.tools", "step.blocks", "toolCall.pre", "toolCall.post", "step.post")
ARRIVES = (*PLACES, "before step.llmCall", "after step.llmCall")


@pytest.mark.requirement("CONFIG-02")
@pytest.mark.parametrize("place", ARRIVES)
async def test_no_step_sees_half_of_a_change_wherever_it_comes(stage: Stage, place: str) -> None:
    """One patch of prompt, config and tools arrives at this place of the first step: the step ends as it began, and the
    next one has all of it."""
    looking = new("looking", LOOKING.replace("PLACES", repr(PLACES)), config={"number": 0, "other": 0})
    kernel = Patching(stage, looking)
    actor = await kernel.start("k")
    assert kernel.operator(replace("/prompt/system", "0"), key="k") == ACCEPTED
    at = "/extensions/1/config"
    whole = [replace("/prompt/system", "1"), replace(f"{at}/number", 1), replace(f"{at}/other", 1), remove("/tools/0")]
    HAPPENS[place] = lambda: NOTES.append(kernel.operator(*whole, key="k"))
    answer = await actor.turn("[]", calls(("look__n0", {})), calls(("look__n1", {})), "done")
    assert answer.error is None, answer.error
    assert ACCEPTED in NOTES, "it came"
    for request, number in zip(actor.asked, (0, 1, 1), strict=True):
        tools = {tool.name: tool.description for tool in request.tools}
        told = [(name, said) for name, said in tools.items() if name.startswith("look__")]
        assert (request.system, told) == (str(number), [(f"look__n{number}", str(number))])
        assert ("files__read" in tools) is (number == 0)
    steps: dict[int, set[tuple[Any, ...]]] = {}
    for one in NOTES:
        if one[0] == "saw" and one[1] >= 0:
            steps.setdefault(one[1], set()).add((int(one[3]), *one[4:]))
    assert steps == {0: {(0, 0, 0, 0)}, 1: {(1, 1, 1, 1)}, 2: {(1, 1, 1, 1)}}
