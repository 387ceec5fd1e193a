"""Bundled extensions whose config is for a feature: what the core asks of it. Pure.

An extension is code of an agent, so what bounds an agent cannot be left to it. A feature reads the config of such an
extension, and the kernel keeps to it. The manifest of the extension names the feature (`spec.feature`), and no agent
can use the extension where that feature is missing.

What the config becomes is a part of the agent's specification, under the feature's name. The core passes it on
unopened.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from msgspec import Struct

from goondan.features import FEATURES, parts
from goondan.kernel.bundle.checked import CheckedAgent
from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.schemas.bundle.launch import ExtensionSpec


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
    #: What is odd about the config, as a code and a sentence; None: nothing.
    warning: tuple[str, str] | None = None


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
    found: list[FolderRules] = [module.FOLDERS for module in parts("bundle") if hasattr(module, "FOLDERS")]
    return next((rules for rules in found if is_bundled(rules.extension, entry, bundled)), None)


@cache
def feature_extensions() -> tuple[FeatureExtension, ...]:
    """`EXTENSION` of each feature's `bundle.py` that has one. Raises ImportError when a file is missing."""
    return tuple(module.EXTENSION for module in parts("bundle") if hasattr(module, "EXTENSION"))


def is_bundled(name: str, entry: str, bundled: bool) -> bool:
    """Whether an extension with this entry is the bundled one of this name, under whatever name the bundle has it."""
    return bundled and posixpath.basename(posixpath.dirname(entry)) == name.replace("-", "_")


def has_feature(name: str) -> bool:
    """Whether this installation has a feature of this name that reads bundles."""
    return any(feature.name == name and "bundle" in feature.files for feature in FEATURES)
