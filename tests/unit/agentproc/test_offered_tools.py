"""The tools of requests: encoded once while they are the same, and never those of an earlier request."""

from __future__ import annotations

from typing import Any

import msgspec

from goondan.agentproc.providers.vendor import MAX_KEPT, OfferedTools
from goondan.schemas.bundle.launch import CatalogItem


class Counted:
    def __init__(self) -> None:
        self.made = 0
        self.tools = OfferedTools(self.offer)

    def offer(self, item: CatalogItem) -> dict[str, Any]:
        self.made += 1
        return {"name": item.name, "description": item.description}

    def of(self, *items: CatalogItem) -> Any:
        return msgspec.json.decode(self.tools.of(list(items)))


ONE, TWO = CatalogItem(name="a__b"), CatalogItem(name="c__d", description="가")


def test_the_same_items_are_encoded_once() -> None:
    counted = Counted()
    assert counted.of() == []
    for _ in range(3):
        assert [tool["name"] for tool in counted.of(ONE, TWO)] == ["a__b", "c__d"]
    assert counted.made == 2


def test_other_items_another_order_and_equal_names_are_encoded_anew() -> None:
    counted = Counted()
    other = CatalogItem(name="a__b", description="other")
    for items in ((ONE, TWO), (TWO, ONE), (ONE,), (ONE, TWO), (other, TWO), ()):
        assert counted.of(*items) == [{"name": item.name, "description": item.description} for item in items]


def test_very_many_are_not_kept() -> None:
    counted = Counted()
    large = CatalogItem(name="l__l", description="x" * MAX_KEPT)
    counted.of(large)
    counted.of(large)
    assert counted.made == 2
    assert counted.of(ONE) == [{"name": "a__b", "description": None}]
