"""References of a document to others, in any spelling, and the checks of the documents that are only references:
Connectors and Connections. Pure.

Connectors do not run yet. One is left out with a warning. A Connection is an error, because no messages would come.

Source: docs/design/bundle.md section 4; requirement EXT-12.
"""

from __future__ import annotations

from msgspec import Struct

from goondan.kernel.bundle.rules import lookup, shape, variables
from goondan.kernel.bundle.rules.problems import Path, Report
from goondan.schemas.bundle import resources

Use = resources.ToolUse | resources.ExtensionUse | resources.AgentUse


class Ref(Struct, frozen=True):
    """A reference, normalised."""

    #: Kind of the resource.
    kind: str
    #: Name of the resource.
    name: str
    #: The package that it is in.
    package: str | None = None
    #: The path of what was written, below the item.
    at: Path = ()


class BadRef(Struct, frozen=True):
    """Why something is no reference."""

    #: What is wrong. `{}` in it stands for what is written at `at`. "": it was reported already.
    message: str
    #: The path of what was written, below the item.
    at: Path = ()
    #: What to do about it.
    suggestion: str | None = None


def read_ref(value: resources.RefLike, kind: str, at: Path = ()) -> Ref | BadRef:
    """A reference to a resource of `kind`, written at `at`."""
    if isinstance(value, resources.ObjectRef):
        if not value.kind or not value.name:
            return BadRef("", at)
        if value.kind != kind:
            return BadRef(f"a {kind} is wanted here, not {{}}", (*at, "kind"), f"Write kind: {kind}.")
        return Ref(value.kind, value.name, value.package, (*at, "name"))
    found, slash, name = value.partition("/")
    if not value:
        return BadRef("", at)
    if not slash or not found or not name or "/" in name:
        return BadRef("{} is no reference of the form Kind/name", at, f"Write {kind}/NAME.")
    if found != kind:
        return BadRef(f"a {kind} is wanted here, not {{}}", at, f"Write {kind}/NAME.")
    return Ref(found, name, None, at)


def read_entry_agent(value: resources.RefLike) -> Ref | BadRef:
    """`spec.entryAgent` of a Swarm: a reference to an Agent, or its name alone, which can mean nothing else."""
    bare = isinstance(value, str) and value and "/" not in value
    return read_ref(f"Agent/{value}" if bare else value, "Agent", ("entryAgent",))


def read_use(item: str | Use, kind: str, at: Path = ()) -> Ref | BadRef:
    """A reference in a list item: the text itself, by `ref`, or by `kind` and `name`."""
    if isinstance(item, str):
        return read_ref(item, kind, at)
    if item.ref is not None:
        if item.kind is not None or item.name is not None or item.package is not None:
            return BadRef("both `ref` and `kind`, `name` or `package` are given", at, "Write one of the two forms.")
        return read_ref(item.ref, kind, (*at, "ref"))
    if item.kind is None or item.name is None:
        return BadRef("neither `ref` nor `kind` and `name` are given", at, f"Write ref: {kind}/NAME.")
    return read_ref(resources.ObjectRef(item.kind, item.name, item.package), kind, at)


def check_connector(
    document: shape.Document, body: resources.ConnectorBody, files: lookup.Files, report: Report
) -> str | None:
    """Report the problems of a Connector. Returns the file of its entry. None when there is none."""
    entry = find_entry(document, body.entry, files, report) if body.entry else None
    names = [event.name for event in body.events]
    for index, name in enumerate(names):
        if name and name in names[:index]:
            at: Path = ("spec", "events", index, "name")
            message = f"the event {document.text(*at)} stands twice"
            report.error("E_CONFIG_DUPLICATE", message, document.place(*at))
    message = f"{document.resource} is not started: connectors are not implemented yet"
    report.warn("W_CONFIG_NOT_STARTED", message, document.place("kind"))
    return None if entry is None else entry.path


def check_connection(document: shape.Document, body: resources.ConnectionBody, report: Report) -> None:
    """Report the problems of a Connection, except those of its references."""
    for group in ("config", "secrets"):
        for key, value in getattr(body, group).items():
            variables.check_value(document, value, ("spec", group, key), report)
    for index, rule in enumerate(body.ingress.rules):
        if rule.route.instance_key is not None and rule.route.instance_key_property is not None:
            place = document.key("spec", "ingress", "rules", index, "route", "instanceKeyProperty")
            report.error("E_CONFIG_INVALID_VALUE", "both instanceKey and instanceKeyProperty are given", place)
    message = f"{document.resource} cannot be used: connectors are not implemented yet"
    report.error("E_CONFIG_UNSUPPORTED", message, document.place("kind"), "Leave the Connection out.")


def find_entry(document: shape.Document, entry: str, files: lookup.Files, report: Report) -> lookup.Found | None:
    """The file that `spec.entry` names. None: it cannot be used, which is reported."""
    found = files.find(entry)
    if found.fault is None:
        return found
    message = f"the entry {document.text('spec', 'entry')} cannot be used: {found.fault}"
    hint = "Correct the path; it is relative to the bundle's root and may not leave it."
    report.error("E_CONFIG_ENTRY", message, document.place("spec", "entry"), hint)
    return None
