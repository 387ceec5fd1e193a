"""The ways to write a reference, over any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle.rules.references import BadRef, Ref, read_ref, read_use
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.bundle.resources import ObjectRef, ToolUse

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,8}[a-z0-9-])?", fullmatch=True).filter(is_resource_name)


@pytest.mark.requirement("EXT-12")
@given(NAMES)
def test_every_spelling_means_the_same(name: str) -> None:
    short, long = f"Tool/{name}", ObjectRef("Tool", name)
    spellings: list[str | ToolUse] = [short, ToolUse(ref=short), ToolUse(ref=long), ToolUse(kind="Tool", name=name)]
    found = [read_use(item, "Tool") for item in spellings] + [read_ref(short, "Tool"), read_ref(long, "Tool")]
    assert {(ref.kind, ref.name, ref.package) for ref in found if isinstance(ref, Ref)} == {("Tool", name, None)}
    assert all(isinstance(ref, Ref) for ref in found)


@given(st.text())
def test_any_text_is_a_reference_or_says_why_not(text: str) -> None:
    ref = read_ref(text, "Tool")
    if isinstance(ref, Ref):
        assert text == f"Tool/{ref.name}"
        assert ref.name
        assert "/" not in ref.name
    else:
        assert ref.message or not text


def test_where_a_reference_stands() -> None:
    assert read_use(ToolUse(ref="Tool/x"), "Tool", ("a",)) == Ref("Tool", "x", None, ("a", "ref"))
    assert read_use(ToolUse(kind="Tool", name="x"), "Tool", ("a",)) == Ref("Tool", "x", None, ("a", "name"))
    assert read_use(ToolUse(ref=ObjectRef("Tool", "x", "@p/q")), "Tool") == Ref("Tool", "x", "@p/q", ("ref", "name"))


@pytest.mark.parametrize(
    "item",
    [ToolUse(), ToolUse(kind="Tool"), ToolUse(name="x"), ToolUse(ref="Tool/x", package="@p/q"), ToolUse(ref="Agent/x")],
)
def test_what_is_no_reference(item: ToolUse) -> None:
    assert isinstance(read_use(item, "Tool"), BadRef)


def test_what_was_reported_already_is_not_reported_again() -> None:
    assert read_ref("", "Tool") == BadRef("")
    assert read_ref(ObjectRef("", "x"), "Tool") == BadRef("")
