"""The check for circles of imports finds each kind of import, and says when a known circle is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.import_circles import circles, faults, graph_of, imports

KNOWN = {"p", "p.a", "p.b", "p.q", "p.q.c"}


@pytest.mark.parametrize(
    ("source", "module", "package", "found"),
    [
        ("import p.a", "p.b", False, {"p.a"}),
        ("from p.a import x", "p.b", False, {"p.a"}),
        ("from p import a, x", "p.b", False, {"p.a", "p"}),
        ("from . import a", "p.b", False, {"p.a"}),
        ("from .a import x", "p.b", False, {"p.a"}),
        ("from ..a import x", "p.q.c", False, {"p.a"}),
        ("from .c import x", "p.q", True, {"p.q.c"}),
        ("def f():\n    from p.a import x", "p.b", False, {"p.a"}),
        ("if TYPE_CHECKING:\n    from p.a import x", "p.b", False, {"p.a"}),
        ("import os\nfrom json import loads", "p.b", False, set()),
    ],
)
def test_imports(source: str, module: str, package: bool, found: set[str]) -> None:
    assert imports(source, module, KNOWN, package=package) == found


def test_a_circle_is_found_however_long_it_is_and_what_only_leads_to_it_is_none() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set(), "f": {"g"}, "g": {"f", "e"}}
    assert circles(graph) == [frozenset("abc"), frozenset("fg")]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_a_new_circle_and_a_known_one_that_is_gone_are_faults() -> None:
    graph = {"a": {"b"}, "b": {"a"}, "c": set()}
    assert faults(graph, [frozenset("ab")]) == []
    assert faults(graph, []) == ["these modules import each other: a -> b; b -> a"]
    (line,) = faults({"a": set(), "b": set()}, [frozenset("ab")])
    assert line.startswith("no circle any more")


def test_a_tree_is_read_with_its_packages(tmp_path: Path) -> None:
    (tmp_path / "p" / "templates").mkdir(parents=True)
    (tmp_path / "p" / "__init__.py").write_text("from goondan.p.a import x")
    (tmp_path / "p" / "a.py").write_text("import goondan.p.b")
    (tmp_path / "p" / "b.py").write_text("def f():\n    from goondan.p import a")
    (tmp_path / "p" / "templates" / "t.py").write_text("not Python at all {{")
    assert circles(graph_of(tmp_path, ["p"])) == [frozenset({"goondan.p.a", "goondan.p.b"})]
