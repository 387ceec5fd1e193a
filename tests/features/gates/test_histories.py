"""A sample of the histories of moods; `make simulate` lives through 10,000."""

from __future__ import annotations

import pytest

from goondan.features.gates.broker import gate
from tests.features.gates.histories import history


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_a_gate_recovers_from_every_mood_of_its_server(first: int) -> None:
    lived = [history(number) for number in range(first, first + 30)]
    assert {one.agents for one in lived} >= {1, 2}


def test_the_histories_notice_a_gate_that_does_not_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EASE_AFTER_S", "FORGET_S", "FORGET_ALONE_S"):
        monkeypatch.setattr(gate, name, 10_000.0)
    failed = 0
    for number in range(30):
        try:
            history(number)
        except AssertionError:
            failed += 1
    assert failed > 3
