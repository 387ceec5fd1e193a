"""`make mutants`: what it tries, and how it tells what came of it. The tool itself runs for itself only."""

from __future__ import annotations

import re
import tomllib

from scripts.mutants import GROUPS, KILLED_AT_LEAST, SURVIVORS, Group, Outcome, Survivor, configuration, listing
from scripts.mutations import ROOT


def test_every_module_and_every_test_is_there_and_no_module_twice() -> None:
    modules = [module for group in GROUPS.values() for module in group.modules]
    assert len(set(modules)) == len(modules)
    for path in (*modules, *(test for group in GROUPS.values() for test in group.tests)):
        assert (ROOT / path).exists(), path


def test_what_the_tool_reads_is_toml() -> None:
    made = tomllib.loads(configuration(Group(["a/b.py"], ["tests/t.py"])))["tool"]["mutmut"]
    assert (made["only_mutate"], made["pytest_add_cli_args_test_selection"]) == (["goondan/a/b.py"], ["tests/t.py"])


def test_what_nobody_noticed_is_listed_by_its_place() -> None:
    outcome = Outcome(3, [Survivor("b.py: two", "x = 1", "x = 2"), Survivor("a.py: one", "if a:", "if not a:")], 1.0)
    assert (outcome.made, outcome.percent) == (5, 60.0)
    assert listing({"g": outcome}).partition("## ")[2] == (
        "g: 3 of 5 noticed, 60.0 %\n"
        "a.py: one\n    - if a:\n    + if not a:\nb.py: two\n    - x = 1\n    + x = 2\n"
    )  # fmt: skip


def test_what_the_list_in_the_repository_says_is_enough() -> None:
    heads = re.findall(r"^## (\w+): .* ([\d.]+) %$", SURVIVORS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert heads
    assert {name for name, _ in heads} <= set(GROUPS)
    assert min(float(percent) for _, percent in heads) >= KILLED_AT_LEAST
