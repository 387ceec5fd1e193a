"""The checks of one Extension by itself, and the specification that an agent needs to run it.

An extension is trusted code, but a kernel process never imports it: whether its module has a `register` is read from
the syntax tree. A module that gives itself that name by other means than a definition, an assignment or an import at
its top level is not recognised.

Source: docs/design/bundle.md sections 3 and 5; requirements EXT-01, EXT-02, EXT-06, EXT-10, DYNAMIC-09.
"""

from __future__ import annotations

import ast
import posixpath
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.extension_members import unknown_members
from goondan.kernel.bundle.extension_modules import modules_of
from goondan.kernel.bundle.lookup import Files, Unreadable
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.tools import CheckedTool
from goondan.kernel.bundle.variables import names_any
from goondan.schemas.bundle import resources
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.bundle.resources import API_V1, BASE_PACKAGE

#: Entries of extensions that come with the kernel: `@goondan/base/NAME`.
_BASE_ENTRY: Final = BASE_PACKAGE + "/"
#: A v0.9 Extension with this annotation has its tools in the catalog by themselves (DYNAMIC-09).
EXPOSE_TOOLS: Final = "goondan.ai/expose-tools"
#: Members of `api` that are told of one extension; the rest is seldom another mistake.
MAX_UNKNOWN: Final = 10
_NO_REGISTER: Final = "it has no function register"


class CheckedExtension(Struct):
    """An Extension whose document was checked."""

    #: Its document.
    document: Document
    #: Its name.
    name: str
    #: The document as a struct.
    resource: resources.Extension | resources.ExtensionV09
    #: Absolute path of its module. '': it was not found.
    entry: str = ""
    #: Absolute path of its folder. '': it was not found.
    root: str = ""
    #: The modules that it may import from the bundle.
    modules: dict[str, str] = {}
    #: Where these are, if not in `root`.
    beside: list[str] = []
    #: Why an agent cannot use it, although nothing is wrong with it. None: it can.
    missing: str | None = None
    #: Names of the Extensions that it depends on.
    depends_on: list[str] = []
    #: Its code comes with the kernel.
    bundled: bool = False
    #: The Extension whose code it runs.
    code_of: resources.Extension | None = None
    #: The bundled Tools that it brings to its agents.
    tools: list[CheckedTool] = []

    @property
    def schema(self) -> dict[str, Any] | None:
        body = (self.code_of or self.resource).spec
        return body.config_schema if isinstance(body, resources.ExtensionBody) else None

    def spec(self, config: dict[str, Any] | None, *, named: bool = False) -> ExtensionSpec:
        """For one agent; its own `config` takes the place of the document's. `named`: the agent's document puts
        variables of the environment into it.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self.resource)
        if config is not None:
            fields["spec"]["config"] = config
        metadata = self.resource.metadata
        automatic = self.resource.api_version == API_V1 or metadata.annotations.get(EXPOSE_TOOLS) == "auto"
        return ExtensionSpec(
            name=self.name,
            entry=self.entry,
            resource=fields,
            config=fields["spec"].get("config") or {},
            exposes_tools=automatic,
            modules=None if self.bundled else self.modules,
            config_schema=self.schema,
            bundled=self.bundled,
            confidential=named if config is not None else names_any(self.document.node, "spec", "config"),
            tools=[tool.name for tool in self.tools],
        )


class Bundled(Protocol):
    """The extensions that come with the kernel."""

    def names(self) -> list[str]:
        """All of them."""

    def find(self, name: str) -> CheckedExtension | None:
        """The one of this name."""

    def tool_names(self) -> frozenset[str]:
        """The names of all Tools that they bring."""


class NoBundled:
    """There are none."""

    def names(self) -> list[str]:
        """None."""
        return []

    def find(self, name: str) -> CheckedExtension | None:
        """None."""
        return None

    def tool_names(self) -> frozenset[str]:
        """None."""
        return frozenset()


def check_extension(extension: CheckedExtension, files: Files, report: Report, bundled: Bundled) -> None:
    """Report what is wrong with the entry, and fill in what was found."""
    document, entry = extension.document, extension.resource.spec.entry
    if not entry:
        return
    at: Path = ("spec", "entry")
    place, text = document.place(*at), document.text(*at)
    if entry.startswith(_BASE_ENTRY):
        name = entry.removeprefix(_BASE_ENTRY)
        if not is_resource_name(name):
            message = f"{text} names no bundled extension"
            report.error("E_CONFIG_ENTRY", message, place, "Write @goondan/base/NAME.")
        found_there = bundled.find(name)
        if found_there is None:
            extension.missing = f"there is no bundled extension {text}"
        else:
            assert isinstance(found_there.resource, resources.Extension)
            extension.entry, extension.code_of, extension.bundled = found_there.entry, found_there.resource, True
            extension.tools = found_there.tools
        return
    found = files.find(entry)
    if found.fault is not None:
        message = f"the entry {text} cannot be used: {found.fault}"
        hint = "Correct the path; it is relative to the bundle's root and may not leave it."
        report.error("E_CONFIG_ENTRY", message, place, hint)
        return
    extension.entry = found.path
    folder = posixpath.dirname(found.path)
    extension.root = found.path if folder == files.root else folder
    if not entry.endswith(".py"):
        extension.missing = f"the entry {text} cannot run yet"
        return
    module = _read_module(found.path, files)
    fault = module if isinstance(module, str) else None if "register" in _names(module.body) else _NO_REGISTER
    if isinstance(module, str) or fault is not None:
        message = f"the entry {text} cannot be used: {fault}"
        report.error("E_CONFIG_ENTRY", message, place, "Give the module a function register(api).")
        return
    for unknown in unknown_members(module)[:MAX_UNKNOWN]:
        message = f"{unknown.name[:100]} does not exist ({text}, line {unknown.line})"
        report.warn("W_CONFIG_API", message, place, unknown.suggestion)
    try:
        extension.modules, extension.beside = modules_of(found.path, files)
    except Unreadable as error:
        message = f"the entry {text} cannot be used: {error}"
        report.error("E_CONFIG_ENTRY", message, place, "Give the extension a folder of its own.")


def _read_module(path: str, files: Files) -> ast.Module | str:
    """The syntax tree of a module, or why it has none."""
    try:
        return ast.parse(files.read_text(path))
    except Unreadable as error:
        return str(error)
    except SyntaxError as error:
        return f"{error.msg} (line {error.lineno})"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read as Python: {str(error)[:100] or type(error).__name__}"


def _names(body: list[ast.stmt]) -> set[str]:
    """What the statements define; of a condition or `try`, every branch."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in statement.names)
            if any(alias.name == "*" for alias in statement.names):
                names.add("register")  # it may bring one
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                names |= _names(getattr(statement, inner, []))
            for handler in getattr(statement, "handlers", []):
                names |= _names(handler.body)
    return names
