"""Packages beside a bundle: folders with a Package document and Tools, below `$GOONDAN_STATE_ROOT/packages`.

A package is somebody else's: nothing of it is replaced from our environment, and its tools get the defaults until the
operator accepts what they request (kernel/grants). It lies outside of the bundle's tree, where no jail can write.

Source: docs/design/bundle.md section 4; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os

from goondan.kernel.bundle.documents import load_documents
from goondan.kernel.bundle.files import BundleFiles
from goondan.kernel.bundle.installed_packages import Package
from goondan.kernel.bundle.positions import Scalar
from goondan.kernel.bundle.problems import Report
from goondan.kernel.bundle.shape import Builder, Document, Environment
from goondan.kernel.bundle.tools import CheckedTool, check_tool
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.bundle.resources import Tool


class PackageFolders:
    """Packages by name, read when they are first asked for. What is wrong with one goes into the report."""

    def __init__(self, folder: str | None, report: Report) -> None:
        self._folder = folder
        self._report = report
        self._known: dict[str, Package | str] = {}

    def find(self, name: str) -> Package | str:
        """The package, or why it cannot be used."""
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def found(self) -> list[Package]:
        """Every package that was asked for and is there."""
        return [package for package in self._known.values() if not isinstance(package, str)]

    def _load(self, name: str) -> Package | str:
        scope, slash, rest = name.partition("/")
        sound = (
            is_resource_name(rest) and scope[:1] == "@" and is_resource_name(scope[1:])
            if slash
            else is_resource_name(name)
        )
        if not sound:
            return "it is no name of a package"
        if self._folder is None:
            return "it is not installed"
        root = os.path.realpath(os.path.join(self._folder, name))
        if not os.path.isdir(root):
            return f"it is not installed: there is no {os.path.join(self._folder, name)}"
        loaded = load_documents(root, self._report)
        files = BundleFiles(root)
        tools: dict[str, CheckedTool] = {}
        named: str | None = None
        for document in loaded.documents:
            kind = _text(document, "kind")
            if kind == "Package":
                named = _text(document, "metadata", "name")
            elif kind == "Tool":
                tool = self._tool(document, name, files)
                if tool.name in tools:
                    message = f"{document.resource} stands twice in the package {name}"
                    self._report.error("E_CONFIG_DUPLICATE", message, document.place("metadata", "name"))
                tools[tool.name] = tool
        if named != name:
            return f"{root} is not the package {name}: its Package document says so, and names another or is missing"
        return Package(name, root, tools, [source.path for source in loaded.sources])

    def _tool(self, document: Document, package: str, files: BundleFiles) -> CheckedTool:
        document.resource = "Tool"
        built: Tool = Builder(document, Environment(None), self._report).build(Tool)
        document.resource = f"Tool/{built.metadata.name}"
        tool = CheckedTool(document, built.metadata.name, built.spec, package=package)
        check_tool(tool, files, self._report)
        if not is_resource_name(tool.name):
            message = f"{document.text('metadata', 'name')} is no resource name"
            self._report.error("E_CONFIG_INVALID_NAME", message, document.place("metadata", "name"))
        return tool


def _text(document: Document, *path: str) -> str | None:
    node: object = document.node
    for key in path:
        node = node.get(key) if hasattr(node, "get") else None
    return node.text if isinstance(node, Scalar) else None
