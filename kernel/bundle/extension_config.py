"""Whether the config of an extension fits the schema that the extension declares, said where the config is written.

Pure. Source: requirements EXT-02, EXT-10.
"""

from __future__ import annotations

import re
from typing import Any, Final

from goondan.kernel.bundle.extensions import CheckedExtension
from goondan.kernel.bundle.feature_extensions import feature_extensions, is_bundled
from goondan.kernel.bundle.problems import Path, Report, did_you_mean
from goondan.kernel.bundle.servers import server_rules_of
from goondan.kernel.bundle.shape import Document
from goondan.schemas.bundle.extensions import check_config
from goondan.schemas.wire.errors import GoondanError


def check_given(extension: CheckedExtension, report: Report) -> None:
    """Report what does not fit in the config that the Extension's own document gives, and a bad schema."""
    config = extension.resource.spec.config
    issues = _issues(extension, config or {}, report)
    if config is not None:
        _report(extension, issues, extension.document, ("spec", "config"), report)


def check_used(
    extension: CheckedExtension, own: dict[str, Any] | None, document: Document, at: Path, report: Report
) -> None:
    """Report what does not fit in the config that one agent gives, or what is missing when nobody gives one.

    `at` is where the extension stands in the agent's `document`. A config of the Extension's own document has been
    looked at already.
    """
    if own is not None:
        _report(extension, _issues(extension, own, report), document, (*at, "config"), report)
    elif extension.resource.spec.config is None:
        _report(extension, _issues(extension, {}, report), document, at, report)


def _issues(extension: CheckedExtension, config: dict[str, Any], report: Report) -> list[str]:
    try:
        issues = check_config(extension.schema, config)
        for known in feature_extensions() if not issues else ():
            if is_bundled(known.extension, extension.entry, extension.bundled):
                return known.faults(config)
        if not issues and (rules := server_rules_of(extension.entry, extension.bundled)) is not None:
            return rules.faults(extension.name, config)
        return issues
    except GoondanError as error:
        place = extension.document.place("spec", "configSchema")
        message = f"the configSchema cannot be used: {error.info.message}"
        report.error("E_CONFIG_SCHEMA", message, place, error.info.suggestion)
        return []


def _report(extension: CheckedExtension, issues: list[str], document: Document, at: Path, report: Report) -> None:
    for issue in issues:
        where, _, what = issue.partition(": ")
        path, known = _followed(where, extension.schema)
        hint = None
        if what == UNKNOWN and known:
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
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
#: What is said of a field that nobody has declared.
UNKNOWN: Final = "unexpected property"
#: What is wrong with one place, as goondan.schemas.bundle.arguments words it, and its code. All else is a wrong value.
_CODES: Final = {
    UNKNOWN: "E_CONFIG_UNKNOWN_FIELD",
    "required property is missing": "E_CONFIG_MISSING_FIELD",
}
