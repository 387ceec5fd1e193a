"""Modules that import each other in a circle, over the whole product.

Every import counts: at the top, inside a function, and for types only (`TYPE_CHECKING`). A type that two modules need
of each other is a thing of its own, or the two are one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("schemas", "kernel", "agentproc", "toolhost", "features")

#: Circles that still exist; each entry holds its modules, in any order. An entry that is no circle any more is an error
#: as well.
KNOWN: Final[tuple[frozenset[str], ...]] = ()


def module_of(path: PurePath) -> str:
    """The name of the module in a file; `path` is relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(("goondan", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(source: str, module: str, known: Iterable[str], *, package: bool) -> set[str]:
    """Modules of `known` that a module imports. `package`: it is the `__init__` of one."""
    known = set(known)
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return (found & known) - {module}


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The largest sets of modules of which each reaches each other, without those of one module."""
    reached = {module: _reached(graph, module) for module in graph}
    found = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted((circle for circle in found if len(circle) > 1), key=sorted)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """The modules that can be reached from a module by one import or more."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - found:
            found.add(module)
            waiting.append(module)
    return found


def graph_of(root: Path, packages: Iterable[str]) -> dict[str, set[str]]:
    """The imports between the modules of these packages. Templates are no modules of the product."""
    files = [
        file.relative_to(root)
        for package in packages
        for file in (root / package).rglob("*.py")
        if "templates" not in file.parts
    ]
    known = {module_of(file): file for file in files}
    return {
        module: imports((root / file).read_text(encoding="utf-8"), module, known, package=file.name == "__init__.py")
        for module, file in known.items()
    }


def faults(graph: Mapping[str, set[str]], known: Iterable[frozenset[str]]) -> list[str]:
    """A line for each circle that is not known, and for each known one that is gone."""
    found, known = circles(graph), set(known)
    new = [
        "these modules import each other: " + "; ".join(_arrows(graph, circle))
        for circle in found
        if circle not in known
    ]
    gone = [f"no circle any more, take it out of KNOWN: {', '.join(sorted(one))}" for one in known - set(found)]
    return new + sorted(gone)


def _arrows(graph: Mapping[str, set[str]], circle: frozenset[str]) -> list[str]:
    return [f"{module} -> {other}" for module in sorted(circle) for other in sorted(graph[module] & circle)]


def main() -> int:
    """Print the errors. Returns 1 if there are any."""
    lines = faults(graph_of(ROOT, PACKAGES), KNOWN)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
