"""Comparing with a recording: what may differ does not count, everything else does, and the place of it is named."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.recordings.wire import Request
from goondan.features.recordings.wire.texts import (
    MAX_ENTRY,
    Difference,
    around,
    comparable,
    differs,
    first_difference,
    same,
    shortened,
    without_places,
)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("at 2026-11-23T15:33:51.123Z.", "at <time>."),
        ("at 2026-11-23 15:33, then", "at <time>, then"),
        ("2026-11-23T15:33:51+09:00", "<time>"),
        ("the year 2026-11", "the year 2026-11"),
        ("id 0f8fad5b-d9cb-469f-a165-70867728950e", "id <id>"),
        ("t352fd78cbaf0098156d2/call_1~76b96a5aa1a74ed648d57629", "<id>/call_1<id>"),
        ("t352fd78cbaf0098156d2-2/x", "<id>/x"),
        ("event 0123456789abcdef-12", "event <id>"),
        ("a commit 0123456789abcdef0123456789abcdef01234567", "a commit 0123456789abcdef0123456789abcdef01234567"),
        ("the answer is 42", "the answer is 42"),
    ],
)
def test_times_and_ids_of_the_kernel_may_differ(text: str, left: str) -> None:
    assert comparable(text) == left


@given(st.text(alphabet="t0123456789abcdef-~:TZ <>/timed ", max_size=80))
def test_what_was_made_comparable_stays_so(text: str) -> None:
    assert comparable(comparable(text)) == comparable(text)


def test_folders_have_names() -> None:
    places = (("/s/i/workspace", "<workdir>"), ("/s", "<state>"), ("", "<nothing>"))
    assert without_places("/s/i/workspace/a and /s/logs", places) == "<workdir>/a and <state>/logs"


@pytest.mark.parametrize(
    ("expected", "came", "equal"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("key *** end", "key s3cret end", True),
        ("key *** end", "key end", False),
        ("***", "", True),
        ("a *** b *** c", "a 1 b 2 c", True),
        ("a *** b *** c", "a 1 c 2 b", False),
        ("ab***ba", "aba", False),
        ("a", "***", False),
    ],
)
def test_anything_may_come_in_the_place_of_a_secret(expected: str, came: str, equal: bool) -> None:
    assert same(expected, came) is equal


def test_many_secrets_cost_no_more_than_the_text_is_long() -> None:
    began = time.process_time()
    assert not same("a***" * 20_000 + "b", "a" * 200_000)
    assert time.process_time() - began < 2


def test_a_long_entry_is_compared_by_its_digest() -> None:
    entry = "tool x: " + "y" * MAX_ENTRY
    assert shortened("short") == "short"
    assert shortened(entry) != shortened(entry + "z")
    assert shortened(entry)[:MAX_ENTRY] == entry[:MAX_ENTRY]
    assert f"({len(entry)} characters, sha256:" in shortened(entry)
    assert shortened("y" * MAX_ENTRY + "\ud800").startswith("yyy"), "half of a pair is no error"


def test_the_first_difference_names_its_entry() -> None:
    def differs_from(entries: list[str], *tools: str) -> tuple[str, str, str] | None:
        return first_difference(recorded, Request(entries, list(tools)))

    recorded = Request(["system: s", "user: a"], ["a__b"])
    assert differs_from(["system: s", "user: a"], "a__b") is None
    assert differs_from(["system: s", "user: a"], "a__b", "new__one") is None, "kernels get more tools"
    assert differs_from(["system: s", "user: a"], "other__one") == ("the tools of the request", "a__b", "")
    assert differs_from(["system: s", "user: b"], "a__b") == ("entry 2 of the request (user)", "user: a", "user: b")
    assert differs_from(["system: s"], "a__b") == ("entry 2 of the request (user)", "user: a", "")
    longer = ["system: s", "user: a", "assistant: x"]
    assert differs_from(longer, "a__b") == ("entry 3 of the request (assistant)", "", "assistant: x")


def test_an_error_shows_where_two_texts_begin_to_differ() -> None:
    expected, came = around("x" * 500 + "one", "x" * 500 + "two")
    assert (expected, came) == ("…" + "x" * 40 + "one", "…" + "x" * 40 + "two")
    assert around("", "a") == ("nothing", "a")
    difference = Difference(agent="main", instance="k", turn=2, step=3, what="it", expected="one", came="two")
    error = differs(difference)
    assert error.code == "E_REPLAY_DIFFERS"
    assert error.info.message == "agent main (k), turn 2, step 3: it differs: recorded 'one', came 'two'"
