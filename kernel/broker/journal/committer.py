"""Begins and writes a journal: groups of batches, with the rules of durability and of a full disk.

With `durability: power` a thread owns the write connection (`Committer`). The broker's loop hands batches over and goes
on. The thread writes all batches that have come meanwhile in one transaction (group commit), waits for the disk, and
wakes the loop. So the loop does not wait for a sync, and many events share one. When the disk fails, `settled` raises,
and the loop must end the process. With `durability: process` the loop writes itself (`InlineJournal`).

When the disk is full, only ends of old work are written, and the reserve is freed as far as they need it. New work is
refused, item by item, until the reserve could be made again. Ends without room even then wait. They are acknowledged
only when they are written.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.broker.journal.files import Reserve
from goondan.kernel.broker.journal.store import JOURNAL_FILE, Durability, JournalStore
from goondan.kernel.broker.state.records import DiskFull, Item, Journal, JournalFailed, Write
from goondan.schemas.wire.errors import GoondanError

#: How often a full disk is tried again (seconds).
FULL_RETRY_S: Final = 1.0

#: Batches in order.
Group = list[Sequence[Item]]


class GroupWriter:
    """Writes to one store. For one thread."""

    def __init__(self, store: JournalStore, reserve: Reserve, wall_ms: Callable[[], int]) -> None:
        self._store = store
        self._reserve = reserve
        self._wall_ms = wall_ms
        #: True while new work is refused because the disk is full.
        self.full = not reserve.make()
        self._next_try = 0.0  # when a full disk is tried again (time.monotonic)

    def write(self, group: Group) -> list[frozenset[int]]:
        """Write a group as one transaction. Raises DiskFull when there is no room for ends of old work either: nothing
        was written then, and the group is to be written again. Raises JournalFailed.
        """
        if self.full and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + FULL_RETRY_S
            self.full = not self._reserve.make()
        if not self.full:
            try:
                self._commit(_writes(group, refusable=True), self._wall_ms())
                return [frozenset() for _ in group]
            except DiskFull:
                self.full = True
                self._next_try = time.monotonic() + FULL_RETRY_S
        ends = _writes(group, refusable=False)
        try:
            if ends:
                self._commit(ends, self._wall_ms())
        except DiskFull:
            self._commit_ends(ends)
        return [frozenset(at for at, item in enumerate(batch) if item.refusable) for batch in group]

    def _commit(self, writes: list[Write], now_ms: int) -> None:
        """Write as durably as promised."""
        if self._store.durability == "process":
            self._store.promise(writes, now_ms)
        else:
            self._store.commit(writes, now_ms)

    def _commit_ends(self, ends: list[Write]) -> None:
        """Write ends of old work, with as much of the reserve as they need. Raises DiskFull when it is used up."""
        while True:
            # Pages that were copied into the file free room in the WAL. A copy that finds too little room still makes
            # the file longer, so the next copy needs less.
            self._store.checkpoint()
            with suppress(DiskFull):  # nor need it stay in the redo file
                self._store.fold()
            try:
                self._commit(ends, self._wall_ms())
                return
            except DiskFull:
                if not self._reserve.release():
                    raise

    def fold(self) -> None:
        """Bring what was promised into the tables. On a full disk as much of the reserve is used as that needs. What
        finds no room is tried again later: it is promised all the same. Raises JournalFailed.
        """
        if self.full and time.monotonic() < self._next_try:
            return
        try:
            self._store.fold()
            return
        except DiskFull:
            self.full = True
            self._next_try = time.monotonic() + FULL_RETRY_S
        while self._reserve.release():
            self._store.checkpoint()
            with suppress(DiskFull):
                self._store.fold()
                return

    def tidy(self) -> bool:
        """Remove some old rows; True when there is more to do. Raises JournalFailed."""
        if self.full:
            return False
        try:
            return self._store.tidy(self._wall_ms())
        except DiskFull:
            return False  # the next write finds out


def _writes(group: Group, *, refusable: bool) -> list[Write]:
    """All writes of the group in order; without those that may be refused unless `refusable`."""
    return [write for batch in group for item in batch if refusable or not item.refusable for write in item.writes]


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
    """The common part of both journals: reads go to the store at once."""

    def __init__(self, store: JournalStore, writer: GroupWriter) -> None:
        self._store = store
        self._writer = writer
        self.find_ended = store.find_ended
        self.find_answer = store.find_answer
        self.find_records = store.find_records
        self.files = store.files


class Committer(_OverStore):
    """Writes batches in the order in which they come. All methods are for the loop's thread."""

    def __init__(self, store: JournalStore, writer: GroupWriter) -> None:
        super().__init__(store, writer)
        self._waiting: deque[Sequence[Item]] = deque()
        self._settled: deque[frozenset[int]] = deque()
        self._failure: str | None = None
        self._closing = False
        self._work = threading.Condition()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, batch: Sequence[Item]) -> None:
        """See Journal."""
        with self._work:
            self._waiting.append(batch)
            self._work.notify()

    def settled(self) -> list[frozenset[int]]:
        """See Journal."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        done = [self._settled.popleft() for _ in range(len(self._settled))]
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
                    items += sum(len(batch) for batch in group)
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
        while self._waiting and (not group or size + len(self._waiting[0]) <= MAX_ITEMS):
            size += len(self._waiting[0])
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

    def __init__(self, store: JournalStore, writer: GroupWriter) -> None:
        super().__init__(store, writer)
        self._waiting: Group = []
        self._settled: list[frozenset[int]] = []
        self._since_checkpoint = self._since_tidy = self._unfolded = 0
        self._retry_at = 0.0
        self._next_tidy = time.monotonic() + TIDY_BUSY_S
        self._work = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._copy, name="checkpoint", daemon=True)
        self._thread.start()

    def append(self, batch: Sequence[Item]) -> None:
        """See Journal."""
        self._waiting.append(batch)
        if len(self._waiting) == 1 or time.monotonic() >= self._retry_at:
            self._write()

    def settled(self) -> list[frozenset[int]]:
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
        items = sum(len(batch) for batch in self._waiting)
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


#: The file whose space is freed when the disk is full.
RESERVE_FILE: Final = "kernel.reserve"
#: In the folder of the kernel's locks: remembers that there was a journal.
WITNESS_FILE: Final = "kernel/journal"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """What names the machine's present boot."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def open_store(state_dir: str, durability: Durability, *, accept_loss: bool = False) -> JournalStore:
    """The journal's store of `state_dir`: which kind it is, is decided here and nowhere else. Raises GoondanError: see
    JournalStore.
    """
    path, witness = os.path.join(state_dir, JOURNAL_FILE), os.path.join(state_dir, WITNESS_FILE)
    while True:
        try:
            return JournalStore(
                path, durability=durability, boot_id=boot_id(), accept_loss=accept_loss, witness=witness
            )
        except GoondanError as error:
            if error.info.code != "E_DISK_FULL" or not release_reserve(state_dir):
                raise


def release_reserve(state_dir: str) -> bool:
    """Free a part of the reserve, because a start has to write a little. False when nothing of it is left."""
    return Reserve(os.path.join(state_dir, RESERVE_FILE)).release()


def start(store: JournalStore, state_dir: str) -> Journal:
    """Begin to write. The store belongs to the journal from now on."""
    writer = GroupWriter(store, Reserve(os.path.join(state_dir, RESERVE_FILE)), wall_ms)
    return Committer(store, writer) if store.durability == "power" else InlineJournal(store, writer)


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
