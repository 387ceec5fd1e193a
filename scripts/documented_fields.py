"""A check that each field of a struct is documented: by a comment `#:` above it, by a description in its type, or by
its type, where that is a struct of the same module with a docstring.

It reads the sources of the product, and knows a struct by its bases: msgspec's Struct, or a class that is one. A field
whose value cannot change (`Literal` with one value, such as the kind of a document) says itself what it is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("schemas", "kernel", "agentproc", "toolhost", "features")


def problems(root: Path = ROOT) -> list[str]:
    """`file:line: Struct.field` of each field without documentation, in the order of files and lines."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(root)}
    structs = struct_names(trees.values())
    found = []
    for path, tree in trees.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        described = described_types(tree)
        for kind in classes(tree):
            if not base_names(kind) & structs:
                continue
            for field in fields(kind):
                if ast.unparse(field.annotation) not in described and not is_documented(field, lines):
                    name = f"{kind.name}.{ast.unparse(field.target)}"
                    found.append(f"{path.relative_to(root)}:{field.lineno}: {name} has no comment `#:`")
    return found


def sources(root: Path) -> Iterator[Path]:
    """The modules of the product."""
    for package in (*PACKAGES, "clients/python/goondan_client"):
        yield from sorted((root / package).rglob("*.py"))


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Every class of a module, also one inside a function or another class."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def base_names(kind: ast.ClassDef) -> set[str]:
    """The last part of the name of each base: `msgspec.Struct` is `Struct`."""
    return {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in kind.bases}


def struct_names(trees: Iterable[ast.Module]) -> set[str]:
    """The names of all structs: Struct, and whatever has one of them as a base."""
    kinds = [kind for tree in trees for kind in classes(tree)]
    known = {"Struct"}
    while True:
        more = {kind.name for kind in kinds if base_names(kind) & known} - known
        if not more:
            return known
        known |= more


def fields(kind: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """The fields of a struct."""
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            yield node


def described_types(tree: ast.Module) -> set[str]:
    """The names of a module's types that have a description: aliases, and classes with a docstring."""
    aliases = (node for node in tree.body if isinstance(node, ast.Assign) and _has_description(node.value))
    names = {ast.unparse(target) for node in aliases for target in node.targets}
    return names | {kind.name for kind in classes(tree) if ast.get_docstring(kind)}


def is_documented(field: ast.AnnAssign, lines: list[str]) -> bool:
    """Whether a field says what it is."""
    if _is_constant(field.annotation) or _has_description(field.annotation):
        return True
    at = field.lineno - 2
    while at >= 0 and lines[at].lstrip().startswith("#"):
        if lines[at].lstrip().startswith("#:"):
            return True
        at -= 1
    return False


def _is_constant(annotation: ast.expr) -> bool:
    """Whether it is a Literal with one value."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Literal":
        return False
    return isinstance(annotation.slice, ast.Constant)


def _has_description(annotation: ast.expr) -> bool:
    """Whether a Meta in the annotation has a description."""
    return any(
        isinstance(node, ast.Call) and any(keyword.arg == "description" for keyword in node.keywords)
        for node in ast.walk(annotation)
    )


if __name__ == "__main__":
    found = problems()
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
