"""What counts as a line of code (scripts/size.py)."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from scripts.size import code_lines, import_lines, measure, script_lines

MODULE = '''"""What it is for.

More of it.
"""

from collections.abc import (
    Iterable,
)

#: A comment.
TEXT = """one
# no comment, a text
three"""


def f(x: int) -> int:
    """Say it."""
    import os  # late

    return (
        # why
        x
    )


class C:
    "In one quote."

    "no docstring, but a text"
'''


def test_comments_docstrings_and_blanks_are_no_code() -> None:
    # the import's 3, the text's 3, def, import, return's 3, class, the second text
    assert code_lines(MODULE) == 3 + 3 + 1 + 1 + 3 + 1 + 1
    assert import_lines(MODULE) == 4


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("// all\nlet a = 1; // why\n\n/* two\nlines */\n", 1),
        ('const url = "http://x/*"; // y\nconst b = `//\n`;\n', 3),
        ("/* head */ a {\n  color: red;\n}\n", 3),
    ],
)
def test_scripts_are_counted_without_comments(source: str, lines: int) -> None:
    assert script_lines(source) == lines


def test_each_file_has_its_row(tmp_path: Path) -> None:
    texts = {
        "kernel/a.py": "import os\nX = 1\n",
        "features/x/broker.py": "Y = 1\n",
        "tests/t.py": "Z = 1\n",
        "clients/node/index.mjs": "let a\n",
        "clients/node/wire.d.ts": "export type Made = string;\n",
        "clients/node/test/peer.test.mjs": "let b\n",
        "README.md": "one two",
        "notes/decisions/one.md": "three",
        "tests/README.md": "not a document of the project",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = measure([PurePath(name) for name in texts], tmp_path)
    assert {name: count for name, count in rows.items() if count} == {
        "product": 3,
        "kernel": 2,
        "features": 1,
        "modules": 2,
        "import lines": 1,
        "tests": 2,
        "JavaScript, TypeScript, CSS": 1,
        "words of documents": 2,
        "words of decisions": 1,
    }
