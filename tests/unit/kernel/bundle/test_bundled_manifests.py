"""The manifests that come along: no start looks at their schemas, so this does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kernel.bundle.base import IN_AGENTS, IN_JAILS, MANIFEST, base_tools, load_manifests, tool_folders
from kernel.bundle.problems import BundleError

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
