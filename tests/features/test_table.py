"""The table of features says what is there: a row for each folder, and in it each of its files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from goondan import features
from goondan.agentproc.turn import parts as agent_parts
from goondan.features import FEATURES, Feature, parts
from goondan.kernel.broker import __main__ as broker
from goondan.kernel.bundle.rules import kinds
from goondan.kernel.cli.commands import command_of
from goondan.kernel.cli.console.questions import questions
from goondan.schemas.bundle.launch import KernelPlan, ToolHostSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError

FOLDER = Path(features.__file__).parent
#: What a folder of a feature can have (docs/design/features.md).
FILES = {
    "wire",
    "broker",
    "agent",
    "host",
    "bundle",
    "command",
    "console",
    "door",
    "status",
    "process",
    "program",
    "jail",
    "api",
    "base",
}


def folders() -> Iterator[Path]:
    return (path for path in sorted(FOLDER.iterdir()) if path.is_dir() and path.name != "__pycache__")


def test_each_folder_has_one_row() -> None:
    assert [path.name for path in folders()] == sorted(feature.name for feature in FEATURES)


def test_a_row_names_the_files_of_its_folder_and_each_is_loaded_by_a_known_process() -> None:
    for feature in FEATURES:
        there = {path.stem for path in (FOLDER / feature.name).iterdir()} - {"__init__", "__pycache__"}
        assert there == set(feature.files), feature.name
        assert there <= FILES, feature.name


def test_features_need_each_other_in_no_circle() -> None:
    left = {feature.name: set(feature.needs) for feature in FEATURES}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        assert all(needs <= {feature.name for feature in FEATURES} for needs in left.values())
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


def test_a_row_names_the_commands_of_its_feature() -> None:
    for feature in FEATURES:
        assert bool(feature.commands) == ("command" in feature.files), feature.name
        if feature.commands:
            module = import_module(f"goondan.features.{feature.name}.command")
            groups = {name.rpartition(" ")[0] for name in feature.commands}
            assert list(module.COMMANDS) == [name for name in feature.commands if name not in groups]


def test_parts_are_loaded_in_the_order_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return ModuleType(name)

    rows = (Feature("tape", ("agent",)), Feature("gate", ("broker",)), Feature("count", ("broker", "agent")))
    monkeypatch.setattr(features, "FEATURES", rows)
    monkeypatch.setattr(features, "import_module", load)
    assert [module.__name__ for module in parts("agent")] == loaded
    assert loaded == ["goondan.features.tape.agent", "goondan.features.count.agent"]


def test_a_file_that_is_missing_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEATURES", (Feature("no_such_feature", ("broker",)),))
    with pytest.raises(ImportError, match="no_such_feature"):
        parts("broker")
    assert parts("agent") == []


#: What loads a file of a feature.
LOADERS: dict[str, Callable[[Feature], Any]] = {
    "broker": lambda row: broker.features(),
    "bundle": lambda row: kinds.feature_extensions.__wrapped__(),
    "agent": lambda row: agent_parts.kinds.__wrapped__(),
    "console": lambda row: questions(SimpleNamespace(on=lambda kind, call: None)),  # type: ignore[arg-type]
    "command": lambda row: command_of([*row.commands][-1]),
}


@pytest.mark.parametrize(
    ("row", "file"),
    [(row, file) for row in FEATURES for file in LOADERS if file in row.files],
    ids=lambda value: getattr(value, "name", value),
)
async def test_a_file_that_a_row_names_and_that_is_gone_stops_each_process_that_loads_it(
    monkeypatch: pytest.MonkeyPatch, row: Feature, file: str
) -> None:
    LOADERS[file](row)
    monkeypatch.setitem(sys.modules, f"goondan.features.{row.name}.{file}", None)
    with pytest.raises(ImportError, match=row.name):
        LOADERS[file](row)


def test_without_a_feature_that_knows_of_model_servers_none_is_chosen_or_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kinds, "parts", lambda file: [ModuleType("one"), ModuleType("another")])
    models = kinds.local_models()
    assert models.chosen("/s", "/b") is None
    models.offer("/s", "/b")
    assert models.before_start("/b", "/s", None)("openai, m") is None


def test_a_plan_with_a_part_for_a_feature_that_is_not_there_is_refused_by_name() -> None:
    plan = KernelPlan(
        revision="r",
        bundle="/b",
        state_dir="/s",
        entry_agent="",
        agents={},
        toolhost=ToolHostSpec(tools=[], state_dir="/s", revision="r"),
    )
    broker.refuse_unclaimed(plan)
    with pytest.raises(GoondanError, match="the bundle needs the feature counting") as refused:
        broker.refuse_unclaimed(replace(plan, parts={"counting": to_raw({})}))
    assert refused.value.info.code == "E_CONFIG_UNSUPPORTED"
