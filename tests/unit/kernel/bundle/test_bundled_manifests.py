"""The manifests that come along: no start looks at their schemas, so this does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from goondan.kernel.bundle import documents
from goondan.kernel.bundle.documents import (
    IN_AGENTS,
    IN_JAILS,
    MANIFEST,
    base_tools,
    load_manifests,
    prepared_nodes,
    read_manifest,
    tool_folders,
)
from goondan.kernel.bundle.rules.positions import Allowance, compose
from goondan.kernel.bundle.rules.problems import BundleError, Report

FOLDERS = [*tool_folders(IN_JAILS), *tool_folders(IN_AGENTS)]


def test_every_bundled_manifest_has_sound_schemas_and_fitting_examples() -> None:
    assert load_manifests(FOLDERS, schemas=True).keys() == base_tools().keys()


def broken(tmp_path: Path, schema: object) -> list[str]:
    """A bundled tool's folder whose first parameters are `schema`."""
    (tmp_path / "bash.py").write_text("handlers = {}\n")
    manifest = yaml.safe_load((Path(base_tools()["bash"].document.file)).read_text())
    manifest["spec"]["exports"][0]["parameters"] = schema
    (tmp_path / MANIFEST).write_text(yaml.safe_dump(manifest))
    return [str(tmp_path)]


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"type": "object", "required": ["another"]}])
def test_one_that_is_not_sound_is_found_here(tmp_path: Path, schema: object) -> None:
    with pytest.raises(BundleError):
        load_manifests(broken(tmp_path, schema), schemas=True)


def manifests() -> list[Path]:
    return [path for folder in FOLDERS if (path := Path(folder, MANIFEST)).is_file()]


def test_no_start_reads_the_yaml_of_a_bundled_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(documents, "compose_file", lambda data, _: asked.append(data))
    assert len(load_manifests(FOLDERS)) == len(manifests()) > 10
    assert asked == []


@pytest.mark.parametrize("path", manifests(), ids=lambda path: path.parent.name)
def test_what_was_prepared_is_what_the_yaml_says(path: Path) -> None:
    assert [prepared_nodes(path.read_bytes())] == compose(path.read_text(), Allowance()).documents


def test_a_manifest_that_has_changed_since_is_read(tmp_path: Path) -> None:
    changed = tmp_path / MANIFEST
    changed.write_text(manifests()[0].read_text().replace("kind: Tool", "kind: Another"))
    (document,) = read_manifest(str(changed), Allowance(), Report())
    assert document.text("kind") == "'Another'"


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"a": 1}'], ids=["none", "empty", "nothing", "damaged"])
def test_without_what_was_prepared_every_manifest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "prepared.json").write_bytes(content)
    monkeypatch.setattr(documents, "PREPARED_FILE", str(tmp_path / "prepared.json"))
    monkeypatch.setattr(documents, "_prepared", documents._prepared.__wrapped__)
    assert prepared_nodes(manifests()[0].read_bytes()) is None
    assert load_manifests(FOLDERS).keys() == base_tools().keys()
