"""What the page has of others is what npm has, byte for byte, and vendor.json says so."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

from tests.features.page.browser import packages

ROOT: Final = Path(__file__).parents[3]
FILES: Final = ROOT / "features" / "page" / "door" / "files"
VENDOR: Final = FILES / "vendor"
ROWS: Final[list[dict[str, Any]]] = json.loads((VENDOR / "vendor.json").read_text())


def test_each_vendored_file_has_a_row_with_its_hash_and_each_package_its_licence() -> None:
    assert sorted(row["file"] for row in ROWS) == sorted({path.name for path in VENDOR.iterdir()} - {"vendor.json"})
    for row in ROWS:
        assert hashlib.sha256((VENDOR / row["file"]).read_bytes()).hexdigest() == row["sha256"], row["file"]
    licensed = {row["license"] for row in ROWS if row["path"] == "LICENSE"}
    assert {row["license"] for row in ROWS} == licensed == {"MIT", "Apache-2.0"}


def test_what_vendored_modules_import_is_in_the_import_map_and_comes_from_nowhere_else() -> None:
    found = re.search(r'<script type="importmap">(.*?)</script>', (FILES / "index.html").read_text())
    assert found is not None
    mapped = json.loads(found[1])["imports"]
    assert sorted(mapped.values()) == sorted(f"./vendor/{row['file']}" for row in ROWS if row["path"] != "LICENSE")
    for row in ROWS:
        imported = re.findall(r'\bfrom ?"([^"]+)"|\bimport\("([^"]+)"\)', (VENDOR / row["file"]).read_text())
        assert {one or other for one, other in imported} <= mapped.keys()


def test_what_the_first_view_needs_is_asked_for_at_once_and_not_only_when_its_importer_has_come() -> None:
    index = (FILES / "index.html").read_text()
    found = re.search(r'<script type="importmap">(.*?)</script>', index)
    assert found is not None
    mapped = json.loads(found[1])["imports"]
    needed, left = set[str](), ["app.js", "now.js"]
    while left:
        name = left.pop()
        needed.add(name)
        imported = re.findall(r'^(?:import|export) [^;]*?from ?"([^"]+)"', (FILES / name).read_text(), re.MULTILINE)
        left += {mapped.get(one, one).removeprefix("./") for one in imported} - needed
    preloaded = set(re.findall(r'<link rel="modulepreload" href="([^"]+)">', index))
    assert preloaded == {name for name in needed if not name.startswith("vendor/")} - {"app.js"} | {
        path.removeprefix("./") for path in mapped.values()
    }


def test_the_vendored_files_are_those_of_npm() -> None:
    folder = packages() / "node_modules"
    for row in ROWS:
        package = folder / row["name"]
        said = json.loads((package / "package.json").read_text())
        assert (said["version"], said["license"]) == (row["version"], row["license"])
        assert (package / row["path"]).read_bytes() == (VENDOR / row["file"]).read_bytes(), row["file"]
    # The licence of signals-core is that of signals.
    texts = {(folder / name / "LICENSE").read_bytes() for name in ("@preact/signals", "@preact/signals-core")}
    assert len(texts) == 1
