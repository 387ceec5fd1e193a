"""Connectors and Connections: the checks of one document by itself. Pure.

Neither runs yet. A Connector is left out with a warning. A Connection is an error, because no messages would come.
"""

from __future__ import annotations

from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.values import check_value
from goondan.schemas.bundle.resources import ConnectionBody, ConnectorBody


def check_connector(document: Document, body: ConnectorBody, files: Files, report: Report) -> str | None:
    """Report the problems of a Connector. Returns the file of its entry. None when there is none."""
    path = _entry_of(document, body.entry, files, report)
    names = [event.name for event in body.events]
    for index, name in enumerate(names):
        if name and name in names[:index]:
            at: Path = ("spec", "events", index, "name")
            message = f"the event {document.text(*at)} stands twice"
            report.error("E_CONFIG_DUPLICATE", message, document.place(*at))
    message = f"{document.resource} is not started: connectors are not implemented yet"
    report.warn("W_CONFIG_NOT_STARTED", message, document.place("kind"))
    return path


def check_connection(document: Document, body: ConnectionBody, report: Report) -> None:
    """Report the problems of a Connection, except those of its references."""
    for group in ("config", "secrets"):
        for key, value in getattr(body, group).items():
            check_value(document, value, ("spec", group, key), report)
    for index, rule in enumerate(body.ingress.rules):
        if rule.route.instance_key is not None and rule.route.instance_key_property is not None:
            place = document.key("spec", "ingress", "rules", index, "route", "instanceKeyProperty")
            report.error("E_CONFIG_INVALID_VALUE", "both instanceKey and instanceKeyProperty are given", place)
    message = f"{document.resource} cannot be used: connectors are not implemented yet"
    report.error("E_CONFIG_UNSUPPORTED", message, document.place("kind"), "Leave the Connection out.")


def _entry_of(document: Document, entry: str, files: Files, report: Report) -> str | None:
    if not entry:
        return None
    found = files.find(entry)
    if found.fault is None:
        return found.path
    message = f"the entry {document.text('spec', 'entry')} cannot be used: {found.fault}"
    hint = "Correct the path; it is relative to the bundle's root and may not leave it."
    report.error("E_CONFIG_ENTRY", message, document.place("spec", "entry"), hint)
    return None
