"""The exported JSON Schema: what is committed is what the structs say, and it says the same as the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from goondan.kernel.bundle.rules.tools import BUNDLED_EXPORTS
from scripts import export_schemas as export

ROOT = Path(__file__).parent.parent.parent


def schema(name: str) -> Any:
    return json.loads((export.COMMITTED / f"{name}.schema.json").read_text())


def test_the_committed_files_have_not_drifted() -> None:
    assert export.drift() == []


def test_drift_is_noticed(tmp_path: Path) -> None:
    export.write(tmp_path)
    assert export.drift(tmp_path) == []
    (tmp_path / "frame.schema.json").write_text("{}")
    (tmp_path / "worker.schema.json").unlink()
    (tmp_path / "old.schema.json").write_text("{}")
    assert len(export.drift(tmp_path)) == 3
    assert export.main([str(tmp_path), "--check"]) == 1
    assert export.main([str(tmp_path)]) == 0
    assert len(export.drift(tmp_path)) == 1


@pytest.mark.parametrize("path", sorted(export.COMMITTED.glob("*.json")), ids=lambda path: path.name)
def test_every_file_is_a_json_schema(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_every_frame_type_is_listed() -> None:
    assert set(schema("frame")["$defs"]["Frame"]["properties"]["type"]["enum"]) == set(export.frame_types())


OURS = [ROOT / "examples" / "quickstart" / "goondan.yaml", *sorted((ROOT / "toolhost" / "base").glob("*/tool.yaml"))]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.parent.name)
def test_our_own_documents_fit_the_schema(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert documents
    for document in documents:
        for exported in document["spec"].get("exports", []):
            if exported["name"] in BUNDLED_EXPORTS:  # no user's Tool may have such a name (NAME-12)
                exported["name"] = exported["name"].lower()
        jsonschema.Draft202012Validator(schema("bundle")).validate(document)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Tol"},
        {"apiVersion": "goondan.ai/v2"},
        {"status": {}},
        {"metadata": {"name": "a__b"}},
        {"metadata": {"name": "A"}},
        {"spec": {"entry": "x.py", "exports": []}},
        {"spec": {"entry": "x.py", "exports": [{"name": "a"}], "runtime": "node"}},
        {"spec": {"entry": "", "exports": [{"name": "a"}]}},
        {"spec": {"entry": "x.py", "exports": [{"name": "a b"}]}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, Any]) -> None:
    good = {
        "apiVersion": "goondan.ai/v1",
        "kind": "Tool",
        "metadata": {"name": "words"},
        "spec": {"entry": "x.py", "exports": [{"name": "count"}]},
    }
    validator = jsonschema.Draft202012Validator(schema("bundle"))
    validator.validate(good)
    assert not validator.is_valid({**good, **change})


def test_a_reference_has_one_of_its_two_forms() -> None:
    validator = jsonschema.Draft202012Validator({**schema("bundle"), "anyOf": [{"$ref": "#/$defs/ToolUse"}]})
    assert validator.is_valid({"ref": "Tool/x"})
    assert validator.is_valid({"kind": "Tool", "name": "x"})
    assert not validator.is_valid({"ref": "Tool/x", "kind": "Tool", "name": "x"})
    assert not validator.is_valid({"kind": "Tool"})


def test_what_stands_above_a_field_is_its_description() -> None:
    document = json.loads(export.export()["frame.schema.json"])
    properties = document["$defs"]["Frame"]["properties"]
    assert [name for name, schema in properties.items() if not schema.get("description")] == []
    assert properties["attach"]["description"] == (
        "`tool.call` only: the call was started before. A tool host that does not know it does not start it."
    )
