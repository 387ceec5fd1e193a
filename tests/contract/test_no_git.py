"""The trusted half starts no git, whose hooks and fsmonitor would run on the host what a jail has written; but for one
module that starts it without any of them, and never in a folder that a jail or an agent can write to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What runs in jails is no part of it.
JAILED = ("toolhost/base/", "toolhost/inside/")


#: Starts it as docs/decisions/067 says; tests/features/changesets/process/test_changeset_engine.py attacks it.
THE_ONE = "features/changesets/bundle/git.py"


def of_tool(path: Path) -> bool:
    """Whether it belongs to a tool of a feature that runs in jails."""
    return any((folder / "brought.yaml").exists() for folder in path.parents)


def trusted() -> Iterator[Path]:
    for package in ("schemas", "kernel", "agentproc", "toolhost", "features"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(JAILED) and not of_tool(path):
                yield path


def commands(source: str) -> list[str]:
    """Strings that could be a program's name or a command line of it."""
    if "git" not in source:  # which spares most of them the parser
        return []
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
    found = {path.relative_to(ROOT).as_posix(): commands(path.read_text(encoding="utf-8")) for path in paths}
    assert [path for path, names in found.items() if names] == [THE_ONE] * (ROOT / THE_ONE).exists()
