"""The bundled package `@goondan/base`: its manifests, read as data files.

No code of the tools is imported here: their folders are found through the import system's finders only. Most tools run
in the tool host's jails; those beside the agent's code run in the process of the agent that calls them. Manifests of
the package follow the same rules as a user's, except for two published export names and `${NAME}`, which stays text in
them. An entry is relative to the manifest's own folder.

Source: docs/design/bundle.md section 4; requirements BASE-01, BASE-02, NAME-12.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Final

from goondan.kernel.bundle.files import BundleFiles, read_file
from goondan.kernel.bundle.lookup import MAX_FILE_BYTES, Unreadable
from goondan.kernel.bundle.positions import Allowance, Fault, Mapping, compose, decode
from goondan.kernel.bundle.prepared import prepared_nodes
from goondan.kernel.bundle.problems import BundleError, Position, Report
from goondan.kernel.bundle.shape import Builder, Document, Environment
from goondan.kernel.bundle.tools import CheckedTool, check_tool
from goondan.schemas.bundle.resources import Tool

MANIFEST: Final = "tool.yaml"
#: The manifest of a bundled tool that a bundled extension brings to its agents (base_extensions.py). No other agent has
#: such a tool, and no document names it.
BROUGHT_MANIFEST: Final = "brought.yaml"
#: The packages whose `base` folders hold bundled tools, by where their handlers run.
IN_JAILS: Final = "goondan.toolhost"
IN_AGENTS: Final = "goondan.agentproc"


def tool_folders(package: str) -> list[str]:
    """The folders of the bundled tools in this Python package; none when it is not installed."""
    base = in_package(package, "base")
    return [] if base is None else [os.path.join(base, name) for name in sorted(os.listdir(base))]


def in_package(package: str, name: str) -> str | None:
    """The path of a file or a folder of this Python package; None when it is not installed."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((path for path in (os.path.join(place, name) for place in places) if os.path.exists(path)), None)


@lru_cache(maxsize=1)
def base_tools() -> dict[str, CheckedTool]:
    """The bundled tools by name, in the order of names. Raises BundleError when a manifest of ours is broken."""
    tools = load_manifests(tool_folders(IN_JAILS))
    for name, tool in load_manifests(tool_folders(IN_AGENTS)).items():
        tool.in_agent = True
        tools[name] = tool
    return dict(sorted(tools.items()))


def load_manifests(
    folders: list[str], *, schemas: bool = False, manifest: str = MANIFEST, form: type[Tool] = Tool
) -> dict[str, CheckedTool]:
    """The Tools whose manifests lie in `folders`; folders without one are skipped. `form` is what a manifest must fit.
    Raises BundleError.

    Their parameters and examples are looked at with `schemas` only. They come along and do not change: a test looks at
    them, so that not every start has to.
    """
    report = Report()
    tools: dict[str, CheckedTool] = {}
    allowance = Allowance()
    for folder in folders:
        path = os.path.join(folder, manifest)
        if not os.path.isfile(path):
            continue
        for document in read_manifest(path, allowance, report):
            document.resource = "Tool"
            built: Tool = Builder(document, Environment(None), report).build(form)
            document.resource = f"Tool/{built.metadata.name}"
            files = BundleFiles(folder)
            tool = CheckedTool(document, built.metadata.name, built.spec, bundled=True)
            check_tool(tool, files, report, schemas=schemas)
            tool.root = files.root
            tools[tool.name] = tool
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    return tools


def read_manifest(path: str, allowance: Allowance, report: Report) -> list[Document]:
    """The documents of one manifest; what is wrong with it is reported."""
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except Unreadable as error:
        report.error("E_CONFIG_NOT_FOUND", str(error), Position(path))
        return []
    known = prepared_nodes(data)
    if known is not None:
        return [Document(path, known)]
    text = decode(data)
    if isinstance(text, Fault):
        report.error(text.code, text.message, Position(path, text.line, text.column))
        return []
    composed = compose(text, allowance)
    for fault in composed.faults:
        report.error(fault.code, fault.message, Position(path, fault.line, fault.column, fault.path), fault.suggestion)
    return [Document(path, node) for node in composed.documents if isinstance(node, Mapping)]
