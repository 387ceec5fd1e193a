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

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._parked: list[Slot] = []

    def run(self, job: Callable[[Slot], None]) -> None:
        """Give a job to a waiting thread, or to a new one."""
        with self._lock:
            slot = self._parked.pop() if self._parked else None
        if slot is None:
            slot = Slot()
            start_new_thread(self._work, (slot,))
        slot.job = job
        slot.wake.release()

    def serve(self, slot: Slot) -> None:
        """Make this thread one of them. Never returns."""
        with self._lock:
            self._parked.append(slot)
        self._work(slot)

    def _work(self, slot: Slot) -> None:
        while True:
            slot.wake.acquire()
            if slot.job is not None:
                slot.job(slot)
            with self._lock:
                self._parked.append(slot)


class Lane:
    """Jobs of which at most `most` run at a time, and at most `together` with those of the lane `beside`.

    The others wait, first come, first served.
    """

    def __init__(self, threads: Threads, most: int, beside: Lane | None = None, together: int = 0) -> None:
        self._threads = threads
        self._most = most
        self._beside = beside
        self._together = together
        self._lock = allocate_lock()
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job, now or when there is room for it. Raises RuntimeError when no thread can be started."""
        with self._lock:
            if self._running >= self._room():
                self._waiting.append(job)
                return
            self._running += 1
        try:
            self._threads.run(lambda slot: self._run(job))
        except BaseException:
            with self._lock:
                self._running -= 1
            raise

    def _room(self) -> int:
        return self._most if self._beside is None else min(self._most, self._together - self._beside._running)

    def _run(self, job: Callable[[], None]) -> None:
        while True:
            job()
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                job = self._waiting.popleft()
