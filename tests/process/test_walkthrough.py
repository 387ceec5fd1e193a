"""README.md, docs/quickstart.md and docs/tools.md, followed by a newcomer who has nothing but this clone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from goondan.toolhost.policy.subject import GUARDED_NAMES
from scripts.walkthrough import Command, File, Walker, fits, steps
from tests.kernel_fixture import ROOT, Sandbox, sandbox
from tests.process.model_servers import server

PAGES = {
    "README.md": ROOT / "README.md",
    "quickstart.md": ROOT / "docs" / "quickstart.md",
    "tools.md": ROOT / "docs" / "tools.md",
}


def clone(kernel: Sandbox) -> Path:
    """This tree as a folder of its own: what a page writes lands there, and its folders are links.

    Those that no tool may replace (`.git`, `.venv`) are folders with links: a link there is refused as a workdir.
    """
    folder = kernel.home / "clone"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name in GUARDED_NAMES and entry.is_dir():
            (folder / entry.name).mkdir()
            for inside in entry.iterdir():
                (folder / entry.name / inside.name).symlink_to(inside)
        elif entry.is_dir():
            (folder / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, folder)
    return folder


def as_here(page: str) -> str:
    """The page without what would install packages: test_setup.py and `make test-matrix` are for `make run`."""
    page = page.replace("$ make run", "$ gdn run").replace("path/to/goondan.yaml", "examples/quickstart")
    return page.replace('export PATH="$PWD/.venv/bin:$PATH"', "test -x .venv/bin/gdn")


@pytest.mark.timeout(240)  # each of some dozen commands is a program, and many of them start a kernel
@pytest.mark.parametrize(
    "page", ["README.md", "quickstart.md", pytest.param("tools.md", marks=pytest.mark.feature("try_out"))]
)
def test_everything_on_the_page_works(page: str) -> None:
    with sandbox() as kernel, kernel.on_path() as forked:
        folder = clone(kernel)
        # One page with the program itself: each of its starts takes a second of the processors.
        path = f"{folder}/.venv/bin:{os.environ['PATH']}" if page == "README.md" else forked
        # As a newcomer: nothing says that every bundle is trusted, and nobody is asked.
        newcomer = {**kernel.env, "PATH": path, "HOME": str(kernel.home), "GOONDAN_TRUST": ""}
        walker = Walker(folder, newcomer)
        outcomes = walker.follow(steps(as_here(PAGES[page].read_text(encoding="utf-8"))))
        assert len(outcomes) > 5
        assert [str(outcome) for outcome in outcomes if not outcome.fits] == []


def is_call(step: Command | File) -> bool:
    return isinstance(step, Command) and step.line.startswith("gdn call ")


@pytest.mark.timeout(240)
def test_the_quickstart_works_for_whoever_has_set_a_model() -> None:
    """As section 3 says, with a server of one's own; its question is asked, too. Calls of tools ask no model."""
    page = steps(as_here(PAGES["quickstart.md"].read_text(encoding="utf-8")))
    asked = Command("gdn run --workdir .", 'call text-file__count {"path": "README.md"}\n', 'done: …"lines"…\n')
    at = next(number for number, step in enumerate(page) if isinstance(step, Command) and "my-swarm" in step.line)
    with server("fake_llm") as base, sandbox() as kernel, kernel.on_path() as path:
        folder = clone(kernel)
        newcomer = {**kernel.env, "PATH": path, "HOME": str(kernel.home), "GOONDAN_TRUST": ""}
        walker = Walker(folder, {**newcomer, "OPENAI_BASE_URL": f"{base}/v1"})
        own = [File("todo.txt", "buy bread\n") if is_call(step) else step for step in page[at:]]
        outcomes = walker.follow([asked, *own])
        assert [str(outcome) for outcome in outcomes if not outcome.fits] == []
        talked = next(outcome for outcome in outcomes if "/tools" in outcome.command.typed)
        assert "  todo__add" in talked.out, "the model's own list, which nobody types"


def test_both_languages_ask_for_the_same() -> None:
    for page in PAGES.values():
        korean = page.with_suffix(".ko.md").read_text(encoding="utf-8")
        assert steps(korean) == steps(page.read_text(encoding="utf-8"))


def test_a_page_is_read_as_it_is_meant() -> None:
    page = (
        "# Page\n```console\n$ one  # a remark\nshown\n$ two\n> typed\n```\nand\n```console\nmore\n```\n"
        "In `a/b.py`:\n\n```python\nx = 1\n```\nSet `THIS`:\n```sh\nrm -rf /\n```\nand\n```yaml\na: 1\n```\n"
    )
    assert steps(page) == [
        Command("one", shown="shown\n"),
        Command("two", typed="typed\nmore\n"),
        File("a/b.py", "x = 1\n"),
    ]


def test_what_is_shown_is_compared() -> None:
    assert fits("", "anything")
    assert fits("b …d\n", "a\nb c d\ne\n")
    assert fits("a\n…\nd\n", "a\nb\nc\nd\n")
    assert not fits("a\nd\n", "a\nb\nd\n")
    assert not fits("b", "abc\n")


def test_commands_that_fail_or_print_something_else_are_noticed(tmp_path: Path) -> None:
    walker = Walker(tmp_path, {"PATH": os.environ["PATH"]})
    lines = ["export A=1", "mkdir d", "cd d", "echo $A; pwd\n1\n…/d", "false", "echo no\nyes", "cat\n> in\nin"]
    page = "```console\n" + "".join(f"$ {line}\n" for line in lines) + "```\n"
    assert [outcome.fits for outcome in walker.follow(steps(page))] == [True] * 4 + [False, False, True]
