"""Threads of a worker: how many jobs run at a time, and what happens to those that wait."""

from __future__ import annotations

import sys
from threading import Event, Lock, get_ident

from goondan.toolhost.inside.running import Lane, Threads

WAIT_S = 20.0


class Jobs:
    """Jobs that note how many of them ran at the same time, and which ones, until they are let go."""

    def __init__(self) -> None:
        self.go = Event()
        self.begun: list[int] = []
        self.most = 0
        self.idents: set[int] = set()
        self._now = 0
        self._lock = Lock()
        self._changed = Event()

    def job(self, number: int) -> None:
        with self._lock:
            self.begun.append(number)
            self.idents.add(get_ident())
            self._now += 1
            self.most = max(self.most, self._now)
        self._changed.set()
        assert self.go.wait(WAIT_S)
        with self._lock:
            self._now -= 1

    def wait_begun(self, count: int) -> None:
        while len(self.begun) < count:
            assert self._changed.wait(WAIT_S)
            self._changed.clear()


def test_more_jobs_wait_for_room_first_come_first_served() -> None:
    jobs, lane = Jobs(), Lane(Threads(9), 1)
    for number in range(5):
        lane.submit(lambda number=number: jobs.job(number))  # type: ignore[misc]
    jobs.wait_begun(1)
    jobs.go.set()
    jobs.wait_begun(5)
    assert (jobs.begun, jobs.most, len(jobs.idents)) == ([0, 1, 2, 3, 4], 1, 1)


def test_two_lanes_together_have_a_bound() -> None:
    jobs, threads = Jobs(), Threads(4)
    pending, slow = Lane(threads, 3), Lane(threads, 3)
    for number in range(2):
        pending.submit(lambda number=number: jobs.job(number))  # type: ignore[misc]
    for number in range(2, 6):
        slow.submit(lambda number=number: jobs.job(number))  # type: ignore[misc]
    jobs.wait_begun(4)
    assert sorted(jobs.begun) == [0, 1, 2, 3]
    jobs.go.set()
    jobs.wait_begun(6)
    assert jobs.most == 4


def test_a_long_queue_takes_no_stack() -> None:
    jobs, lane = Jobs(), Lane(Threads(9), 1)
    count = 3 * sys.getrecursionlimit()
    jobs.go.set()
    for number in range(count):
        lane.submit(lambda number=number: jobs.job(number))  # type: ignore[misc]
    jobs.wait_begun(count)
    assert jobs.begun == list(range(count))
