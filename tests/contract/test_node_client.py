"""The Node client keeps the recorded frames, the sequences and the rules of a link, and its types are right."""

from __future__ import annotations

import pytest

from scripts.node_client import ROOT, declarations
from tests.machine import FOUND
from tests.node_fixture import node, node_client


@pytest.mark.parametrize("name", ["wire", "link"])
def test_the_rules_without_a_kernel(name: str) -> None:
    done = node("--test", "--test-reporter=spec", node_client() / "test" / f"{name}.test.mjs")
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.feature("approvals")  # the client names what waits for a person
def test_its_types_are_strict_and_its_declarations_those_of_its_modules() -> None:
    """The compiler takes seconds: it says what is wrong while it makes the declarations."""
    node_client()
    for path, content in declarations(FOUND).items():
        written = (ROOT / path).read_text(encoding="utf-8")
        assert written == content, f"{path} is out of date: run `python -m scripts.node_client --types`"
