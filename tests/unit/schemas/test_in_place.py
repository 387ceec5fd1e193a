"""What a process can take over, field by field: a new field of a specification is replaced until somebody decides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from goondan.schemas.bundle.effective_config import can_follow
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ExtensionSpec, ModelSpec, OutputSpec
from goondan.schemas.wire.codec import to_raw

ONE = ExtensionSpec(name="one", entry="/b/ext/one.py", resource={"a": 1}, config={"level": 1}, modules={"one.py": "ab"})
SPEC = AgentSpec(
    name="writer", model=ModelSpec(provider="embedded"), registry=[], catalog=[], state_dir="/s", revision="1",
    extensions=[ONE],
)  # fmt: skip

FOLLOWED: dict[str, Any] = {
    "system": "another",
    "max_steps_per_turn": 7,
    "registry": [CatalogItem(name="a__b")],
    "catalog": ["a__b"],
    "allow_registry": ["a*"],
    "addable": ["a__b"],
    "dynamic": ["c__d"],
    "extensions": [replace(ONE, config={"level": 2}, resource={"a": 2}, config_schema={}, exposes_tools=False)],
    "resource": {"a": 1},
    "swarm": {"a": 1},
    "revision": "2",
    "parts": {"counting": to_raw(1)},
}
REPLACED: dict[str, Any] = {
    "name": "another",
    "model": ModelSpec(provider="embedded", params={"temperature": 1}),
    "fallback": [ModelSpec(provider="embedded")],
    "state_dir": "/t",
    "durability": "process",
    "idle_s": 1.0,
    "stall_timeout_s": 1.0,
    "conversation_mb": 1,
    "traces": "whole",
    "request_timeout_ms": 1,
    "servers": ["files"],
    "confined": True,
    "own_state": True,
    "output": OutputSpec({"type": "object"}),
    "tool_choice": "required",
}


def test_every_field_is_one_or_the_other() -> None:
    assert {field.name for field in fields(AgentSpec)} == FOLLOWED.keys() | REPLACED.keys()


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_process_takes_over(name: str) -> None:
    assert can_follow(SPEC, replace(SPEC, **{name: FOLLOWED[name]}))


@pytest.mark.parametrize("name", REPLACED)
def test_what_the_next_process_is_for(name: str) -> None:
    assert not can_follow(SPEC, replace(SPEC, **{name: REPLACED[name]}))


@pytest.mark.parametrize(
    ("extensions", "follows"),
    [
        ([], True),
        ([replace(ONE, entry="/copy/ext/one.py")], True),  # the same code in another folder
        ([replace(ONE, modules={"one.py": "cd"})], False),
        ([replace(ONE, entry="/b/ext/two.py")], False),
        ([replace(ONE, modules=None)], False),
        ([ONE, ExtensionSpec(name="two", entry="/b/two.py", resource={}, modules={"two.py": "x"})], True),
        ([ExtensionSpec(name="two", entry="/b/two.py", resource={}, modules={"two.py": "x"}), ONE], True),
    ],
)
def test_code_is_not_taken_over(extensions: list[ExtensionSpec], follows: bool) -> None:
    assert can_follow(SPEC, replace(SPEC, extensions=extensions)) is follows


def test_the_first_extension_needs_a_process_of_its_own() -> None:
    assert not can_follow(replace(SPEC, extensions=[]), SPEC)
