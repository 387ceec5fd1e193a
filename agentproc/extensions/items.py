"""Checks the items of a step's catalog that middleware may have changed: each must be an item, and callable.

Pure. Source: docs/design/tools.md section 1; requirements CATALOG-05, ITEM-07.
"""

from __future__ import annotations

from typing import Any

import msgspec

from goondan.agentproc.catalog import Catalog
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.extensions.sources import with_known_source
from goondan.schemas.address import SEPARATOR, shown_tool_name
from goondan.schemas.launch import CatalogItem


class Unreachable(MiddlewareError):
    """A tool was added that this agent cannot call. `suggestion` names the field to change."""

    def __init__(self, message: str, suggestion: str) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def read_items(items: Any, catalog: Catalog) -> list[CatalogItem]:
    """The items of a catalog. Raises MiddlewareError for an invalid item, Unreachable for a tool that
    cannot be called.
    """
    if not isinstance(items, list | tuple):
        raise MiddlewareError(f"tool_catalog is {type(items).__name__}, not a list")
    read: list[CatalogItem] = []
    for item in items:
        if not isinstance(item, CatalogItem):
            try:
                item = msgspec.convert(with_known_source(item), CatalogItem)
            except msgspec.ValidationError as error:
                raise MiddlewareError(f"tool_catalog has a bad item: {error}") from None
        shown = shown_tool_name(item.name)
        if not catalog.reaches(shown):
            raise Unreachable(*_refusal(shown, catalog))
        name = catalog.canonical(shown)
        read.append(item if name == shown else item.replace(name=name))
    return read


def _refusal(name: str, catalog: Catalog) -> tuple[str, str]:
    """The message and the suggestion for a tool that cannot be called."""
    item = catalog.registry.get(name)
    if item is None:
        message = f"tool_catalog names {name[:80]!r}, which no Tool of the bundle has and no extension has registered"
        return message, "Register it with api.tools.register before it is added, or correct the name."
    message = f"tool_catalog names {name!r}, which extensions of agent {catalog.agent} may not add"
    where = f"spec.tools of Agent/{catalog.agent}"
    tool = f"Tool/{item.source.name or name.partition(SEPARATOR)[0]}"
    if not catalog.widened:
        return message, f"Name {tool} in {where}. Bundled extensions add no tools to those of their agent."
    pattern = f"policy.toolCalls.extensionsMayAdd of Agent/{catalog.agent}"
    return message, f"Add {name!r} or a pattern for it to {pattern}, or name {tool} in {where}."
