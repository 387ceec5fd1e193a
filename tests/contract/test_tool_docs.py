"""docs/builtin-tools.md in both languages against the manifests that it is written from."""

from __future__ import annotations

import re

import pytest

from goondan.kernel.bundle.base import base_tools
from goondan.kernel.bundle.parameters import parameter_rows
from goondan.kernel.cli.tool_catalog import full_names
from scripts import tool_docs
from tests.kernel_fixture import ROOT

PAGES = pytest.mark.parametrize("page", ["builtin-tools.md", "builtin-tools.ko.md"])


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@PAGES
def test_every_function_and_parameter_is_on_the_page(page: str) -> None:
    parts = re.split(r"^### ", read(page), flags=re.MULTILINE)[1:]
    sections = {part.partition("\n")[0]: part for part in parts}
    assert list(sections) == full_names(base_tools())
    for tool in base_tools().values():
        for export in tool.body.exports:
            section = sections[f"{tool.name}__{export.name}"]
            assert set(re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE)) == {
                row.name for row in parameter_rows(export.parameters)
            }
            assert section.count("\n{") >= len(export.examples)


def test_both_languages_have_the_same_shape() -> None:
    english, korean = (
        read(page).split("\n## ", 1)[1].splitlines() for page in ("builtin-tools.md", "builtin-tools.ko.md")
    )
    assert len(english) == len(korean)
    for ours, theirs in zip(english, korean, strict=True):
        assert ours.count("|") == theirs.count("|")
        assert ours.startswith(("#", "{", "→", "```")) == theirs.startswith(("#", "{", "→", "```"))


def test_a_text_without_its_translation_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    page = tool_docs.Page(korean=True)
    page.say("Something new.")
    assert "no Korean for: Something new." in page.problems()
    page = tool_docs.Page(korean=True)
    monkeypatch.setattr(tool_docs, "base_tools", dict)
    page.text()
    assert "nothing says any more: Which case." in page.problems()
