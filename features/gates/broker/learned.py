"""What a server allows, learned from its refusals. Pure; times are seconds on any clock that never goes back.

A refusal does not say whether too many requests ran at once or too many came in a minute, nor how long such a minute
is. So both are estimated, and the one is blamed that was not proven yet.

- All requests that were out when the first of them was refused belong to one episode. It ends when the server's wait is
  over, and only then is counted: what was accepted meanwhile is not refused any more.
- At once: as many as were accepted side by side in the episode, unless as many as now had been accepted before. Then
  the rate is blamed: what was accepted since the last episode, through the time until this one is over, the wait
  included. That is right for every kind of minute, whatever its length.
- Both are raised gently while requests wait for them, and lowered at the next refusal.
- Nothing of it is believed for long. A server that was refusing for a while looks like one that allows little. When it
  has refused nobody for EASE_AFTER_S, more is let out, ever faster, until it refuses again or all is forgotten.

Source: docs/design/turns.md section 13; docs/decisions/107.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec import Struct

#: Names an ask or a permit: the address of the connection, and the id that it gave.
Key = tuple[str, str]
#: A learned rate stays so far below what was measured: clocks and networks are not exact.
MARGIN: Final = 0.97
#: The first wait after a refusal that names none, and the longest (seconds). It doubles while nothing is accepted. A
#: longer one would leave a server alone that is well again.
FIRST_WAIT_S: Final = 1.0
MAX_OWN_WAIT_S: Final = 8.0
#: The longest wait that is believed (seconds).
MAX_WAIT_S: Final = 60.0
#: So many accepted requests make a measurement.
MIN_ACCEPTED: Final = 2
#: A pause of this length (seconds) with nothing out begins a new measurement: what is not asked cannot be accepted.
PAUSE_S: Final = 1.0
#: After how many accepted requests a rate is raised, and by how much at first. The step doubles while nothing is
#: refused.
RATE_SAMPLES: Final = 20
RATE_STEP: Final = 0.01
MAX_RATE_STEP: Final = 0.08
#: A rate that was refused is lowered to this share. Near it (a share) it is raised by the first step only, until it is
#: passed (a share).
LOWERED: Final = 0.92
NEAR: Final = 0.98
PASSED: Final = 1.05
#: After how many accepted requests one more may be out at once; more after each refusal of such a trial.
TRIAL_SAMPLES: Final = 20
MAX_TRIAL_SAMPLES: Final = 1600
#: So many accepted requests prove that as many at once are accepted.
PROOFS: Final = 5
#: Another broker lets nobody out for so long (seconds): who waited at this one comes back in any order.
TAKE_OVER_S: Final = 1.0
#: When the server has accepted for so long without a refusal (seconds), what was learned is eased: it doubles every
#: EASE_S. A server that still limits as before is asked too much once in that time.
EASE_AFTER_S: Final = 70.0
EASE_S: Final = 3.0
#: After so long (seconds) it is forgotten. Even the lowest rate has become thousands of times as high by then.
FORGET_S: Final = 115.0
#: The same for an agent that nobody else waits with: its refusals hold nobody up.
FORGET_ALONE_S: Final = 20.0
#: The lowest and highest rate that is learned (requests a second).
MIN_RATE: Final = 1 / 600
MAX_RATE: Final = 10_000.0


class Lesson(Struct, frozen=True, array_like=True):
    """What was learned, for another broker."""

    #: Requests at once; None: nothing is known.
    concurrent: int | None = None
    #: How many at once were accepted before.
    proven: int = 0
    #: Whether more than `concurrent` were refused.
    refused_above: bool = False
    #: Requests a second; None: nothing is known.
    rate: float | None = None
    #: Until when nobody is let out (CLOCK_BOOTTIME, seconds).
    held_until: float = 0.0


class Learned:
    """What is known of one server."""

    def __init__(self) -> None:
        self.concurrent: int | None = None
        self.rate: float | None = None
        self.held_until = 0.0
        #: Since when the server refuses everything; None: it accepts.
        self.refusing_since: float | None = None
        self.refused_at: float | None = None
        #: Since when the server accepts and refuses nothing; None: it has accepted nothing since the last refusal.
        self.well_since: float | None = None
        #: When the first of it was learned, and how many requests were refused since.
        self.since = 0.0
        self.refusals = 0
        self._proven = 0
        self._proofs: Counter[int] = Counter()
        self._refused_above = False
        self._trial_samples = TRIAL_SAMPLES
        self._at_limit = 0  # accepted since the last trial, while others waited
        self._step = RATE_STEP
        self._ceiling: float | None = None  # the rate that was refused last
        self._at_rate = 0  # accepted since the rate was raised, while others waited
        self._wait_s = FIRST_WAIT_S
        # The measurement: since the rate was blamed last.
        self._since: float | None = None
        self._accepted = 0
        self._last_out = 0.0
        # The episode: since when, and what was out then and is not refused.
        self._episode: float | None = None
        self._out: set[Key] = set()
        self._eased = False  # more than was learned had been let out when it began

    @property
    def active(self) -> bool:
        """Whether anything is known."""
        return self.refused_at is not None

    def ease(self, now: float) -> float:
        """By how much more is let out than was learned, because nobody was refused for long."""
        eased_s = 0.0 if self.well_since is None else now - self.well_since - EASE_AFTER_S
        return 1.0 if eased_s <= 0 else 2.0 ** (min(eased_s, FORGET_S) / EASE_S)

    def is_over(self, now: float, *, alone: bool, idle: bool) -> bool:
        """Whether it is time to forget all. `alone`: nobody waits for anybody else. `idle`: nobody asks at all."""
        since = self.refused_at if self.well_since is None and idle else self.well_since
        return since is not None and now - since >= (FORGET_ALONE_S if alone and not idle else FORGET_S)

    def warned(self, now: float) -> None:
        """The server has said that it accepts little more."""
        self.since = now if self.refused_at is None else self.since
        self.refused_at, self.well_since = now, None

    def lesson(self) -> Lesson:
        """What was learned."""
        return Lesson(self.concurrent, self._proven, self._refused_above, self.rate, self.held_until)

    def take_over(self, lesson: Lesson, now: float) -> None:
        """An earlier broker has learned this."""
        self.concurrent, self._proven, self._refused_above = lesson.concurrent, lesson.proven, lesson.refused_above
        self.rate = lesson.rate
        self.held_until = max(now + TAKE_OVER_S, min(lesson.held_until, now + MAX_WAIT_S))
        self.warned(now)

    # --- what happens

    def let_out(self, out: int, now: float) -> None:
        """A request goes out, with `out` others before it."""
        if self._since is None or (not out and now - self._last_out > PAUSE_S):
            self._since, self._accepted = now, 0
        self._last_out = now

    def accepted(self, level: int, now: float, *, waiting: bool, at_limit: bool) -> None:
        """A request was accepted that was the `level`-th at once. `waiting`: others wait for the rate or for the
        limit. `at_limit`: as many are out as may be.
        """
        self._last_out = now
        self._accepted += 1
        if self._episode is not None:
            return
        self.refusing_since = None
        self.well_since = now if self.well_since is None else self.well_since
        self._wait_s = FIRST_WAIT_S
        self._prove(level)
        if not waiting:
            return
        if at_limit and self.concurrent is not None:
            self._at_limit += 1
            if not self._refused_above or self._at_limit >= self._trial_samples:
                self.concurrent, self._at_limit = self.concurrent + 1, 0
        elif self.rate is not None:
            self._at_rate += 1
            if self._at_rate >= RATE_SAMPLES:
                self._raise_rate(self.rate)

    def refused(self, key: Key, let_out_at: float, out: set[Key], wait_s: float | None, now: float) -> None:
        """A request was refused that had gone out at `let_out_at`. `out` are the others that are out."""
        eased = self.ease(now) > 1
        self.warned(now)
        self.refusals += 1
        self._last_out = now
        if self._episode is not None and let_out_at <= self._episode:
            self._out.discard(key)
        elif self._episode is None:
            self._episode, self._out, self._eased = now, set(out), eased
            self.refusing_since = now if self.refusing_since is None else self.refusing_since
        wait_s = self._wait_s if wait_s is None else wait_s
        self.held_until = max(self.held_until, now + min(wait_s, MAX_WAIT_S))

    def was_out(self, key: Key) -> None:
        """A request says late that it was out when the episode began."""
        if self._episode is not None:
            self._out.add(key)

    def settle(self, now: float) -> None:
        """Learn from the episode, if it is over."""
        began = self._episode
        if began is None or now < self.held_until:
            return
        beside, self._episode, self._out = len(self._out), None, set()
        self._proofs.clear()
        if beside + 1 > self._proven:
            self._blame_concurrency(beside)
        elif self._since is not None and self._accepted >= MIN_ACCEPTED:
            self._blame_rate(began - self._since, self.held_until - began)
        if not self._accepted:
            self._wait_s = min(2 * self._wait_s, MAX_OWN_WAIT_S)
        self._at_limit = self._at_rate = 0

    def _raise_rate(self, rate: float) -> None:
        """Try a little more. Near the rate that was refused last, the steps stay small."""
        ceiling = self._ceiling
        if ceiling is not None and rate >= PASSED * ceiling:
            ceiling = self._ceiling = None
        near = ceiling is not None and rate * (1 + self._step) > NEAR * ceiling
        step = RATE_STEP if near else self._step
        self._step = min(MAX_RATE_STEP, 2 * step)
        self.rate, self._at_rate = min(MAX_RATE, rate * (1 + step)), 0

    def _prove(self, level: int) -> None:
        """A request was accepted as the `level`-th at once. One alone proves nothing: another may just have ended."""
        if level > self._proven:
            self._proofs[level] += 1
            if self._proofs[level] >= PROOFS:
                self._proven = level

    def _blame_concurrency(self, beside: int) -> None:
        if self._refused_above and not self._eased:
            self._trial_samples = min(2 * self._trial_samples, MAX_TRIAL_SAMPLES)
        # At first nothing is known of the cause, so the number grows quickly again until the next refusal.
        self._refused_above = self.concurrent is not None
        self.concurrent = self._proven = max(1, beside)

    def _blame_rate(self, busy_s: float, held_s: float) -> None:
        """Requests went out for `busy_s`, and then none for `held_s`."""
        measured = MARGIN * self._accepted / max(busy_s + held_s, 0.001)
        if self.rate is None or (held_s > busy_s and measured < self.rate):
            rate = measured
        elif self._eased:
            rate = self.rate  # too much was let out on purpose
        elif self._accepted < RATE_SAMPLES / 2:
            return  # the same excess as the last time
        else:
            rate, self._ceiling = LOWERED * self.rate, self.rate
        self.rate = min(MAX_RATE, max(MIN_RATE, rate))
        self._step = RATE_STEP
        self._since, self._accepted = None, 0
