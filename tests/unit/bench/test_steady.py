"""When a soak has kept its bounds."""

from __future__ import annotations

import pytest

from bench import steady


def grown(first: float, last: float, count: int = 100) -> list[float]:
    """A series that grows steadily from one figure to another."""
    return [first + (last - first) * number / (count - 1) for number in range(count)]


@pytest.mark.parametrize(
    ("series", "kept"),
    [
        ([50.0] * 100, True),
        (grown(50, 55), True),
        (grown(50, 80), False),
        ([10.0] * 20 + [50.0] * 80, True),  # it warms up
        ([50.0, 90.0] * 50, True),  # it goes up and down
        ([50.0] * 60 + [90.0] * 40, False),
        ([50.0] * 99 + [900.0], True),  # one look says nothing
        (grown(80, 50), True),
    ],
)
def test_what_grows_with_the_work_is_not_flat(series: list[float], kept: bool) -> None:
    assert steady.flat("memory", "MiB", series, steady.MEMORY_MARGIN).kept is kept


def test_a_leak_of_one_descriptor_for_each_of_twenty_kills_is_found() -> None:
    leaking = [20.0 + kills for kills in range(20) for _ in range(5)]
    assert not steady.flat("descriptors", "", leaking, steady.DESCRIPTORS_MARGIN).kept


def test_a_process_that_was_seldom_there_says_nothing_and_every_other_has_a_verdict() -> None:
    series: dict[str, list[float | None]] = {
        "broker": [10.0] * 20,
        "spare": [None] * 15 + [10.0] * 5,
        "worker": [None] * 5 + [*grown(10, 90, 15)],
    }
    found = {each.what: each.kept for each in steady.all_flat("memory", "MiB", series, 3.0)}
    assert found == {"memory, broker": True, "memory, worker": False}


def test_times_may_not_grow_and_too_few_of_them_are_no_proof() -> None:
    assert steady.stable([100.0, None, 110.0, 90.0, 120.0, 100.0, 110.0, 105.0]).kept
    assert not steady.stable([100.0] * 10 + [160.0] * 10).kept
    assert not steady.stable([100.0, None, 100.0]).kept
    with pytest.raises(ValueError, match="too few"):
        steady.ends([1.0, 2.0])


def test_each_accepted_message_has_one_turn_that_answered_it() -> None:
    assert steady.once(["a", "b"], {"a": {"t1"}, "b": {"t2"}, "refused": set()}).kept
    assert not steady.once(["a", "b"], {"a": {"t1"}}).kept
    assert not steady.once(["a"], {"a": {"t1", "t2"}}).kept


def test_the_bounds_of_an_overload() -> None:
    assert (steady.bounded(512, 512).kept, steady.bounded(513, 512).kept) == (True, False)
    assert (steady.refused(1).kept, steady.refused(0).kept) == (True, False)
    assert (steady.back(29.0).kept, steady.back(31.0).kept) == (True, False)
    assert (steady.few_failed({"E_X": 5}, 1000).kept, steady.few_failed({"E_X": 6}, 1000).kept) == (True, False)
