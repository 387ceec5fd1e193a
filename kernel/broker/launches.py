"""Remembers which launches of agents have ended. Pure.

The supervisor numbers launches from 1 and uses no number twice. So the ended launches are a few runs of numbers, with
living launches between them. A million launches take as little memory as a hundred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class EndedLaunches:
    """The numbers of ended launches."""

    def __init__(self) -> None:
        #: First and last number of each run, in order; there is a gap between two runs.
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, launch: int) -> bool:
        at = bisect_right(self._first, launch) - 1
        return at >= 0 and launch <= self._last[at]

    def __len__(self) -> int:
        """The number of runs."""
        return len(self._first)

    def add(self, launch: int) -> None:
        """This launch has ended."""
        if launch in self:
            return
        at = bisect_right(self._first, launch)
        after = at < len(self._first) and self._first[at] == launch + 1
        if at > 0 and self._last[at - 1] == launch - 1:
            self._last[at - 1] = self._last[at] if after else launch
            if after:
                del self._first[at], self._last[at]
        elif after:
            self._first[at] = launch
        else:
            self._first.insert(at, launch)
            self._last.insert(at, launch)

    def all_but(self, living: Iterable[int]) -> None:
        """These launches live. Every other launch up to the highest known number has ended."""
        known = sorted(set(living))
        top = max([*known[-1:], *self._last[-1:]], default=0)
        self._first, self._last = [], []
        begin = 1
        for launch in [*known, top + 1]:
            if begin < launch:
                self._first.append(begin)
                self._last.append(launch - 1)
            begin = launch + 1
