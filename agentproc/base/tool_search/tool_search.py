"""The bundled extension `tool-search`: an agent with many tools shows few of them, and offers a tool that finds the
others.

A deferred tool can still be called. Tools that a search has found are shown from the next step on, in this instance.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from schemas.launch import CatalogItem

FIND: Final = "tool-search.find"
_SHOWN_FIND: Final = "tool-search__find"
_WORDS: Final = re.compile(r"[^\W_]+")
#: The score of a word of the query that is in a tool's name; below, in its description or in the names of its
#: parameters.
_IN_NAME: Final = 3
_IN_TEXT: Final = 1
#: How many letters two forms of a word have in common; also the length of a short word that begins the other one.
_SAME_STEM: Final = 4
_SHORT_STEM: Final = 3


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


def best(tools: list[CatalogItem], query: str, limit: int) -> list[CatalogItem]:
    """The tools that fit a query, the best first. A tool that fits no word is left out."""
    words = set(_words(query))
    scored = [(sum(_worth(word, item) for word in words), item) for item in tools]
    fitting = [(score, item) for score, item in scored if score]
    fitting.sort(key=lambda pair: (-pair[0], pair[1].name))
    return [item for _, item in fitting[:limit]]


def _worth(word: str, item: CatalogItem) -> int:
    properties = (item.parameters or {}).get("properties")
    text = " ".join([item.description or "", *(properties if isinstance(properties, dict) else ())])
    return _IN_NAME * _has(word, item.name) + _IN_TEXT * _has(word, text)


def _has(word: str, text: str) -> int:
    """1 when a word of the text is this word or another form of it, otherwise 0."""
    return any(_alike(word, known) for known in _words(text))


def _alike(one: str, other: str) -> bool:
    """True for `files` and `file`, `writing` and `write`; false for `form` and `forecast`."""
    if one == other:
        return True
    least = min(len(one), len(other))
    common = next((n for n in range(least) if one[n] != other[n]), least)
    return common >= max(_SAME_STEM, least - 1) or (common == least >= _SHORT_STEM)


def _words(text: str) -> list[str]:
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)  # readFile is two words
    return [word.lower() for word in _WORDS.findall(split)]
