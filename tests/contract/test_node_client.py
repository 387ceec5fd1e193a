"""The Node client keeps the recorded frames, the sequences and the rules of a link, and its types are right."""

from __future__ import annotations

import pytest

from tests.node_fixture import node, node_client


@pytest.mark.parametrize("name", ["wire", "link"])
def test_the_rules_without_a_kernel(name: str) -> None:
    done = node("--test", "--test-reporter=spec", node_client() / "test" / f"{name}.test.mjs")
    assert done.returncode == 0, done.stdout[-6000:]


def test_its_types_are_strict_and_declared_as_written() -> None:
    folder = node_client()
    done = node(folder / "node_modules" / "typescript" / "bin" / "tsc", "--project", folder)
    assert done.returncode == 0, done.stdout
