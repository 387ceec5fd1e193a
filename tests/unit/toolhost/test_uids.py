"""User numbers of jails: each for one at a time, the same ones again, none of anybody's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.users import TOOLHOST_UID
from toolhost.policy.uids import BLOCK, INSTANCES, Uids


def test_the_lowest_free_number_comes_first() -> None:
    uids = Uids(0)
    first, second = uids.take(), uids.take()
    assert first is not None and second == first + 1
    assert uids.next() == first + 2
    uids.give_back(first)
    assert uids.take() == first


def test_numbers_run_out() -> None:
    uids = Uids(7)
    taken = [uids.take() for _ in range(BLOCK)]
    assert len(set(taken)) == BLOCK
    assert uids.take() is None and uids.next() is None
    uids.give_back(taken[5] or 0)
    assert uids.take() == taken[5]


def test_no_jail_has_the_number_of_the_tool_host() -> None:
    last_of_all = Uids(32767)
    taken = [last_of_all.take() for _ in range(BLOCK)]
    assert taken[-2:] == [TOOLHOST_UID - 1, None]
    assert last_of_all.bounds[1] == TOOLHOST_UID - 1
    assert INSTANCES[0] > TOOLHOST_UID


@given(st.integers(1, 4_194_304), st.integers(1, 4_194_304))
def test_numbers_lie_where_nobody_has_any(one: int, other: int) -> None:
    for pid in (one, other):
        first = Uids(pid).next()
        assert first is not None and first >= 0x70000000 and first + BLOCK - 1 <= 0x7FFFFFFE
    if one % 32768 != other % 32768:
        assert abs((Uids(one).next() or 0) - (Uids(other).next() or 0)) >= BLOCK
