"""Kinds of documents that features bring: what the core asks of one. Pure.

The form of their documents is with that of all others (schemas/bundle/resources.py), because the exported schema has
them all. What such documents become is a part of the plan, under the feature's name. The core passes it on unopened.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol

from goondan.features import parts
from goondan.kernel.bundle.problems import Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.trust.powers import Power


class Kind(Protocol):
    """One kind of document."""

    @property
    def name(self) -> str:
        """What documents have as their `kind`."""

    @property
    def part(self) -> str:
        """The name of the feature, and of the part of the plan."""

    @property
    def secrets(self) -> Mapping[tuple[str, str], str]:
        """The paths of fields with secrets, each with the use of a variable whose value goes there, as a person reads
        it who is asked for trust.
        """

    def check(self, document: Document, body: Any, report: Report, *, whole: bool) -> None:
        """Report what is wrong with a document. `whole`: it fits its form, so that no value was replaced."""

    def resolve(self, name: str, body: Any, env: Mapping[str, str]) -> Any:
        """What the plan has of a document."""

    def powers(self, document: Document, body: Any) -> Iterable[Power]:
        """What a bundle can do by a document, for the person who is asked for trust."""


@cache
def kinds() -> Mapping[str, Kind]:
    """All such kinds by their names: `KIND` of each feature's `bundle.py` that has one."""
    found: list[Kind] = [module.KIND for module in parts("bundle") if hasattr(module, "KIND")]
    return {kind.name: kind for kind in found}


def secret_use(kind: str, path: tuple[str, ...]) -> str | None:
    """The use of a variable whose value goes into a secret field of a feature's kind; None for any other place."""
    known = kinds().get(kind)
    return None if known is None else next((use for at, use in known.secrets.items() if path[:2] == at), None)
