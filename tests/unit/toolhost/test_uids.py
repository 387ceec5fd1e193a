"""User numbers of jails: each for one at a time, the same ones again, none of anybody's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import goondan.toolhost.drop_privileges
from goondan.schemas.system.users import DEFAULT, TOOLHOST_UID, read_user_numbers
from goondan.toolhost.drop_privileges import ASKED, Accounts, account_of
from goondan.toolhost.privileges.powers import BLOCK, TRIES, Uids


def test_the_lowest_free_number_comes_first() -> None:
    uids = Uids(0, DEFAULT)
    first, second = uids.take(), uids.take()
    assert first is not None and second == first + 1
    assert uids.next() == first + 2
    uids.give_back(first)
    assert uids.take() == first


def test_numbers_run_out() -> None:
    uids = Uids(7, DEFAULT)
    taken = [uids.take() for _ in range(BLOCK)]
    assert len(set(taken)) == BLOCK
    assert uids.take() is None and uids.next() is None
    uids.give_back(taken[5] or 0)
    assert uids.take() == taken[5]


def test_no_jail_has_the_number_of_the_tool_host() -> None:
    last_of_all = Uids(3071, DEFAULT)
    taken = [last_of_all.take() for _ in range(BLOCK)]
    assert taken[-2:] == [TOOLHOST_UID - 1, None]
    assert last_of_all.bounds[1] == TOOLHOST_UID - 1
    assert DEFAULT.instances[0] > TOOLHOST_UID


@given(st.integers(1, 4_194_304), st.integers(1, 4_194_304))
def test_numbers_lie_where_nobody_has_any(one: int, other: int) -> None:
    for pid in (one, other):
        first = Uids(pid, DEFAULT).next()
        # SSSD and FreeIPA hand out numbers up to 2,000,200,000.
        assert first is not None and first > 2_000_200_000 and first + BLOCK - 1 <= 0x7FFFFFFE
    if one % 3072 != other % 3072:
        assert abs((Uids(one, DEFAULT).next() or 0) - (Uids(other, DEFAULT).next() or 0)) >= BLOCK


def test_a_block_that_somebody_has_is_passed_over() -> None:
    uids = Uids(5, DEFAULT)
    was = uids.bounds
    somebodys = was[0] + 17
    assert uids.pass_over(lambda first, last: first <= somebodys <= last)
    assert uids.bounds == (was[0] + BLOCK, was[1] + BLOCK)
    assert uids.take() == was[0] + BLOCK
    last = Uids(3071, DEFAULT)
    assert last.pass_over(lambda first, last: last == TOOLHOST_UID - 1)
    assert last.bounds[0] == DEFAULT.jails[0], "it goes on at the beginning"


def test_a_range_that_is_all_somebodys_is_told() -> None:
    uids, asked = Uids(5, DEFAULT), []
    was = uids.bounds

    def taken(first: int, last: int) -> bool:
        asked.append(first)
        return True

    assert not uids.pass_over(taken)
    assert (uids.bounds, len(asked), len(set(asked))) == (was, TRIES, TRIES)


@given(st.integers(1000, 0xFFFFFFFD), st.integers(16_384, 1 << 28), st.integers(1, 4_194_304))
def test_another_range(first: int, count: int, pid: int) -> None:
    last = first + count - 1
    if last > 0xFFFFFFFD or (first <= 65_535 and last >= 65_534):
        with pytest.raises(ValueError, match="GOONDAN_JAIL_UIDS must"):
            read_user_numbers(f"{first}-{last}")
        return
    numbers = read_user_numbers(f" {first}-{last} ")
    low, high = Uids(pid, numbers).bounds
    assert first <= low <= high < numbers.toolhost < numbers.instances[0] <= numbers.instances[1] == last


@pytest.mark.parametrize(
    "setting", ["x", "1", "1-2-3", "-5", "5000-4000", "0-100000", "999-99999", "100000-100100", "100000-4294967295",
                "60000-90000", "1e9-2e9", "0x1000-0x9000", "100000-\u0661\u0662\u0663\u0664\u0665\u0666"],
)  # fmt: skip
def test_settings_that_are_none(setting: str) -> None:
    with pytest.raises(ValueError, match="GOONDAN_JAIL_UIDS"):
        read_user_numbers(setting)


def test_no_setting() -> None:
    assert read_user_numbers(None) == read_user_numbers("") == DEFAULT


def accounts(tmp_path: Path, switch: str = "passwd: files systemd\ngroup: files [NOTFOUND=return]\n") -> Accounts:
    etc, proc = tmp_path / "etc", tmp_path / "proc"
    for folder in (etc, proc / "1", proc / "not a process"):
        folder.mkdir(parents=True, exist_ok=True)
    (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nbroken\nldap:x:2005000017:1::/:/bin/sh\n:x:y:\n")
    (etc / "group").write_text("staff:x:2005000200:\n")
    (etc / "subuid").write_text("me:2006000000:65536\nme:x:y\n")
    (etc / "nsswitch.conf").write_text(switch)
    return Accounts(str(etc), str(proc))


def test_what_is_somebodys(tmp_path: Path) -> None:
    found = accounts(tmp_path)
    for first, last, taken in (
        (2_005_000_000, 2_005_000_016, False), (2_005_000_000, 2_005_000_017, True),
        (2_005_000_018, 2_005_000_200, True), (2_005_999_000, 2_005_999_999, False),
        (2_005_999_000, 2_006_000_000, True), (2_006_065_535, 2_006_070_000, True),
        (2_006_065_536, 2_006_070_000, False), (os.getuid(), os.getuid(), True),
    ):  # fmt: skip
        assert found.taken(first, last) is taken, (first, last)


@pytest.mark.parametrize("switch", ["passwd: files sss\n", "group: files ldap # x\n", "passwd:compat winbind\n"])
def test_a_service_is_asked_number_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    asked: list[int] = []

    def account(number: int) -> str | None:
        asked.append(number)
        return "somebody" if number == 2_010_000_050 else None

    monkeypatch.setattr(goondan.toolhost.drop_privileges, "account_of", account)
    assert accounts(tmp_path, switch).taken(2_010_000_000, 2_010_004_095)
    assert asked == list(range(2_010_000_000, 2_010_000_051))
    assert not accounts(tmp_path, switch).taken(2_011_000_000, 2_011_004_095)
    assert len(asked) == 51 + ASKED
    assert not accounts(tmp_path, "passwd: files\n").taken(2_010_000_000, 2_010_004_095)


def test_accounts_by_number() -> None:
    assert account_of(0) == "root"
    assert account_of(TOOLHOST_UID) is None
    assert account_of(1 << 40) is None
