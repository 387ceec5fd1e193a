"""Each rule of the bus and of the channel into a jail has an id, and something that fails when the rule is broken."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted((ROOT / "schemas").glob("PROTOCOL*.md")), ROOT / "schemas" / "WORKER.md"]
VECTORS = ROOT / "schemas" / "vectors"
ID = re.compile(r"\[([A-Z]-[A-Z]+-\d+)\]")
MARK = re.compile(r"mark\.must\(([^)]*)\)")


def stated() -> Counter[str]:
    """The ids that the documents put behind their rules."""
    return Counter(rule for page in PAGES for rule in ID.findall(page.read_text(encoding="utf-8")))


def shown() -> set[str]:
    """The ids that sequences, vectors and tests say they show."""
    sequences = json.loads((VECTORS / "sequences.json").read_text(encoding="utf-8"))["sequences"]
    frames = json.loads((VECTORS / "frames.json").read_text(encoding="utf-8"))
    ids = {rule for one in [*sequences, *frames["valid"], *frames["bad"]] for rule in one.get("must", ())}
    for test in (ROOT / "tests").rglob("test_*.py"):
        for mark in MARK.findall(test.read_text(encoding="utf-8")):
            ids |= set(re.findall(r'"([^"]+)"', mark))
    return ids


def test_each_id_is_of_one_rule() -> None:
    ids = stated()
    assert ids and {rule for rule, times in ids.items() if times > 1} == set()


def test_nothing_shows_a_rule_that_is_not_there() -> None:
    assert shown() - stated().keys() == set()


def test_each_sequence_shows_a_rule() -> None:
    sequences = json.loads((VECTORS / "sequences.json").read_text(encoding="utf-8"))["sequences"]
    assert [sequence["name"] for sequence in sequences if not sequence["must"]] == []
