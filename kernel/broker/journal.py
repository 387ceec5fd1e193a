"""Where accepted events and their ends are written. The broker knows only this interface.

`MemoryJournal` survives nothing but is in order and complete, so the broker's rules do not change when a durable
journal takes its place: the loop hands over batches, goes on, and acts on a batch when its number is durable.

Source: delivery.md section 7.
"""

from __future__ import annotations

from typing import Protocol

from kernel.broker.mailbox import Staged


class Journal(Protocol):
    """An append-only record of decisions, written in batches."""

    def append(self, batch: list[Staged]) -> int:
        """Take a batch; returns its number (1, 2, …). Does not wait for the disk."""

    def durable(self) -> int:
        """The number of the last batch that will survive what this journal survives."""

    def wake_fd(self) -> int | None:
        """A descriptor that becomes readable when `durable` has grown; None when it grows within `append`."""

    def close(self) -> None:
        """Write what is left and end."""


class MemoryJournal:
    """Durable at once, for as long as the process lives."""

    def __init__(self) -> None:
        self._batches = 0

    def append(self, batch: list[Staged]) -> int:
        """See Journal."""
        self._batches += 1
        return self._batches

    def durable(self) -> int:
        """See Journal."""
        return self._batches

    def wake_fd(self) -> int | None:
        """See Journal."""
        return None

    def close(self) -> None:
        """See Journal."""
