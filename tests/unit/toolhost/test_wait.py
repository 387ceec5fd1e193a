"""The bundled tool `wait` on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from goondan.toolhost.base.wait import wait
from goondan.toolhost.inside import ToolError


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.ctx: Any = SimpleNamespace(cancelled=False, remaining_ms=None)
        self.cancel_at: float | None = None
        monkeypatch.setattr(wait, "monotonic", lambda: self.now)
        monkeypatch.setattr(wait, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= wait.LOOK_S
        self.now += seconds
        self.ctx.cancelled = self.cancel_at is not None and self.now >= self.cancel_at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(0, 0), (0.0004, 0), (0.0005, 1), (0.0025, 3), (1.5, 1500), (300, 300_000), (-0.0, 0)]
)
def test_it_takes_as_long_as_it_says(clock: Clock, seconds: float, milliseconds: int) -> None:
    made = wait.seconds(clock.ctx, {"seconds": seconds})
    assert made == {"waitedSeconds": seconds, "waitedMs": milliseconds}
    assert clock.now - 100 == pytest.approx(milliseconds / 1000)


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "'seconds' must be greater than or equal to 0"), (300.5, "'seconds' must be less than or equal to 300"),
     (1e308, "'seconds' must be less than or equal to 300"), ("1", "'seconds' must be a finite number"),
     (None, "'seconds' must be a finite number")],
)  # fmt: skip
def test_what_it_does_not_wait_for(clock: Clock, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        wait.seconds(clock.ctx, {"seconds": value})
    assert (str(caught.value), clock.now) == (message, 100)


def test_it_ends_soon_after_a_cancel(clock: Clock) -> None:
    clock.cancel_at = 107.0
    with pytest.raises(ToolError) as caught:
        wait.seconds(clock.ctx, {"seconds": 200})
    assert caught.value.code == "E_CANCELLED"
    assert clock.now <= 107.0 + 2 * wait.LOOK_S


def test_it_does_not_begin_what_the_deadline_would_end(clock: Clock) -> None:
    clock.ctx.remaining_ms = 2000
    assert wait.seconds(clock.ctx, {"seconds": 2})["waitedMs"] == 2000
    began = clock.now
    with pytest.raises(ToolError) as caught:
        wait.seconds(clock.ctx, {"seconds": 2.001})
    assert (caught.value.code, clock.now) == ("E_TOOL_TIMEOUT", began)
