"""The Extension document of an MCP server, and its text. Pure.

Source: docs/mcp.md; requirements MCP-02 to MCP-10.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any, Final

from goondan.schemas.bundle.address import is_resource_name

#: The Extension that speaks with MCP servers.
ENTRY: Final = "@goondan/base/mcp"
#: What stands before the name of a server in the name of its Extension. It is not in the names of tools.
PREFIX: Final = "mcp-"
#: The longest name of a server (characters): the names of its tools begin with it.
MAX_NAME: Final = 24
#: A text that every reader of YAML takes for a text.
_PLAIN: Final = re.compile(r"[A-Za-z/@][A-Za-z0-9_./@-]*[A-Za-z0-9/]|[A-Za-z/]")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"})


def extension_document(
    name: str,
    transport: Mapping[str, Any],
    *,
    scope: str = "instance",
    sandbox: Mapping[str, Any] | None = None,
    tools: bool | list[str] = True,
) -> dict[str, Any]:
    """The document of a server that is kept, with everything that it offers exposed, of its tools perhaps these only.
    `scope`: `instance`, `agent`.
    """
    config: dict[str, Any] = {
        "transport": dict(transport),
        "attach": {"mode": "stateful", "scope": scope},
        "expose": {"tools": tools, "resources": True, "prompts": True},
    }
    if sandbox:
        config["sandbox"] = dict(sandbox)
    return {
        "apiVersion": "goondan.ai/v1",
        "kind": "Extension",
        "metadata": {"name": name},
        "spec": {"entry": ENTRY, "config": config},
    }


def usable_name(wanted: str, tools: Container[str], taken: Container[str]) -> str:
    """The name of an Extension for a server of this name: `mcp-github` for `GitHub`. No two are the same, and none has
    the name of a tool behind `mcp-`.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    slug = slug.removeprefix(PREFIX).removesuffix("-mcp")[:MAX_NAME].strip("-") or "server"
    if not is_resource_name(slug):
        slug = f"s-{slug}"[:MAX_NAME].strip("-")
    made, count = slug, 1
    while made in tools or PREFIX + made in taken:
        count += 1
        made = f"{slug}-{count}" if slug not in tools or count > 2 else f"{slug}-mcp"
    return PREFIX + made


def yaml_text(document: Mapping[str, Any]) -> str:
    """The document as YAML that a person can go on writing, with a line's end behind it."""
    return "\n".join(_lines(document, 0)) + "\n"


def _lines(value: Mapping[str, Any], depth: int) -> list[str]:
    lines: list[str] = []
    for key, part in value.items():
        begin = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(part, Mapping) and part and not _short(part):
            lines += [begin, *_lines(part, depth + 1)]
        elif isinstance(part, list) and part and not _fits(begin, part):
            lines += [begin, *(f"{'  ' * depth}  - {_flow(item)}" for item in part)]
        else:
            lines.append(f"{begin} {_flow(part)}")
    return lines


def _short(value: Mapping[str, Any]) -> bool:
    """Whether an object fits one line, because a person would write it so."""
    return all(isinstance(part, bool) for part in value.values()) or set(value) <= {"name", "mode", "scope"}


def _fits(begin: str, value: list[Any]) -> bool:
    return len(begin) + len(_flow(value)) < 110


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        # `@` begins nothing in YAML, and a text of digits and dots may be a number
        return value if not value.startswith("@") else f'"{value}"'
    return '"' + "".join(map(_in_quotes, value)) + '"' if isinstance(value, str) else json.dumps(value)


def _in_quotes(char: str) -> str:
    """A character as it stands between double quotes."""
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
