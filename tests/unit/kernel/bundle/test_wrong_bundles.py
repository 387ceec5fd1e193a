"""What is said to a person of a wrong bundle: the place, the cause, and a next step that works when it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.kernel.bundle.conftest import GOOD, Look

CASES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "wrong_bundles.yaml").read_text())
#: With two bundled extensions, so that their configs can be wrong.
BUNDLE = GOOD.replace(
    "  tools:\n    - Tool/words\n",
    "  extensions:\n    - {ref: Extension/budget, config: {limits: {tokens: 9}}}\n"
    "    - {ref: Extension/skills, config: {discovery: {skillDirs: [./skills]}}}\n  tools:\n    - Tool/words\n",
)
FILES = {"skills/a/SKILL.md": "---\nname: a\ndescription: b\n---\n"}
#: The cases about these two.
OF_EXTENSIONS = [name for name, case in CASES.items() if case["old"] not in GOOD]


def test_there_are_twenty_and_the_bundle_is_right(look: Look) -> None:
    assert len(CASES) == 20
    assert len(OF_EXTENSIONS) == 3
    seen = look(GOOD)
    assert (seen.errors, seen.warnings) == ([], [])


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_EXTENSIONS])
def test_the_place_the_cause_and_a_next_step_that_works(look: Look, name: str) -> None:
    is_told(look, GOOD, CASES[name])


@pytest.mark.feature("budgets", "skills")
@pytest.mark.parametrize("name", OF_EXTENSIONS)
def test_the_same_of_the_configs_of_bundled_extensions(look: Look, name: str) -> None:
    seen = look(BUNDLE, files=FILES)
    assert (seen.errors, seen.warnings) == ([], [])
    is_told(look, BUNDLE, CASES[name])


def is_told(look: Look, bundle: str, case: dict[str, Any]) -> None:
    assert bundle.count(case["old"]) >= 1
    wrong = bundle.replace(case["old"], case["new"], 1)
    seen = look(wrong, files=FILES)
    problems = seen.warnings if case.get("warning") else seen.errors
    at = wrong.index(case["at"])
    line, column = wrong.count("\n", 0, at) + 1, at - wrong.rfind("\n", 0, at)
    assert [(p.message.replace(p.file, "FILE"), p.suggestion, (p.line, p.column)) for p in problems] == [
        (case["says"], case["step"], (line, column))
    ]
    old, new = case["take"]
    mended = look(wrong.replace(old, new, 1), files=FILES)
    assert (mended.errors, mended.warnings) == ([], [])
