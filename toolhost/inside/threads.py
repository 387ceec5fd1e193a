"""Threads of a worker: slots that wait for their next job, and lanes in which so many jobs run at a time."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
else:
    from _collections import deque  # without the package around it, which takes 4 ms


class Slot:
    """One thread. It waits for its next job."""

    __slots__ = ("job", "wake")

    def __init__(self) -> None:
        self.wake = allocate_lock()
        self.wake.acquire()
        self.job: Callable[[Slot], None] | None = None


class Threads:
    """The slots of a worker. A thread that has done its job waits here for the next one."""

    def __init__(self, most: int) -> None:
        """`most` jobs run at a time in all lanes together."""
        self.most = most
        #: Guards this and the lanes.
        self.lock = allocate_lock()
        #: How many jobs run in lanes.
        self.busy = 0
        self._parked: list[Slot] = []

    def run(self, job: Callable[[Slot], None]) -> None:
        """Give a job to a waiting thread, or to a new one. Raises RuntimeError when no thread can be started."""
        with self.lock:
            slot = self._parked.pop() if self._parked else None
        if slot is None:
            slot = Slot()
            start_new_thread(self._work, (slot,))
        slot.job = job
        slot.wake.release()

    def serve(self, slot: Slot) -> None:
        """Make this thread one of them. Never returns."""
        with self.lock:
            self._parked.append(slot)
        self._work(slot)

    def _work(self, slot: Slot) -> None:
        while True:
            slot.wake.acquire()
            if slot.job is not None:
                slot.job(slot)
            with self.lock:
                self._parked.append(slot)


class Lane:
    """Jobs of which at most `most` run at a time. The others wait, first come, first served.

    A lane always has room for one job if all other lanes together may have fewer than `threads.most`.
    """

    def __init__(self, threads: Threads, most: int) -> None:
        self._threads = threads
        self._most = most
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job, now or when there is room for it. Raises RuntimeError when no thread can be started."""
        threads = self._threads
        with threads.lock:
            if self._running >= self._most or threads.busy >= threads.most:
                self._waiting.append(job)
                return
            self._count(1)
        try:
            threads.run(lambda slot: self._run(job))
        except BaseException:
            with threads.lock:
                self._count(-1)
            raise

    def _run(self, job: Callable[[], None]) -> None:
        while True:
            job()
            with self._threads.lock:
                if not self._waiting:
                    self._count(-1)
                    return
                job = self._waiting.popleft()

    def _count(self, more: int) -> None:
        self._running += more
        self._threads.busy += more
