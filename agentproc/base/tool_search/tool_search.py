"""The bundled extension `tool-search`: an agent with many tools shows few of them, and offers a tool that finds the
others.

A deferred tool can still be called. Tools that a search has found are shown from the next step on, in this instance.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from agentproc.tool_ranking import best
from schemas.launch import CatalogItem

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
        return ctx.replace(tool_catalog=[self._placed(item) for item in items])

    def _placed(self, item: CatalogItem) -> CatalogItem:
        name = item.name.replace(".", "__", 1)
        keep = name == _SHOWN_FIND or name in self._found
        if keep or any(fnmatchcase(name, pattern) for pattern in self._config["keep"]):
            return item
        return item if item.deferred else msgspec.structs.replace(item, deferred=True)

    def find(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Handle one call of the search."""
        found = best(self._tools, given["query"], self._config["maxResults"])
        names = [item.name.replace(".", "__", 1) for item in found]
        kept = [*(name for name in self._found if name not in names), *reversed(names)][-self._config["maxShown"] :]
        if kept != self._found:
            self._found = kept
            self._api.state.set({"found": kept})
        told = [
            {"name": name, "description": item.description, "parameters": item.parameters}
            for name, item in zip(names, found, strict=True)
        ]
        return {"tools": told, "searched": len(self._tools)}
