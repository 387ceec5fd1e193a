"""The bundled extensions: Extension documents of `@goondan/base`, each beside its code in `agentproc/base/`.

A manifest is read when a bundle names its extension, and no other is: a bundle without bundled extensions pays nothing.
No code is imported here. The folder of `message-window` is `message_window`.

An extension that bounds what its agent may do leaves that to a feature, which its manifest names in `spec.feature`
(feature_extensions.py). No agent can use it without that feature.

An extension whose work needs a jail brings a Tool: `spec.tools` of its manifest names it, and the Tool has its manifest
(`brought.yaml`) and its code in a folder of `toolhost/base/`. Agents with the extension may call it, and the extension
shows it to the model (`api.tools.bring`). Other agents do not have it, and no document can name it.

Source: docs/design/tools.md section 14.
"""

from __future__ import annotations

import os
from typing import Final

from goondan.kernel.bundle.base import (
    BROUGHT_MANIFEST,
    IN_AGENTS,
    IN_JAILS,
    load_manifests,
    read_manifest,
    tool_folders,
)
from goondan.kernel.bundle.extensions import CheckedExtension
from goondan.kernel.bundle.feature_extensions import has_feature
from goondan.kernel.bundle.files import BundleFiles
from goondan.kernel.bundle.positions import Allowance
from goondan.kernel.bundle.problems import BundleError, Report
from goondan.kernel.bundle.shape import Builder, Environment
from goondan.kernel.bundle.tools import CheckedTool
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.bundle.resources import Extension, ExtensionBody, Tool, ToolBody

EXTENSION_MANIFEST: Final = "extension.yaml"


class BundledExtensionBody(ExtensionBody, frozen=True):
    """The `spec` of a bundled extension's manifest."""

    #: Names of the Tools that it brings.
    tools: list[str] = []
    #: The feature that reads its config; "": its code does.
    feature: str = ""


class BundledExtension(Extension, frozen=True):
    """The manifest of a bundled extension."""

    #: What the manifest says.
    spec: BundledExtensionBody


class BroughtToolBody(ToolBody, frozen=True, kw_only=True):
    """The `spec` of the manifest of a Tool that a bundled extension brings."""

    #: Its calls name a folder, which their jail shows read-only.
    takes_folder: bool = False


class BroughtTool(Tool, frozen=True):
    """The manifest of a Tool that a bundled extension brings."""

    #: What the manifest says.
    spec: BroughtToolBody


class BaseExtensions:
    """Those that come with the kernel, read when they are asked for."""

    def __init__(self) -> None:
        self._known: dict[str, CheckedExtension] = {}

    def names(self) -> list[str]:
        """All of them, in the order of names."""
        return sorted(os.path.basename(folder).replace("_", "-") for folder in _folders())

    def find(self, name: str) -> CheckedExtension | None:
        """The bundled extension of this name. Raises BundleError when its manifest is broken."""
        if name not in self._known:
            folder = self._folder(name)
            if folder is None:
                return None
            self._known[name] = _load(folder)
        return self._known[name]

    @staticmethod
    def tool_names() -> frozenset[str]:
        """The names of all Tools that they bring, used or not. The folder of `code-run` is `code_run`."""
        folders = [folder for folder in tool_folders(IN_JAILS) if os.path.isfile(f"{folder}/{BROUGHT_MANIFEST}")]
        return frozenset(os.path.basename(folder).replace("_", "-") for folder in folders)

    @staticmethod
    def _folder(name: str) -> str | None:
        if not is_resource_name(name) or "_" in name:
            return None
        wanted = name.replace("-", "_")
        return next((folder for folder in _folders() if os.path.basename(folder) == wanted), None)


def _folders() -> list[str]:
    return [folder for folder in tool_folders(IN_AGENTS) if os.path.isfile(os.path.join(folder, EXTENSION_MANIFEST))]


def _load(folder: str) -> CheckedExtension:
    report = Report()
    path = os.path.join(folder, EXTENSION_MANIFEST)
    found: list[CheckedExtension] = []
    for document in read_manifest(path, Allowance(), report):
        document.resource = "Extension"
        built: BundledExtension = Builder(document, Environment(None), report).build(BundledExtension)
        document.resource = f"Extension/{built.metadata.name}"
        entry = BundleFiles(folder).find(built.spec.entry)
        tools = brought_tools(built.spec.tools)
        found.append(
            CheckedExtension(document, built.metadata.name, built, entry=entry.path, bundled=True, tools=tools)
        )
        if built.spec.feature and not has_feature(built.spec.feature):
            found[-1].missing = f"it needs the feature {built.spec.feature}, which this installation does not have"
            found[-1].mend = "Install the kernel anew, with that feature."
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    return found[0]


def brought_tools(names: list[str]) -> list[CheckedTool]:
    """The bundled Tools of these names that an extension brings. The folder of `code-run` is `code_run`.

    Raises BundleError when a manifest is broken, and KeyError when there is none.
    """
    if not names:
        return []
    wanted = {name.replace("-", "_") for name in names}
    folders = [folder for folder in tool_folders(IN_JAILS) if os.path.basename(folder) in wanted]
    loaded = load_manifests(folders, manifest=BROUGHT_MANIFEST, form=BroughtTool)
    for tool in loaded.values():
        tool.brought = True
        tool.takes_folder = isinstance(tool.body, BroughtToolBody) and tool.body.takes_folder
    return [loaded[name] for name in names]
