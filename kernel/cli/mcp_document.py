"""Extension documents of MCP servers into a bundle's goondan.yaml, behind the last document, as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any


def add_to_bundle(documents: Sequence[Mapping[str, Any]], folder: str) -> str:
    """Add documents to the bundle of a folder, all or none; the path of its goondan.yaml.

    Raises GoondanError E_INIT: there is no bundle, it has one of them already, or it cannot be written.
    """
    from kernel.cli.new_resource import addition, read_bundle
    from kernel.cli.placing import Placing
    from kernel.mcp.document import yaml_text
    from kernel.paths import BUNDLE_FILE
    from schemas.errors import fail

    folder = os.path.expanduser(folder)
    path = os.path.join(folder, BUNDLE_FILE)
    before = None
    for document in documents:
        before = read_bundle(path, document["metadata"]["name"], "Extension")
    if before is None:
        raise fail("E_INIT", f"there is no {path}", suggestion="Begin with `gdn init`, or name the folder with --dir.")
    added = b""
    for document in documents:
        added += addition(path, before + added, yaml_text(document).encode())
    with Placing(folder) as placing:
        placing.append(BUNDLE_FILE, before, added)
    return path
