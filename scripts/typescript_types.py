"""`python -m scripts.typescript_types [--check]`: TypeScript declarations, made from the JSON Schemas of schemas/json.

OUTPUTS says which file has which definitions; what those refer to comes along. Another file is another row. Integers
are `number`: those of the structs stay within 2^53. A field that may be absent is optional.

Source: PROTOCOL.md "Payloads"; docs/design/wire.md section 11.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from goondan.features import FEATURES
from scripts.node_client import DECLARATIONS

ROOT: Final = Path(__file__).resolve().parent.parent
SCHEMAS: Final = ROOT / "schemas" / "json"
#: How wide a comment may be, with its indentation (characters).
WIDTH: Final = 116
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][\w$]*")
_PLAIN: Final = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


@dataclass(frozen=True)
class Output:
    """One file of declarations."""

    #: Where it lies, relative to the root of the repository.
    path: str
    #: Name of a schema file (`payloads` for `payloads.schema.json`) to names of definitions in it.
    definitions: Mapping[str, tuple[str, ...]]
    #: What a field is whose schema allows any JSON value.
    any_value: str = "unknown"
    #: A file that is written by hand and stands above the declarations, relative to the root; '' for none.
    head: str = ""


def _is_there(feature: str) -> bool:
    return any(row.name == feature for row in FEATURES)


OUTPUTS: Final = (
    Output(
        "clients/node/wire.d.ts",
        {
            "frame": ("Frame",),
            "payloads": (
                "AgentEvent",
                *(("ApprovalDecided", "ApprovalItem") if _is_there("approvals") else ()),
                "Credit",
                "ErrorPayload",
                "Hello",
                "RuntimeEvent",
                "Shutdown",
                "ToolResult",
                "Welcome",
            ),
        },
    ),
    Output(
        "toolhost/inside/javascript/core/index.d.ts",
        {"payloads": ("AgentsCatalog", "AgentsListed", "SpawnedAgent")},
        any_value="JsonValue",
        head="scripts/goondan_core.ts",
    ),
)
#: The paths of all these files, and of the declarations that the compiler makes.
GENERATED: Final = frozenset(output.path for output in OUTPUTS) | frozenset(DECLARATIONS)


def declarations(output: Output) -> str:
    """The content of the file.

    Raises: KeyError when a schema has no such definition, ValueError when two schemas mean different things by a name.
    """
    found: dict[str, dict[str, Any]] = {}
    for schema, names in output.definitions.items():
        known = json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8"))["$defs"]
        left = list(names)
        while left:
            name = left.pop()
            if name not in found:
                found[name] = known[name]
                left += _references(known[name])
            elif _meaning(found[name]) != _meaning(known.get(name, found[name])):
                raise ValueError(f"{output.path}: {name} of {schema} is another one")
    sources = " and ".join(filter(None, ("schemas/json", output.head)))
    parts = [f"// Made by `python -m scripts.typescript_types` from {sources}. Do not edit.\n"]
    parts += [(ROOT / output.head).read_text(encoding="utf-8").strip() + "\n"] if output.head else []
    parts += [_declaration(name, found[name], output.any_value) for name in sorted(found)]
    return "\n".join(parts)


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for value in schema.values() for name in _references(value)]
    return [name for item in schema for name in _references(item)] if isinstance(schema, list) else []


def _meaning(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


def _declaration(name: str, schema: dict[str, Any], any_value: str) -> str:
    head = _comment(schema.get("description", ""), "")
    if "properties" not in schema:
        return f"{head}export type {name} = {_type(schema, any_value)};\n"
    required = frozenset(schema.get("required", ()))
    fields = "".join(
        f"{_comment(field.get('description', ''), '  ')}  {_key(key)}{'' if key in required else '?'}: "
        f"{_type(field, any_value)};\n"
        for key, field in schema["properties"].items()
    )
    return f"{head}export interface {name} {{\n{fields}}}\n"


def _comment(text: str, indent: str) -> str:
    text = text.replace("*/", "*\\/")
    if not text:
        return ""
    if "\n" not in text and len(indent) + len(text) + 7 <= WIDTH:
        return f"{indent}/** {text} */\n"
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, WIDTH - len(indent) - 3) or [""]]
    return "".join([f"{indent}/**\n", *(f"{indent} * {line}".rstrip() + "\n" for line in lines), f"{indent} */\n"])


def _key(name: str) -> str:
    return name if _IDENTIFIER.fullmatch(name) else json.dumps(name)


def _union(kinds: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(kinds))


def _type(schema: dict[str, Any], any_value: str) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return _union(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return _union(_type(kind, any_value) for kind in schema["anyOf"])
    kind = schema.get("type")
    if kind == "array":
        items = _type(schema.get("items", {}), any_value)
        return f"({items})[]" if " | " in items else f"{items}[]"
    if kind == "object":
        values = schema.get("additionalProperties", {})
        return f"{{ [key: string]: {_type(values if isinstance(values, dict) else {}, any_value)} }}"
    return any_value if kind is None else _PLAIN[kind]


def main(arguments: list[str]) -> int:
    """Write the files, or check them: 1 when one has drifted."""
    status = 0
    for output in OUTPUTS:
        path, content = ROOT / output.path, declarations(output)
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            print(f"{output.path} is out of date: run `python -m scripts.typescript_types`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
