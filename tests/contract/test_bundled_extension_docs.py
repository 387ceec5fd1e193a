"""docs/bundled-extensions.md says what the manifests say, and each example runs in a turn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.loader import open_bundle
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import runner_of

PAGE = (Path(__file__).parents[2] / "docs" / "bundled-extensions.md").read_text(encoding="utf-8")
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: helper}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash]
"""


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def examples(text: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)


DOCUMENTED = sections()


TABLE = re.findall(r"^\| \[?`([a-z-]+)`", PAGE.partition("\n## ")[0], re.MULTILINE)


def test_every_bundled_extension_is_in_the_table_of_the_page_once() -> None:
    assert [TABLE.count(name) for name in BaseExtensions().names()] == [1] * len(BaseExtensions().names())


@pytest.mark.feature("approvals", "budgets", "code_mode", "mcp", "skills")
def test_the_table_has_no_other() -> None:
    assert sorted(TABLE) == BaseExtensions().names()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_table_has_the_keys_and_defaults_of_the_manifest(name: str) -> None:
    found = BaseExtensions().find(name)
    assert found is not None
    assert found.schema is not None
    rows = dict(re.findall(r"^\| `(\w+)` \|(?: `(.*?)`)? \|", DOCUMENTED[name], flags=re.MULTILINE))
    wanted = {key: about.get("default") for key, about in found.schema["properties"].items()}
    assert list(rows) == list(wanted)
    assert {key: row if isinstance(wanted[key], str) else yaml.safe_load(row) for key, row in rows.items()} == wanted


@pytest.mark.parametrize("name", DOCUMENTED)
async def test_the_example_runs(tmp_path: Path, name: str) -> None:
    (example,) = examples(DOCUMENTED[name])
    await run_turn(tmp_path, BUNDLE + "".join(f"  {line}\n" for line in example.splitlines()), [name])


async def test_a_configuration_with_a_name_of_its_own_runs(tmp_path: Path) -> None:
    (example,) = examples(PAGE.partition("\n## ")[0])
    await run_turn(tmp_path, f"{BUNDLE}  extensions: [Extension/short-window]\n---\n{example}", ["short-window"])


async def run_turn(tmp_path: Path, text: str, names: list[str]) -> None:
    """A turn with a tool call, in an agent as the kernel would start it."""
    (tmp_path / "goondan.yaml").write_text(text)
    state = str(tmp_path / "state")
    plan = open_bundle(str(tmp_path / "goondan.yaml"), state_dir=state, env={}, handlers=False).plan
    spec = plan.agents["helper"]
    assert [extension.name for extension in spec.extensions] == names
    model = FakeModel(wants(("a", "bash__exec", {"command": "ls"})), says("done"))
    link: Any = FakeLink()
    runner = runner_of(spec, link, model)
    try:
        await runner.load_extensions()
        await runner.run(event_frame("e1", "go"))
    finally:
        await runner.close()
    assert json.dumps([answer.response for answer in link.answers()]) == '["done"]'
