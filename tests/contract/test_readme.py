"""The documents agree with each other and with the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from goondan.kernel.cli.commands import helps

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.ko.md")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """The commands of all console blocks, without prompts and comments."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ").partition("  #")[0].rstrip() for line in lines]


def test_both_languages_show_the_same_files_and_commands() -> None:
    english, korean = READMES
    assert blocks(english, "python") == blocks(korean, "python")
    assert blocks(english, "yaml") == blocks(korean, "yaml")
    assert commands(english) == commands(korean)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "README.ko.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/commands.md",
        "docs/quickstart.md",
        "docs/quickstart.ko.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    base = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    ours = [target for target in targets if "://" not in target]
    assert ours, "the expression above finds nothing"
    assert [target for target in ours if not (base / target).exists()] == []


def test_decisions_are_all_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = set(re.findall(r"\]\((\d{3}-[^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


def test_the_commands_are_all_listed() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `gdn ([a-z]+)` \|", page, flags=re.MULTILINE)) == sorted(helps())


@pytest.mark.parametrize("name", ["agents", "extensions", "mcp", "models", "quickstart", "skills", "tools"])
def test_both_languages_have_the_same_sections(name: str) -> None:
    english, korean = (
        re.findall(r"^(#{2,3}) ", (ROOT / f"docs/{name}{language}.md").read_text(encoding="utf-8"), re.MULTILINE)
        for language in ("", ".ko")
    )
    assert english == korean


def terms(page: str) -> list[str]:
    """The terms of a glossary, in English, in their order."""
    rows = re.findall(r"^\| (?!term|용어|-)(.+?) \|", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [term for row in rows for term in re.sub(r" \(.*\)$", "", row).split(", ")]


def test_the_glossary_is_short_and_the_same_in_both_languages() -> None:
    english, korean = terms("docs/glossary.md"), terms("docs/glossary.ko.md")
    assert english == korean
    assert 40 < len(english) <= 60, len(english)
    assert len(set(english)) == len(english), "one word, one thing"


@pytest.mark.parametrize("name", READMES)
def test_it_names_the_tools_that_run_in_no_jail(name: str) -> None:
    """Their manifests lie in agentproc/base and features/*/base; all others run in jails."""
    manifests = [path for folder in ("agentproc", "features/*") for path in ROOT.glob(f"{folder}/base/*/tool.yaml")]
    tools = {path.parent.name.replace("_", "-") for path in manifests}
    said = next(text for text in (ROOT / name).read_text(encoding="utf-8").split("\n- ") if "`self-restart`" in text)
    assert {f"`{tool}`" for tool in tools} <= set(re.findall(r"`[\w-]+`", said))
