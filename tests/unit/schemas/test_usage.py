"""Parts of what was used, as rows of a file, and their sums."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.wire.usage import Part, Usage, Used, encode_used, part_of, read_used, total_of

parts = st.builds(
    Part,
    st.dates().map(lambda day: day.isoformat()),
    st.text(min_size=1),
    st.one_of(st.none(), st.from_regex(r"[A-Z]{3}", fullmatch=True)),
)
amounts = st.builds(Used, *(st.integers(0, 10**9) for _ in Used.__struct_fields__))


@given(parts, amounts)
def test_a_row_is_read_as_it_was_written(part: Part, used: Used) -> None:
    assert part_of(part.row) == part
    assert read_used(encode_used(used)) == used


def test_what_is_no_row_is_nothing() -> None:
    assert [part_of(name) for name in ("epoch", "usage/", "usage/2026-11-23", "usages/a/b/c")] == [None] * 4
    assert [read_used(value) for value in (None, 7, b"", b"{}", b"[1,2", '["a"]')] == [None] * 6
    assert [read_used(b"[1,%s1%s]" % (sign, b"0" * 400)) for sign in (b"", b"-")] == [None] * 2  # no float has it


def test_sums_have_a_cost_where_there_is_one_currency() -> None:
    dollars, euros, free = Part("d", "a", "USD"), Part("d", "b", "EUR"), Part("d", "c")
    one = Used(1, 10, 5, 4, 3, 2, 1_500_000_000)
    assert total_of([(dollars, one), (free, one)]) == Usage(
        input_tokens=20, output_tokens=10, cached_tokens=8, cache_write_tokens=6, reasoning_tokens=4, model_calls=2,
        cost=3.0,
    )  # fmt: skip
    assert (total_of([(euros, one)]).cost, total_of([(euros, one)]).currency) == (1.5, "EUR")
    assert total_of([(dollars, one), (euros, one)]).cost is None
    assert total_of([]) == Usage(input_tokens=0, output_tokens=0, model_calls=0)
