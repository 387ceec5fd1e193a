"""The tools of a request as JSON, encoded once for as long as they stay the same.

An agent with MCP servers can have hundreds of tools. Each request has all of them, and from step to step they rarely
change: to make and encode 500 of them anew takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Final

from msgspec import Raw

from goondan.agentproc.providers.vendor import encode_json
from goondan.schemas.bundle.launch import CatalogItem

#: The bytes of these are kept. A request with more is rare, and would take as much memory again.
MAX_KEPT: Final = 4 << 20


class OfferedTools:
    """The tools of one conversation's requests. `offer` gives one in the vendor's form."""

    def __init__(self, offer: Callable[[CatalogItem], object]) -> None:
        self._offer = offer
        self._items: list[CatalogItem] = []
        self._encoded = Raw(b"[]")

    def of(self, items: Sequence[CatalogItem]) -> Raw:
        """The list of these tools. Items are read-only, so the same ones have the same JSON."""
        known = self._items
        if len(items) == len(known) and all(map(is_, items, known)):
            return self._encoded
        encoded = Raw(encode_json([self._offer(item) for item in items]))
        if len(memoryview(encoded)) <= MAX_KEPT:
            self._items, self._encoded = list(items), encoded
        return encoded
