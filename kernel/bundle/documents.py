"""Documents from files: those of a bundle, of the packages beside it, and of the bundled package `@goondan/base`.

One file can be a bundle. If the bundle is a directory, all YAML files in it belong to it. A file that is not named
goondan.yaml and has no document of ours (a compose file, a CI workflow) is skipped with a warning.

A package lies below `$GOONDAN_STATE_ROOT/packages`: a folder with a Package document and Tools. It is somebody else's:
nothing of it is replaced from our environment, and its tools get the defaults until the operator accepts what they
request (kernel/grants). It lies outside of the bundle's tree, where no jail can write.

The bundled package has its manifests as data files, and no code of it is imported here: its folders are found through
the import system's finders only. Most of its tools run in the tool host's jails; those beside the agent's code run in
the process of the agent that calls them. Its manifests follow the same rules as a user's, except for two published
export names and `${NAME}`, which stays text in them. An entry is relative to the manifest's own folder. The nodes of
the manifests of tools were prepared before, because reading their YAML would take 15 ms of every start: they are found
by the digest of the manifest's bytes, and a manifest that is not known is read as YAML. `scripts/prepare_manifests.py`
writes them, and `make check` fails when they are out of date.

The manifest of a bundled extension is read when a bundle names it, and no other is. The folder of `message-window` is
`message_window`. What belongs to a feature lies in the folder of the feature: its extensions, and its tools that run
in an agent's process, in `base/`; its tools that run in jails in `jail/`. Without the feature there are none of them.

An extension whose work needs a jail brings a Tool: `spec.tools` of its manifest names it, and the Tool has its manifest
(`brought.yaml`) and its code in a folder of its own. Agents with the extension may call it, and the extension shows it
to the model (`api.tools.bring`). Other agents do not have it, and no document can name it.

Source: docs/design/bundle.md sections 1 and 4; docs/design/tools.md section 14; docs/design/sandbox.md section 1;
requirements BASE-01, BASE-02, NAME-12.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Struct

from goondan.features import folders
from goondan.kernel.bundle.files import NOTHING, BundleFiles, Overlay, list_documents, read_file, read_instead
from goondan.kernel.bundle.rules.checked import CheckedExtension, CheckedTool, Package
from goondan.kernel.bundle.rules.kinds import kind_names
from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES, Unreadable
from goondan.kernel.bundle.rules.positions import Allowance, Mapping, Node, Scalar, compose_file
from goondan.kernel.bundle.rules.problems import BundleError, Position, Report
from goondan.kernel.bundle.rules.shape import Builder, Document, Environment
from goondan.kernel.bundle.rules.tools import check_tool
from goondan.kernel.paths import BUNDLE_FILE
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.bundle.resources import API_V1, API_V1ALPHA1, Extension, ExtensionBody, Tool, ToolBody

#: The beginnings of the apiVersion of documents for us.
_GROUPS: Final = (API_V1.partition("/")[0] + "/", API_V1ALPHA1.partition("/")[0] + "/")


class Source(Struct, frozen=True):
    """One file of a bundle: its absolute path and its content."""

    #: Its absolute path.
    path: str
    #: Its content.
    data: bytes


class Loaded(Struct):
    """The documents of a bundle."""

    #: The folder of the bundle.
    root: str
    #: The files that were read.
    sources: list[Source]
    #: Their documents.
    documents: list[Document]
    #: False: a part could not be read, and may contain anything.
    complete: bool


def load_documents(path: str, report: Report, instead: Overlay = NOTHING) -> Loaded:
    """Read the bundle at `path` (absolute, links resolved). All problems go into `report`. `instead` has contents that
    are used in place of those of files.
    """
    folder = os.path.isdir(path)
    loaded = Loaded(path if folder else os.path.dirname(path), [], [], True)
    allowance = Allowance()
    try:
        files = list(list_documents(path)) if folder else [path]
    except Unreadable as error:
        report.error("E_CONFIG_NOT_FOUND", str(error), Position(path))
        loaded.complete = False
        return loaded
    for file in files:
        _load_file(file, not folder or os.path.basename(file) == BUNDLE_FILE, loaded, allowance, report, instead)
    if not loaded.documents and not report.errors:
        message = "there is no document in it" if not folder else "there is no YAML file with a Goondan document in it"
        report.error("E_CONFIG_NOT_FOUND", message, Position(path))
    return loaded


def _load_file(file: str, strict: bool, loaded: Loaded, allowance: Allowance, report: Report, instead: Overlay) -> None:
    """Read one file. `strict`: every document in it must be ours."""
    try:
        data = read_instead(file, MAX_FILE_BYTES, instead)
    except Unreadable as error:
        if strict:
            report.error("E_CONFIG_NOT_FOUND", f"the file cannot be read: {error}", Position(file))
            loaded.complete = False
        else:
            report.warn("W_CONFIG_SKIPPED", f"skipped: {error}", Position(file))
        return
    strict = strict or any(group.encode() in data for group in _GROUPS)
    # A foreign file may have any size, because its content does not count for the bundle.
    allowed = allowance if strict else Allowance()
    composed = compose_file(data, allowed)
    if not strict and (composed.faults or not any(_is_ours(node) for node in composed.documents)):
        report.warn("W_CONFIG_SKIPPED", "skipped: there is no Goondan document in it", Position(file))
        return
    loaded.sources.append(Source(file, data))
    loaded.complete = loaded.complete and composed.complete
    composed.report_faults(file, report)
    for index, node in enumerate(composed.documents):
        if isinstance(node, Mapping):
            loaded.documents.append(Document(file, node, index, from_file=True))
        else:
            message = "a document is a mapping with apiVersion, kind, metadata and spec"
            report.error("E_CONFIG_INVALID_VALUE", message, Position(file, node.line, node.column))


def _is_ours(node: Node) -> bool:
    if not isinstance(node, Mapping):
        return False
    version, kind = node.get("apiVersion"), node.get("kind")
    if isinstance(version, Scalar):
        return version.text.startswith(_GROUPS)
    return isinstance(kind, Scalar) and kind.text in kind_names()


MANIFEST: Final = "tool.yaml"
#: The manifest of a bundled tool that a bundled extension brings to its agents. No other agent has
#: such a tool, and no document names it.
BROUGHT_MANIFEST: Final = "brought.yaml"
#: The packages whose `base` folders hold bundled tools, by where their handlers run, and the folders of features that
#: hold more of them.
IN_JAILS: Final = "goondan.toolhost"
IN_AGENTS: Final = "goondan.agentproc"
_OF_FEATURES: Final = {IN_JAILS: "jail", IN_AGENTS: "base"}


def tool_folders(package: str) -> list[str]:
    """The folders in which bundled tools and extensions can lie, with those of features. None of the package's own when
    it is not installed.
    """
    base = in_package(package, "base")
    places = [*([] if base is None else [base]), *folders(_OF_FEATURES[package])]
    return [os.path.join(place, name) for place in places for name in sorted(os.listdir(place))]


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
            files = BundleFiles(folder)
            tool = _built(document, report, form)
            tool.bundled = True
            check_tool(tool, files, report, schemas=schemas)
            tool.root = files.root
            tools[tool.name] = tool
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    return tools


def _built(document: Document, report: Report, form: type[Tool] = Tool) -> CheckedTool:
    """The Tool of a document in which no variable of the environment is replaced."""
    document.resource = "Tool"
    built: Tool = Builder(document, Environment(None), report).build(form)
    document.resource = f"Tool/{built.metadata.name}"
    return CheckedTool(document, built.metadata.name, built.spec)


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
    composed = compose_file(data, allowance)
    composed.report_faults(path, report)
    return [Document(path, node) for node in composed.documents if isinstance(node, Mapping)]


#: The file, beside this module.
PREPARED_FILE: Final = "prepared.json"
#: The largest size of this file (bytes). It has some 100 KB; a larger file is not ours.
MAX_PREPARED_BYTES: Final = 4 << 20


class Prepared(Struct, frozen=True):
    """One manifest: `manifest` is its file from the root of the packages, for whoever looks; `node` its document."""

    #: Its file, from the root of the packages.
    manifest: str
    #: Its document.
    node: Mapping


def manifest_digest(data: bytes) -> str:
    """The name of a manifest's bytes: their SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def prepared_nodes(data: bytes) -> Mapping | None:
    """The only document of a manifest with these bytes. None when it is not known and must be read."""
    found = _prepared().get(manifest_digest(data))
    return None if found is None else found.node


@lru_cache(maxsize=1)
def _prepared() -> dict[str, Prepared]:
    try:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), PREPARED_FILE)
        return msgspec.json.decode(read_file(path, MAX_PREPARED_BYTES), type=dict[str, Prepared])
    except (Unreadable, msgspec.DecodeError):
        return {}  # every manifest is read, then


EXTENSION_MANIFEST: Final = "extension.yaml"


class BundledExtensionBody(ExtensionBody, frozen=True):
    """The `spec` of a bundled extension's manifest."""

    #: Names of the Tools that it brings.
    tools: list[str] = []


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
            self._known[name] = _load_extension(folder)
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


def _load_extension(folder: str) -> CheckedExtension:
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
        tool = _built(document, self._report)
        tool.package = package
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
