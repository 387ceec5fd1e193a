"""The names that the tools of an MCP server get."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.bundle.address import MAX_TOOL_NAME, SHOWN_NAME, build_tool_name
from goondan.schemas.worker.servers import export_names, longest_export

NAMES = st.lists(st.text(min_size=1, max_size=90) | st.from_regex(r"[a-c._]{1,4}\Z"), max_size=12)


@given(NAMES, st.integers(min_value=12, max_value=48))
def test_every_name_is_taken_by_vendors_and_none_twice(names: list[str], longest: int) -> None:
    exports = export_names(names, longest)
    assert list(exports) == list(dict.fromkeys(names))
    assert len(set(exports.values())) == len(exports)
    for export in exports.values():
        assert len(export) <= longest
        assert SHOWN_NAME.match(build_tool_name("s", export))


@given(NAMES, st.randoms(use_true_random=False))
def test_the_order_of_the_list_means_nothing(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert export_names(names, 48) == export_names(shuffled, 48)


def test_a_name_that_needs_no_change_keeps_it() -> None:
    exports = export_names(["create_issue", "create.issue", "get-sum", "API.read", "문서"], 48)
    assert exports["create_issue"] == "create_issue"
    assert exports["create.issue"].startswith("create_issue_")
    assert exports["get-sum"] == "get-sum"
    assert exports["API.read"] == "API_read"
    assert exports["문서"] == "_"


def test_a_server_cannot_take_the_name_that_another_tool_would_get() -> None:
    made = export_names(["a.b", "a b"], 48)
    exports = export_names(["a.b", "a b", *made.values()], 48)
    assert len(set(exports.values())) == 4
    assert [exports[name] for name in made.values()] == list(made.values())


def test_a_full_name_has_room() -> None:
    assert len(build_tool_name("github", "x" * longest_export("github"))) == MAX_TOOL_NAME
