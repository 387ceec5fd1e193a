"""Write docs/builtin-tools.md and docs/builtin-tools.ko.md: every function of the bundled tools, from their manifests.

`python scripts/tool_docs.py` writes both; `--check` says what is out of date and exits 1. Words come from the
manifests, the first paragraphs from scripts/tool_text/. The Korean page says the same through tool_text/ko.yaml; an
English text without its Korean one, or a Korean one that nothing needs, is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from goondan.kernel.bundle.base import base_tools
from goondan.kernel.bundle.parameters import Parameter, parameter_rows
from goondan.kernel.bundle.tools import CheckedTool
from goondan.schemas.address import build_tool_name
from goondan.schemas.launch import DEFAULT_ERROR_LIMIT, Limits
from goondan.schemas.resources import Example, NetworkAllow, Sandbox, ToolExport
from scripts.pages import write_or_check

ROOT: Final = Path(__file__).resolve().parent.parent
TEXT: Final = ROOT / "scripts" / "tool_text"
#: Sentences with a place for a value, so that their translations can put it where their language wants it.
SENTENCES: Final = {
    "limit": "Error messages have at most {} characters.",
    "isolation": "Isolation: {}.",
    "network": "Network: {}.",
    "env": "Reads these variables of the host's environment, if they are set: {}.",
    "limits": "Limits: {}.",
    "permissions": "Permissions: {}.",
}


class Page:
    """One language's page. `say` turns an English text into this language."""

    def __init__(self, korean: bool) -> None:
        self.korean = korean
        self._table: dict[str, str] = yaml.safe_load((TEXT / "ko.yaml").read_text(encoding="utf-8")) if korean else {}
        self._missing: dict[str, None] = {}
        # Words for what some manifest will ask for, whether or not one does now.
        self._used = set(SENTENCES.values())

    @property
    def path(self) -> Path:
        """Where it belongs."""
        return ROOT / "docs" / ("builtin-tools.ko.md" if self.korean else "builtin-tools.md")

    def problems(self) -> list[str]:
        """What the table of translations lacks, or holds for nobody; after `text`."""
        unused = sorted(set(self._table) - self._used)
        return [f"no Korean for: {text}" for text in self._missing] + [
            f"nothing says any more: {text}" for text in unused
        ]

    def say(self, text: str) -> str:
        """`text`, on one line, in the page's language."""
        text = " ".join(text.split())
        if not self.korean or not text:
            return text
        self._used.add(text)
        if text not in self._table:
            self._missing[text] = None
        return self._table.get(text, text)

    def text(self) -> str:
        """The whole page."""
        head = (TEXT / ("head.ko.md" if self.korean else "head.md")).read_text(encoding="utf-8")
        return "\n".join([head, *(line for tool in base_tools().values() for line in self.tool(tool))])

    def tool(self, tool: CheckedTool) -> Iterator[str]:
        """The section of one Tool."""
        yield f"## {tool.name}\n"
        remarks = list(self.remarks(tool))
        if remarks:
            yield " ".join(remarks) + "\n"
        for export in tool.body.exports:
            yield from self.export(tool.name, export)

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
        return self.say(SENTENCES[which]).replace("{}", value)

    def export(self, tool: str, export: ToolExport) -> Iterator[str]:
        """The section of one function."""
        yield f"### {build_tool_name(tool, export.name)}\n"
        yield self.say(export.description or "") + "\n"
        rows = parameter_rows(export.parameters)
        if rows:
            heads = [self.say(word) for word in ("Parameter", "Type", "What it is")]
            yield "\n".join([f"| {' | '.join(heads)} |", "|---|---|---|", *map(self.row, rows)]) + "\n"
        if export.aliases:
            pairs = ", ".join(f"`{alias}` → `{name}`" for alias, name in export.aliases.items())
            yield f"{self.say('Other spellings:')} {pairs}.\n"
        if export.examples:
            lines = [line for example in export.examples for line in self.example(example)]
            yield "\n".join(["```text", *lines, "```"]) + "\n"

    def row(self, row: Parameter) -> str:
        """One parameter."""
        name = f"`{row.name}`" + (f" **{self.say('required')}**" if row.required else "")
        default = f" ({self.say('default')} `{row.default}`)" if row.default else ""
        cells = (name, row.type, self.say(row.description) + default)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def example(self, example: Example) -> Iterator[str]:
        """The arguments, and what is answered if the manifest says it."""
        yield _json(example.input)
        if example.output is not None:
            yield f"→ {_json(example.output)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(write_or_check((Page(korean=False), Page(korean=True)), "scripts/tool_docs.py", sys.argv[1:]))
