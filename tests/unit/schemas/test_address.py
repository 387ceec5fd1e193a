"""Names and addresses: what they are made of, and that different keys never meet on disk."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from goondan.schemas.bundle.address import (
    EXPORT_NAME,
    RESOURCE_NAME,
    ToolName,
    build_tool_name,
    instance_dir,
    instance_workdir,
    is_export_name,
    is_instance_key,
    is_resource_name,
    parse_tool_name,
    path_segment,
    segment_key,
    tool_identity,
)

resource_names = st.from_regex(RESOURCE_NAME, fullmatch=True).filter(is_resource_name)
export_names = st.from_regex(EXPORT_NAME, fullmatch=True).filter(is_export_name)
#: Also what no instance key may be: the folder must be safe whatever comes.
any_text = st.text(st.characters(exclude_categories=()), max_size=300)


@pytest.mark.requirement("NAME-02", "NAME-07")
@pytest.mark.parametrize(
    ("full_name", "parts"),
    [
        ("file-system__read", ("file-system", "read")),
        ("a__b__c", ("a", "b__c")),
        ("bash", None),
        ("bash.exec", None),
        ("bash_exec", None),
        ("", None),
        ("__", ("", "")),
    ],
)
def test_tool_names_are_split_at_the_first_double_underscore(full_name: str, parts: ToolName | None) -> None:
    assert parse_tool_name(full_name) == parts


@pytest.mark.requirement("NAME-01", "NAME-08")
def test_tool_names_are_joined_by_a_double_underscore() -> None:
    assert build_tool_name("bash", "exec") == "bash__exec"


@pytest.mark.requirement("NAME-09")
@given(resource_names, export_names)
@example("a-_b", "_c")
def test_what_validation_accepts_comes_back_from_its_full_name(resource: str, export: str) -> None:
    assert parse_tool_name(build_tool_name(resource, export)) == (resource, export)


@pytest.mark.requirement("NAME-09")
def test_no_resource_name_ends_like_the_separator() -> None:
    assert parse_tool_name(build_tool_name("a_", "b")) == ("a", "_b")
    assert not is_resource_name("a_")


@pytest.mark.requirement("NAME-13")
def test_a_tool_is_identified_by_kind_and_name() -> None:
    assert tool_identity("bash") == "Tool/bash"


@pytest.mark.parametrize("name", ["bash", "file-system", "a", "1", "a_b", "x" * 64])
def test_resource_names_that_are_fine(name: str) -> None:
    assert is_resource_name(name)


@pytest.mark.parametrize("name", ["", "a__b", "a_", "_a", "-a", "A", "a.b", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_resource_names_that_are_refused(name: str) -> None:
    assert not is_resource_name(name)


@pytest.mark.parametrize("key", ["u1", "사용자 1", "a/b", "..", "x" * 256, "고객 #7", "👩\u200d💻"])
def test_instance_keys_are_nearly_any_text(key: str) -> None:
    assert is_instance_key(key)


@pytest.mark.parametrize(
    "key",
    ["", "x" * 257, "a\nb", "\x00", "\x7f", "\x1b[2J", "a\tb", "a\x9bb", "a\u202eb", "a\u2066b", "a\u200bb", "\u3164"],
)
def test_instance_keys_are_not_empty_not_long_and_printable(key: str) -> None:
    assert not is_instance_key(key)


@given(any_text)
@example("..")
@example(".")
@example("a/../../b")
@example("\ud800")
def test_a_folder_name_is_one_safe_segment(key: str) -> None:
    segment = path_segment(key)
    assert len(os.fsencode(segment)) <= 255
    assert segment not in (".", "..")
    assert "/" not in segment and "\0" not in segment
    if key:
        assert PurePosixPath("/base", segment).parent == PurePosixPath("/base")


@given(any_text, any_text)
@example("a", "A")
@example("%", "%25")
@example("x" * 300, "x" * 301)
def test_different_keys_have_different_folders(one: str, other: str) -> None:
    assume(one != other)
    assert path_segment(one) != path_segment(other)


def test_files_of_an_instance_lie_below_the_state_directory() -> None:
    assert instance_dir("/state", "coder", "u/1") == "/state/instances/coder/u%2F1"
    assert instance_workdir("/state", "coder", "u/1") == "/state/instances/coder/u%2F1/workspace"


@given(any_text)
@example("k" * 121)
def test_a_key_comes_back_from_its_folder_unless_it_was_cut(key: str) -> None:
    segment = path_segment(key)
    assert segment_key(segment) == (None if "." in segment else key)


@given(any_text)
@example("%ff")
@example("%41")
@example("%FF")
@example("a.b")
@example("\ud800")
def test_a_folder_that_no_key_has_gives_none(segment: str) -> None:
    key = segment_key(segment)
    assert key is None or path_segment(key) == segment
