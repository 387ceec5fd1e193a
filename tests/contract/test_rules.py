"""Each rule of the bus and of the channel into a jail has an id, and something that fails when the rule is broken."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted((ROOT / "schemas").glob("PROTOCOL*.md")), ROOT / "schemas" / "WORKER.md"]
VECTORS = ROOT / "schemas" / "vectors"
SCENARIOS = sorted((ROOT / "features").glob("certify/command/*.yaml"))
ID = re.compile(r"\[([A-Z]-[A-Z]+-\d+)\]")
#: Tests that show a rule, by its id, where no sequence, vector or scenario does: `file: test`.
TESTS: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "tests" / "rules.yaml").read_text(encoding="utf-8"))


def stated() -> Counter[str]:
    """The ids that the documents put behind their rules."""
    return Counter(rule for page in PAGES for rule in ID.findall(page.read_text(encoding="utf-8")))


def sequences() -> list[dict[str, Any]]:
    """All of them."""
    recorded = json.loads((VECTORS / "sequences.json").read_text(encoding="utf-8"))
    return [sequence for kind, some in recorded.items() if kind != "format" for sequence in some]


def recorded() -> set[str]:
    """The ids that sequences, vectors and scenarios of certificates say they show."""
    frames = json.loads((VECTORS / "frames.json").read_text(encoding="utf-8"))
    ids = {rule for one in [*sequences(), *frames["valid"], *frames["bad"]] for rule in one.get("must", ())}
    for file in SCENARIOS:
        found = re.findall(r"must: \[([^\]]*)\]", file.read_text(encoding="utf-8"))
        ids |= {rule.strip() for rules in found for rule in rules.split(",") if rule.strip()}
    return ids


def test_each_id_is_of_one_rule() -> None:
    ids = stated()
    assert ids and {rule for rule, times in ids.items() if times > 1} == set()


@pytest.mark.feature("certify")
def test_each_rule_is_shown_and_nothing_shows_a_rule_that_is_not_there() -> None:
    shown = recorded() | TESTS.keys()
    assert (sorted(stated().keys() - shown), sorted(shown - stated().keys())) == ([], [])


def test_each_test_that_shows_a_rule_is_there() -> None:
    for rule, tests in TESTS.items():
        for file, name in tests.items():
            assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), rule


def test_each_sequence_shows_a_rule() -> None:
    assert [sequence["name"] for sequence in sequences() if not sequence["must"]] == []
