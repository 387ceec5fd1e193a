"""A bundle with a budget never runs without it: whichever file of the feature is missing, what needs it stops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from goondan import features
from goondan.agentproc.turn import parts
from goondan.features.budgets.wire import FEATURE
from goondan.kernel.broker import assemble
from goondan.kernel.bundle.rules import extension_config
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ModelSpec, ToolHostSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from tests.unit.kernel.bundle.conftest import Look
from tests.unit.kernel.bundle.test_bundled_extensions import own, using

LOADERS: dict[str, Callable[[], Any]] = {
    "bundle": extension_config.feature_extensions,
    "broker": assemble.features,
    "agent": parts.kinds,
}
WITH_BUDGET = using("{ref: Extension/budget, config: {limits: {calls: 1}}}")
#: An extension of the bundle with the bundled code.
OWN = own('entry: "@goondan/base/budget", config: {limits: {calls: 7}}') + using("Extension/mine")


@pytest.fixture(autouse=True)
def _load_anew() -> None:
    for load in LOADERS.values():
        getattr(load, "cache_clear", lambda: None)()


def without_row() -> tuple[features.Feature, ...]:
    return tuple(row for row in features.FEATURES if row.name != FEATURE)


@pytest.mark.parametrize("file", LOADERS)
def test_a_process_does_not_start_without_its_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"goondan.features.{FEATURE}.{file}", None)
    with pytest.raises(ImportError, match=FEATURE):
        LOADERS[file]()


@pytest.mark.parametrize(
    "load",
    [
        "from goondan.agentproc.turn.parts import kinds; kinds()",
        "from goondan.kernel.broker.assemble import features; features()",
        "import goondan.kernel.cli.commands.traces",
        "import goondan.toolhost.app",
    ],
    ids=["agent", "broker", "gdn denied", "tool host"],
)
def test_every_process_knows_the_code(load: str) -> None:
    """No handler can speak with it, and a turn that fails by it ends as one that has spent its budget."""
    code = f"{load}; from goondan.schemas.wire.errors import row_of; assert row_of('E_BUDGET_SPENT').refuser"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_feature_no_agent_can_use_the_extension(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEATURES", without_row())
    for bundle, code in ((WITH_BUDGET, "E_CONFIG_MISSING_REF"), (OWN, "E_CONFIG_UNSUPPORTED")):
        (error,) = look(bundle).errors
        assert error.code == code
        assert "budget" in error.message


def test_without_the_feature_the_broker_takes_no_plan_with_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = AgentSpec(
        name="lead",
        model=ModelSpec(provider="embedded"),
        registry=[],
        catalog=[],
        state_dir="/s",
        revision="r",
        parts={FEATURE: to_raw({"calls": 1})},
    )
    plan = KernelPlan(
        revision="r",
        bundle="/b",
        state_dir="/s",
        entry_agent="lead",
        agents={"lead": agent},
        toolhost=ToolHostSpec(tools=[], state_dir="/s", revision="r"),
    )
    assemble.refuse_unclaimed(plan)
    monkeypatch.setattr(assemble, "FEATURES", without_row())
    with pytest.raises(GoondanError, match=f"the bundle needs the feature {FEATURE}") as refused:
        assemble.refuse_unclaimed(plan)
    assert refused.value.info.code == "E_CONFIG_UNSUPPORTED"
