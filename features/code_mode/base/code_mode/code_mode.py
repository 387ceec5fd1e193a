"""The bundled extension `code-mode`: the model sees one tool, `code__run`, and calls all others from its scripts.

The other tools are deferred: they stay in the catalog, so that scripts, and a model that knows them, can call them.

Source: docs/code-mode.md; docs/design/tools.md section 12.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from goondan.features.code_mode.wire import CODE_TOOL
from goondan.schemas.bundle.launch import CatalogItem

#: Families of tools that are named to the model. It finds the others with a search.
MAX_FAMILIES: Final = 24


def register(api: Any, config: dict[str, Any]) -> None:
    """Bring the tool, and defer the others after every other extension has changed the catalog."""
    api.tools.bring(CODE_TOOL)

    def defer(ctx: Any) -> Any:
        return ctx.replace(tool_catalog=placed(ctx.tool_catalog, config["keep"], config["from"]))

    api.pipelines.mutate("step.tools", defer, priority=1_000_000)


def placed(items: list[CatalogItem], keep: list[str], least: int) -> list[CatalogItem]:
    """The catalog of a step: the script's tool says what there is, and the other tools are deferred."""
    others = [item for item in items if _name(item) != CODE_TOOL]
    if len(others) < least:
        return items
    return [_placed(item, others, keep) for item in items]


def _placed(item: CatalogItem, others: list[CatalogItem], keep: list[str]) -> CatalogItem:
    name = _name(item)
    if name == CODE_TOOL:
        return msgspec.structs.replace(item, description=f"{item.description} {families(others)}".strip())
    if item.deferred or any(fnmatchcase(name, pattern) for pattern in keep):
        return item
    return msgspec.structs.replace(item, deferred=True)


def families(items: list[CatalogItem]) -> str:
    """How many tools there are, and of which families: one sentence, however many there are."""
    counted = Counter(_name(item).partition("__")[0] for item in items)
    if not counted:
        return "There are no tools to call."
    named = [f"{family}__* ({count})" for family, count in sorted(counted.items())[:MAX_FAMILIES]]
    more = len(counted) - len(named)
    rest = f" and {more} more families" if more else ""
    return f"There are {len(items)} tools to call: {', '.join(named)}{rest}."


def _name(item: CatalogItem) -> str:
    return item.name.replace(".", "__", 1)
