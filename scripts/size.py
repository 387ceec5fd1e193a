"""How large everything is: the only counter of lines (`make size`).

A code line holds a token that is neither a comment nor a docstring. So a blank line, a comment on a line of its own and
each line of a docstring count nothing; each line of any other text in quotes counts. The product is what runs: the
Python of the packages below. JavaScript, TypeScript and CSS are counted without comments and blank lines; declarations
that a script makes are not, nor are files of others in a folder `vendor`. What lies in a client's folder of tests is
tests.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Final

from scripts.check import files
from scripts.typescript_types import GENERATED

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("schemas", "kernel", "agentproc", "toolhost", "features")
BESIDE: Final = ("clients", "tests", "scripts", "bench")
SCRIPTS: Final = frozenset({".js", ".mjs", ".ts", ".mts", ".css"})
#: Folders of tests within a client.
TESTS: Final = frozenset({"test", "tests"})
#: What begins and ends no line of code.
_LAYOUT: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
#: Texts in quotes, which may hold what looks like a comment, and comments, of JavaScript, TypeScript and CSS.
_SCRIPT_TOKENS: Final = re.compile(
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)|/\*.*?\*/|(?<!:)//[^\n]*""", re.DOTALL
)


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def code_lines(source: str) -> int:
    """Lines of Python that hold a token which is no comment and no docstring.

    Raises: SyntaxError.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def import_lines(source: str) -> int:
    """Lines of Python that are part of an import, wherever it stands."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def script_lines(source: str) -> int:
    """Lines of JavaScript, TypeScript or CSS that are neither blank nor comment alone."""
    return sum(bool(line.strip()) for line in _SCRIPT_TOKENS.sub(lambda found: found[1] or "", source).splitlines())


def measure(names: Iterable[PurePath], root: Path = ROOT) -> dict[str, int]:
    """All rows, by name. `names` are files, relative to `root`."""
    rows = dict.fromkeys(("product", *PRODUCT, "modules", "import lines", *BESIDE, "JavaScript, TypeScript, CSS"), 0)
    rows |= {"words of documents": 0, "words of decisions": 0}
    for name in names:
        top = "tests" if name.parts[0] == "clients" and TESTS & set(name.parts[:-1]) else name.parts[0]
        if str(name) in GENERATED or "vendor" in name.parts:
            continue
        if name.suffix == ".py" and top in (*PRODUCT, *BESIDE):
            source = (root / name).read_text(encoding="utf-8")
            lines = code_lines(source)
            rows[top] += lines
            if top in PRODUCT:
                rows["product"] += lines
                rows["modules"] += 1
                rows["import lines"] += import_lines(source)
        elif name.suffix in SCRIPTS and top in (*PRODUCT, "clients", "tests"):
            row = "tests" if top == "tests" else "JavaScript, TypeScript, CSS"
            rows[row] += script_lines((root / name).read_text(encoding="utf-8"))
        elif name.suffix == ".md" and top not in ("tests", "bench"):
            words = len((root / name).read_text(encoding="utf-8").split())
            rows["words of decisions" if "decisions" in name.parts else "words of documents"] += words
    return rows


def main(arguments: list[str]) -> int:
    """Print the rows, with `--json` as one document."""
    rows = measure(files())
    if "--json" in arguments:
        print(json.dumps(rows))
        return 0
    for name, count in rows.items():
        print(f"{'  ' if name in PRODUCT else ''}{name:<{28 if name in PRODUCT else 30}}{count:>9,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
