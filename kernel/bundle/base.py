"""The bundled package `@goondan/base`: its manifests, read as data files.

The tool host's code is never imported here: the folder is found through the import system's finders only. Manifests
of the package follow the same rules as a user's, except for two published export names and `${NAME}`, which stays
text in them. An entry is relative to the manifest's own folder.

Source: design section 8; requirements BASE-01, BASE-02, NAME-12.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Final

from kernel.bundle.files import BundleFiles, read_file
from kernel.bundle.lookup import MAX_FILE_BYTES, Unreadable
from kernel.bundle.positions import Budget, Fault, Mapping, compose, decode
from kernel.bundle.problems import BundleError, Place, Report
from kernel.bundle.shape import Builder, Document, Environment
from kernel.bundle.tools import CheckedTool, check_tool
from schemas.resources import Tool

MANIFEST: Final = "tool.yaml"


def base_folder() -> str | None:
    """Where the bundled tools are; None when the tool host is not installed."""
    spec = importlib.util.find_spec("toolhost")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((path for path in (os.path.join(place, "base") for place in places) if os.path.isdir(path)), None)


@lru_cache(maxsize=1)
def base_tools() -> dict[str, CheckedTool]:
    """The bundled tools by name. Raises BundleError when a manifest of ours is broken."""
    folder = base_folder()
    names = sorted(os.listdir(folder)) if folder is not None else []
    return load_manifests([os.path.join(folder or "", name) for name in names])


def load_manifests(folders: list[str]) -> dict[str, CheckedTool]:
    """The Tools whose manifests lie in `folders`; folders without one are skipped. Raises BundleError."""
    report = Report()
    tools: dict[str, CheckedTool] = {}
    budget = Budget()
    for folder in folders:
        path = os.path.join(folder, MANIFEST)
        if not os.path.isfile(path):
            continue
        for document in _documents(path, budget, report):
            document.resource = "Tool"
            built: Tool = Builder(document, Environment(None), report).build(Tool)
            document.resource = f"Tool/{built.metadata.name}"
            files = BundleFiles(folder)
            tool = CheckedTool(document, built.metadata.name, built.spec, bundled=True)
            check_tool(tool, files, report)
            tool.root = files.root
            tools[tool.name] = tool
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    return tools


def _documents(path: str, budget: Budget, report: Report) -> list[Document]:
    try:
        text = decode(read_file(path, MAX_FILE_BYTES))
    except Unreadable as error:
        report.error("E_CONFIG_NOT_FOUND", str(error), Place(path))
        return []
    if isinstance(text, Fault):
        report.error(text.code, text.message, Place(path, text.line, text.column))
        return []
    composed = compose(text, budget)
    for fault in composed.faults:
        report.error(fault.code, fault.message, Place(path, fault.line, fault.column, fault.path), fault.suggestion)
    return [Document(path, node) for node in composed.documents if isinstance(node, Mapping)]
