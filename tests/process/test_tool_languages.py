"""docs/tools.md shows one tool in several languages: each of them is taken from the page, tested and called."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.javascript_runtimes import runtime
from tests.kernel_fixture import ROOT, Sandbox, sandbox

PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
#: The file of each language, and the program without which it is skipped.
FILES = {
    "python": ("count.py", None),
    "typescript": ("count.ts", "node"),
    "sh": ("count.sh", "jq"),
    "c": ("count.c", "gcc"),
}


def block(language: str) -> str:
    """The page's code in a language: the first block of it in the section about languages."""
    section = PAGE[PAGE.index("## One tool in four languages") :]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def manifest(name: str, entry: str) -> str:
    document = block("yaml")
    assert "entry: ./tools/count.sh" in document
    return document.replace("./tools/count.sh", entry).replace("{name: count}", f"{{name: {name}}}")


def missing(language: str) -> str | None:
    """The program that this machine lacks for a language."""
    needed = FILES[language][1]
    if needed == "node":
        try:
            runtime("node")
        except pytest.skip.Exception:
            return "node"
        return None
    return needed if needed is not None and shutil.which(needed) is None else None


def write(language: str, folder: Path) -> str:
    """Write the tool of a language, and build it as the page says. Its entry."""
    name = FILES[language][0]
    (folder / "tools").mkdir(exist_ok=True)
    (folder / "tools" / name).write_text(block(language))
    if language == "sh":
        (folder / "tools" / name).chmod(0o755)
    if language == "c":
        (command,) = set(re.findall(r"`cc (-.*?)`", PAGE))
        subprocess.run(["gcc", "-Wall", "-Werror", *command.split()], cwd=folder, check=True)
        return "./tools/count"
    return f"./tools/{name}"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    """A kernel with the tool of every language that this machine has."""
    node = {"GOONDAN_NODE": runtime("node")} if missing("typescript") is None else {}
    with sandbox("", node) as made:
        written = [manifest(f"in-{x}", write(x, made.home)) for x in FILES if missing(x) is None]
        (made.home / "goondan.yaml").write_text("---\n".join(written))
        made.detach()
        yield made


@pytest.mark.feature("try_out")
@pytest.mark.parametrize("language", FILES)
def test_the_tool_of_the_page(kernel: Sandbox, language: str) -> None:
    if (needed := missing(language)) is not None:
        pytest.skip(f"there is no {needed}")
    tool = f"in-{language}__count"
    tested = kernel.gdn("tool", "test", tool)
    assert (tested.status, tested.out.splitlines()[-1]) == (0, "1 passed"), tested.out
    for text, words in [('a "quoted"\n\tline  of\\n words', 5), ("  한 글 ", 2), ("x" * 100_000, 1)]:
        called = kernel.gdn("call", tool, json.dumps({"text": text}), "--json")
        assert json.loads(called.out)["output"] == {"words": words}, called.out
    empty = json.loads(kernel.gdn("call", tool, '{"text": " "}', "--json").out)["error"]
    assert (empty["message"], empty["code"], empty["suggestion"]) == ("there are no words", "E_EMPTY", "Give a text.")
