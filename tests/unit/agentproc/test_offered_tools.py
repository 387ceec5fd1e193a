"""The tools of requests: encoded once while they are the same, and never those of an earlier request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from goondan.agentproc.http import wire_of
from goondan.agentproc.machine.messages import UserData
from goondan.agentproc.providers.vendor import MAX_KEPT
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec, OutputSpec
from goondan.schemas.models.model_providers import BY_NAME
from tests.unit.agentproc.vendor_formats import asked, conversation

ONE, TWO = CatalogItem(name="a__b"), CatalogItem(name="c__d", description="가")
BOTH = [ONE, TWO]


class Counted:
    """A vendor that counts the tools that it writes."""

    def __init__(self, provider: str) -> None:
        self.vendor: Any = wire_of(provider).VENDOR()
        self.made = 0
        self.request = asked(conversation(UserData("hello")), provider, system="Be brief.")
        offer = self.vendor._offer

        def count(item: CatalogItem) -> object:
            self.made += 1
            return offer(item)

        self.vendor._offer = count

    def body(self, **changes: Any) -> bytes:
        self.request = structs.replace(self.request, **changes)
        return b"".join(self.vendor.request(self.request).body)

    def of(self, tools: list[CatalogItem]) -> list[str]:
        found = json.loads(self.body(tools=tools)).get("tools", [])
        return [tool.get("function", tool)["name"] for tool in found]


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_the_same_items_are_encoded_once(provider: str) -> None:
    counted = Counted(provider)
    assert counted.of([]) == []
    for _ in range(3):
        assert counted.of(BOTH) == ["a__b", "c__d"]
        counted.request = structs.replace(counted.request, system=b"Be brief.".decode())
    assert counted.made == 2


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_other_items_another_order_and_equal_names_are_encoded_anew(provider: str) -> None:
    counted = Counted(provider)
    other = CatalogItem(name="a__b", description="other")
    for items in (BOTH, [TWO, ONE], [ONE], BOTH, [other, TWO], []):
        assert counted.of(items) == [item.name for item in items]
        assert (b"other" in counted.body()) is (other in items)


@pytest.mark.parametrize("provider", sorted(BY_NAME))
@pytest.mark.parametrize(
    "changes",
    [
        {"model": ModelSpec(provider="p", model="another", params={"top": 1}, api_key="k")},
        {"system": "Be long."},
        {"output": OutputSpec(schema={"type": "object", "properties": {"n": {"type": "integer"}}})},
        {"tool_choice": "required"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_stands_around_a_conversation_is_that_of_the_request(provider: str, changes: dict[str, Any]) -> None:
    """A request behind another one is as it would be alone, and so is the other one again behind it."""
    counted = Counted(provider)
    before = counted.request
    first = counted.vendor.request(before)
    after = structs.replace(before, **changes)
    assert counted.vendor.request(after) == wire_of(provider).VENDOR().request(after) != first
    assert counted.vendor.request(before) == first


def test_very_many_are_not_kept() -> None:
    counted = Counted("openai")
    large = [CatalogItem(name="l__l", description="x" * MAX_KEPT)]
    for _ in range(2):
        assert counted.of(large) == ["l__l"]
    assert counted.made == 2
    assert counted.of([ONE]) == ["a__b"]


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_a_request_that_cannot_be_written_leaves_nothing_to_the_next(provider: str) -> None:
    counted = Counted(provider)
    assert b"Be brief." in counted.body()
    for _ in range(2):
        with pytest.raises(UnicodeEncodeError):
            counted.body(system="half a pair: \ud800")
    assert b"Be long." in counted.body(system="Be long.")
