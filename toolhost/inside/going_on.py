"""Pending work that is no coroutine: each piece on a thread of its own, so many at a time; more waits for a thread."""

from __future__ import annotations

from _thread import get_ident, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import Any

    from .running import Running, Serving
else:
    from _collections import deque  # without the package around it, which takes 4 ms

#: Pieces of work at a time. With the threads for calls they stay below the default limit of 64 processes.
MAX_WORKING = 40


class GoingOn:
    """The work of one worker; `count` pieces of it run. Guarded by the worker's lock."""

    def __init__(self, worker: Serving) -> None:
        self.count = 0
        self._worker = worker
        self._waiting: deque[tuple[Running, Callable[[], Any]]] = deque()

    def submit(self, call: Running, work: Callable[[], Any]) -> None:
        """Begin it, now or when there is a thread for it."""
        with self._worker.lock:
            if self.count >= MAX_WORKING:
                self._waiting.append((call, work))
                return
            self.count += 1
        try:
            start_new_thread(self._run, (call, work))
        except BaseException:
            with self._worker.lock:
                self.count -= 1
            raise

    def _run(self, call: Running, work: Callable[[], Any]) -> None:
        while True:
            self._one(call, work)
            with self._worker.lock:
                if not self._waiting:
                    self.count -= 1
                    return
                call, work = self._waiting.popleft()

    def _one(self, call: Running, work: Callable[[], Any]) -> None:
        """One piece to its end, which is a second result of the call."""
        worker, ident = self._worker, get_ident()
        worker.current[ident] = call.id
        try:
            value = work()
            if hasattr(type(value), "__await__"):
                worker.to_loop(call, value)
                return
            body = worker.result_frame(call, value)
        except BaseException as error:
            body = worker.failure(call.id, error)
        finally:
            worker.current.pop(ident, None)
        worker.send(worker.finish(call, body))
