"""The rules of Tool documents: names, parameters, aliases, examples, the entry file, and the sandbox that they request:
whether anybody can grant it, and how the tool host is told. Pure.

Source: docs/design/bundle.md section 3; docs/design/tools.md sections 2 and 3; docs/design/sandbox.md section 1;
requirements SCHEMA-02 to SCHEMA-12, NAME-04, NAME-05, NAME-09, NAME-10, NAME-12, VALIDATE-01, VALIDATE-03.
"""

from __future__ import annotations

import posixpath
import shlex
import sys
from contextlib import suppress
from typing import Any, Final

from goondan.kernel.bundle.rules import references, variables
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Path, Report, did_you_mean
from goondan.kernel.bundle.rules.shape import Document
from goondan.schemas.bundle import launch, resources
from goondan.schemas.bundle.address import MAX_TOOL_NAME, SEPARATOR, build_tool_name, is_export_name
from goondan.schemas.wire.blobs import MAX_OUTPUT_BYTES
from goondan.schemas.worker.hosts import MAX_RULES, BadHost, parse_rule, write_network
from goondan.schemas.worker.hosts import network as make_network

#: Published names of the bundled package that the rule for export names would refuse (NAME-12).
BUNDLED_EXPORTS: Final = frozenset({"setChatAction", "downloadFile"})


def check_tool(tool: CheckedTool, files: Files, report: Report, *, schemas: bool = True) -> None:
    """Report what is wrong with one Tool by itself, and fill in its entry, its root and its sandbox.

    `schemas` False leaves out what costs most, the look into parameters and examples: for manifests that are known.
    """
    check_name(tool, report)
    _check_entry(tool, files, report)
    _check_exports(tool, report, schemas=schemas)
    check_sandbox(tool.body.sandbox, tool.document, ("spec", "sandbox"), files, report)
    if "tools" in tool.body.sandbox.permissions and not tool.bundled:
        at = tool.body.sandbox.permissions.index("tools")
        message = "the permission 'tools' is for tools that come with the kernel"
        place = tool.document.place("spec", "sandbox", "permissions", at)
        report.error("E_CONFIG_INVALID_VALUE", message, place, "Leave it out.")
    if (
        tool.body.sandbox.javascript is not None
        and tool.body.entry
        and launch.entry_kind(tool.body.entry) != "javascript"
    ):
        message = "the entry is neither JavaScript nor TypeScript"
        place = tool.document.place("spec", "sandbox", "javascript")
        report.error("E_CONFIG_INVALID_VALUE", message, place, "Leave it out.")
    tool.sandbox = resolve_sandbox(tool.body.sandbox, files)


def check_name(tool: CheckedTool, report: Report) -> None:
    """Each full name must fit into what vendors accept."""
    if not tool.name:
        return
    for index, export in enumerate(tool.body.exports):
        length = len(build_tool_name(tool.name, export.name))
        if export.name and length > MAX_TOOL_NAME:
            message = f"the full name of the tool has {length} characters, and {MAX_TOOL_NAME} is the most"
            place = tool.document.place("spec", "exports", index, "name")
            report.error("E_CONFIG_INVALID_NAME", message, place, "Shorten the name of the Tool or of the export.")


def _check_entry(tool: CheckedTool, files: Files, report: Report) -> None:
    named = tool.body.entry
    if not named:
        return
    place = tool.document.place("spec", "entry")
    text = tool.document.text("spec", "entry")
    kind = launch.entry_kind(named)
    if kind is None:
        message = f"the entry {text} is neither a module that a worker loads nor a program"
        report.error("E_CONFIG_ENTRY", message, place, "Name a .py, .js, .mjs, .ts or .mts file, or a program.")
        return
    found = references.find_entry(tool.document, named, files, report)
    if found is None:
        return
    if kind == "executable":
        if not found.executable:
            message = f"the entry {text} is not executable"
            report.error("E_CONFIG_ENTRY", message, place, f"chmod +x {shlex.quote(found.path)}")
            return
        for index, permission in enumerate(tool.body.sandbox.permissions):
            message = f"the entry {text} is a program, which has no use for the permission {permission!r}"
            at = tool.document.place("spec", "sandbox", "permissions", index)
            report.error("E_CONFIG_INVALID_VALUE", message, at, "Leave it out, or write the handlers in Python.")
    tool.entry = found.path
    folder = posixpath.dirname(found.path)
    # A jail sees the tool's own folder, never the bundle's root, which can hold keys: then it sees the file alone.
    tool.root = found.path if folder == files.root else folder


def _check_exports(tool: CheckedTool, report: Report, *, schemas: bool) -> None:
    first: dict[str, int] = {}
    for index, export in enumerate(tool.body.exports):
        at: Path = ("spec", "exports", index)
        if export.name:
            _check_export_name(tool, export.name, (*at, "name"), report)
            if export.name in first:
                text = tool.document.text(*at, "name")
                message = f"the export {text} stands twice, first as exports[{first[export.name]}]"
                report.error("E_CONFIG_DUPLICATE", message, tool.document.place(*at, "name"))
            first.setdefault(export.name, index)
        if schemas:
            _check_parameters(tool, export, at, report)


def _check_export_name(tool: CheckedTool, name: str, at: Path, report: Report) -> None:
    if is_export_name(name) or (tool.bundled and name in BUNDLED_EXPORTS):
        return
    what = "contains __, which separates tool and export" if SEPARATOR in name else "is no export name"
    message = f"{tool.document.text(*at)} {what}"
    hint = "Use 1 to 64 lowercase letters, digits, - and _, without __."
    report.error("E_CONFIG_INVALID_NAME", message, tool.document.place(*at), hint)


def _check_parameters(tool: CheckedTool, export: resources.ToolExport, at: Path, report: Report) -> None:
    document, schema = tool.document, export.parameters
    if schema is None:
        if export.aliases:
            message = "aliases need parameters to stand for"
            report.error("E_CONFIG_INVALID_VALUE", message, document.key(*at, "aliases"))
        return
    where = (*at, "parameters")
    if schema.get("type") != "object":
        message = "the parameters of a tool are a JSON Schema of type 'object'"
        place = document.place(*where, "type") if "type" in schema else document.key(*where)
        report.error("E_CONFIG_SCHEMA", message, place, "Add type: object.")
    sound = check_schema(schema, document, where, report)
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    for alias, canonical in export.aliases.items():
        place = document.place(*at, "aliases", alias)
        if canonical not in known:
            message = f"the alias stands for {document.text(*at, 'aliases', alias)}, which is no parameter"
            report.error("E_CONFIG_INVALID_VALUE", message, place, did_you_mean(canonical, map(str, known)))
        elif alias in known:
            message = "the alias is itself a parameter"
            report.error("E_CONFIG_INVALID_VALUE", message, document.key(*at, "aliases", alias), "Remove the alias.")
    if sound and schema.get("type") == "object":
        _check_examples(export, document, at, report)


def check_schema(schema: dict[str, Any], document: Document, at: Path, report: Report) -> bool:
    """Whether `schema` is valid JSON Schema by itself: its meta-schema, its patterns, its references (VALIDATE-03).

    Every fault is reported. Nothing is fetched: a reference to another document is one. Messages never repeat values.
    """
    import jsonschema_rs  # 12 ms, and a bundle without parameters does not need it

    from goondan.schemas.bundle.arguments import LOOK_AROUND, LOOK_AROUND_HINT, backtracking, limits_of, make_validator

    limits, costly = limits_of(schema)
    if costly is not None and not costly.lost:
        report.error("E_CONFIG_SCHEMA", costly.message, document.place(*at, *costly.path), _SIMPLER)
        return False
    backtracks = backtracking(limits) if limits is not None else []
    for path in backtracks:
        report.error("E_CONFIG_SCHEMA", LOOK_AROUND, document.place(*at, *path), LOOK_AROUND_HINT)
    if backtracks:
        return False
    try:
        make_validator(schema, "the value")
    except jsonschema_rs.ValidationError as error:
        for fault in _faults(schema, error):
            message = f"not valid JSON Schema: {_in_words(fault)}"
            report.error("E_CONFIG_SCHEMA", message, document.place(*at, *fault.instance_path), _hint(schema, fault))
        return False
    except (ValueError, TypeError, RecursionError, OverflowError):
        report.error("E_CONFIG_SCHEMA", "not valid JSON Schema", document.place(*at))
        return False
    if costly is not None:
        report.error("E_CONFIG_SCHEMA", costly.message, document.place(*at, *costly.path))
        return False
    return True


def _faults(schema: dict[str, Any], first: Any) -> list[Any]:
    """Everything that the meta-schema says, and what was met first, which it may not know of (a reference)."""
    import jsonschema_rs

    named = schema.get("$schema")
    meta = {"$ref": named if isinstance(named, str) else META_SCHEMA}
    try:
        found = list(jsonschema_rs.Draft202012Validator(meta, mask="the value", offline=True).iter_errors(schema))
    except (jsonschema_rs.ValidationError, ValueError, TypeError, RecursionError, OverflowError):
        return [first]
    places = [list(fault.instance_path) for fault in found]
    return found if list(first.instance_path) in places else [first, *found]


def _hint(schema: Any, fault: Any) -> str | None:
    """The type that was meant, where one was mistyped."""
    value = schema
    for step in fault.instance_path:
        value = value[step]
    return did_you_mean(value, TYPES) if list(fault.instance_path)[-1:] == ["type"] and isinstance(value, str) else None


def _in_words(error: Any) -> str:
    """The fault of a schema, without the value: it may have come from the environment, or be of any length."""
    kind, where = error.kind.name, list(error.instance_path)
    if kind == "type":
        return "expected " + " or ".join(str(name) for name in error.kind.types)
    if kind == "anyOf" and where[-1:] == ["type"]:
        return "a type is one or several of " + ", ".join(TYPES)
    return _SCHEMA_FAULTS.get(kind, f"the value does not fit ({kind})")


#: What a schema without `$schema` is written in.
META_SCHEMA: Final = "https://json-schema.org/draft/2020-12/schema"
_SIMPLER: Final = "Refer to fewer schemas at once, or merge those that are combined into one."
TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_SCHEMA_FAULTS: Final[dict[str, str]] = {
    "$ref": "a reference or $schema leads nowhere, or out of the document",
    "format": "the text is no regular expression or URI",
    "minimum": "the number is too small",
    "uniqueItems": "an item stands twice",
}


def _check_examples(export: resources.ToolExport, document: Document, at: Path, report: Report) -> None:
    if not export.examples:
        return
    from goondan.schemas.bundle.arguments import compile_arguments

    checker = compile_arguments(export.parameters, export.aliases)
    for index, example in enumerate(export.examples):
        _, issues = checker.apply(example.input)
        if issues:
            message = f"the example does not fit the parameters: {issues[0]}"
            place = document.key(*at, "examples", index, "input")
            report.error("E_CONFIG_INVALID_VALUE", message, place, "Correct the example or the parameters.")


def check_sandbox(
    sandbox: resources.Sandbox | resources.SandboxPart, document: Document, at: Path, files: Files, report: Report
) -> None:
    """Report requests that nobody can grant: bad hosts and names, bad limits, a folder that is not a venv."""
    check = _Check(document, at, report)
    if isinstance(sandbox.network, resources.NetworkAllow):
        check.network(sandbox.network)
    check.env(sandbox)
    check.filesystem(sandbox.filesystem)
    check.limits(sandbox.limits)
    if sandbox.python is not None and sandbox.python.venv is not None:
        check.environment(sandbox.python.venv, files)


class _Check:
    """One sandbox of a document, part by part."""

    def __init__(self, document: Document, at: Path, report: Report) -> None:
        self._document = document
        self._at = at
        self._report = report

    def _wrong(self, path: Path, message: str, hint: str) -> None:
        self._report.error("E_CONFIG_INVALID_VALUE", message, self._document.place(*self._at, *path), hint)

    def _text(self, *path: str | int) -> str:
        return self._document.text(*self._at, *path)

    def network(self, network: resources.NetworkAllow) -> None:
        for index, host in enumerate(network.allow):
            try:
                parse_rule(to_ascii(host))
            except BadHost as error:
                path = ("network", "allow", index)
                hint = "Write for example api.example.com:443 or *.example.org:443."
                if host:
                    self._wrong(path, f"{self._text(*path)} is no host:port: {error}", hint)
        if len(network.allow) > MAX_RULES:
            hint = "Name fewer, or use *.example.org:443."
            self._wrong(("network", "allow"), f"there are more than {MAX_RULES} hosts", hint)

    def env(self, sandbox: resources.Sandbox | resources.SandboxPart) -> None:
        for index, name in enumerate(sandbox.env or []):
            if not variables.VARIABLE_NAME.match(name):
                message = f"{self._text('env', index)} is no name of an environment variable"
                self._wrong(("env", index), message, "Write for example API_TOKEN.")
        if sandbox.isolation == "shared" and (sandbox.env or sandbox.permissions):
            what = "env" if sandbox.env else "permissions"
            self._wrong((what,), f"a shared jail has no {what}", "Use isolation: instance.")

    def filesystem(self, filesystem: launch.Filesystem | resources.FilesystemPart | None) -> None:
        for access in ("read", "write"):
            for index, path in enumerate(getattr(filesystem, access, None) or []):
                if not path or any(c < " " for c in path):
                    message = "the path is empty or holds control characters"
                    self._wrong(("filesystem", access, index), message, "Write a path.")

    def limits(self, limits: launch.Limits | resources.LimitsPart | None) -> None:
        names = zip(launch.Limits.__struct_fields__, launch.Limits.__struct_encode_fields__, strict=True)
        for attribute, key in names:
            value = getattr(limits, attribute, None)
            if value is not None and value < 1:
                self._wrong(("limits", key), "a limit is at least 1", "Write a positive number.")
            elif key == "outputMb" and value is not None and value > MAX_OUTPUT_BYTES >> 20:
                hint = "Write less, and let the tool write to a file in the workdir."
                self._wrong(("limits", key), f"an output has at most {MAX_OUTPUT_BYTES >> 20} MiB", hint)

    def environment(self, venv: str, files: Files) -> None:
        place = files.resolve(venv)
        if not files.is_environment(place):
            message = f"{self._text('python', 'venv')} is no virtual environment"
            hint = f"Make it: {sys.executable} -m venv {shlex.quote(place)}, and install what the tool needs."
            self._wrong(("python", "venv"), message, hint)


def to_ascii(host: str) -> str:
    """A rule with its name as the network knows it (`xn--…`). Raises BadHost for what has no such form."""
    if host.isascii():
        return host
    import idna  # 4 ms, and hardly any bundle needs it

    name, colon, port = host.rpartition(":")
    pattern = name.startswith("*.")
    try:
        encoded = idna.encode(name.removeprefix("*."), uts46=True, transitional=False).decode()
    except idna.IDNAError:
        raise BadHost("its name has no form in ASCII") from None
    return f"{'*.' if pattern else ''}{encoded}{colon}{port}"


def resolve_network(network: Any) -> Any:
    """A manifest's network as launch specifications write it; what is no rule has been reported and is left out."""
    if not isinstance(network, resources.NetworkAllow):
        return network
    rules = []
    for host in network.allow:
        with suppress(BadHost):
            rules.append(parse_rule(to_ascii(host)))
    return write_network(make_network(rules))


def resolve_sandbox(asked: resources.Sandbox, files: Files) -> launch.SandboxSpec:
    """What a document asks for as the tool host gets it."""
    venv = asked.python.venv
    return launch.SandboxSpec(
        isolation=asked.isolation,
        network=resolve_network(asked.network),
        filesystem=launch.Filesystem(
            read=[files.resolve(path) for path in asked.filesystem.read],
            write=[files.resolve(path) for path in asked.filesystem.write],
        ),
        env=asked.env,
        permissions=asked.permissions,
        python=launch.PythonSpec(venv=None if venv is None else files.resolve(venv)),
        limits=asked.limits,
        min_tier=asked.min_tier,
    )


def check_output(document: Document, output: launch.OutputSpec | None, report: Report) -> None:
    """Report what is wrong with `spec.output` of an Agent document."""
    if output is None:
        return
    at = ("spec", "output", "schema")
    if output.schema.get("type") != "object":
        message = "the schema of an answer has `type: object` at its root"
        report.error("E_CONFIG_SCHEMA", message, document.place(*at), "Put the value into a property of an object.")
        return
    check_schema(output.schema, document, at, report)
