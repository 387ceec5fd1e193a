"""What `step.config` changes is put in place: extensions by key, tools, the prompt. Real modules, whole turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ToolSource
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, api_of, code_of

#: Notes what happens to it in instance.shared.
NOTING = """
def register(api, config):
    name = api.extension.metadata.name
    notes = api.instance.shared.setdefault("notes", [])
    state = api.ext_state()
    notes.append((name, "register", config.get("level"), state.get("turns", 0)))
    async def cleanup(payload):
        notes.append((name, "cleanup", config.get("level")))
    api.events.on("extension.cleanup", cleanup)
    def count(ctx):
        state["turns"] = state.get("turns", 0) + 1
        return ctx
    api.pipelines.mutate("step.blocks", count)
    api.tools.register({"name": name + ".stats", "description": "x", "handler": lambda ctx, given: dict(state)})
"""

#: Changes the configuration as its own `config` says.
CHANGING = """
def register(api, config):
    def change(ctx):
        made = dict(ctx.effective_config)
        changes = api.instance.shared.get("changes", [])
        if changes:
            made |= changes.pop(0)
        return ctx.replace(effective_config=made)
    api.pipelines.mutate("step.config", change)
"""

ONE, TWO, CHANGER = ({"kind": "Extension", "name": name} for name in ("one", "two", "changer"))


def spec_of(place: Path, name: str, code: str, **config: Any) -> ExtensionSpec:
    folder = place / "bundle" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.py").write_text(code)
    resource = {"kind": "Extension", "metadata": {"name": name}, "spec": {"config": config}}
    return ExtensionSpec(name=name, entry=str(folder / "main.py"), resource=resource, config=config)


class Agent:
    """An agent with the extensions `changer`, `one` and `two`."""

    def __init__(self, runner: TurnRunner, link: FakeLink, model: FakeModel) -> None:
        self.runner = runner
        self.link = link
        self.model = model
        self.shared: dict[str, Any] = {}
        self.turns = 0

    async def turn(self, *changes: dict[str, Any]) -> list[Any]:
        """One turn whose steps change the configuration so; what was noted in it."""
        shared = self.runner.instance.extensions._shared
        shared["changes"] = list(changes)
        notes = shared.setdefault("notes", [])
        before = len(notes)
        self.turns += 1
        await self.runner.run(event_frame(f"e{self.turns}", "go"))
        found: list[Any] = notes[before:]
        return found


@pytest.fixture
async def agent(make: Make, tmp_path: Path) -> Agent:
    specs = [spec_of(tmp_path, "changer", CHANGING), *(spec_of(tmp_path, n, NOTING, level=1) for n in ("one", "two"))]
    link, model = FakeLink(), FakeModel(*[says("done")] * 9)
    runner = make(link, model, extensions=specs, system="Be kind.")
    await runner.load_extensions()
    return Agent(runner, link, model)


@pytest.mark.requirement("LOAD-01", "EXT-08")
async def test_extensions_are_loaded_once_in_the_order_of_the_agent(agent: Agent) -> None:
    assert agent.runner.instance.extensions.names == ["changer", "one", "two"]
    notes = agent.runner.instance.extensions._shared["notes"]
    assert notes == [("one", "register", 1, 0), ("two", "register", 1, 0)]
    assert await agent.turn() == []
    assert await agent.turn() == []


@pytest.mark.requirement("RECONCILE-03", "RECONCILE-04")
async def test_another_order_recreates_nothing(agent: Agent) -> None:
    assert await agent.turn({"extensions": [TWO, ONE, CHANGER]}) == []
    assert await agent.turn({"extensions": ["Extension/two", {"ref": "Extension/one"}, CHANGER]}) == []
    assert agent.link.answers()[-1].status == "completed"


@pytest.mark.requirement("RECONCILE-01", "RECONCILE-02", "RECONCILE-05", "CONFIG-03")
async def test_what_leaves_the_configuration_cleans_up_and_is_gone_and_comes_back_fresh(agent: Agent) -> None:
    await agent.turn()
    notes = await agent.turn({"extensions": [CHANGER, TWO]})
    assert notes == [("one", "cleanup", 1)]
    names = [item.name for item in agent.model.requests[-1].tools]
    assert "two__stats" in names
    assert agent.runner.instance.extensions.names == ["changer", "two"]
    assert agent.runner.instance.tools.get("one__stats") is None
    assert await agent.turn() == [("one", "register", 1, 0)]  # its state went with its key


@pytest.mark.requirement("RECONCILE-03")
async def test_another_config_registers_only_that_one_again_and_its_state_stays(agent: Agent) -> None:
    await agent.turn()
    await agent.turn()
    changed = {**ONE, "config": {"level": 2}}
    notes = await agent.turn({"extensions": [CHANGER, changed, TWO]})
    assert notes == [("one", "cleanup", 1), ("one", "register", 2, 2)]
    assert await agent.turn({"extensions": [CHANGER, changed, TWO]}) == []
    assert await agent.turn() == [("one", "cleanup", 2), ("one", "register", 1, 4)]


@pytest.mark.requirement("CONFIG-03")
async def test_the_tools_and_the_prompt_of_a_step_are_as_its_configuration_has_them(make: Make, tmp_path: Path) -> None:
    registry = [
        CatalogItem(name=f"{tool}__{export}", source=ToolSource("config", tool))
        for tool, export in (("bash", "exec"), ("notes", "add"), ("notes", "list"))
    ]
    link, model = FakeLink(), FakeModel(wants(("a", "bash__exec", {})), says("done"), says("again"))
    addable = ["notes__add", "notes__list"]
    runner = make(link, model, registry=registry, catalog=["bash__exec"], addable=addable, system="Be kind.")
    changes = [{"tools": ["Tool/notes"], "prompt": {"system": "Be brief."}}]

    def change(ctx: Any) -> Any:
        assert ctx.effective_config["tools"] == [{"kind": "Tool", "name": "bash"}]
        return ctx.replace(effective_config=ctx.effective_config | (changes.pop() if changes else {}))

    api_of(runner).pipelines.mutate("step.config", change)
    await runner.run(event_frame("e1", "go"))
    first, second = model.requests
    assert ([item.name for item in first.tools], first.system) == (["notes__add", "notes__list"], "Be brief.")
    assert ([item.name for item in second.tools], second.system) == (["bash__exec"], "Be kind.")
    assert link.calls == []  # the call of the first step was outside its catalog


@pytest.mark.requirement("RECONCILE-05")
async def test_the_end_of_the_instance_cleans_up_everything_once(agent: Agent) -> None:
    notes = agent.runner.instance.extensions._shared["notes"]
    del notes[:]
    await agent.runner.close()
    await agent.runner.close()
    assert sorted(notes) == [("one", "cleanup", 1), ("two", "cleanup", 1)]


@pytest.mark.requirement("LOAD-04", "LOAD-05")
async def test_one_that_fails_to_register_fails_every_turn_and_is_told_in_the_log(
    make: Make, link: FakeLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path, "broken", "def register(api):\n    raise KeyError('no such thing')")
    runner = make(link, FakeModel(says("never")), extensions=[spec])
    await runner.load_extensions()
    for number in (1, 2):
        await runner.run(event_frame(f"e{number}", "go"))
        assert code_of(link.answers()[-1]) == "E_EXTENSION_FAILED"
        assert link.answers()[-1].steps == 0, "no step has begun"
    for part in ("broken", spec.entry, "KeyError", "no such thing", "Traceback"):
        assert part in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extensions": "none"}, "is str, not a list"),
        ({"extensions": ["Extension/missing"]}, "names Extension/missing, which the agent does not have"),
        ({"extensions": [ONE, ONE, CHANGER]}, "names Extension/one twice"),
        ({"extensions": [{**ONE, "config": 5}]}, "the config of Extension/one is no object"),
        ({"extensions": [{"kind": "Tool", "name": "one"}]}, "is no reference to one Extension"),
        ({"extensions": [None]}, "is no reference to one Extension"),
        ({"tools": ["Tool/missing"]}, "names Tool/missing, which there is not"),
        ({"prompt": {"system": 5}}, "system a text or nothing"),
        ({"prompt": None}, "system a text or nothing"),
    ],
)
async def test_a_configuration_that_cannot_be_is_the_steps_error(agent: Agent, change: Any, told: str) -> None:
    assert await agent.turn(change) == []
    answer = agent.link.answers()[-1]
    assert code_of(answer) == "E_MIDDLEWARE"
    assert told in str(answer.error)
    assert "extension changer" in str(answer.error)
    await agent.turn()
    assert agent.link.answers()[-1].status == "completed"


async def test_one_that_cannot_be_registered_again_fails_the_step_and_the_next_tries_anew(agent: Agent) -> None:
    place = Path(agent.runner.instance.spec.extensions[1].entry)
    shared = agent.runner.instance.extensions._shared
    module = agent.runner.instance.extensions._loaded["one"].module
    module.register = lambda api: 1 / 0  # type: ignore[attr-defined]
    assert await agent.turn({"extensions": [CHANGER, {**ONE, "config": {"level": 2}}, TWO]}) == [("one", "cleanup", 1)]
    assert code_of(agent.link.answers()[-1]) == "E_EXTENSION_FAILED"
    assert place.exists()
    assert agent.runner.instance.extensions.names == ["changer", "two"]
    assert await agent.turn() == [("one", "register", 1, 0)]
    assert agent.link.answers()[-1].status == "completed"
    assert shared["notes"]


@pytest.mark.requirement("STATE-01", "STATE-02", "STATE-03", "STATE-04")
async def test_state_in_memory_is_ones_own_and_the_shared_is_everybodys(agent: Agent, make: Make) -> None:
    await agent.turn()
    assert {name: found.state for name, found in agent.runner.instance.extensions._loaded.items()} == {
        "changer": {},
        "one": {"turns": 1},
        "two": {"turns": 1},
    }
    again = make(FakeLink(), FakeModel(says("done")), extensions=agent.runner.instance.spec.extensions)
    await again.load_extensions()  # as another process of the same instance
    assert all(found.state == {} for found in again.instance.extensions._loaded.values())
    assert again.instance.extensions._shared == {"notes": [("one", "register", 1, 0), ("two", "register", 1, 0)]}
