"""A journal that lives as long as its object: for simulations, and as the baseline of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from goondan.kernel.broker.state.records import DropAnswer, Ended, Item, Put, Row


class MemoryJournal:
    """See records.Journal. `rows` gives what a restart would read."""

    def __init__(self) -> None:
        self._records: dict[str, list[Row]] = {}
        self._ended: dict[str, Ended] = {}
        self._answers: dict[str, tuple[bytes, str | None]] = {}
        self._last = 0
        self._settled: list[frozenset[int]] = []

    def append(self, batch: Sequence[Item]) -> None:
        """See Journal."""
        for item in batch:
            for write in item.writes:
                self._last += 1
                if isinstance(write, Put):
                    self._records.setdefault(write.subject, []).append(Row(self._last, write.subject, write.data))
                    continue
                if isinstance(write, DropAnswer):
                    self._answers.pop(write.subject, None)
                    continue
                self._records.pop(write.subject, None)
                if write.digest is not None:
                    self._ended[write.subject] = Ended(write.digest, write.state, 0)
                if write.answer is not None:
                    self._answers[write.subject] = write.answer, None if write.large is None else write.large[0]
        self._settled.append(frozenset())

    def settled(self) -> list[frozenset[int]]:
        """See Journal."""
        done, self._settled = self._settled, []
        return done

    def wake_fd(self) -> int | None:
        """See Journal."""
        return None

    def is_behind(self) -> bool:
        """See Journal."""
        return False

    def catch_up(self) -> None:
        """See Journal."""

    def rows(self) -> Iterator[Row]:
        """All records, in order."""
        yield from sorted(row for rows in self._records.values() for row in rows)

    def find_ended(self, subject: str) -> Ended | None:
        """See Archive."""
        return self._ended.get(subject)

    def find_answer(self, subject: str) -> bytes | None:
        """See Archive."""
        kept = self._answers.get(subject)
        return None if kept is None else kept[0]

    def find_records(self, subject: str) -> list[bytes]:
        """See Archive."""
        return [row.data for row in self._records.get(subject, ())]

    def files(self) -> frozenset[str]:
        """See Journal."""
        return frozenset(file for _, file in self._answers.values() if file is not None)

    def close(self) -> None:
        """See Journal."""
