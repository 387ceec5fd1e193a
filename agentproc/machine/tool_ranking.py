"""Which tools of a catalog fit a question, by the words in their names, descriptions and parameters. Pure."""

from __future__ import annotations

import re
from typing import Final

from goondan.schemas.bundle.launch import CatalogItem

_WORDS: Final = re.compile(r"[^\W_]+")
#: The score of a word of the query that is in a tool's name; below, in its description or in the names of its
#: parameters.
_IN_NAME: Final = 3
_IN_TEXT: Final = 1
#: How many letters two forms of a word have in common; also the length of a short word that begins the other one.
_SAME_STEM: Final = 4
_SHORT_STEM: Final = 3


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
