"""docs/builtin-tools.md against the manifests that it is written from."""

from __future__ import annotations

import re

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.tool_pages import parameter_rows
from goondan.kernel.cli.commands.bundles import full_names
from tests.kernel_fixture import ROOT


def test_every_function_and_parameter_is_on_the_page() -> None:
    page = (ROOT / "docs" / "builtin-tools.md").read_text(encoding="utf-8")
    parts = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    sections = {part.partition("\n")[0]: part for part in parts}
    assert list(sections) == full_names(base_tools())
    heads = {part.partition("\n")[0]: part for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]}
    for tool in base_tools().values():
        shared = names(heads[tool.name].partition("\n### ")[0])
        for export in tool.body.exports:
            section = sections[f"{tool.name}__{export.name}"].partition("\n## ")[0]
            above = re.findall(r"`([^`]+)`", "".join(re.findall(r"^As above: (.*)\.$", section, flags=re.MULTILINE)))
            assert set(above) <= shared
            assert names(section) | set(above) == {row.name for row in parameter_rows(export.parameters)}
            assert section.count("\n{") >= len(export.examples)


def names(section: str) -> set[str]:
    """The parameters in the table of a section."""
    return set(re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE))
