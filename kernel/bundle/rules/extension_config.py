"""Configs of extensions: whether one fits the schema that its extension declares, said where the config is written; and
bundled extensions whose config is for a feature. Pure.

An extension is code of an agent, so what bounds an agent cannot be left to it. A feature reads the config of such an
extension, and the kernel keeps to it. The extension lies in the feature's folder, so there is none without the feature.

What the config becomes is a part of the agent's specification, under the feature's name. The core passes it on
unopened.

Source: docs/design/features.md section 6; requirements EXT-02, EXT-10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol

from msgspec import Struct

from goondan.kernel.bundle.rules.checked import CheckedAgent, server_rules_of
from goondan.kernel.bundle.rules.extensions import CheckedExtension
from goondan.kernel.bundle.rules.kinds import brought
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Path, Report, did_you_mean
from goondan.kernel.bundle.rules.shape import Document
from goondan.schemas.bundle.extensions import check_config
from goondan.schemas.bundle.launch import ExtensionSpec, is_bundled
from goondan.schemas.wire.errors import GoondanError


class FeatureExtension(Protocol):
    """A bundled extension whose config is for a feature."""

    @property
    def feature(self) -> str:
        """The name of the feature, and of the part of an agent's specification."""

    @property
    def extension(self) -> str:
        """The name of the extension: `NAME` of `@goondan/base/NAME`."""

    def faults(self, config: Mapping[str, Any]) -> list[str]:
        """What is wrong with a config that fits its schema, worded as issues of the schema are."""

    def check(self, agents: Sequence[CheckedAgent], report: Report) -> None:
        """Report what is wrong between the agents of the swarm. What is wrong with one config is reported already."""

    def part(self, extensions: Sequence[ExtensionSpec]) -> Any | None:
        """The part of the specification of an agent that has these extensions. None: it has no such extension."""


class NamedFolders(Struct, frozen=True):
    """What becomes of an agent's use of an extension whose config names folders."""

    #: The specification of the extension, with absolute paths in its config.
    spec: ExtensionSpec
    #: The existing folders outside of workdirs, as absolute paths. The Tool that the extension brings may read them.
    granted: list[str]
    #: What is odd about the config, as a code, a sentence, and what to do about it; None: nothing.
    warning: tuple[str, str, str] | None = None


class FolderRules(Protocol):
    """A bundled extension whose config names folders that its Tool works in."""

    @property
    def extension(self) -> str:
        """The name of the extension: `NAME` of `@goondan/base/NAME`."""

    def check(self, config: Mapping[str, Any], document: Document, at: Path, report: Report) -> None:
        """Report what is wrong with the folders that a config names. `at` is its place in the document."""

    def resolve(self, spec: ExtensionSpec, files: Files) -> NamedFolders:
        """What becomes of a config that fits the extension's schema."""


def folder_rules_of(entry: str, bundled: bool) -> FolderRules | None:
    """The rules for the folders of an extension with this entry: `FOLDERS` of a feature's `bundle.py`. None: its config
    names none.
    """
    found: list[FolderRules] = brought("FOLDERS")
    return next((rules for rules in found if is_bundled(rules.extension, entry, bundled)), None)


@cache
def feature_extensions() -> tuple[FeatureExtension, ...]:
    """`EXTENSION` of each feature's `bundle.py` that has one. Raises ImportError when a file is missing."""
    return tuple(brought("EXTENSION"))


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
