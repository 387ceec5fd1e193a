"""Loading: real modules in real folders, and every way in which one can be no extension."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.extensions import loaded as load_module
from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.extensions.loaded import Extensions, InstancePaths
from goondan.agentproc.extensions.points.pipeline import Pipeline
from goondan.agentproc.turn.configuration import Configuration
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.errors import GoondanError
from tests.unit.agentproc.fakes import make_spec


def load(folder: Path, *codes: str, config: dict[str, Any] | None = None) -> tuple[Pipeline, DynamicTools]:
    """Load one extension for each module text, in order."""
    specs: list[ExtensionSpec] = []
    for number, code in enumerate(codes):
        place = folder / f"e{number}"
        place.mkdir(exist_ok=True)
        (place / "main.py").write_text(code)
        resource = {"kind": "Extension", "metadata": {"name": f"e{number}"}, "spec": {"config": config or {}}}
        entry = str(place / "main.py")
        specs.append(ExtensionSpec(name=f"e{number}", entry=entry, resource=resource, config=config or {}))
    pipeline, tools = Pipeline(), DynamicTools({})

    async def run() -> None:
        place = InstancePaths("a", "k", str(folder / "instance"), str(folder / "state"))
        events = EventBus()
        config = Configuration(make_spec(place.state_dir))
        await Extensions(pipeline, tools, events, place, config, workdir=str).reconcile(specs)

    asyncio.run(run())
    return pipeline, tools


@pytest.mark.requirement("EXT-06")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1", "no function register"),
        ("def register(", "SyntaxError"),
        ("import no_such_module_here\ndef register(api): ...", "ModuleNotFoundError"),
        ("def register(api):\n    raise ValueError('config wrong')", "ValueError: config wrong"),
        ("def register(api):\n    raise SystemExit('leave')", "SystemExit"),
        ("def register(api):\n    api.pipeline.register('steps', print)", "no middleware kind 'steps'"),
        ("def register(api):\n    api.pipelines.mutate('step.llmCall', print)", "no point 'step.llmCall' for mutate"),
        ("def register():\n    pass", "TypeError"),
    ],
)
def test_what_cannot_be_loaded_is_one_error_that_names_the_extension(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(GoondanError) as raised:
        load(tmp_path, "def register(api): ...", code)
    info = raised.value.info
    assert info.code == "E_EXTENSION_FAILED"
    assert "e1" in info.message
    assert says in info.message


def test_register_may_not_take_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "REGISTER_S", 0.02)
    with pytest.raises(GoondanError, match="longer than"):
        load(tmp_path, "import asyncio\nasync def register(api):\n    await asyncio.sleep(60)")
