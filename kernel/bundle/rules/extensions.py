"""The checks of one Extension by itself, the specification that an agent needs to run it, the order in which
Extensions depend on each other, and whether a config fits the schema that its extension declares. Pure.

An extension is trusted code, but a kernel process never imports it: whether its module has a `register` is read from
the syntax tree. A module that gives itself that name by other means than a definition, an assignment or an import at
its top level is not recognised. The tree also shows which members of `api` do not exist: attributes of the first
parameter of `register`, in this function and in the functions inside it, until the name gets another meaning.

An agent process may import only an extension's own modules from the bundle. When an extension has a folder of its own,
the whole folder belongs to it. But its entry may lie in the bundle's root, which tools may write to. Then only the
modules count that it imports by name, and those that these modules import.

Extensions are loaded in the order of the agent, whatever they depend on. So circles and a wrong order are warnings.

Source: docs/design/bundle.md sections 3 and 5; docs/design/sandbox.md section 2; docs/extensions.md; requirements
EXT-01, EXT-02, EXT-06, EXT-09, EXT-10, EXT-12, LOAD-06, DYNAMIC-09.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.rules import references, shape, variables
from goondan.kernel.bundle.rules.checked import Bundled, CheckedExtension
from goondan.kernel.bundle.rules.kinds import api_members, feature_extensions, server_rules_of
from goondan.kernel.bundle.rules.lookup import Files, Unreadable
from goondan.kernel.bundle.rules.problems import Path, Report, did_you_mean
from goondan.schemas.bundle import address, extensions, launch, resources
from goondan.schemas.wire.errors import GoondanError

#: Entries of extensions that come with the kernel: `@goondan/base/NAME`.
_BASE_ENTRY: Final = resources.BASE_PACKAGE + "/"
#: A v0.9 Extension with this annotation has its tools in the catalog by themselves (DYNAMIC-09).
EXPOSE_TOOLS: Final = "goondan.ai/expose-tools"
#: Members of `api` that are told of one extension; the rest is seldom another mistake.
MAX_UNKNOWN: Final = 10
_NO_REGISTER: Final = "it has no function register"


def extension_spec(
    extension: CheckedExtension, config: dict[str, Any] | None, *, named: bool = False
) -> launch.ExtensionSpec:
    """An extension for one agent; its own `config` takes the place of the document's. `named`: the agent's document
    puts variables of the environment into it.
    """
    fields: dict[str, Any] = msgspec.to_builtins(extension.resource)
    if config is not None:
        fields["spec"]["config"] = config
    metadata = extension.resource.metadata
    automatic = extension.resource.api_version == resources.API_V1 or metadata.annotations.get(EXPOSE_TOOLS) == "auto"
    return launch.ExtensionSpec(
        name=extension.name,
        entry=extension.entry,
        resource=fields,
        config=fields["spec"].get("config") or {},
        exposes_tools=automatic,
        modules=None if extension.bundled else extension.modules,
        config_schema=extension.schema,
        bundled=extension.bundled,
        confidential=named if config is not None else variables.names_any(extension.document.node, "spec", "config"),
        tools=[tool.name for tool in extension.tools],
    )


def check_extension(extension: CheckedExtension, files: Files, report: Report, bundled: Bundled) -> None:
    """Report what is wrong with the entry, and fill in what was found."""
    document, entry = extension.document, extension.resource.spec.entry
    if not entry:
        return
    at: Path = ("spec", "entry")
    place, text = document.place(*at), document.text(*at)
    if entry.startswith(_BASE_ENTRY):
        name = entry.removeprefix(_BASE_ENTRY)
        if not address.is_resource_name(name):
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
    found = references.find_entry(document, entry, files, report)
    if found is None:
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


_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(Struct, frozen=True):
    """A use of a member that does not exist."""

    #: The member as it is written: `api.events.listen`.
    name: str
    #: The line, from 1.
    line: int
    #: A member with a similar name.
    suggestion: str | None = None


def unknown_members(tree: ast.Module) -> list[Unknown]:
    """The unknown members in the order of the text, each name once."""
    found: dict[str, Unknown] = {}
    for node in tree.body:
        if isinstance(node, _Function) and node.name == "register":
            parameters = [*node.args.posonlyargs, *node.args.args]
            if parameters:
                for unknown in sorted(_in_function(node, parameters[0].arg), key=lambda unknown: unknown.line):
                    found.setdefault(unknown.name, unknown)
    return sorted(found.values(), key=lambda unknown: unknown.line)


def _in_function(function: _Function, api: str) -> Iterator[Unknown]:
    if api in _assigned(function.body):
        return  # it may be anything
    for node in _walk(function.body, api):
        if isinstance(node, ast.Attribute):
            unknown = _look(node, api)
            if unknown is not None:
                yield unknown


def _walk(body: list[ast.stmt], api: str) -> Iterator[ast.AST]:
    """Every node where the name still means the parameter."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.Lambda):
            inner = node.body if isinstance(node.body, list) else []
            if api in _parameters(node.args) or api in _assigned(inner):
                continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _parameters(given: ast.arguments) -> set[str]:
    named = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {argument.arg for argument in named if argument is not None}


def _assigned(body: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _look(node: ast.Attribute, api: str) -> Unknown | None:
    if isinstance(node.value, ast.Name) and node.value.id == api:
        if node.attr not in api_members() and not node.attr.startswith("__"):
            return Unknown(f"{api}.{node.attr}", node.lineno, did_you_mean(_snake(node.attr), api_members()))
        return None
    inner = node.value
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == api:
        members = api_members().get(inner.attr)
        if members is not None and node.attr not in members and not node.attr.startswith("__"):
            return Unknown(f"{api}.{inner.attr}.{node.attr}", node.lineno, did_you_mean(_snake(node.attr), members))
    return None


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


#: The most modules of one extension. A folder with more contains other things as well.
MAX_MODULES: Final = 2000
#: The suffixes of modules: sources, and libraries of machine code.
_SUFFIXES: Final = (".py", ".so")


def modules_of(entry: str, files: Files) -> tuple[dict[str, str], list[str]]:
    """Path from the entry's folder -> SHA-256 in hexadecimal digits, and the files and folders beside the entry that
    these are in: none but for an entry in the bundle's root.

    Raises Unreadable when there are more than MAX_MODULES.
    """
    folder = posixpath.dirname(entry)
    if folder != files.root:
        return _digests(folder, files.list_files(folder, _SUFFIXES, MAX_MODULES), files), []
    wanted, beside = [posixpath.basename(entry)], []
    todo = [entry]
    seen: set[str] = set()
    while todo:
        for name in _imported(todo.pop(), files) - seen:
            seen.add(name)
            found = [f"{name}.py"] if files.is_file(f"{folder}/{name}.py") else []
            if not found:
                inner = files.list_files(f"{folder}/{name}", _SUFFIXES, MAX_MODULES)
                found = [f"{name}/{path}" for path in inner]
            if found:
                beside.append(f"{folder}/{name}" if "/" in found[0] else f"{folder}/{found[0]}")
                wanted += found
                todo += [f"{folder}/{path}" for path in found if path.endswith(".py")]
            if len(wanted) > MAX_MODULES:
                raise Unreadable(f"it imports more than {MAX_MODULES} modules of the bundle")
    return _digests(folder, wanted, files), sorted(set(beside) - {entry})


def _digests(folder: str, paths: list[str], files: Files) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[path] = files.digest(f"{folder}/{path}")
        except Unreadable:
            continue  # it cannot be imported, and the import will report that
    return found


def _imported(path: str, files: Files) -> set[str]:
    """The top-level names that a module imports anywhere in it."""
    try:
        tree = ast.parse(files.read_text(path))
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def circles(dependencies: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Circles that have no name in common, as the names along them, until what is left has none. Each begins with the
    name that comes first in `dependencies`.
    """
    order = {name: place for place, name in enumerate(dependencies)}
    left = {name: [wanted for wanted in needs if wanted in order] for name, needs in dependencies.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][:0:-1]  # there, each name is wanted by the next one
        else:
            return
        first = min(range(len(circle)), key=lambda place: order[circle[place]])
        yield [*circle[first:], *circle[:first]]
        left = {name: [wanted for wanted in needs if wanted not in circle] for name, needs in left.items()}


def misplaced(loaded: Sequence[str], dependencies: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, bool]]:
    """The dependencies that are not loaded before their extension, for an agent with this order: (extension,
    dependency, whether the dependency is loaded at all).
    """
    there: set[str] = set()
    for name in loaded:
        for wanted in dependencies.get(name, ()):
            if wanted not in there and wanted != name:
                yield name, wanted, wanted in loaded
        there.add(name)


# --- configs --------------------------------------------------------------------------------------------------------


def check_given(extension: CheckedExtension, report: Report) -> None:
    """Report what does not fit in the config that the Extension's own document gives, and a bad schema."""
    config = extension.resource.spec.config
    issues = _issues(extension, config or {}, report)
    if config is not None:
        _report(extension, issues, extension.document, ("spec", "config"), report)


def check_used(
    extension: CheckedExtension, own: dict[str, Any] | None, document: shape.Document, at: Path, report: Report
) -> None:
    """Report what does not fit in the config that one agent gives, or what is missing when nobody gives one.

    `at` is where the extension stands in the agent's `document`. A config of the Extension's own document has been
    looked at already.
    """
    if own is not None:
        _report(extension, _issues(extension, own, report), document, (*at, "config"), report)
    elif extension.resource.spec.config is None:
        _report(extension, _issues(extension, {}, report), document, at, report)


def fits(extension: CheckedExtension, config: dict[str, Any]) -> bool:
    """Whether nothing is reported of this config."""
    return not _issues(extension, config, Report())


def _issues(extension: CheckedExtension, config: dict[str, Any], report: Report) -> list[str]:
    try:
        issues = extensions.check_config(extension.schema, config)
        for known in feature_extensions() if not issues else ():
            if launch.is_bundled(known.extension, extension.entry, extension.bundled):
                return known.faults(config)
        if not issues and (rules := server_rules_of(extension.entry, extension.bundled)) is not None:
            return rules.faults(extension.name, config)
        return issues
    except GoondanError as error:
        place = extension.document.place("spec", "configSchema")
        message = f"the configSchema cannot be used: {error.info.message}"
        report.error("E_CONFIG_SCHEMA", message, place, error.info.suggestion)
        return []


def _report(extension: CheckedExtension, issues: list[str], document: shape.Document, at: Path, report: Report) -> None:
    for issue in issues:
        where, _, what = issue.partition(": ")
        path, known = _followed(where, extension.schema)
        hint = None
        if what == UNKNOWN and known and path:  # a name without a character is no step of a path
            hint = did_you_mean(str(path[-1]), known) or "It has: " + ", ".join(known) + "."
        while path and not document.has(*at, *path):  # what is missing has no place
            path = path[:-1]
        place = document.key(*at, *path) if path and isinstance(path[-1], str) else document.place(*at, *path)
        report.error(_CODES.get(what, "E_CONFIG_INVALID_VALUE"), _printable(extension, issue), place, hint)


def _followed(where: str, schema: dict[str, Any] | None) -> tuple[Path, list[str]]:
    """The path of an issue (`config.limits.mony`, `config.servers[0].url`), and what may stand at its last step."""
    path: list[str | int] = [int(n) if n else name for name, n in _STEP.findall(where.removeprefix("config"))]
    for step in path[:-1]:
        at = schema or {}
        below = at.get("items") if isinstance(step, int) else (at.get("properties") or {}).get(step)
        schema = below if isinstance(below, dict) else {}
    properties = (schema or {}).get("properties")
    return tuple(path), list(properties) if isinstance(properties, dict) else []


def _printable(extension: CheckedExtension, issue: str) -> str:
    message = f"the config of {extension.document.resource} does not fit: {issue}"
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in message)


#: One step of the path of an issue: a name or an index.
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d{1,9})\]")
#: What is said of a field that nobody has declared.
UNKNOWN: Final = "unexpected property"
#: What is wrong with one place, as goondan.schemas.bundle.arguments words it, and its code. All else is a wrong value.
_CODES: Final = {
    UNKNOWN: "E_CONFIG_UNKNOWN_FIELD",
    "required property is missing": "E_CONFIG_MISSING_FIELD",
}
