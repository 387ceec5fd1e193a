"""Which rights a ruleset takes away and gives back, for every version of the kernel's interface."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.toolhost.inside.confine import open_places
from goondan.toolhost.policy.launch_plan import DEVICES, LIST, READ, RUN, WRITE, for_file, ruleset

RULES = [("/", LIST), ("/usr", RUN), ("/dev", DEVICES), ("/w", WRITE)]


def test_a_kernel_without_it_has_no_ruleset() -> None:
    assert ruleset(0, RULES, network=False) is None


@pytest.mark.parametrize(("abi", "bits"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (6, 16), (7, 16), (99, 16)])
def test_all_rights_that_the_kernel_knows_are_taken_away(abi: int, bits: int) -> None:
    made = ruleset(abi, RULES, network=False)
    assert made is not None
    assert made.files == (1 << bits) - 1
    assert made.net == (3 if abi >= 4 else 0)
    assert made.scopes == (3 if abi >= 6 else 0)
    assert [path for path, _ in made.rules] == ["/", "/usr", "/dev", "/w"]
    assert all(rights & ~made.files == 0 for _, rights in made.rules)  # else the kernel refuses the rule


def test_tcp_is_left_to_a_grant() -> None:
    made = ruleset(6, RULES, network=True)
    assert made is not None and made.net == 0 and made.scopes == 3


def test_a_rule_is_for_the_place_that_was_looked_at(tmp_path: Path) -> None:
    """Without mounts nothing else tells that a folder was exchanged for a link."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    at, status = str(tmp_path / "one"), (tmp_path / "one").stat()
    ((place, rights),) = open_places([(at, WRITE)], {at: (status.st_dev, status.st_ino)})
    assert (os.fstat(place).st_ino, rights) == (status.st_ino, WRITE)
    os.close(place)
    (tmp_path / "one").rename(tmp_path / "was")
    (tmp_path / "one").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="was replaced while the jail was being made"):
        open_places([(at, WRITE)], {at: (status.st_dev, status.st_ino)})


def test_what_the_rights_are() -> None:
    execute, write_file, make_char, make_block, ioctl = 1, 2, 1 << 6, 1 << 11, 1 << 15
    assert not READ & (execute | write_file) and READ | execute == RUN
    assert not WRITE & (make_char | make_block | ioctl) and WRITE & execute and WRITE & write_file
    assert DEVICES & ioctl and not DEVICES & execute
    assert for_file(RUN) == execute | 4
    assert for_file(LIST) == 0
    assert [path for path, _ in ruleset(6, [("/f", for_file(LIST))], network=False).rules] == []  # type: ignore[union-attr]
