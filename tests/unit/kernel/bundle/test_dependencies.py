"""Extensions that wait for each other: circles, and agents whose order does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle.rules.extensions import circles, misplaced
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound

GRAPHS = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefx"), max_size=4))


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({}, []),
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["a"]}, [["a"]]),
        ({"b": ["a"], "a": ["b"]}, [["b", "a"]]),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, [["b", "c"]]),
        ({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}, [["a", "b"], ["c", "d"]]),
        ({"a": ["missing"]}, []),
    ],
)
def test_which_circles_there_are(graph: dict[str, list[str]], found: list[list[str]]) -> None:
    assert list(circles(graph)) == found


@given(GRAPHS)
def test_a_circle_is_found_exactly_when_there_is_one(graph: dict[str, list[str]]) -> None:
    found = list(circles(graph))
    for circle in found:
        assert all(follower in graph[name] for name, follower in zip(circle, [*circle[1:], circle[0]], strict=True))
    left = {name: {other for other in others if other in graph} for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert bool(found) == bool(left)


def test_a_long_chain_needs_no_stack() -> None:
    graph = {str(number): [str(number + 1)] for number in range(5000)} | {"5000": ["0"]}
    assert [len(circle) for circle in circles(graph)] == [5001]


def test_what_is_loaded_too_late_or_not_at_all() -> None:
    wanted = {"a": ["b", "c", "a"], "b": [], "c": ["b"]}
    assert list(misplaced(["b", "c", "a"], wanted)) == []
    assert list(misplaced(["a", "b"], wanted)) == [("a", "b", True), ("a", "c", False)]


def extension(name: str, *wanted: str) -> str:
    needs = "".join(f"\n    - {ref}" for ref in wanted)
    return (
        f"apiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {{name: {name}}}\n"
        f"spec:\n  entry: ext/x.py\n  dependsOn:{needs or ' []'}\n---\n"
    )


@pytest.mark.requirement("LOAD-06")
def test_a_circle_is_a_warning_and_the_order_stays(look: Look) -> None:
    text = extension("one", "Extension/two") + extension("two", "{kind: Extension, name: one}")
    uses = GOOD.replace("  tools:\n", "  extensions:\n    - Extension/two\n    - Extension/one\n  tools:\n", 1)
    found = sound(look(text + uses, files={"ext/x.py": "def register(api): ..."}))
    assert [warning.code for warning in found.warnings] == ["W_CONFIG_DEPENDENCY"] * 2
    assert "Extension/one -> Extension/two -> Extension/one" in found.warnings[0].message
    assert "Extension/two depends on Extension/one, which is loaded after it" in found.warnings[1].message
    assert [spec.name for spec in found.checked.agents["helper"].extensions] == ["two", "one"]


def test_an_unknown_dependency_is_an_error(look: Look) -> None:
    found = look(extension("one", "Extension/missing") + GOOD, files={"ext/x.py": "def register(api): ..."})
    assert [(error.code, error.path) for error in found.errors] == [("E_CONFIG_MISSING_REF", "spec.dependsOn[0]")]
