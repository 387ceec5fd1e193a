"""The walls around features: who may import what, and that the core names none.

A file of a feature is loaded by one process, so a wrong import in it takes another process's code, and what that code
may do, over a wall of privileges. A module of the core that names a feature cannot stay as it is when the feature goes.

`tests/features/names.yaml` has the words by which each feature is known, the exceptions with their reasons, and the
modules that name a feature today. That list only shrinks: a module that has become clean must go from it (`--update`
takes it out, and follows modules that have moved or were joined).

Source: docs/design/features.md sections 3 and 4.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from goondan.features import FEATURES, Feature
from scripts.import_circles import PACKAGES, graph_of

ROOT: Final = Path(__file__).resolve().parent.parent
NAMES: Final = ROOT / "tests" / "features" / "names.yaml"
#: The most exceptions that the core may have.
MAX_EXCEPTIONS: Final = 12
#: Of each file of a feature: the package of the process that loads it, and which files of its own feature it may take.
LOADED_BY: Final[Mapping[str, tuple[str | None, frozenset[str]]]] = {
    "wire": (None, frozenset()),
    "api": ("kernel", frozenset({"wire"})),
    "broker": ("kernel", frozenset({"wire", "api"})),
    "bundle": ("kernel", frozenset({"wire", "api"})),
    "command": ("kernel", frozenset({"wire", "api", "bundle", "process"})),
    "door": ("kernel", frozenset({"wire", "api"})),
    "console": ("kernel", frozenset({"wire", "api", "command"})),
    "status": ("kernel", frozenset({"wire", "api"})),
    "program": ("agentproc", frozenset({"wire", "api"})),
    "process": ("kernel", frozenset({"wire", "api", "bundle"})),
    "agent": ("agentproc", frozenset({"wire", "api"})),
    "base": ("agentproc", frozenset({"wire", "api"})),
    "host": ("toolhost", frozenset({"wire", "api"})),
    "jail": ("toolhost", frozenset({"wire"})),
}
#: What a feature may take of another that it needs.
OPEN: Final = frozenset({"wire", "api"})
#: What runs with privileges or in a jail: it reaches no feature, and not their table either.
WITHOUT_FEATURES: Final = (
    "goondan.toolhost.launcher",
    "goondan.toolhost.privileges",
    "goondan.toolhost.drop_privileges",
    "goondan.toolhost.inside",
)
#: Folders whose Python is text of the product and no part of the core: bundled tools, templates.
NOT_CORE: Final = ("toolhost/base", "agentproc/base", "kernel/templates")
_CODE: Final = re.compile(r"\b[EW]_[A-Z][A-Z_]+\b")
_COMMAND: Final = re.compile(r"\bgdn ([a-z]+)")


# --- imports --------------------------------------------------------------------------------------------------------


def _place(module: str) -> tuple[str, str] | None:
    """The feature and the file that a module is of. None for one of the core, and for the table."""
    parts = module.split(".")
    return (parts[2], parts[3] if len(parts) > 3 else "") if parts[1] == "features" and len(parts) > 2 else None


def import_faults(graph: Mapping[str, set[str]], features: Iterable[Feature] = FEATURES) -> list[str]:
    """A line for each import that goes over a wall. `graph`: what each module imports."""
    rows = {feature.name: feature for feature in features}
    found = []
    for module, imported in sorted(graph.items()):
        place = _place(module)
        for other in sorted(imported):
            reason = _core_fault(other) if place is None else _feature_fault(place, other, rows)
            if reason:
                found.append(f"{module} imports {other}: {reason}")
    for module in sorted(graph):
        if module.startswith(WITHOUT_FEATURES):
            found.extend(
                f"{module} reaches {other}: it has privileges, or runs in a jail, and loads nothing by a table"
                for other in sorted(_reached(graph, module))
                if other.split(".")[1] == "features"
            )
        place = _place(module)
        if place is not None and (home := LOADED_BY.get(place[1], (None,))[0]) is not None:
            found.extend(
                f"{module} reaches {other}, which another process loads"
                for other in sorted(_reached(graph, module))
                if other.split(".")[1] not in (home, "schemas", "features", "__init__")
            )
    return found


def _core_fault(other: str) -> str:
    return "" if _place(other) is None else "the core imports no feature"


def _feature_fault(place: tuple[str, str], other: str, rows: Mapping[str, Feature]) -> str:
    name, file = place
    target = _place(other)
    package = other.split(".")[1]
    if file not in LOADED_BY:
        return "" if not file and target is None and package != "features" else f"no process loads {file or 'it'}"
    home, own = LOADED_BY[file]
    if target is None:
        if package == "features":
            return "a feature does not read the table"
        return "" if package in (home, "schemas") else f"{file} is not loaded by {package}"
    if target[0] == name:
        return "" if target[1] in {*own, file, ""} else f"{file} and {target[1]} are loaded by different processes"
    if target[0] not in rows[name].needs:
        return f"the row of {name} does not need {target[0]}"
    return "" if target[1] in {*OPEN, ""} else f"of a feature that it needs, it takes {' and '.join(sorted(OPEN))} only"


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph.get(waiting.pop(), set()) - found:
            found.add(module)
            waiting.append(module)
    return found


# --- names ----------------------------------------------------------------------------------------------------------


@cache
def words_of(identifier: str) -> str:
    """An identifier in small letters, its words between single `_`, with one before and one behind."""
    parted = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier)
    parted = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", parted)
    return "_" + re.sub(r"[^A-Za-z0-9]+", "_", parted).strip("_").lower() + "_"


def identifiers(source: str) -> Iterator[str]:
    """What a module names: identifiers, texts without blanks, and codes of errors and commands in other texts."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # what holds others comes before them
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                documentation.add(_docstring(node))
            case ast.Module():
                documentation.add(_docstring(node))
            case ast.keyword(arg=str(name)) | ast.ImportFrom(module=str(name)):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                if not re.search(r"\s", text):
                    yield text
                else:
                    yield from _CODE.findall(text)
                    yield from _COMMAND.findall(text)
            case _:
                pass


def _docstring(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    first = node.body[0] if node.body else None
    return id(first.value) if isinstance(first, ast.Expr) else 0


def named(path: str, source: str, words: Mapping[str, Iterable[str]]) -> set[str]:
    """The features that a module names, by the name of its file or in it."""
    said = "".join(words_of(name) for name in {path.removesuffix(".py"), *identifiers(source)})
    return {feature for feature, listed in words.items() if any(f"_{word}_" in said for word in listed)}


def name_faults(found: Mapping[str, set[str]], names: Mapping[str, object], features: Iterable[str]) -> list[str]:
    """A line for each module of the core that names a feature and is not listed, and for each entry that is not so.

    `found`: the features that each module of the core names. `names`: the document tests/features/names.yaml.
    """
    words, exceptions, listed = _parts(names)
    excepted = {(entry["module"], entry["feature"]) for entry in exceptions}
    today = {(module, feature) for feature, modules in listed.items() for module in modules}
    there = {(module, feature) for module, named_there in found.items() for feature in named_there}
    faults = [f"names.yaml says no words for the feature {name}" for name in features if name not in words]
    if len(exceptions) > MAX_EXCEPTIONS:
        faults.append(f"names.yaml has {len(exceptions)} exceptions, and {MAX_EXCEPTIONS} are allowed")
    faults += [f"names.yaml: the exception {e['module']} has no reason" for e in exceptions if not e.get("reason")]
    faults += [f"{module} names the feature {feature}" for module, feature in sorted(there - today - excepted)]
    faults += [
        f"{module} does not name {feature} any more: python -m scripts.feature_walls --update"
        for module, feature in sorted((today | excepted) - there)
    ]
    return faults


def shrunk(found: Mapping[str, set[str]], names: Mapping[str, object]) -> dict[str, list[str]]:
    """The list of modules that name a feature, as it is now.

    Raises ValueError when a feature is named by more modules than the list has.
    """
    _, exceptions, listed = _parts(names)
    excepted = {(entry["module"], entry["feature"]) for entry in exceptions}
    result = {}
    for feature, modules in listed.items():
        now = sorted(
            module for module, features in found.items() if feature in features and (module, feature) not in excepted
        )
        if len(now) > len(modules):
            more = ", ".join(sorted(set(now) - set(modules)))
            raise ValueError(f"{len(now)} modules name {feature}, and {len(modules)} did: {more}")
        if now:
            result[feature] = now
    return result


def _parts(names: Mapping[str, object]) -> tuple[dict[str, list[str]], list[dict[str, str]], dict[str, list[str]]]:
    words, exceptions, listed = names["words"], names.get("exceptions") or [], names.get("today") or {}
    if not isinstance(words, dict) or not isinstance(exceptions, list) or not isinstance(listed, dict):
        raise TypeError("names.yaml: words and today are mappings, exceptions is a list")
    return words, exceptions, listed


def core(root: Path = ROOT) -> Iterator[Path]:
    """The modules of the core."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if package != "features" and not path.relative_to(root).as_posix().startswith(NOT_CORE):
                yield path


def named_in_core(words: Mapping[str, Iterable[str]], root: Path = ROOT) -> dict[str, set[str]]:
    """The features that each module of the core names."""
    paths = {path.relative_to(root).as_posix(): path for path in core(root)}
    found = {name: named(name, path.read_text(encoding="utf-8"), words) for name, path in paths.items()}
    return {name: features for name, features in found.items() if features}


def main(arguments: list[str], write: Callable[[str], None] = print) -> int:
    """Print the faults, or write the list anew. Returns 1 if there is a fault."""
    text = NAMES.read_text(encoding="utf-8")
    names = yaml.safe_load(text)
    found = named_in_core(names["words"])
    if "--update" in arguments:
        head = text.partition("\ntoday:")[0]
        body = yaml.safe_dump({"today": shrunk(found, names)}, width=1000)
        NAMES.write_text(f"{head}\n{body}", encoding="utf-8")
        return 0
    faults = import_faults(graph_of(ROOT, PACKAGES)) + name_faults(found, names, [row.name for row in FEATURES])
    for line in faults:
        write(line)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
