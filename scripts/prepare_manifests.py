"""Write kernel/bundle/prepared.json: the nodes of the bundled tools' manifests, so that no start reads their YAML.

`python scripts/prepare_manifests.py` writes it; `--check` says whether it is out of date and exits 1. One line is one
manifest, so that changes of two manifests can be merged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from goondan.kernel.bundle.documents import (
    BROUGHT_MANIFEST,
    IN_AGENTS,
    IN_JAILS,
    MANIFEST,
    PREPARED_FILE,
    Prepared,
    manifest_digest,
    tool_folders,
)
from goondan.kernel.bundle.rules.positions import Allowance, Mapping, compose
from scripts.pages import write_or_check

ROOT: Final = Path(__file__).resolve().parent.parent


class PreparedManifests:
    """The file. It is no page, and nothing of it is translated."""

    path = ROOT / "kernel" / "bundle" / PREPARED_FILE

    def text(self) -> str:
        """What it should be."""
        lines = (f"{_json(digest)}:{_json(found)}" for digest, found in self.manifests())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def problems(self) -> list[str]:
        """Nothing else can be wrong with it."""
        return []

    @staticmethod
    def manifests() -> Iterator[tuple[str, Prepared]]:
        """Each manifest of one document without fault, by its digest; others are read at each start, and say why."""
        folders = (*tool_folders(IN_JAILS), *tool_folders(IN_AGENTS))
        for path in (Path(folder, name) for folder in folders for name in (MANIFEST, BROUGHT_MANIFEST)):
            if not path.is_file():
                continue
            data = path.read_bytes()
            composed = compose(data.decode(), Allowance())
            if len(composed.documents) == 1 and isinstance(composed.documents[0], Mapping) and not composed.faults:
                name = os.path.relpath(path, ROOT / "goondan")
                yield manifest_digest(data), Prepared(name, composed.documents[0])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    sys.exit(write_or_check([PreparedManifests()], "scripts/prepare_manifests.py", sys.argv[1:]))
