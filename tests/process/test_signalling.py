"""Signals go to those that were meant, whoever has got their numbers since."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.procfs import signal_all


@pytest.fixture
def two() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_only_who_is_found_twice_gets_it(two: list[subprocess.Popen[bytes]]) -> None:
    meant, stranger = two
    rounds = iter([[meant.pid, stranger.pid], [meant.pid]])  # between the two the second one's number was given away
    assert signal_all(lambda: next(rounds), signal.SIGKILL) == 2
    assert meant.wait(30) == -signal.SIGKILL
    assert stranger.poll() is None


def test_who_has_ended_meanwhile_is_no_error(two: list[subprocess.Popen[bytes]]) -> None:
    two[0].kill()
    two[0].wait()
    assert signal_all(lambda: [process.pid for process in two], signal.SIGKILL) == 2
    assert two[1].wait(30) == -signal.SIGKILL
    assert signal_all(list, signal.SIGKILL) == 0


def test_a_jail_that_is_gone_has_no_processes_whoever_has_its_number_now(two: list[subprocess.Popen[bytes]]) -> None:
    view = procfs.by_namespace(two[0].pid)
    assert procfs.outer_processes(view) == [two[0].pid]
    another = view._replace(born=view.born - 1)  # started before the one that has the number now
    assert procfs.outer_processes(another) == []
