"""Many agents before a simulated server that says nothing of its limits but 429: what the gate learns of them."""

from __future__ import annotations

import random
import statistics

import pytest

from goondan.features.gates.broker.gate import Gate, Key
from goondan.schemas.models.model_providers import ModelLimits
from tests.features.gates.histories import TICK_S, Simulation

#: The longest way of a request to the server (seconds).
WAY_S = 0.005


class Server:
    """Accepts so many at once, and so many in each of its minutes of `minute_s`: sliding ones, or one after another."""

    def __init__(self, at_once: int, a_minute: int, minute_s: float, *, sliding: bool) -> None:
        self.at_once = at_once
        self.a_minute = a_minute
        self.minute_s = minute_s
        self.sliding = sliding
        self.running = 0
        self.accepted: list[tuple[float, Key]] = []
        self.refused: list[float] = []

    def ask(self, key: Key, now: float) -> float | None:
        """None, or how long to wait."""
        begins = now - self.minute_s if self.sliding else now // self.minute_s * self.minute_s
        minute = [at for at, _ in self.accepted[-self.a_minute :] if at > begins]
        if len(minute) >= self.a_minute:
            self.refused.append(now)
            return (minute[0] if self.sliding else begins) + self.minute_s - now
        if self.running >= self.at_once:
            self.refused.append(now)
            return 0.3
        self.running += 1
        self.accepted.append((now, key))
        return None


class Simulated(Simulation):
    """Agents that make `calls` model calls each; the broker's place is taken by another one at the times `restarts`."""

    def __init__(self, server: Server, agents: int, calls: int, answer_s: float, restarts: tuple[float, ...]) -> None:
        super().__init__(random.Random(1))
        self.server, self.calls, self.answer_s = server, calls, answer_s
        self.waits: dict[str, float] = {}
        for agent in range(agents):
            self._at(0.0, self._begin, str(agent), 0)
        for moment in restarts:
            self._at(moment, self._restart)
        self._at(TICK_S, self._tick)
        self._left = agents * calls

    def run(self) -> None:
        while self._plan and self._left and self.now < 1000:
            self.step()
        assert self._left == 0

    def _goes_out(self, key: Key) -> None:
        self._at(WAY_S * self.dice.random(), self._arrive, key)

    def _arrive(self, key: Key) -> None:
        wait_s = self.server.ask(key, self.now)
        if wait_s is None:
            self._at(self.answer_s * self.dice.uniform(0.7, 1.3), self._answered, key)
        else:
            self._at(WAY_S, self._refused, key, wait_s)

    def _answered(self, key: Key) -> None:
        self.server.running -= 1
        self._at(WAY_S, self._over, key)

    def _over(self, key: Key) -> None:
        self._open.discard(key)
        self.gate.over(key, self.now, accepted=True, tokens=None, news=None)
        agent, call = key[0], int(key[1])
        self.waits[agent] = self.waits.get(agent, 0.0) + self.now - self.asked[key]
        self._left -= 1
        if call + 1 < self.calls:
            self._begin(agent, call + 1)
        self._pump()

    def _restart(self) -> None:
        old, self.gate = self.gate, Gate(ModelLimits())
        self.gate.take_over(*old.lesson(self.now), self.now)
        for permit in old.permits.values():
            self.gate.is_out(permit)
        for ask in old.queue:
            self.gate.ask(ask)


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("answer_s", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("restarts", [(), (10.0, 25.0)])
def test_a_server_with_both_limits(sliding: bool, answer_s: float, restarts: tuple[float, ...]) -> None:
    server = Server(8, 60, 6.0, sliding=sliding)
    simulated = Simulated(server, 200, 3, answer_s, restarts)
    simulated.run()
    assert simulated.now <= 1.15 * 60 + 2 * len(restarts)  # the server's own pace, and a second for each broker
    late = sum(at > server.minute_s for at in server.refused)
    assert late <= 0.05 * sum(at > server.minute_s for at, _ in server.accepted)
    assert max(simulated.waits.values()) <= 1.5 * statistics.median(simulated.waits.values())
    order = [simulated.asked[key] for _, key in server.accepted]
    assert all(sum(later > asked + 0.1 for later in order[:at]) <= 8 for at, asked in enumerate(order))


def test_a_server_that_limits_only_how_many_run_at_once() -> None:
    server = Server(8, 10**6, 60.0, sliding=True)
    simulated = Simulated(server, 100, 10, 0.1, ())
    simulated.run()
    assert simulated.now <= 1.3 * 1000 * 0.1 / 8
    assert len(server.refused) <= 92 + 0.01 * len(server.accepted)


def test_a_server_that_limits_only_the_minute_is_not_slowed_down_by_long_answers() -> None:
    server = Server(10**6, 60, 6.0, sliding=True)
    simulated = Simulated(server, 200, 3, 2.0, ())
    simulated.run()
    assert simulated.now <= 1.25 * 60


def test_a_server_with_few_requests_a_minute() -> None:
    server = Server(8, 6, 60.0, sliding=True)
    simulated = Simulated(server, 10, 2, 1.0, ())
    simulated.run()
    assert simulated.now <= 260
    assert len(server.refused) <= 6 + 4


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("server_of", [(8, 60, 6.0), (8, 60, 60.0), (3, 10**6, 60.0)])
def test_a_server_that_limits_for_long_refuses_few_although_more_is_tried(
    server_of: tuple[int, int, float], sliding: bool
) -> None:
    at_once, a_minute, minute_s = server_of
    pace = min(a_minute / minute_s, at_once / 0.5)
    server = Server(at_once, a_minute, minute_s, sliding=sliding)
    simulated = Simulated(server, 20, int(600 * pace / 20), 0.5, ())
    simulated.run()
    late = sum(at > minute_s for at in server.refused)
    assert late <= 0.05 * len(server.accepted)
    assert simulated.now <= 1.2 * 600
