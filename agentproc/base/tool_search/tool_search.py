"""The bundled extension `tool-search`: an agent with many tools shows few of them, and offers a tool that finds the
others.

A deferred tool can still be called. Tools that a search has found are shown from the next step on, in this instance.
They stand behind all others, in the order in which they were found, and keep their places: so what earlier requests
began with, later ones begin with, too, and a vendor's cache knows it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from goondan.agentproc.machine.catalog import best
from goondan.schemas.bundle.launch import CatalogItem

FIND: Final = "tool-search.find"
_SHOWN_FIND: Final = "tool-search__find"


def register(api: Any, config: dict[str, Any]) -> None:
    """Defer tools after every other extension has changed the catalog, and offer the search."""
    search = _Search(api, config)
    api.pipelines.mutate("step.tools", search.defer, priority=1_000_000)
    api.tools.register(
        {
            "name": FIND,
            "description": "Find tools by what they do. There are more tools than are shown; those that are found can "
            "be called at once and are shown from the next step on.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "minLength": 1,
                        "description": "What the tool should do, in some words.",
                    }
                },
                "required": ["query"],
                "additionalProperties": False,
            },
            "idempotent": True,
            "inReplay": True,
        },
        search.find,
    )


class _Search:
    """The tools that were found in one instance, and the tools of the running step."""

    def __init__(self, api: Any, config: dict[str, Any]) -> None:
        self._api = api
        self._config = config
        self._tools: list[CatalogItem] = []
        self._found: list[str] = list(api.state.get().get("found", []))

    def defer(self, ctx: Any) -> Any:
        """Handle `step.tools`: defer every tool that is neither to be kept nor found."""
        items: list[CatalogItem] = ctx.tool_catalog
        self._tools = [item for item in items if item.name != FIND]
        if len(self._tools) <= self._config["from"]:
            return ctx.replace(tool_catalog=self._tools)
        found = {name: item for item in items if (name := _shown(item)) in self._found and not self._kept(name)}
        others = [item if self._kept(_shown(item)) else _deferred(item) for item in items if _shown(item) not in found]
        return ctx.replace(tool_catalog=[*others, *(found[name] for name in self._found if name in found)])

    def _kept(self, name: str) -> bool:
        """Whether a tool is always shown."""
        return name == _SHOWN_FIND or any(fnmatchcase(name, pattern) for pattern in self._config["keep"])

    def find(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Handle one call of the search."""
        found = best(self._tools, given["query"], self._config["maxResults"])
        names = [_shown(item) for item in found]
        kept = self._with(names)
        if kept != self._found:
            self._found = kept
            self._api.state.set({"found": kept})
        told = [
            {"name": name, "description": item.description, "parameters": item.parameters}
            for name, item in zip(names, found, strict=True)
        ]
        return {"tools": told, "searched": len(self._tools)}

    def _with(self, names: list[str]) -> list[str]:
        """The tools that were found, in their order, with these as well. Those that were found first go first, but none
        of these unless they are too many by themselves.
        """
        limit = self._config["maxShown"]
        names = names[:limit]
        kept = [*self._found, *(name for name in names if name not in self._found)]
        spare = [name for name in kept if name not in names][: max(0, len(kept) - limit)]
        return [name for name in kept if name not in spare]


def _shown(item: CatalogItem) -> str:
    return item.name.replace(".", "__", 1)


def _deferred(item: CatalogItem) -> CatalogItem:
    return item if item.deferred else msgspec.structs.replace(item, deferred=True)
