"""Seeded histories of a model server's moods, in simulated time: agents ask it through a gate, and at last it is well.

`history(number)` lives through one and raises AssertionError when the gate has not recovered in time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from goondan.features.gates.broker.gate import Ask, Gate, Key
from goondan.schemas.models.model_providers import ModelLimits

#: How often the broker looks at its gates (seconds).
TICK_S: Final = 0.2
#: After its first success with a server that is well, an agent alone waits for nothing any more, and so do many
#: (seconds).
ALONE_S: Final = 30.0
MANY_S: Final = 120.0
#: A wait of this length (seconds) is none: the broker looks only so often.
NO_WAIT_S: Final = TICK_S + 0.05


class Mood:
    """How a server answers for a time. A limit that is None does not limit."""

    def __init__(self, dice: random.Random, *, well: bool = False) -> None:
        kind = "well" if well else dice.choice(["well", "down", "flaky", "minute", "at once", "both"])
        self.lasts_s = dice.choice([2, 10, 40, 90]) * dice.uniform(0.5, 1.5)
        self.refuses = {"down": 1.0, "flaky": dice.choice([0.05, 0.3, 0.8])}.get(kind, 0.0)
        self.a_minute = dice.choice([4, 20, 200]) if kind in ("minute", "both") else None
        self.minute_s = dice.choice([2.0, 10.0, 60.0])
        self.at_once = dice.choice([1, 3, 10]) if kind in ("at once", "both") else None
        #: The wait that it names.
        self.names = dice.choice([None, None, 0.2, 1.0, 20.0])


class Simulation:
    """Agents before a gate, in simulated time. `_goes_out` takes a request to the server."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.gate = Gate(ModelLimits())
        self.now = 0.0
        self.asked: dict[Key, float] = {}
        self._open: set[Key] = set()  # out through the open gate
        self._plan: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def step(self) -> None:
        """What comes next."""
        self.now, _, step, arguments = heapq.heappop(self._plan)
        step(*arguments)

    def _at(self, after: float, step: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._plan, (self.now + after, next(self._numbers), step, arguments))

    def _goes_out(self, key: Key) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        self.gate.forget_old(self.now)
        self._pump()
        self._at(TICK_S, self._tick)

    def _pump(self) -> None:
        while taken := self.gate.take(self.now):
            for permit in taken:
                self._goes_out(permit.key)

    def _begin(self, agent: str, call: int) -> None:
        key = (agent, str(call))
        self.asked[key] = self.now
        if self.gate.limited:
            self.gate.ask(Ask(key, agent, self.now))
            self._pump()
        else:
            self._open.add(key)
            self._goes_out(key)

    def _refused(self, key: Key, wait_s: float | None) -> None:
        first = not self.gate.limited
        self._open.discard(key)
        if first or key in self.gate.permits:
            self.gate.refused(key, wait_s, self.now)
        if first:
            for other in self._open:
                self.gate.is_out(Ask(other, other[0], self.now, out_since=self.now))
        self.gate.ask(Ask(key, key[0], self.asked[key], not_before=self.now + (wait_s or 0.0)))
        self._pump()


class History(Simulation):
    """Agents that ask again and again while the server's mood changes."""

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        super().__init__(dice)
        self.agents = dice.choice([1, 1, 1, 2, 3, 8])
        self.answer_s = dice.choice([0.05, 0.3, 2.0])
        self.idle_s = dice.choice([0.05, 1.0, 5.0]) if self.agents < 3 else dice.choice([0.5, 1.0, 5.0])
        moods = [Mood(dice) for _ in range(dice.randint(1, 4))]
        self.moods = [*moods, Mood(dice, well=True)]
        self.well_at = sum(mood.lasts_s for mood in moods)
        #: When it first accepted a request that came when it was well already.
        self.first: float | None = None
        #: (when it was asked, how long it waited) of each call that came in the promised time or later.
        self.late: list[tuple[float, float]] = []
        self._accepted: list[float] = []
        self._running = 0

    @property
    def promised_s(self) -> float:
        """How long recovering may take."""
        return ALONE_S if self.agents == 1 else MANY_S

    def run(self) -> None:
        """Live through it."""
        for agent in range(self.agents):
            self._at(self.dice.uniform(0, 1), self._begin, f"agent/a/{agent}", 0)
        self._at(TICK_S, self._tick)
        until = self.well_at + 1000.0
        while self.now < until:
            self.step()
            if self.first is not None:
                until = self.first + self.promised_s + 10 + 2 * (self.answer_s + self.idle_s)
        assert self.first is not None, "nothing was accepted by a server that is well"
        assert self.late, "nobody asked when it had recovered"
        worst = max(wait for _, wait in self.late)
        assert worst <= NO_WAIT_S, f"{worst:.2f} s wait {self.promised_s:.0f} s after the first success"

    def _tick(self) -> None:
        for ask in self.gate.given_up(self.now):
            self._at(self.idle_s, self._begin, ask.key[0], int(ask.key[1]) + 1)
        super()._tick()

    def _goes_out(self, key: Key) -> None:
        asked = self.asked[key]
        if self.first is not None and asked >= self.first + self.promised_s:
            self.late.append((asked, self.now - asked))
        self._at(0.002, self._arrives, key)

    def _arrives(self, key: Key) -> None:
        mood, left = self.moods[0], self.now
        for mood in self.moods:
            if left < mood.lasts_s:
                break
            left -= mood.lasts_s
        refused = self.dice.random() < mood.refuses or (mood.at_once is not None and self._running >= mood.at_once)
        if mood.a_minute is not None:
            lately = self._accepted[-mood.a_minute :]
            refused = refused or (len(lately) == mood.a_minute and lately[0] > self.now - mood.minute_s)
        if refused:
            self._at(0.002, self._refused, key, mood.names)
            return
        self._accepted.append(self.now)
        self._running += 1
        self._at(self.answer_s * self.dice.uniform(0.8, 1.2), self._over, key, self.now >= self.well_at)

    def _over(self, key: Key, well: bool) -> None:
        self._running -= 1
        self._open.discard(key)
        self.gate.over(key, self.now, accepted=True, tokens=None, news=None)
        if well and self.first is None:
            self.first = self.now
        self._at(self.idle_s * self.dice.uniform(0.5, 1.5), self._begin, key[0], int(key[1]) + 1)
        self._pump()


def history(number: int) -> History:
    """Live through the history of this number. Raises AssertionError when something does not hold in it."""
    lived = History(number)
    lived.run()
    return lived
