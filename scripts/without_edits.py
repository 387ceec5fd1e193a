"""The tree without some features: what a copy loses with their folders (scripts/without.py). Pure.

Each function takes the text of a file and gives what stays of it. A ledger loses the rows that a feature owns, and no
other:

- a requirement has its `owner` in tests/requirements.yaml, and its rows elsewhere are its owner's;
- a rule of the protocol is the feature's if only tests of the feature show it;
- a change of code (tests/mutations.yaml) is the feature's if its code or its test is.

Source: docs/design/features.md "Without a feature".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import yaml

from goondan.features import Feature

#: What a file is without the tests that go, when no test is left in it.
NO_TEST: Final = ""


def going(names: Collection[str], features: Sequence[Feature]) -> frozenset[str]:
    """The named features (`all`: each), with those that need one of them.

    Raises: ValueError for a name that no row has.
    """
    rows = {feature.name: feature for feature in features}
    gone = set(rows) if "all" in names else set(names)
    if unknown := sorted(gone - rows.keys()):
        raise ValueError(f"no such feature: {', '.join(unknown)}; there are {', '.join(rows)}")
    while more := {name for name, row in rows.items() if name not in gone and gone & set(row.needs)}:
        gone |= more
    return frozenset(gone)


def table(source: str, gone: Collection[str]) -> str:
    """features/__init__.py without the rows of these features."""
    rows = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Feature"
    ]
    return _cut(source, [_element(source, row) for row in rows if _text(row.args[0]) in gone])


def imports(source: str, gone: Collection[str]) -> bool:
    """Whether a file imports one of the features or tests of it, or starts a program of one by its path."""
    names = "|".join(map(re.escape, sorted(gone)))
    imported = rf"^ *(?:from|import) (?:goondan|tests)\.features\.(?:{names})\b"
    return bool(re.search(rf"{imported}|[\"']features/(?:{names})/", source, re.MULTILINE))


# --- tests ----------------------------------------------------------------------------------------------------------


def marked(source: str, gone: Collection[str]) -> bool:
    """Whether a test of this file needs one of the features."""
    return "mark.feature" in source and any(
        _needs(node, gone) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)
    )


def whole(source: str, gone: Collection[str]) -> bool:
    """Whether the file says in `pytestmark` that all its tests need one of the features."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and any(isinstance(part, ast.expr) and _needs(part, gone) for part in ast.walk(node.value))
        for node in ast.parse(source).body
    )


def tests(source: str, gone: Collection[str]) -> str:
    """A file of tests without those that need one of the features; NO_TEST if none is left."""
    if whole(source, gone):
        return NO_TEST
    tree = ast.parse(source)
    cuts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if any(_needs(decorator, gone) for decorator in node.decorator_list):
                cuts.append(_lines(source, node.decorator_list[0].lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "param":
            marks = [part for keyword in node.keywords if keyword.arg == "marks" for part in ast.walk(keyword.value)]
            if any(isinstance(part, ast.expr) and _needs(part, gone) for part in marks):
                cuts.append(_element(source, node))
    left = _cut(source, cuts)
    return left if _has_tests(left) else NO_TEST


def _has_tests(source: str) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for node in ast.walk(ast.parse(source))
    )


def _needs(node: ast.expr, gone: Collection[str]) -> bool:
    """Whether this is `pytest.mark.feature(…)` with one of these names."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "feature"
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "mark"
        and any(_text(argument) in gone for argument in node.args)
    )


# --- ledgers --------------------------------------------------------------------------------------------------------


def owned(requirements: str, gone: Collection[str]) -> frozenset[str]:
    """The requirements that these features own."""
    entries = yaml.load(requirements, Loader=yaml.CSafeLoader)
    return frozenset(entry["id"] for entry in entries if entry.get("owner") in gone)


def covered(text: str, requirements: Collection[str]) -> str:
    """tests/requirements_covered.txt without these requirements."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip() not in requirements)


def mutations(text: str, requirements: Collection[str], there: Callable[[str, str], bool]) -> str:
    """tests/mutations.yaml without the entries of these requirements, and those whose code or test has gone.

    `there(path, function)`: whether a file is there and has this function ("": any).
    """
    head, *entries = re.split(r"^(?=- id: )", text, flags=re.MULTILINE)
    kept = [head]
    for entry in entries:
        (row,) = yaml.safe_load(entry)
        path, _, function = row["test"].partition("::")
        function = function.partition("[")[0]
        if row["id"] not in requirements and there(row["file"], "") and there(path, function):
            kept.append(entry)
    return "".join(kept)


def rules(text: str, there: Callable[[str, str], bool]) -> tuple[str, list[str]]:
    """tests/rules.yaml without tests that have gone, and the rules that have none any more: their features own them."""
    kept, lost = [], []
    for line in text.splitlines(keepends=True):
        row = yaml.safe_load(line) if line.strip() and not line.startswith(("#", " ")) else None
        if not isinstance(row, dict):
            kept.append(line)
            continue
        ((rule, shown),) = row.items()
        left = {file: test for file, test in shown.items() if there(f"tests/{file}", test)}
        if left == shown:
            kept.append(line)
        elif left:
            kept.append(f"{rule}: {{{', '.join(f'{file}: {test}' for file, test in left.items())}}}\n")
        else:
            lost.append(rule)
    return "".join(kept), lost


def without_rules(page: str, lost: Iterable[str]) -> str:
    """A page of the protocol without the ids of these rules. The sentences stay."""
    for rule in lost:
        page = re.sub(rf" ?\[{re.escape(rule)}\]", "", page)
    return page


def project(text: str, gone: Collection[str]) -> str:
    """pyproject.toml without the names of modules of these features."""
    names = "|".join(map(re.escape, sorted(gone)))
    named = rf'"goondan\.features\.(?:{names})(?:\.[.\w*]+)?"(?: ->[^"]*)?'
    text = re.sub(rf"^ *{named},?\n", "", text, flags=re.MULTILINE)
    return re.sub(rf", {named}|{named}, ", "", text)


def page(text: str, gone: Collection[str], codes: Collection[str] = ()) -> str:
    """A page without the links to files of these features and to the sections of their error codes, and without the
    quotes around their paths. The words stay.
    """
    names = "|".join(map(re.escape, sorted(gone)))
    below = rf"(?:tests/)?features/(?:{names})/"
    text = re.sub(rf"\[([^\]\n]*)\]\((?:\.\./)*{below}[^)\s]*\)", r"\1", text)
    if codes:
        anchors = "|".join(sorted(code.lower() for code in codes))
        text = re.sub(rf"\[([^\]\n]*)\]\([\w./-]*#(?:{anchors})\)", r"\1", text)
    return re.sub(rf"`({below}[\w./-]*)`", r"\1", text)


def error_page(text: str, codes: Collection[str]) -> str:
    """A page with a section for each error code, without the sections of these."""
    parts = re.split(r"^(?=##)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if part.partition("\n")[0].removeprefix("### ").strip() not in codes)


def commands(text: str, names: Iterable[str]) -> str:
    """docs/commands.md without the rows of these commands."""
    listed = "|".join(map(re.escape, names))
    return re.sub(rf"^\| `gdn (?:{listed})` \|.*\n", "", text, flags=re.MULTILINE) if listed else text


# --- places in texts ------------------------------------------------------------------------------------------------


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _starts(source: str) -> list[int]:
    """Where each line begins. Lines are those of Python: a form feed ends none."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _lines(source: str, first: int, last: int) -> tuple[int, int]:
    """Where these lines are, with the comments right above them."""
    lines = source.split("\n")
    while first > 1 and lines[first - 2].lstrip().startswith("#") and not lines[first - 2].startswith("# ---"):
        first -= 1
    starts = _starts(source)
    return starts[first - 1], starts[last]


def _element(source: str, node: ast.expr) -> tuple[int, int]:
    """Where an element of a list is, with the comma behind it and the blanks before the next one."""
    starts = _starts(source)
    lines = source.split("\n")

    def place(line: int, column: int) -> int:  # columns are counted in bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    begin = place(node.lineno, node.col_offset)
    if not source[starts[node.lineno - 1] : begin].strip():
        begin = starts[node.lineno - 1]  # it has lines of its own
    end = place(node.end_lineno or node.lineno, node.end_col_offset or 0)
    behind = re.compile(r"\s*,[ \t]*\n?|").match(source, end)
    assert behind is not None  # it matches nothing as well
    return begin, behind.end()


def _cut(source: str, cuts: Iterable[tuple[int, int]]) -> str:
    left, at = [], 0
    for begin, end in sorted(cuts):  # one can be within another: a case of a test that goes itself
        left.append(source[at:begin])
        at = max(at, end)
    return "".join(left) + source[at:]


def functions(sources: Mapping[str, str]) -> Callable[[str, str], bool]:
    """`there` for ledgers, of the Python files of a tree: path -> source. For other files, `sources` has the path."""
    names: dict[str, frozenset[str]] = {}

    def there(path: str, function: str) -> bool:
        if path not in sources or not function:
            return path in sources
        if path not in names:
            names[path] = frozenset(_function_names(sources[path]))
        return function.rpartition("::")[2] in names[path]

    return there


def _function_names(source: str) -> Iterator[str]:
    return (found[1] for found in re.finditer(r"^ *(?:async )?def (\w+)\(", source, re.MULTILINE))
