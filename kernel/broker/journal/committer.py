"""The journal for `durability: power`: a thread that owns the write connection.

The broker's loop hands batches over and goes on. The thread writes all batches that have come meanwhile in one
transaction (group commit), waits for the disk, and wakes the loop. So the loop does not wait for a sync, and many
events share one. When the disk fails, `settled` raises, and the loop must end the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.broker.journal.group import FULL_RETRY_S, Group, GroupWriter
from goondan.kernel.broker.journal.interface import DiskFull, Item, JournalFailed, Settled, Store

#: The most items of one transaction, so that the next batch waits only some milliseconds.
MAX_ITEMS: Final = 4096
#: How long a pause must be before old rows are removed (seconds).
TIDY_IDLE_S: Final = 0.5
#: The longest time between two removals of old rows, also when there is no pause (seconds).
TIDY_BUSY_S: Final = 30.0
#: The most items between two removals. One removal takes up to twice as many rows, so a load without a pause does not
#: make the file grow.
TIDY_ITEMS: Final = 1_000


class _OverStore:
    """The common part of both journals: reads go to the store at once, and batches are numbered as they come."""

    def __init__(self, store: Store, writer: GroupWriter) -> None:
        self._store = store
        self._writer = writer
        self.find_ended = store.find_ended
        self.find_answer = store.find_answer
        self.find_records = store.find_records
        self.files = store.files
        self._numbers = 0


class Committer(_OverStore):
    """Writes batches in the order in which they come. All methods are for the loop's thread."""

    def __init__(self, store: Store, writer: GroupWriter) -> None:
        super().__init__(store, writer)
        self._waiting: deque[tuple[int, Sequence[Item]]] = deque()
        self._settled: deque[Settled] = deque()
        self._failure: str | None = None
        self._closing = False
        self._work = threading.Condition()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, batch: Sequence[Item]) -> int:
        """See Journal."""
        self._numbers += 1
        with self._work:
            self._waiting.append((self._numbers, batch))
            self._work.notify()
        return self._numbers

    def settled(self) -> list[Settled]:
        """See Journal."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        done: list[Settled] = []
        while self._settled:
            done.append(self._settled.popleft())
        if self._failure is not None and not done:
            raise JournalFailed(self._failure)
        return done

    def wake_fd(self) -> int | None:
        """See Journal."""
        return self._wake_r

    def is_behind(self) -> bool:
        """See Journal."""
        return False

    def catch_up(self) -> None:
        """See Journal."""

    def close(self) -> None:
        """See Journal."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        os.close(self._wake_r)
        os.close(self._wake_w)
        self._store.close()

    # --- the thread

    def _run(self) -> None:
        try:
            last_tidy, items = time.monotonic(), 0
            while True:
                quiet = False
                with self._work:
                    if not self._waiting and not self._closing:
                        quiet = not self._work.wait(TIDY_IDLE_S)
                    group = self._take()
                    if not group and self._closing:
                        return
                if group:
                    self._write(group)
                    items += sum(len(batch) for _, batch in group)
                if quiet or items >= TIDY_ITEMS or time.monotonic() - last_tidy > TIDY_BUSY_S:
                    last_tidy = time.monotonic()
                    while self._writer.tidy() and not self._closing:
                        items -= TIDY_ITEMS
                        if self._waiting and items < TIDY_ITEMS:
                            break
                    items = 0
        except BaseException as error:  # the loop must know of every error
            self._failure = str(error) or type(error).__name__
            self._wake()

    def _take(self) -> Group:
        """Take whole batches: at least one, and no more than MAX_ITEMS items."""
        group: Group = []
        size = 0
        while self._waiting and (not group or size + len(self._waiting[0][1]) <= MAX_ITEMS):
            size += len(self._waiting[0][1])
            group.append(self._waiting.popleft())
        return group

    def _write(self, group: Group) -> None:
        while True:
            try:
                self._settled.extend(self._writer.write(group))
                self._wake()
                return
            except DiskFull:
                with self._work:
                    if self._closing:
                        raise JournalFailed("the disk is full, and the ends of events cannot be written") from None
                    self._work.wait(FULL_RETRY_S)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the loop has not read the earlier wake-ups yet
            os.write(self._wake_w, b"\0")


class InlineJournal(_OverStore):
    """The journal for `durability: process`: the loop writes itself, because nothing waits for the disk.

    A batch is appended to the redo file. That is a write into the page cache and costs less than waking a thread. The
    batch comes into the tables when nobody waits. Copying the WAL into the file does wait for the disk, so a thread
    does that.
    """

    def __init__(self, store: Store, writer: GroupWriter) -> None:
        super().__init__(store, writer)
        self._waiting: Group = []
        self._settled: list[Settled] = []
        self._since_checkpoint = self._since_tidy = self._unfolded = 0
        self._retry_at = 0.0
        self._next_tidy = time.monotonic() + TIDY_BUSY_S
        self._work = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._copy, name="checkpoint", daemon=True)
        self._thread.start()

    def append(self, batch: Sequence[Item]) -> int:
        """See Journal."""
        self._numbers += 1
        self._waiting.append((self._numbers, batch))
        if len(self._waiting) == 1 or time.monotonic() >= self._retry_at:
            self._write()
        return self._numbers

    def settled(self) -> list[Settled]:
        """See Journal."""
        if self._waiting and time.monotonic() >= self._retry_at:
            self._write()
        done, self._settled = self._settled, []
        return done

    def wake_fd(self) -> int | None:
        """See Journal."""
        return None

    def is_behind(self) -> bool:
        """See Journal."""
        return self._unfolded >= FOLD_ITEMS

    def catch_up(self) -> None:
        """See Journal."""
        if self._unfolded:
            self._unfolded = 0
            self._writer.fold()

    def close(self) -> None:
        """See Journal."""
        if self._waiting:
            self._write()
        self._closing = True
        self._work.set()
        self._thread.join()
        self._store.close()

    def _write(self) -> None:
        try:
            self._settled += self._writer.write(self._waiting)
        except DiskFull:
            self._retry_at = time.monotonic() + FULL_RETRY_S
            return
        items = sum(len(batch) for _, batch in self._waiting)
        self._since_checkpoint += items
        self._since_tidy += items
        self._unfolded += items
        self._waiting = []
        if self._unfolded >= MAX_UNFOLDED_ITEMS:
            self.catch_up()
        if self._since_checkpoint >= CHECKPOINT_ITEMS:
            self._since_checkpoint = 0
            self._work.set()
        # While nothing is written the loop does not call this, so old rows are removed together with new writes.
        if self._since_tidy >= TIDY_ITEMS or time.monotonic() >= self._next_tidy:
            rounds, self._since_tidy = max(1, self._since_tidy // TIDY_ITEMS), 0
            more = all(self._writer.tidy() for _ in range(rounds))
            self._next_tidy = time.monotonic() + (TIDY_IDLE_S if more else TIDY_BUSY_S)

    def _copy(self) -> None:
        while not self._closing:
            self._work.wait()
            self._work.clear()
            if not self._closing:
                self._store.checkpoint()


#: How many items are brought into the tables in a quiet moment. Together they cost a fifth of what they cost one by
#: one.
FOLD_ITEMS: Final = 64
#: How many items are brought into the tables although others wait, which takes about 2 ms. So the work of the next
#: start stays small.
MAX_UNFOLDED_ITEMS: Final = 256
#: After how many items the WAL is copied into the file: about 2 MiB of ordinary events.
CHECKPOINT_ITEMS: Final = 2_000
