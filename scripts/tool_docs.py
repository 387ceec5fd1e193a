"""Write docs/builtin-tools.md: every function of the bundled tools, from their manifests.

`python scripts/tool_docs.py` writes the page; `--check` says whether it is out of date and exits 1. Words come from the
manifests; the first paragraphs stand in the page.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.tool_pages import Parameter, parameter_rows
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.bundle.launch import DEFAULT_ERROR_LIMIT, Limits
from goondan.schemas.bundle.resources import Example, NetworkAllow, Sandbox, ToolExport
from scripts.pages import hand_written, write_or_check

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPT: Final = "scripts/tool_docs.py"
#: A parameter that so many functions of a tool have in the same words stands once, at the head of the tool.
SHARED: Final = 2
TABLE: Final = ("| Parameter | Type | What it is |", "|---|---|---|")
#: Sentences about what is not as it is by default, with a place for the value.
SENTENCES: Final = {
    "limit": "Error messages have at most {} characters.",
    "isolation": "Isolation: {}.",
    "network": "Network: {}.",
    "env": "Reads these variables of the host's environment, if they are set: {}.",
    "limits": "Limits: {}.",
    "permissions": "Permissions: {}.",
}


class Page:
    """The page."""

    @property
    def path(self) -> Path:
        """Where it belongs."""
        return ROOT / "docs" / "builtin-tools.md"

    def problems(self) -> list[str]:
        """Nothing can be missing: every text is a manifest's."""
        return []

    def text(self) -> str:
        """The whole page."""
        head = hand_written(self.path, SCRIPT)
        return "\n".join([head, *(line for tool in base_tools().values() for line in self.tool(tool))])

    def tool(self, tool: CheckedTool) -> Iterator[str]:
        """The section of one Tool."""
        yield f"## {tool.name}\n"
        remarks = list(self.remarks(tool))
        if remarks:
            yield " ".join(remarks) + "\n"
        counts = Counter(row for export in tool.body.exports for row in parameter_rows(export.parameters))
        shared = {row: None for row, times in counts.items() if times >= SHARED}
        if shared:
            yield "Parameters of several functions:\n"
            yield "\n".join([*TABLE, *map(self.row, shared)]) + "\n"
        for export in tool.body.exports:
            yield from self.export(tool.name, export, shared)

    def remarks(self, tool: CheckedTool) -> Iterator[str]:
        """What is not as it is by default."""
        if tool.body.error_message_limit != DEFAULT_ERROR_LIMIT:
            yield self.sentence("limit", str(tool.body.error_message_limit))
        asked, default = tool.body.sandbox, Sandbox()
        if asked.isolation != default.isolation:
            yield self.sentence("isolation", f"`{asked.isolation}`")
        if asked.network != default.network:
            hosts = asked.network.allow if isinstance(asked.network, NetworkAllow) else [asked.network]
            yield self.sentence("network", ", ".join(f"`{host}`" for host in hosts))
        if asked.env:
            yield self.sentence("env", ", ".join(f"`{name}`" for name in asked.env))
        if asked.permissions:
            yield self.sentence("permissions", ", ".join(f"`{name}`" for name in asked.permissions))
        fields = zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True)
        values = [(key, getattr(asked.limits, name), getattr(default.limits, name)) for name, key in fields]
        limits = [f"`{key}` {value}" for key, value, usual in values if value != usual]
        if limits:
            yield self.sentence("limits", ", ".join(limits))

    def sentence(self, which: str, value: str) -> str:
        """One of SENTENCES with its value."""
        return SENTENCES[which].format(value)

    def export(self, tool: str, export: ToolExport, shared: Collection[Parameter]) -> Iterator[str]:
        """The section of one function."""
        yield f"### {build_tool_name(tool, export.name)}\n"
        yield one_line(export.description or "") + "\n"
        rows = parameter_rows(export.parameters)
        own = [row for row in rows if row not in shared]
        if len(own) < len(rows):
            yield f"As above: {', '.join(f'`{row.name}`' for row in rows if row in shared)}.\n"
        if own:
            yield "\n".join([*TABLE, *map(self.row, own)]) + "\n"
        if export.aliases:
            pairs = ", ".join(f"`{alias}` → `{name}`" for alias, name in export.aliases.items())
            yield f"Other spellings: {pairs}.\n"
        if export.examples:
            lines = [line for example in export.examples for line in self.example(example)]
            yield "\n".join(["```text", *lines, "```"]) + "\n"

    def row(self, row: Parameter) -> str:
        """One parameter."""
        name = f"`{row.name}`" + (" **required**" if row.required else "")
        default = f" (default `{row.default}`)" if row.default else ""
        cells = (name, row.type, one_line(row.description) + default)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def example(self, example: Example) -> Iterator[str]:
        """The arguments, and what is answered if the manifest says it."""
        yield _json(example.input)
        if example.output is not None:
            yield f"→ {_json(example.output)}"


def one_line(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(write_or_check([Page()], SCRIPT, sys.argv[1:]))
