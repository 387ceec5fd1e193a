"""Declarations for TypeScript say what the schemas say (scripts/typescript_types.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import typescript_types
from scripts.typescript_types import OUTPUTS, ROOT, Output, declarations

ONE: dict[str, Any] = {
    "Thing": {
        "description": "What it is.",
        "properties": {
            "name": {"type": "string", "description": "How */ it is called."},
            "kind": {"enum": ["a", "b", None]},
            "many": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Other"}]}},
            "by-name": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "any": {"default": None},
        },
        "required": ["name"],
    },
    "Other": {"properties": {"thing": {"anyOf": [{"$ref": "#/$defs/Thing"}, {"type": "null"}]}}, "required": ["thing"]},
    "Unused": {"properties": {}},
}
DECLARED = """\
// Made by `python -m scripts.typescript_types` from schemas/json. Do not edit.

import type { JsonValue } from "./json.d.ts";

export interface Other {
  thing: Thing | null;
}

/** What it is. */
export interface Thing {
  /** How *\\/ it is called. */
  name: string;
  kind?: "a" | "b" | null;
  many?: (number | Other)[];
  "by-name"?: { [key: string]: boolean };
  any?: JsonValue;
}
"""


@pytest.fixture
def schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(typescript_types, "SCHEMAS", tmp_path)
    return tmp_path


def test_what_a_definition_refers_to_comes_along(schemas: Path) -> None:
    (schemas / "one.schema.json").write_text(json.dumps({"$defs": ONE}))
    head = schemas / "head.ts"
    head.write_text('import type { JsonValue } from "./json.d.ts";\n')
    expected = DECLARED.replace("schemas/json.", f"schemas/json and {head}.")
    assert declarations(Output("x.d.ts", {"one": ("Thing",)}, "JsonValue", str(head))) == expected


def test_one_name_has_one_meaning_in_a_file(schemas: Path) -> None:
    other: dict[str, Any] = {"Other": {"properties": {}}}
    for name, definitions in (("one", ONE), ("two", other)):
        (schemas / f"{name}.schema.json").write_text(json.dumps({"$defs": definitions}))
    with pytest.raises(ValueError, match="Other of two"):
        declarations(Output("x.d.ts", {"one": ("Thing",), "two": ("Other",)}))
    with pytest.raises(KeyError):
        declarations(Output("x.d.ts", {"one": ("Nothing",)}))


def test_the_committed_files_are_what_the_schemas_give() -> None:
    for output in OUTPUTS:
        assert (ROOT / output.path).read_text() == declarations(output)
