"""The broker is wired one way: each room gets what it needs when it is made, and nothing is put into it later."""

from __future__ import annotations

import ast
from pathlib import Path

import goondan.kernel.broker

BROKER = Path(goondan.kernel.broker.__file__).parent
#: Their fields are annotations, and the values of an object are given when it is made.
RECORDS = {"Struct", "NamedTuple", "Protocol"}


def test_the_router_puts_nothing_into_a_room_that_it_has_made() -> None:
    tree = ast.parse((BROKER / "routing/router.py").read_text())
    (router,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Router"]
    (init,) = [node for node in router.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    targets = [target for node in ast.walk(init) if isinstance(node, ast.Assign) for target in node.targets]
    planted = [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    ]
    assert planted == []


def test_no_room_leaves_a_place_for_what_others_set() -> None:
    left = [
        f"{file.name}: {node.name}.{field.target.id}"
        for file in sorted(BROKER.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not RECORDS & {ast.unparse(base).split("[")[0] for base in node.bases}
        for field in node.body
        if isinstance(field, ast.AnnAssign) and field.value is None and isinstance(field.target, ast.Name)
    ]
    assert left == []
