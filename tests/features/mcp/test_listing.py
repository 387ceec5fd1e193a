"""What of a server's lists is passed on."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.mcp.jail.protocol import results
from goondan.features.mcp.jail.protocol.bounds import MAX_DESCRIPTION
from goondan.features.mcp.jail.protocol.results import Room
from tests.features.mcp.test_lines import json_values

FIELDS = ("name", "title", "description", "inputSchema", "outputSchema", "annotations", "uri", "arguments")
items = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, json_values))


@settings(max_examples=30)
@given(st.lists(items, max_size=4))
def test_lists_of_anything_become_lists_that_travel(listed: list[dict[str, Any]]) -> None:
    room = Room()
    tools = results.tools(listed, 48, room)
    tools += results.offered(tools, resources=True, prompts=True)
    assert len({tool.export for tool in tools}) == len(tools)
    assert all(0 < len(tool.export) <= 48 for tool in tools)
    found = [tools, results.resources(listed, "uri", room), results.prompts(listed, room)]
    msgspec.msgpack.encode(found)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}, **more}


def test_a_name_with_control_characters_is_left_out_and_named() -> None:
    room = Room()
    kept = results.tools([tool("ok"), tool("\x1b[31mred"), tool("a\u202eb"), tool(""), tool("x" * 300)], 48, room)
    assert [found.name for found in kept] == ["ok"]
    assert len(room.told()) == 4


def test_a_description_is_cut_and_cleaned() -> None:
    found = results.tools([tool("a", description="do\x1b[2J this\U000e0041\U000e0042" + "x" * 9000)], 48, Room())
    assert found[0].description is not None
    assert found[0].description.startswith("do[2J thisx")
    assert len(found[0].description) == MAX_DESCRIPTION


def test_a_schema_that_is_too_large_or_too_deep_costs_its_tool() -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"properties": {"a": deep}}
    large = {"enum": ["x" * 1000] * 200}
    room = Room()
    listed = [
        tool("deep", inputSchema=deep),
        tool("large", outputSchema=large),
        tool("big", inputSchema={"const": 2**70}),
    ]
    assert results.tools([*listed, tool("fine")], 48, room)[0].name == "fine"
    assert [note.split()[1] for note in room.told()] == ["deep", "large", "big"]


def test_all_lists_together_have_a_bound() -> None:
    room = Room()
    listed = [tool(f"t{n}", description="x" * 8000) for n in range(500)]
    kept = results.tools(listed, 48, room)
    assert 100 < len(kept) < 120
    assert len(msgspec.msgpack.encode(kept)) <= results.MAX_LISTING_BYTES
    notes = room.told()
    assert len(notes) == results.MAX_NOTES + 1
    assert notes[-1].endswith("more were left out")


def test_only_the_protocols_hints_are_passed_on() -> None:
    given = {"readOnlyHint": True, "destructiveHint": "yes", "evil": {"a": 1}, "title": "Look\nhere"}
    assert results.tools([tool("a", annotations=given)], 48, Room())[0].annotations == {
        "readOnlyHint": True,
        "title": "Look here",
    }


def test_a_server_with_tools_of_these_names_is_not_offered_others() -> None:
    tools = results.tools([tool("read_resource")], 48, Room())
    assert [found.export for found in results.offered(tools, resources=True, prompts=True)] == ["get_prompt"]


def test_the_first_of_two_tools_of_one_name_counts() -> None:
    tools = results.tools([tool("a", description="one"), tool("a", description="two")], 48, Room())
    assert [(found.export, found.description) for found in tools] == [("a", "one")]
