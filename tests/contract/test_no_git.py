"""The trusted half starts no git, whose hooks and fsmonitor would run on the host what a jail has written.

Source: sandbox.md section 2.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What runs in jails is no part of it.
JAILED = ("toolhost/base/", "toolhost/inside/")


def trusted() -> Iterator[Path]:
    for package in ("schemas", "kernel", "agentproc", "toolhost"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(JAILED):
                yield path


def commands(source: str) -> list[str]:
    """Strings that could be a program's name or a command line of it."""
    found = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [
        text
        for text in found
        if isinstance(text, str) and (text == "git" or text.endswith("/git") or text.startswith(("git ", "git-")))
    ]


@pytest.mark.parametrize("source", ['run(["git", "status"])', 'run("git log", shell=True)', 'x = "/usr/bin/git"'])
def test_a_command_would_be_found(source: str) -> None:
    assert commands(source)


def test_no_trusted_module_names_the_program() -> None:
    paths = list(trusted())
    assert len(paths) > 150
    assert {str(path): found for path in paths if (found := commands(path.read_text(encoding="utf-8")))} == {}
