"""The journal of simulations with a real file beside the one in memory: whatever is asked, both must say the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from goondan.kernel.broker.journal.redo import REDO_SUFFIX
from goondan.kernel.broker.journal.store import JOURNAL_FILE, Durability, JournalStore
from goondan.kernel.broker.state.records import Ended, Item, Row
from tests.unit.kernel.broker.memory_journal import MemoryJournal

#: Batches after which what was promised is brought into the tables. A life is some hundred.
FOLDED_AFTER = 5
BOOT = "11111111-2222-3333-4444-555555555555"


class BothJournals(MemoryJournal):
    """See interface.Journal. The files lie in `folder`."""

    def __init__(self, folder: Path, durability: Durability = "process") -> None:
        super().__init__()
        self._folder = folder
        self._durability: Durability = durability
        self._lives = 0
        self._subjects: set[str] = set()
        self._batches = 0
        self._at = folder / "0"
        self._store = self._open()

    def _open(self) -> JournalStore:
        self._at.mkdir(parents=True, exist_ok=True)
        return JournalStore(str(self._at / JOURNAL_FILE), durability=self._durability, boot_id=BOOT)

    def append(self, batch: Sequence[Item]) -> None:
        """See Journal."""
        writes = [write for item in batch for write in item.writes]
        self._subjects.update(write.subject for write in writes)
        self._store.promise(writes, 0) if self._durability == "process" else self._store.commit(writes, 0)
        super().append(batch)
        self._batches += 1
        if self._batches % FOLDED_AFTER == 0:
            self._store.fold()

    def broker_killed(self) -> None:
        """The process is gone: what it has written is there, and nobody has closed anything."""
        self._lives += 1
        old, self._at = self._at, self._folder / str(self._lives)
        self._at.mkdir()
        for suffix in ("", "-wal", "-acked", REDO_SUFFIX):
            name = f"{JOURNAL_FILE}{suffix}"
            if (old / name).exists():
                shutil.copyfile(old / name, self._at / name)
        self._store.close()
        shutil.rmtree(old)
        self._store = self._open()

    def rows(self) -> Iterator[Row]:
        """See MemoryJournal."""
        expected = list(super().rows())
        assert list(self._store.rows()) == expected
        yield from expected

    def find_ended(self, subject: str) -> Ended | None:
        """See Archive."""
        expected = super().find_ended(subject)
        assert self._store.find_ended(subject) == expected
        return expected

    def find_answer(self, subject: str) -> bytes | None:
        """See Archive."""
        expected = super().find_answer(subject)
        assert self._store.find_answer(subject) == expected
        return expected

    def find_records(self, subject: str) -> list[bytes]:
        """See Archive."""
        expected = super().find_records(subject)
        assert self._store.find_records(subject) == expected
        return expected

    def files(self) -> frozenset[str]:
        """See Journal."""
        expected = super().files()
        assert self._store.files() == expected
        return expected

    def close(self) -> None:
        """Compare all that was ever spoken of, as the next process finds it, and remove the files."""
        self.broker_killed()
        list(self.rows())
        for subject in self._subjects:
            self.find_ended(subject)
            self.find_answer(subject)
            self.find_records(subject)
        self.files()
        self._store.close()
        shutil.rmtree(self._at)
