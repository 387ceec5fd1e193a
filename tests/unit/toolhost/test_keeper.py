"""What the kernel does for a jail's limits without control groups; with them: tests/containment/test_growth.py."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from goondan.schemas.bundle.launch import Limits
from goondan.toolhost.privileges.powers import Ordinary
from goondan.toolhost.watch.jail_usage import JailUsage
from goondan.toolhost.watch.keeper import Keeper
from tests.toolhost_fixture import POWERS

TOOLHOST = Path(__file__).parents[3] / "toolhost"


def test_without_groups_and_counter_everything_is_looked_for() -> None:
    keeper = Keeper(POWERS)
    assert (keeper.counts_memory, keeper.counts_processes, keeper.counts_cpu) == (False, False, False)
    assert (keeper.cpu_s(), keeper.peak_memory(), keeper.joins, keeper.freeze()) == (None, None, [], False)
    keeper.stand(5)  # nobody is there yet
    keeper.remove()


def test_a_counter_says_the_processor_time_until_the_jail_is_gone(tmp_path: Path) -> None:
    keeper = Keeper(POWERS)
    counter = os.memfd_create("counter")
    os.write(counter, struct.pack("=Q", 1_500_000_000))
    os.lseek(counter, 0, os.SEEK_SET)
    keeper.began(1, counter)
    usage = JailUsage(Limits(), [str(tmp_path)], keeper, 0, POWERS)
    assert keeper.counts_cpu and usage.cpu_s(()) == 1.5
    usage.close()
    usage.close()
    with pytest.raises(OSError):
        os.fstat(counter)
    with pytest.raises(OSError, match="has ended"):
        usage.cpu_s(())


def test_a_jail_that_is_being_ended_has_met_the_limit_that_it_is_ended_for(tmp_path: Path) -> None:
    """A handler's error can be read after the watch has begun to kill: fewer processes are there at each look."""
    usage = JailUsage(Limits(), [str(tmp_path)], Keeper(POWERS), 0, POWERS)
    assert not usage.refused()
    usage.end("processes")
    assert usage.refused()
    usage.met = "memoryMb"
    assert not usage.refused()


def test_a_jail_yields_by_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    powers, said = Ordinary(), list[tuple[int, int]]()
    monkeypatch.setattr(powers, "set_niceness", lambda pid, niceness: said.append((pid, niceness)))
    keeper = Keeper(powers)
    keeper.began(77, None)
    keeper.stand(9)
    assert said == [(77, 9)]


def test_the_watch_knows_nothing_of_control_groups() -> None:
    """What is counted it asks of the keeper, so a third way to count needs no change there."""
    named = re.compile(r"\bGroupPlan\b|\bTree\b|\bbeside\b|\bfind_tree\b|\bGroup\b")
    asking = [path.name for path in sorted((TOOLHOST / "watch").glob("*.py")) if named.search(path.read_text())]
    assert asking == ["keeper.py"]
